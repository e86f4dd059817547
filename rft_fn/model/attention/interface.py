"""An attention function for packs among those of transformers, and which models can use it."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.attention.engines import packed, warn_once
from rft_fn.model.attention.packs import SequenceBounds
from rft_fn.types import Packed

__all__ = [
    "complete",
    "eager_attention",
    "keeps_scores",
    "packs_of",
    "sdpa_attention",
    "turn_off",
    "turn_on",
    "unfit_model",
    "use",
]

SDPA, EAGER = "rft_packs", "rft_packs_eager"  # in transformers' table of attention functions
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def _unfit(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict) -> str | None:
    """What a layer asks for that `packed` does not do, or None."""
    if options["dropout"]:
        return f"dropout {options['dropout']}"
    if not _causal(module, options):
        return "attention that is not causal"
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        return "a batch, a cache or other keys than its own tokens"
    for name in ("softcap", "position_bias", "cache"):
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


def sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """`_attend` for models on transformers' sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _attend(sdpa_attention_forward, module, query, key, value, attention_mask, options)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """`_attend` for models that know no sdpa, mostly because their heads have sinks."""
    return _attend(_eager, module, query, key, value, attention_mask, options)


def _attend(
    usual: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Any]:
    """An attention function of transformers: query [1, H, T, D], key
    and value [1, H', T, D] -> ([1, T, H, D], weights that nobody reads).

    With `rft_packs` among the options, each sequence for itself; where the layer asks for more than causal
    attention to its own sequence (a window, a cap, a mask), the model's `usual` one with a [T, T] mask, and a
    warning once that names it. Without `rft_packs` the usual one, as it is.
    """
    packs: SequenceBounds | None = options.pop("rft_packs", None)
    if packs is None:
        return usual(module, query, key, value, mask, **options)
    packs.calls += 1
    options.setdefault("dropout", 0.0)
    sinks = options.get("s_aux")
    why = _unfit(module, query, key, mask, options)
    if sinks is not None and usual is not _eager:
        why = "s_aux, which sdpa does not know"
    if why and packs.sequence:
        raise ValueError(f"sp_size: expected 1 for {type(module).__name__}: it asks for {why}")
    if why:
        warn_once(f"attention: packs take a [T, T] mask in {type(module).__name__}: it asks for {why}")
        cut = packs.cut(mask, causal=_causal(module, options))
        return usual(module, query, key, value, cut, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if sinks is not None:
        sinks = sinks.to(q.dtype)
    scale = options.get("scaling")
    if packs.sequence is None:
        return packed(q, k, v, packs, scale=scale, sinks=sinks)[None], None
    if sinks is not None:
        sinks = packs.sequence.share(sinks)
    out = packed(*packs.sequence.heads(q, k, v), packs, scale=scale, sinks=sinks)
    return packs.sequence.tokens(out)[None], None


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    """The attention that the model's own file writes out, which reads what must not be seen off a mask of
    numbers."""
    new, known = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(new, known, dtype=torch.bool, device=query.device).tril(known - new)[None, None]
    if mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, least)
    own = _written_out(module)
    assert own is not None  # `turn_on` has looked
    return own(module, query, key, value, mask, **options)


def _written_out(module: nn.Module) -> Callable | None:
    """The function of attention in the file of a model or of one of its layers (whose class a strategy may
    have extended)."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None


def _config(lm: Any) -> tuple[nn.Module, Any]:
    inner = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
    return inner, inner.config.get_text_config()


def unfit_model(lm: nn.Module) -> str | None:
    """Why packs of this model take a [T, T] mask, or None: it must hand keyword arguments to its attention,
    be on sdpa if it knows that, and have no layers but attention."""
    inner, config = _config(lm)
    if not getattr(inner, "_supports_attention_backend", False):
        return "it does not hand keyword arguments to its attention"
    if config._attn_implementation not in (_usual(inner), SDPA, EAGER):
        return f"its attention is {config._attn_implementation!r}, not {_usual(inner)!r}"
    other = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    return f"it has layers of {sorted(other)}" if other else None


def _usual(inner: Any) -> str:
    """The implementation of attention that this module stands in for: eager only where there is no sdpa."""
    if not inner._supports_sdpa and _written_out(inner) is not None:
        return "eager"
    return "sdpa"


def turn_on(lm: nn.Module) -> None:
    """Names an attention for packs in the config of a text model of transformers; nothing for one that
    `unfit_model` is about.

    For good, not for a call: gradient checkpointing reads the config once more in the backward. Saved models
    do not hold the name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, function in {SDPA: sdpa_attention, EAGER: eager_attention}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    if unfit_model(lm) is None:
        name = SDPA
        if keeps_scores(lm):
            name = EAGER
        use(lm, name)


def use(lm: nn.Module, name: str) -> None:
    """Has a text model look up its attention by this name in transformers' table."""
    _config(lm)[1]._attn_implementation = name


def keeps_scores(lm: nn.Module) -> bool:
    """Whether attention of this model holds a number for each pair of tokens of a sequence: without sdpa."""
    return _usual(_config(lm)[0]) == "eager"


def turn_off(lm: nn.Module, why: str) -> None:
    """Back to the usual attention with a [T, T] mask for each pack, and a warning once."""
    inner = _config(lm)[0]
    use(lm, _usual(inner))
    warn_once(f"attention: packs of {type(inner).__name__} take a [T, T] mask: {why}")


def packs_of(lm: nn.Module, pack: Packed) -> SequenceBounds | None:
    """The boundaries of a pack of several sequences for a model that is turned on, else None
    (with a warning once where the model cannot be). One host sync."""
    if pack.num_seqs == 1:
        return None
    inner, config = _config(lm)
    if config._attn_implementation not in (SDPA, EAGER):
        why = unfit_model(lm)
        if why:  # else it was turned off, which was said
            warn_once(f"attention: packs of {type(inner).__name__} take a [T, T] mask: {why}")
        return None
    counts = torch.unique_consecutive(pack.seq, return_counts=True)[1]
    return SequenceBounds(counts.tolist(), pack.seq.device)


def complete(lm: nn.Module, packs: SequenceBounds) -> bool:
    """Whether every layer got the boundaries."""
    return packs.calls >= _config(lm)[1].num_hidden_layers
