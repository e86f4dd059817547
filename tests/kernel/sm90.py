"""Compile every kernel configuration that the engines can launch for sm_90, and print JSON.

This needs no device. Kernels over logits are compiled twice: for addresses and strides that are multiples of
16, and for those that are not (an odd vocabulary), whose loads are narrower. The kernels of `tile_kernels`
only get the former: `triton._fits`. Those of `decode` are compiled for sm_100 too.

Runs in a separate process (test_sm90.py): triton decides once whether kernels are interpreted. A line of
the result is {"kernel", "options", "registers", "stack", "shared"}; what is spilled lies on the stack.
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rft_kernels import decode, row_kernels, tile_kernels

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {"x_ptr": "x", "bias_ptr": "b", "y_ptr": "l", "kept_ptr": "b", "dx_ptr": "b"}  # other pointers: "f"
TYPES |= {"at_ptr": "l", "first_ptr": "l", "token_ptr": "l", "u_ptr": "u"}
TILES = (tile_kernels.forward_kernel, tile_kernels.backward_kernel)  # `triton._fits`
DECODE = (
    decode.norm_kernel,
    decode.rotate_kernel,
    decode.attend_kernel,
    decode.swiglu_kernel,
    decode.draw_kernel,
)
ALIGNED = (*TILES, *DECODE)
FLOATS = ("eps", "q_eps", "k_eps", "scale")
ABSENT = {
    "BIAS": ("bias_ptr",),
    "SOFTCAP": ("outer_ptr",),
    "ENTROPY": ("g_entropy_ptr",),
    "KEEP": ("kept_ptr",),
    "SCALED": ("grad_scale_ptr",),
    "ADD": ("more_ptr",),
    "NORM": ("q_norm_ptr", "k_norm_ptr"),
}


def compiled(kernel, types, constants, *, aligned, target=TARGET, **options):
    """The kernel with pointers of the given types, to addresses and with strides that are aligned or not."""
    names = [p.name for p in kernel.params]
    pointers = {n: TYPES.get(n, "f") for n in names if n.endswith("_ptr")}
    absent = {v for k, x in ABSENT.items() if constants.get(k) is False for v in x if v in pointers}
    constants = constants | dict.fromkeys(absent)
    signature = {
        n: "*" + types[pointers[n]] if n in pointers else "fp32" if n in FLOATS else "i32" for n in names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    if kernel in TILES:  # they have descriptors of blocks
        m, n, k = (constants[size] for size in ("BM", "BN", "BK"))
        blocks = {"h_desc": (m, k), "w_desc": (n, k), "dx_desc": (m, n // 4)}
        signature |= {x: f"tensordesc<{types['b']}{[*blocks[x]]}>" for x in blocks if x in names}
    known = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if aligned and (n in pointers or "stride" in n or n == "width") and n not in constants
    }
    index = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, index, known)
    return triton.compile(source, target=target, options=options)


def resources(binary):
    """Registers of a thread, bytes of its stack (where spills go), bytes of shared memory of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    stack = count["STACK"] + count["LOCAL"]
    return {"registers": count["REG"], "stack": stack, "shared": binary.metadata.shared}


def configurations():
    """(kernel, types of its pointers, compile-time arguments, options)."""
    on, base = (False, True), {"x": "fp32", "f": "fp32", "l": "i64", "b": "bf16"}
    # Slices of logits from a matrix product; then given logits, whose only option is the entropy.
    linear = [(base | {"b": b}, flags) for b in ("bf16", "fp32") for flags in product(on, repeat=4)]
    given = [(base | {"x": t, "b": t}, (False, False, e, False)) for t in ("bf16", "fp16") for e in on]
    for types, (bias, softcap, entropy, more) in linear + given:
        flags = {"BIAS": bias, "SOFTCAP": softcap, "ENTROPY": entropy}
        for block, warps in row_kernels.ABSORB.items():
            if not (softcap and more):  # a softcap has no unit gradient
                constants = flags | {"KEEP": more, "BLOCK": block}
                options = {"num_warps": warps, "maxnreg": row_kernels.REGISTERS}
                yield row_kernels.absorb_kernel, types, constants, options
        for block, warps in row_kernels.DIFFERENTIATE.items():
            constants = flags | {"SCALED": more, "BLOCK": block}
            yield row_kernels.differentiate_kernel, types, constants, {"num_warps": warps}
    for block, warps in row_kernels.RESCALE.items():
        yield row_kernels.rescale_kernel, base, {"BLOCK": block}, {"num_warps": warps}
    for narrow, bias, softcap, entropy in product(("bf16", "fp16"), on, on, on):
        types, flags = base | {"b": narrow}, {"BIAS": bias, "SOFTCAP": softcap, "ENTROPY": entropy}
        tile = tile_kernels.forward_config(**flags)
        constants = flags | tile_kernels.constants(tile)
        widest = tile == tile_kernels.WIDE and narrow == "bf16"  # which has no register left
        for splits in tile_kernels.SPLITS if widest else tile_kernels.SPLITS[:1]:
            yield (
                tile_kernels.forward_kernel,
                types,
                constants | {"SPLITS": splits},
                {"num_warps": tile.warps},
            )
        tile = tile_kernels.WIDE
        scaled = {"SCALED": narrow == "fp16", "GROUP": tile_kernels.GROUP}
        constants = flags | tile_kernels.constants(tile) | scaled
        yield tile_kernels.backward_kernel, types, constants, {"num_warps": tile.warps}


def decode_configurations():
    """The same of the kernels of `decode`, for widths and heads of common models."""
    for t in ("bf16", "fp32"):
        types, on = {"x": t, "f": t, "b": t, "l": "i64"}, (False, True)
        for add, block in zip(on, (1024, 8192)):
            yield decode.norm_kernel, types, {"ADD": add, "BLOCK": block}, {"num_warps": 4}
        yield decode.swiglu_kernel, types, {"BLOCK": 1024}, {"num_warps": 4}
        for norm, size in zip(on, (64, 128)):
            constants = {"HEADS": 14, "OF_KEYS": 2, "SIZE": size, "NORM": norm, "BLOCK": size // 2}
            yield decode.rotate_kernel, types, constants, {"num_warps": 1}
            constants = {"EACH": 7, "SIZE": size, "GROUP": 16, "WIDTH": size, "BLOCK": 64, "UPCAST": False}
            yield decode.attend_kernel, types, constants, {"num_warps": 4}
    yield decode.draw_kernel, types | {"u": "fp64"}, {"BLOCK": 4096}, {"num_warps": 8}


def main():
    for kernel, types, constants, options in decode_configurations():
        if sys.argv[1:] and kernel.__name__ not in sys.argv[1:]:
            continue
        for arch in (90, 100):
            said = {
                "kernel": kernel.__name__,
                "options": f"sm_{arch} {types['b']} {constants}",
                "aligned": True,
            }
            target = GPUTarget("cuda", arch, 32)
            binary = compiled(kernel, types, constants, aligned=True, target=target, **options)
            print(json.dumps(said | resources(binary)), flush=True)
    for kernel, types, constants, options in configurations():
        if sys.argv[1:] and kernel.__name__ not in sys.argv[1:]:
            continue
        for aligned in (True,) if kernel in ALIGNED else (True, False):
            said = {"kernel": kernel.__name__, "options": f"{types['b']} {constants}", "aligned": aligned}
            binary = compiled(kernel, types, constants, aligned=aligned, **options)
            print(json.dumps(said | resources(binary)), flush=True)


if __name__ == "__main__":
    main()
