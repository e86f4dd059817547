"""Causal attention within each sequence of a pack: one sdpa for each, or one kernel for all."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rft_fn.model.attention.packs import SequenceBounds

__all__ = ["Device", "by_sequence", "by_varlen", "choose", "packed", "warn_once"]

_FLASH = {"flash3": "flash_attn_interface", "flash2": "flash_attn"}  # engine -> package


class Device(NamedTuple):
    """What `choose` needs to know of a machine: kind ("cpu", "cuda"), CUDA capability, engines that can be
    imported."""

    kind: str
    capability: tuple[int, int] = (0, 0)
    installed: frozenset[str] = frozenset()


def choose(device: Device, dtype: torch.dtype, head: int) -> tuple[str, str | None]:
    """(engine, why it is not a faster one | None) for heads of size `head`.

    "flash3" (flash-attn 3, Hopper), "varlen" (flash attention within torch), "flash2" (flash-attn 2): CUDA
    8.0 or later, float16 or bfloat16, heads of at most 256 in steps of 8. "sequence" is everywhere: one
    causal sdpa a length. On the CPU it is the only one and nothing is missed.
    """
    if device.kind == "cpu":
        return "sequence", None
    if device.kind != "cuda" or device.capability < (8, 0):
        return "sequence", f"flash attention needs CUDA 8.0, this is {device.kind} {device.capability}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "sequence", f"flash attention needs float16 or bfloat16, this is {dtype}"
    if head > 256 or head % 8:
        return "sequence", f"flash attention needs heads of at most 256 in steps of 8, these are of {head}"
    hopper = device.capability[0] == 9
    for name in ("flash3", "varlen", "flash2"):
        if name in device.installed and (name != "flash3" or hopper):
            return name, None
    return "sequence", "neither torch.nn.attention.varlen nor flash-attn is installed"


def _imported(module: str, name: str) -> Callable | None:
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError, RuntimeError):  # a package built for another torch or CUDA
        return None


@cache
def _engines() -> dict[str, Callable]:
    """The functions for sequences of different lengths that can be imported here."""
    found = {"varlen": _imported("torch.nn.attention.varlen", "varlen_attn")}
    found |= {name: _imported(module, "flash_attn_varlen_func") for name, module in _FLASH.items()}
    return {name: f for name, f in found.items() if f is not None}


@cache
def _device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(device.type)
    return Device("cuda", torch.cuda.get_device_capability(device), frozenset(_engines()))


@cache
def warn_once(message: str) -> None:
    """A warning, once."""
    warnings.warn(message, stacklevel=2)


def by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packs: SequenceBounds,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D], k and v [T, H', D] -> [T, H, D]: causal softmax(scale q k^T) v within each sequence; scale
    is 1 / sqrt(D) if None. `sinks` [H] take part in each softmax as the score of a token without a value.

    One sdpa for each sequence, or for each length where many have the same. Every sequence is computed from
    its own tokens only, in the same order whatever its neighbours hold. Differentiable, on any device.
    """
    if packs.groups is None:
        parts = [(1, size) for size in packs.sizes]
    else:
        q, k, v = (torch.zeros_like(x).index_copy(0, packs.inverse, x) for x in (q, k, v))
        parts = [(len(g), size) for size, g in packs.groups.items()]
    lengths = [n * size for n, size in parts]
    out = []
    for (n, size), *qkv in zip(parts, *(x.split(lengths) for x in (q, k, v))):
        one = [x.unflatten(0, (n, size)).transpose(1, 2) for x in qkv]
        y = _causal(*one, scale, sinks)
        out.append(y.transpose(1, 2).flatten(0, 1))
    y = torch.cat(out)
    return y if packs.groups is None else torch.zeros_like(y).index_copy(0, packs.order, y)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor | None) -> Tensor:
    """Causal attention of q [N, H, S, D] to k and v [N, H', S, D] -> [N, H, S, D]."""
    size = q.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if sinks is None:
        return scaled_dot_product_attention(q, k, v, is_causal=size > 1, scale=scale, enable_gqa=gqa)
    # one more key, of zeros: its score is what the mask adds, the sink
    k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    score = torch.full((size, size), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    mask = torch.cat([score.expand(len(sinks), -1, -1), sinks[:, None, None].expand(-1, size, 1)], -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask[None], scale=scale, enable_gqa=gqa)


def by_varlen(
    f: Callable, q: Tensor, k: Tensor, v: Tensor, packs: SequenceBounds, *, scale: float | None = None
) -> Tensor:
    """The same by `f`, torch's varlen_attn or flash-attn's flash_attn_varlen_func: one
    kernel for the pack.

    Their keywords differ by version, so they are read from the signature: heads of k and v are repeated where
    grouped ones are not known.
    """
    knows = inspect.signature(f).parameters
    if "softmax_scale" in knows:  # flash-attn
        options: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    else:
        options = {"window_size": (-1, 0)} if "window_size" in knows else {"is_causal": True}
        if "scale" in knows:
            options["scale"] = scale
        elif scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)
        if q.shape[1] != k.shape[1]:
            if "enable_gqa" in knows:
                options["enable_gqa"] = True
            else:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = f(q, k, v, packs.cu, packs.cu, packs.longest, packs.longest, **options)
    return out[0] if isinstance(out, tuple) else out


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packs: SequenceBounds,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`by_sequence` or `by_varlen`, whichever `choose` names for these tensors; a
    warning once where it is not the fast one."""
    engine, why = choose(_device(q.device), q.dtype, q.shape[-1])
    if engine != "sequence" and sinks is not None:
        engine, why = "sequence", "its heads have sinks"
    if engine != "sequence" and v.shape[-1] != q.shape[-1]:
        engine, why = "sequence", f"heads of {q.shape[-1]} for keys, of {v.shape[-1]} for values"
    if why:
        warn_once(f"attention: packs take one sdpa for each sequence: {why}")
    if engine == "sequence":
        return by_sequence(q, k, v, packs, scale=scale, sinks=sinks)
    return by_varlen(_engines()[engine], q, k, v, packs, scale=scale)
