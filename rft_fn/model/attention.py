"""Exact attention for packs: each sequence attends to itself, and no [T, T] mask is made.

`turn_on` registers one attention function with transformers and names it in the module's config, and
`Packs`, the boundaries of the sequences, reaches it as a keyword argument of the model's forward. Without
that argument (sampling with a cache, padded rows, a pack of one sequence) it is transformers' sdpa as it is.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rft_fn.types import Packed

__all__ = ["Device", "Packs", "by_sequence", "by_varlen", "choose", "packs_of", "turn_off", "turn_on"]

NAME = "rft_packs"  # in transformers' table of attention functions
_FLASH = {"flash3": "flash_attn_interface", "flash2": "flash_attn"}  # engine -> package
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class Packs:
    """Where the sequences of a pack lie: sizes in tokens, in order, on the device of the pack.

    `calls` counts the attention layers that got it, so that a model that drops it is found out. `sequence` is
    the axis over which the tokens are split (its heads and tokens exchange them), if they are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | str = "cpu", *, sequence: Any = None):
        self.sizes, self.sequence = list(sizes), sequence
        self.longest, self.calls, self.device = max(self.sizes), 0, device
        self._made: dict[str, Tensor] = {}
        self._cut: tuple[Tensor | None, bool, Tensor] | None = None
        groups: dict[int, list[int]] = {}
        for i, size in enumerate(self.sizes):
            groups.setdefault(size, []).append(i)
        # reordering copies q, k, v: it pays where sequences of one length are many
        self.groups = groups if 2 * len(groups) <= len(self.sizes) else None

    @property
    def cu(self) -> Tensor:
        """[K + 1] i32: where each sequence begins, and the end."""
        if "cu" not in self._made:
            ends = torch.tensor([0, *self.sizes]).cumsum(0)
            self._made["cu"] = ends.to(self.device, torch.int32)
        return self._made["cu"]

    @property
    def order(self) -> Tensor:
        """[T] i64: the tokens, those of sequences of one length together."""
        if "order" not in self._made:
            starts = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
            token = [
                t for g in (self.groups or {}).values() for i in g for t in range(starts[i], starts[i + 1])
            ]
            self._made["order"] = torch.tensor(token).to(self.device)
        return self._made["order"]

    @property
    def inverse(self) -> Tensor:
        """[T] i64: the place of each token in `order`."""
        if "inverse" not in self._made:
            self._made["inverse"] = self.order.argsort()
        return self._made["inverse"]

    @property
    def same(self) -> Tensor:
        """[T, T] bool: whether two tokens are of one sequence. For layers that this module cannot serve."""
        if "same" not in self._made:
            seq = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
            seq = seq.to(self.device)
            self._made["same"] = seq[:, None] == seq
        return self._made["same"]

    def cut(self, mask: Tensor | None, *, causal: bool) -> Tensor:
        """`mask` [1, 1, T, T], or what None stands for, less the pairs of two sequences. Kept for the next
        layer, which mostly has the same mask."""
        if self._cut is None or self._cut[0] is not mask or self._cut[1] != causal:
            same = self.same[None, None]
            if mask is None:
                new = same.tril() if causal else same
            elif mask.dtype == torch.bool:
                new = mask & same
            else:
                new = mask.masked_fill(~same, torch.finfo(mask.dtype).min)
            self._cut = (mask, causal, new)
        return self._cut[2]


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
def say(message: str) -> None:
    """A warning, once."""
    warnings.warn(message, stacklevel=2)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, packs: Packs, *, scale: float | None = None) -> Tensor:
    """q [T, H, D], k and v [T, H', D] -> [T, H, D]: causal softmax(scale q k^T) v within each sequence; scale
    is 1 / sqrt(D) if None.

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
        gqa = q.shape[1] != k.shape[1]
        y = scaled_dot_product_attention(*one, is_causal=size > 1, scale=scale, enable_gqa=gqa)
        out.append(y.transpose(1, 2).flatten(0, 1))
    y = torch.cat(out)
    return y if packs.groups is None else torch.zeros_like(y).index_copy(0, packs.order, y)


def by_varlen(
    f: Callable, q: Tensor, k: Tensor, v: Tensor, packs: Packs, *, scale: float | None = None
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


def _unfit(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict) -> str | None:
    """What a layer asks for that `by_sequence` does not do, or None."""
    if options["dropout"]:
        return f"dropout {options['dropout']}"
    if not _causal(module, options):
        return "attention that is not causal"
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        return "a batch, a cache or other keys than its own tokens"
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if options.get(name) is not None:
            return name
    if options.get("output_attentions"):
        return "output_attentions"
    if mask is not None:
        window = options.get("sliding_window") or getattr(module, "sliding_window", None)
        return f"a mask of its own (sliding_window {window})" if window else "a mask of its own"
    return None


def _causal(module: nn.Module, options: dict) -> bool:
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, H, T, D], key
    and value [1, H', T, D] -> ([1, T, H, D], None).

    With `rft_packs` among the options, each sequence for itself; where the layer asks for more than causal
    attention to its own sequence (a window, a cap, a mask), transformers' sdpa with a [T, T] mask, and a
    warning once that names it. Without `rft_packs` transformers' sdpa, as it is.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    packs: Packs | None = options.pop("rft_packs", None)
    if packs is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    packs.calls += 1
    options.setdefault("dropout", 0.0)
    why = _unfit(module, query, key, attention_mask, options)
    if why and packs.sequence:
        raise ValueError(f"sp_size: expected 1 for {type(module).__name__}: it asks for {why}")
    if why:
        say(f"attention: packs take a [T, T] mask in {type(module).__name__}: it asks for {why}")
        mask = packs.cut(attention_mask, causal=_causal(module, options))
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packs.sequence is None:
        return packed(q, k, v, packs, scale=options.get("scaling"))[None], None
    out = packed(*packs.sequence.heads(q, k, v), packs, scale=options.get("scaling"))
    return packs.sequence.tokens(out)[None], None


def packed(q: Tensor, k: Tensor, v: Tensor, packs: Packs, *, scale: float | None = None) -> Tensor:
    """`by_sequence` or `by_varlen`, whichever `choose` names for these tensors; a
    warning once where it is not the fast one."""
    engine, why = choose(_device(q.device), q.dtype, q.shape[-1])
    if engine != "sequence" and v.shape[-1] != q.shape[-1]:
        engine, why = "sequence", f"heads of {q.shape[-1]} for keys, of {v.shape[-1]} for values"
    if why:
        say(f"attention: packs take one sdpa for each sequence: {why}")
    if engine == "sequence":
        return by_sequence(q, k, v, packs, scale=scale)
    return by_varlen(_engines()[engine], q, k, v, packs, scale=scale)


def _config(lm: Any) -> tuple[nn.Module, Any]:
    inner = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
    return inner, inner.config.get_text_config()


def unfit_model(lm: nn.Module) -> str | None:
    """Why packs of this model take a [T, T] mask, or None: it must hand keyword
    arguments to its attention, be on sdpa, and have no layers but attention."""
    inner, config = _config(lm)
    if not getattr(inner, "_supports_attention_backend", False):
        return "it does not hand keyword arguments to its attention"
    if config._attn_implementation not in ("sdpa", NAME):
        return f"its attention is {config._attn_implementation!r}, not 'sdpa'"
    other = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    return f"it has layers of {sorted(other)}" if other else None


def turn_on(lm: nn.Module) -> None:
    """Names `attention` in the config of a text model of transformers on sdpa; nothing for any other.

    For good, not for a call: gradient checkpointing reads the config once more in the backward. Saved models
    do not hold the name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if unfit_model(lm) is None:
        _config(lm)[1]._attn_implementation = NAME


def turn_off(lm: nn.Module, why: str) -> None:
    """Back to sdpa with a [T, T] mask for each pack, and a warning once."""
    _config(lm)[1]._attn_implementation = "sdpa"
    say(f"attention: packs of {type(_config(lm)[0]).__name__} take a [T, T] mask: {why}")


def packs_of(lm: nn.Module, pack: Packed) -> Packs | None:
    """The boundaries of a pack of several sequences for a model that is turned on, else None
    (with a warning once where the model cannot be). One host sync."""
    if pack.num_seqs == 1:
        return None
    inner, config = _config(lm)
    if config._attn_implementation != NAME:
        why = unfit_model(lm)
        if why:  # else it was turned off, which was said
            say(f"attention: packs of {type(inner).__name__} take a [T, T] mask: {why}")
        return None
    counts = torch.unique_consecutive(pack.seq, return_counts=True)[1]
    return Packs(counts.tolist(), pack.seq.device)


def complete(lm: nn.Module, packs: Packs) -> bool:
    """Whether every layer got the boundaries."""
    return packs.calls >= _config(lm)[1].num_hidden_layers
