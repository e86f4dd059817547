"""Parts of gpu_step.py that run one operation: matrix products, attention of packs, the fused head."""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_step_model import Setting, lengths_of, seconds_of
from torch import Tensor

from rft_fn.model import packed_attention
from rft_fn.model.bounds import SequenceBounds

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench"
Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


def product(setting: Setting, size: int) -> dict[str, Any]:
    """The rate of one matrix product: what the device reaches, beside the peak on its data sheet."""
    a, b = (torch.randn(size, size, device=setting.device).to(setting.dtype) for _ in range(2))
    out = torch.empty_like(a)
    middle = statistics.median(seconds_of(setting, lambda: [torch.mm(a, b, out=out) for _ in range(10)])) / 10
    return {"tflops": 2 * size**3 / middle / 1e12, "of_peak": 2 * size**3 / middle / setting.peak}


def products(setting: Setting) -> Cases:
    """Two square products."""
    sizes = (4096, 8192)
    if setting.dry:
        sizes = (32,)
    for size in sizes:
        yield {"size": size}, lambda n=size: product(setting, n)


def _attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds) -> Tensor:
    """Attention [T, H, D] of a pack by one kernel; "mask" is one sdpa with a [T, T] mask."""
    if kernel == "sequence":
        return packed_attention.by_sequence(q, k, v, bounds)
    if kernel != "mask":
        return packed_attention.by_varlen(packed_attention._kernels()[kernel], q, k, v, bounds)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = bounds.cut(None, causal=True)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _errors(kernel: str, inputs: list[Tensor], bounds: SequenceBounds, upstream: Tensor) -> dict[str, float]:
    """Errors of two heads and of their queries' gradients, against float64 of the same rounded inputs."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    out = _attend(kernel, q, k, v, bounds)
    (dq,) = torch.autograd.grad(out, [q], upstream)
    exact = [x.detach()[:, :n].double() for x, n in zip(inputs, (2, 1, 1), strict=True)]
    exact[0].requires_grad_()
    want = packed_attention.by_sequence(*exact, bounds)
    (dwant,) = torch.autograd.grad(want, [exact[0]], upstream[:, :2].double())
    found = {}
    for name, x, y in (("error", out, want), ("gradient_error", dq, dwant)):
        apart = x.detach()[:, :2].double() - y.detach()
        found[name] = float(apart.norm() / y.detach().norm())
    return found


def attended(setting: Setting, kernel: str, sizes: list[int], heads: tuple[int, int, int]) -> dict[str, Any]:
    """Errors and seconds of one kernel on one pack."""
    g = torch.Generator(setting.device).manual_seed(0)
    q_heads, kv_heads, dim = heads
    total = sum(sizes)
    inputs = [
        torch.randn(total, n, dim, generator=g, device=setting.device).to(setting.dtype)
        for n in (q_heads, kv_heads, kv_heads)
    ]
    bounds = SequenceBounds(sizes, setting.device)
    upstream = torch.randn(total, q_heads, dim, generator=g, device=setting.device).to(setting.dtype)
    row: dict[str, Any] = _errors(kernel, inputs, bounds, upstream)

    with torch.no_grad():
        forward = statistics.median(seconds_of(setting, lambda: _attend(kernel, *inputs, bounds)))
    leaves = [x.requires_grad_() for x in inputs]
    both = statistics.median(
        seconds_of(setting, lambda: torch.autograd.grad(_attend(kernel, *leaves, bounds), leaves, upstream))
    )
    work = 2 * q_heads * dim * sum(n * n for n in sizes)
    row |= {"forward": forward, "both": both, "forward_tflops": work / forward / 1e12}
    return row | {"both_tflops": 3 * work / both / 1e12}


def attend(setting: Setting) -> Cases:
    """Each kernel that this machine has, on packs of short, mixed and long sequences."""
    heads = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128)}
    packs = {"short": (64, 257), "mixed": setting.lengths, "long": (setting.tokens, setting.tokens)}
    if setting.dry:
        heads = {"tiny": (4, 2, 8)}
        packs["short"] = (2, 5)
    names = ["sequence", "mask"]
    if setting.device.type == "cuda":
        major = torch.cuda.get_device_capability(setting.device)[0]
        names += [n for n in packed_attention._kernels() if n != "flash3" or major == 9]
    for model, shape in heads.items():
        for pack, lengths in packs.items():
            sizes = lengths_of(setting, 0, lengths)
            for kernel in names:
                about = {"heads": model, "pack": pack, "sequences": len(sizes), "kernel": kernel}
                yield about, lambda k=kernel, s=sizes, h=shape: attended(setting, k, s, h)


def _bench() -> tuple[Any, Any]:
    """kernels/bench's gpu and tune, scripts that import what is beside them."""
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    import gpu
    import tune

    return gpu, tune


def _on_cpu(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _no_peak(call: Callable[[], object]) -> float:
    call()
    return 0.0


def fused_head(setting: Setting) -> Cases:
    """The bars of the fused head: each engine, beside the rate of its matrix products in the same run."""
    gpu, _ = _bench()
    shapes: Any = gpu.SHAPES
    clock = gpu.CUDA
    options: dict[str, Any] = {}
    if setting.dry:
        shapes = [gpu.Shape(24, 16, 64)]
        clock = gpu.Clock(_on_cpu, _no_peak)
        options = {"engines": {"streamed": "streamed"}, "only": ["naive", "streamed"]}

    def measured(shape: Any) -> dict[str, Any]:
        return gpu.measure(shape, clock, rounds=setting.rounds, device=setting.device.type, **options)

    for shape in shapes:
        yield {"shape": list(shape)}, lambda s=shape: measured(s)


def auto(setting: Setting, out: Path) -> Cases:
    """auto.json: the fastest engine at each width, written beside the results."""
    gpu, tune = _bench()
    args = argparse.Namespace(widths=[512, 896, 1536, 2048, 3584, 5120, 8192], T=8192, V=131072)
    clock = gpu.CUDA
    names = tune.ENGINES
    if setting.dry:
        args = argparse.Namespace(widths=[8, 16], T=24, V=64)
        clock = gpu.Clock(_on_cpu, _no_peak)
        names = ("streamed", "reference")
    args.rounds = setting.rounds

    def measured() -> dict[str, Any]:
        source = {"capability": "dry", "device": "cpu"}
        if not setting.dry:
            source = gpu.provenance()
        found = tune.measure(args, clock, device=setting.device.type, names=names)
        shutil.copy(tune.FILE, out / "auto.json")
        tune.rewrite(out / "auto.json", found, source | {"T": args.T, "V": args.V, "rounds": args.rounds})
        return {"rules": tune.rules(found), "seconds": {str(d): times for d, times in found.items()}}

    yield {"file": "auto.json"}, measured
