"""Causal attention within each sequence of a pack: sdpa and flash attention."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rft_fn.model.bounds import SequenceBounds, take_rows

__all__ = [
    "Device", "by_sequence", "by_tail", "by_varlen", "choose", "computed_wide", "leave_out_plans", "packed",
    "warn_once",
]  # fmt: skip


_FLASH = {"flash3": "flash_attn_interface", "flash2": "flash_attn"}  # kernel -> package


class Device(NamedTuple):
    """The properties of a machine that `choose` looks at."""

    kind: str  # "cpu", "cuda"
    capability: tuple[int, int] = (0, 0)  # of CUDA
    installed: frozenset[str] = frozenset()  # kernels that can be imported


def choose(device: Device, dtype: torch.dtype, head: int) -> tuple[str, str | None]:
    """Return (kernel, reason) for heads of size `head`.

    The reason tells why it is not a faster kernel; None if nothing is missed. "flash3" (flash-attn 3,
    Hopper), "varlen" (flash attention within torch) and "flash2" (flash-attn 2) need CUDA 8.0 or later,
    float16 or bfloat16, and heads of at most 256 in steps of 8. "sequence" runs everywhere: one causal
    sdpa per sequence length. On the CPU it is the only one.
    """
    # No flash attention for this device, type or size of heads.
    if device.kind == "cpu":
        return "sequence", None
    if device.kind != "cuda" or device.capability < (8, 0):
        return "sequence", f"flash attention needs CUDA 8.0, this is {device.kind} {device.capability}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "sequence", f"flash attention needs float16 or bfloat16, this is {dtype}"
    if head > 256 or head % 8:
        return "sequence", f"flash attention needs heads of at most 256 in steps of 8, these are of {head}"

    # The fastest first.
    hopper = device.capability[0] == 9
    for name in ("flash3", "varlen", "flash2"):
        if name in device.installed and (name != "flash3" or hopper):
            return name, None
    return "sequence", "neither torch.nn.attention.varlen nor flash-attn is installed"


def leave_out_plans() -> None:
    """Take cuDNN out of the kernels that `scaled_dot_product_attention` chooses from, in this process.

    On Hopper and later torch asks it first, and it builds a plan for every new shape, about half a second
    each way: lengths are new in every step of a run. The other kernels take any shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _imported(module: str, name: str) -> Callable | None:
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError, RuntimeError):  # a package built for another torch or CUDA
        return None


@cache
def _kernels() -> dict[str, Callable]:
    """Return the importable functions for sequences of different lengths, by the name of the kernel."""
    found = {"varlen": _imported("torch.nn.attention.varlen", "varlen_attn")}
    found |= {name: _imported(module, "flash_attn_varlen_func") for name, module in _FLASH.items()}
    return {name: f for name, f in found.items() if f is not None}


@cache
def _device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(device.type)
    return Device("cuda", torch.cuda.get_device_capability(device), frozenset(_kernels()))


@cache
def warn_once(message: str) -> None:
    """Warn, but only the first time that this message is given."""
    warnings.warn(message, stacklevel=2)


def by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: SequenceBounds,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally within each sequence, by one sdpa for each of their lengths.

    q [T, H, D], k and v [T, H', D] -> [T, H, D]: softmax(scale q k^T) v, where `scale` defaults to 1 /
    sqrt(D). `sinks` [H] take part in each softmax as the score of a token without a value.

    Without many sequences of one length there is one sdpa for each sequence. Every sequence is computed
    only from its own tokens, in the same order whatever its neighbours hold. Differentiable, on any
    device.
    """
    # Put sequences of one length together, so that they are one batch.
    parts = bounds.runs
    if bounds.groups is not None:
        q, k, v = (torch.zeros_like(x).index_copy(0, bounds.inverse, x) for x in (q, k, v))
        parts = [(len(group), size) for size, group in bounds.groups.items()]

    # Each part is [n sequences, size tokens]. They are split at once, because the gradient of a slice is a
    # tensor of zeros of the whole pack.
    cuts = [n * size for n, size in parts]
    split = [x.split(cuts) for x in (q, k, v)]
    out = []
    for (n, _), *part in zip(parts, *split):
        batch = [rearrange(x, "(n s) h d -> n h s d", n=n) for x in part]
        y = _causal(batch[0], batch[1], batch[2], sinks, scale=scale)
        out.append(rearrange(y, "n h s d -> (n s) h d"))
    if len(out) == 1:
        return out[0]

    # Back to the order of the pack.
    y = torch.cat(out)
    if bounds.groups is None:
        return y
    return torch.zeros_like(y).index_copy(0, bounds.order, y)


def by_tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: SequenceBounds,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `by_sequence` for the tokens that a pack keeps.

    q [U, H, D], k and v [U, H', D] -> [U, H, D]: each kept token attends to its whole sequence, with the
    keys and values of those that begin alike. One sdpa for each length and number of kept tokens.
    """
    out = []
    for queries, keys, mask in bounds.tails:
        each = (take_rows(q, queries), take_rows(k, keys), take_rows(v, keys))
        batch = [rearrange(x, "n s h d -> n h s d") for x in each]
        y = _causal(batch[0], batch[1], batch[2], sinks, scale=scale, mask=mask)
        out.append(rearrange(y, "n h s d -> (n s) h d"))
    return take_rows(torch.cat(out), bounds.unpermute)


def computed_wide(q: Tensor) -> bool:
    """Return whether attention of queries q is computed in float32: of 16 bits on a CPU.

    There the backward of sdpa takes up to three times as long in 16 bits.
    """
    return q.device.type == "cpu" and q.dtype in (torch.float16, torch.bfloat16)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """Attend causally in a batch of sequences of one length, from their last tokens.

    q [N, H, Q, D], k and v [N, H', S, D] -> [N, H, Q, D]. `mask` [Q, S] has the keys of each query, if Q <
    S.
    """
    if computed_wide(q):
        sinks = None if sinks is None else sinks.float()
        return _causal(q.float(), k.float(), v.float(), sinks, scale=scale, mask=mask).to(q.dtype)
    count = q.shape[2]
    size = k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if sinks is None:
        causal = mask is None and size > 1
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    # The sink is one more key of zeros: its score is all in the mask.
    k = pad(k, (0, 0, 0, 1))
    v = pad(v, (0, 0, 0, 1))
    score = torch.full((count, size), -torch.inf, dtype=q.dtype, device=q.device).triu(1 + size - count)
    whole = torch.cat([score.expand(len(sinks), -1, -1), sinks[:, None, None].expand(-1, count, 1)], -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=whole[None], scale=scale, enable_gqa=gqa)


def by_varlen(
    f: Callable, q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, *, scale: float | None = None
) -> Tensor:
    """Attend causally within each sequence, by one kernel for the pack.

    Shapes are those of `by_sequence`, or of `by_tail` for a pack with tokens that begin alike. `f` is
    torch's varlen_attn or flash-attn's flash_attn_varlen_func. They let heads of q share one of k and v,
    and take the queries of a sequence with more keys as its last tokens.
    """
    cu_q = cu_k = bounds.cu
    longest_q = longest_k = bounds.longest
    if bounds.prefixes is not None:
        keys, cu_q, cu_k, longest_q, longest_k = bounds.ragged_tails
        k = take_rows(k, keys)
        v = take_rows(v, keys)

    # Keywords differ by package and version: torch 2.11 lets heads share without being told.
    window = (-1, 0)  # causal
    knows = _keywords(f)
    if "deterministic" in knows:  # flash-attn; torch's own follows its mode by itself
        f = partial(f, deterministic=torch.are_deterministic_algorithms_enabled())
    if "softmax_scale" in knows:
        out = f(q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale=scale, causal=True)
    elif "enable_gqa" in knows:
        gqa = q.shape[1] != k.shape[1]
        out = f(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=window, enable_gqa=gqa)
    else:
        out = f(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=window)
    return out[0] if isinstance(out, tuple) else out


@cache
def _keywords(f: Callable) -> frozenset[str]:
    """Return the names of a function's parameters; looked up once, not in every layer."""
    return frozenset(inspect.signature(f).parameters)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: SequenceBounds,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `by_sequence` or `by_varlen`, chosen for these tensors.

    Warns once if it is not the fast one. For a pack with tokens that begin alike and are computed once, q,
    k, v are [U, H, D] of the tokens that it keeps, and so is the result.
    """
    kernel, why = choose(_device(q.device), q.dtype, q.shape[-1])
    if kernel != "sequence" and sinks is not None:
        kernel = "sequence"
        why = "its heads have sinks"
    if kernel != "sequence" and v.shape[-1] != q.shape[-1]:
        kernel = "sequence"
        why = f"heads of {q.shape[-1]} for keys, of {v.shape[-1]} for values"
    exact = torch.are_deterministic_algorithms_enabled()
    if exact and kernel in _FLASH and "deterministic" not in _keywords(_kernels()[kernel]):
        kernel = "sequence"
        why = "the gradient of this flash-attn is not deterministic"
    if why:
        warn_once(f"attention: packs take one sdpa for each sequence: {why}")
    if kernel != "sequence":
        return by_varlen(_kernels()[kernel], q, k, v, bounds, scale=scale)
    attend = by_sequence if bounds.prefixes is None else by_tail
    return attend(q, k, v, bounds, scale=scale, sinks=sinks)
