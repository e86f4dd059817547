"""Linear layers by faster libraries, and weights in low precision under adapters: int8 and nf4.

int8 is torchao's: one scale per row, on the CPU too. nf4 is bitsandbytes' (arXiv 2305.14314): four bits per
weight. A folder that was saved so is loaded so.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from rft_fn.model.packed_attention import warn_once

__all__ = [
    "FastLinear", "check", "count", "dequantize", "int8_as_json", "is_low", "is_plain", "low_kind", "nbytes",
    "options", "packed", "prepare", "require_adapters", "require_whole", "set_fast", "state", "whole",
]  # fmt: skip


# ---------- linear layers of a module through the faster library of a CPU


if TYPE_CHECKING:
    from rft_kernels.linear import Packed


class FastLinear(nn.Linear):
    """A linear layer by `rft_kernels.linear`. A copy of it, or a pickle, is a layer of torch's own class."""

    pack: "Packed | None" = None  # of the weight, inside of `packed`

    def forward(self, input: Tensor) -> Tensor:
        if self.pack is not None:
            return self.pack.linear(input, self.bias)
        from rft_kernels.linear import linear

        return linear(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        # protocol 1 names the class among plain arguments; from 2 on it must be the object's
        reduced: Any = super().__reduce_ex__(1)
        make, (_, *rest), state, *more = reduced
        own = {name: x for name, x in state.items() if name != "pack"}
        return make, (nn.Linear, *rest), own, *more


def set_fast(module: nn.Module, on: bool, *, narrow: bool = False) -> None:
    """Make all plain linear layers of a module `FastLinear`, or make those plain again.

    `narrow`: they will be given bfloat16. Warns once if this processor is slow in it.

    Only the class of a layer changes: parameters, names and hooks stay. Layers of other classes, with
    quantised weights, or with forwards from elsewhere stay as they are, and so does every layer if the
    processor gains nothing.
    """
    from rft_kernels import narrow as of_16_bits
    from rft_kernels import products

    narrow = narrow and next(module.parameters()).device.type == "cpu"
    gain = of_16_bits.gain() if narrow and on else 1.0
    if gain == 0:
        warn_once("bfloat16: this processor multiplies it in float32; float32 throughout would be faster")
    elif gain < 1:
        times = f"{1 / gain:.1f} times as long as in float32"
        warn_once(
            f"bfloat16: products take this processor {times}, which computes them instead; "
            "float32 throughout would be faster"
        )
    old: type[nn.Module] = FastLinear
    new: type[nn.Module] = nn.Linear
    gains = products.packing().elements < math.inf  # also what gains only in sampling
    if on and (gains or narrow):
        old, new = new, old
    for layer in module.modules():
        kind = type(layer)
        whole = type(layer._parameters.get("weight")) is nn.Parameter
        if kind is old and whole and "forward" not in vars(layer):
            layer.__class__ = new


@contextmanager
def packed(module: nn.Module) -> Iterator[None]:
    """Run a module without gradients, a copy of each `FastLinear`'s weight packed for oneDNN meanwhile."""
    from rft_kernels.linear import Packed

    layers = [m for m in module.modules() if type(m) is FastLinear]
    for layer in layers:
        layer.pack = Packed(layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            layer.pack = None


def pack_again(module: nn.Module) -> None:
    """Pack the weights that changed within a block of `packed`."""
    from rft_kernels.linear import Packed

    for layer in module.modules():
        if type(layer) is FastLinear and layer.pack is not None:
            layer.pack = Packed(layer.weight)


def is_plain(layer: Any) -> TypeGuard[nn.Linear]:
    """Return whether a layer is one matrix, with or without bias, and nothing else."""
    return type(layer) in (nn.Linear, FastLinear)


# ---------- weights in low precision, frozen under adapters: int8 and nf4


_LIBRARY = {"int8": "torchao", "nf4": "bitsandbytes"}


def check(kind: str, name: str, *, rank: int, world: int, config: Any) -> None:
    """Raise ValueError if a run cannot train over a base in low precision; `config` is the strategy's."""
    if not kind:
        return
    _require_library(kind)

    # The base is frozen, so there must be adapters.
    if not rank and not Path(name, "adapter_config.json").is_file():
        raise ValueError(f"lora_rank: expected > 0 with quantize {kind}, which freezes the base, got 0")

    # Its weights cannot be sharded or cast: with FSDP2 every process has them whole.
    odd = [x for x in ("zero_stage", "bf16", "use_mp_opt", "fsdp_cpu_offload") if getattr(config, x)]
    if odd:
        raise ValueError(f"quantize: expected none with {', '.join(odd)}, got {kind}, which stays as it is")


def _require_library(kind: str) -> None:
    if kind not in _LIBRARY:
        raise ValueError(f"quantize: expected one of {', '.join(_LIBRARY)}, got {kind!r}")
    if find_spec(_LIBRARY[kind]) is None:
        raise ValueError(f"quantize: {kind} needs {_LIBRARY[kind]}, which is not installed; pip install it")


def options(
    kind: str, *, dtype: torch.dtype, device: torch.device, whole: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the keywords to quantise all but the parts `whole`. ValueError without the library."""
    _require_library(kind)
    kept = [*whole, "lm_head"] if whole else None  # None: the head and what is tied to it
    if kind == "int8":
        from transformers import TorchAoConfig

        return {"quantization_config": TorchAoConfig(_int8(), modules_to_not_convert=kept)}
    from transformers import BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )
    return {"quantization_config": nf4, "device_map": {"": device}}


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]

    return Int8WeightOnlyConfig()


def int8_as_json() -> str:
    """Return torchao's config of int8 as other programs read it. ValueError without the library."""
    _require_library("int8")
    from torchao.core.config import config_to_dict  # type: ignore[import-not-found]

    return json.dumps(config_to_dict(_int8()))


def is_low(x: Any) -> bool:
    """Return whether a weight is in low precision."""
    is_int8 = type(x).__module__.partition(".")[0] == "torchao"
    return is_int8 or getattr(x, "quant_state", None) is not None


def low_kind(module: nn.Module) -> str:
    """Return the low precision that a module has weights in: int8, nf4, or empty for none."""
    for p in module.parameters():
        if is_low(p):
            return "int8" if getattr(p, "quant_state", None) is None else "nf4"
    return ""


def _any_low(module: nn.Module) -> bool:
    return bool(low_kind(module))


def prepare(name: str, module: nn.Module) -> None:
    """Make a model compute with gradients. ValueError for weights that only another library can read."""
    layer: Any
    for layer in module.modules():
        # bitsandbytes: a forward without a gradient would pack the weights into a form that no backward reads
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    for key, p in module.named_parameters():
        if p.dtype.itemsize == 1 and not is_low(p):
            raise ValueError(
                f"model: {name}: {key}: expected full precision, int8 of torchao or nf4 of bitsandbytes, got "
                f"{str(p.dtype).removeprefix('torch.')}; take a folder of it that is not quantised"
            )


def require_whole(module: nn.Module, what: str) -> None:
    """Raise ValueError for a module in low precision, which `what` cannot hold."""
    if _any_low(module):
        raise ValueError(
            f"quantize: expected full precision with {what}, got a quantised model, which trains as it is"
        )


def require_adapters(module: nn.Module) -> None:
    """Raise ValueError for a module in low precision without adapters: it cannot be trained."""
    if _any_low(module) and not hasattr(module, "peft_config"):
        raise ValueError(
            "quantize: expected adapters on a quantised model, which is frozen, got none; set lora_rank"
        )


def whole(x: Tensor) -> Tensor:
    """Return a weight in full precision, as the forward uses it; itself if it is already."""
    if not is_low(x):
        return x
    packing = getattr(x, "quant_state", None)
    if packing is None:
        return x.detach().dequantize()
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

    return dequantize_4bit(x.data, packing)


def nbytes(x: Any) -> int:
    """Return the memory of a weight [bytes], its scales included."""
    packing = getattr(x, "quant_state", None)
    if packing is not None:
        size = x.numel() + packing.absmax.nbytes
        if packing.nested:  # its scales are quantised too
            size += packing.state2.absmax.nbytes
        return size
    if is_low(x):
        return sum(getattr(x, name).nbytes for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()


def count(x: Tensor) -> int:
    """Return the number of elements of a weight in full precision."""
    packing = getattr(x, "quant_state", None)
    return x.numel() if packing is None else packing.shape.numel()


def state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, its weights in full precision."""
    if not _any_low(module):
        return module.state_dict()
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers()}
    every = module.state_dict(keep_vars=True)  # with scales of packed weights, which are left out
    return {name: whole(x).detach() for name, x in every.items() if name in own}


@torch.no_grad()
def dequantize(module: Any) -> nn.Module:
    """Put the weights of a model of transformers in full precision, in place."""
    layers: list[tuple[str, Any]] = [
        (name, m) for name, m in module.named_modules() if is_low(m._parameters.get("weight"))
    ]
    for name, layer in layers:
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        linear.weight = nn.Parameter(whole(layer.weight))
        linear.bias = layer.bias
        module.set_submodule(name, linear)
    if layers:
        module.hf_quantizer = None
        del module.config.quantization_config
    return module
