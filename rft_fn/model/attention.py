"""Exact attention for packs, registered with transformers, without a [T, T] mask.

`turn_on` registers one attention function with transformers and names it in the module's config. The
`SequenceBounds` of a pack reach it as a keyword argument of the model's forward. Without that argument
(sampling with a cache, padded rows, a pack of one sequence) the model's attention is unchanged.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from rft_fn.model import packed_states
from rft_fn.model.bounds import SequenceBounds, find_prefixes
from rft_fn.model.packed_attention import computed_wide, leave_out_plans, packed, warn_once
from rft_fn.model.parts import inside_adapters, text_config
from rft_fn.types import Packed

__all__ = [
    "bounds_of", "complete", "eager_attention", "keep_apart", "keeps_scores", "leave_graphs",
    "needs_all_tokens", "sdpa_attention", "sequences", "turn_off", "turn_on", "unfit_model", "use",
]  # fmt: skip

# names in transformers' table of attention functions
SDPA = "rft_bounds"
EAGER = "rft_bounds_eager"
APART = {SDPA: "rft_bounds_apart", EAGER: "rft_bounds_eager_apart"}  # of compiled blocks
OURS = (*APART, *APART.values())
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# kinds of layers that do not mask by the places of tokens in a whole pack
_WITHOUT_PLACES = {"full_attention", "attention", "linear_attention", "mamba", "conv", "hybrid", "moe", "mlp"}


def _unfit(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict) -> str | None:
    """Return the feature that a layer asks for and `packed` does not have, or None."""
    # `packed` is causal attention of a whole pack: its queries and keys are the same tokens.
    if options["dropout"]:
        return f"dropout {options['dropout']}"
    if not _causal(module, options):
        return "attention that is not causal"
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        return "a batch, a cache or other keys than its own tokens"

    # Some change the scores, others want them back.
    for name in ("softcap", "position_bias", "cache"):
        if options.get(name) is not None:
            return name
    if options.get("output_attentions"):
        return "output_attentions"

    # For packs a causal model makes no mask, so one that is here excludes more.
    if mask is None:
        return None
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    return f"its own mask (sliding_window {window})" if window else "its own mask"


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
    """Run `_attend` for models on transformers' sdpa."""
    return _attend(_sdpa, module, query, key, value, attention_mask, options)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run `_attend` for models without sdpa, most of which have attention sinks."""
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
    """Attend within each sequence of a pack, as an attention function of transformers.

    query [1, H, T, D], key and value [1, H', T, D] -> ([1, T, H, D], weights, which nobody reads). The
    boundaries are `rft_bounds` among the options, or those of `packed_states.apart`. Without them, the
    model's `usual` attention runs. It also runs, with a [T, T] mask, for a layer that asks for more than
    causal attention to its own sequence (a window, a cap, a mask); a warning names the reason.
    """
    bounds: SequenceBounds | None = options.pop("rft_bounds", None) or packed_states.current()
    if bounds is None:
        return usual(module, query, key, value, mask, **options)

    # Counted, so that a model with a layer that never gets here is noticed.
    bounds.calls += 1
    options.setdefault("dropout", 0.0)

    # A [T, T] mask serves any layer, but not one that has a part of the tokens.
    sinks = options.get("s_aux")
    why = _unfit(module, query, key, mask, options)
    if sinks is not None and usual is not _eager:
        why = "s_aux, which sdpa does not know"
    if why and bounds.prefixes is not None:
        # told to the caller once the forward is over, which processes may run together
        bounds.refused = why
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    if why and bounds.sequence is not None:
        raise ValueError(f"sp_size: expected 1 for {type(module).__name__}: it asks for {why}")
    if why:
        warn_once(f"attention: packs take a [T, T] mask in {type(module).__name__}: it asks for {why}")
        cut = bounds.cut(mask, causal=_causal(module, options))
        return usual(module, query, key, value, cut, **options)
    return _by_sequences(query, key, value, bounds, options.get("scaling"), sinks), None


def _by_sequences(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float | None, sinks: Any
) -> Tensor:
    """Attend [1, T, H, D] within each sequence; with a sequence axis, T are this process's tokens."""
    q, k, v = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
    if sinks is not None:
        sinks = sinks.to(q.dtype)
    axis = bounds.sequence
    if axis is None:
        return packed(q, k, v, bounds, scale=scale, sinks=sinks)[None]

    # Attention needs all tokens, so for its sake each process has some of the heads instead.
    if sinks is not None:
        sinks = axis.share(sinks)
    q, k, v = axis.heads(q, k, v)
    out = packed(q, k, v, bounds, scale=scale, sinks=sinks)
    return axis.tokens(out)[None]


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    """Run transformers' sdpa: on a CPU in float32, as in packs."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not computed_wide(query):
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    wide = (query.float(), key.float(), value.float())
    return sdpa_attention_forward(module, *wide, mask, **options)[0].to(query.dtype), None


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    """Run the attention of the model's own file, which adds masks of numbers to the scores."""
    new = query.shape[2]
    known = key.shape[2]
    if mask is None:
        mask = torch.ones(new, known, dtype=torch.bool, device=query.device).tril(known - new)[None, None]
    if mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, least)
    written_out = _written_out(module)
    assert written_out is not None  # `turn_on` has looked
    return written_out(module, query, key, value, mask, **options)


def _written_out(module: nn.Module) -> Callable | None:
    """Return the attention function in the file of a model, layer or parent class."""
    for cls in type(module).__mro__:  # a strategy may have extended the class
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None


def unfit_model(lm: nn.Module) -> str | None:
    """Return the reason why packs of this model take a [T, T] mask, or None.

    A model must hand keyword arguments to its attention, be on sdpa if it knows that, and have no layers
    but attention.
    """
    model = inside_adapters(lm)
    if not getattr(model, "_supports_attention_backend", False):
        return "it does not hand keyword arguments to its attention"
    config = text_config(model)
    if config._attn_implementation not in (_usual(model), *OURS):
        return f"its attention is {config._attn_implementation!r}, not {_usual(model)!r}"
    other = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if other:
        return f"it has layers of {sorted(other)}"
    return None


def needs_all_tokens(lm: nn.Module) -> bool:
    """Return whether layers have a window, which masks by the places of tokens in a whole pack."""
    config = text_config(inside_adapters(lm))
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return not _WITHOUT_PLACES.issuperset(kinds)
    return bool(getattr(config, "sliding_window", None))


def _usual(model: Any) -> str:
    """Return the attention that ours replaces: "eager" if there is no sdpa."""
    return "eager" if not model._supports_sdpa and _written_out(model) is not None else "sdpa"


def turn_on(lm: nn.Module) -> None:
    """Name an attention for packs in the config of a text model of transformers.

    Does nothing for a model that `unfit_model` has a reason against. It stays on, because gradient
    checkpointing reads the config once more in the backward. Saved models do not hold the name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    leave_out_plans()
    for name, function in {SDPA: sdpa_attention, EAGER: eager_attention}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    if text_config(inside_adapters(lm))._attn_implementation in APART.values():
        return  # its blocks are compiled
    if unfit_model(lm) is None:
        use(lm, EAGER if keeps_scores(lm) else SDPA)


def keep_apart(lm: nn.Module, on: bool) -> None:
    """Name an attention for packs also in a model that hands it no keyword arguments, or the usual again.

    Within `packed_states.apart` it needs none. Whether each layer looks the name up is seen when it is tried.
    """
    model = inside_adapters(lm)
    name = text_config(model)._attn_implementation
    if unfit_model(model) is None or name in APART.values():
        return  # `turn_on` has decided, or its blocks are compiled
    if name in (_usual(model), *OURS):
        ours = EAGER if keeps_scores(model) else SDPA
        use(model, ours if on else _usual(model))


def leave_graphs(lm: nn.Module) -> None:
    """Make torch.compile run attention between its graphs, which would hold the boundaries of one pack."""
    name = APART.get(text_config(lm)._attn_implementation)
    if name is not None:
        _register_apart()
        use(lm, name)


@cache
def _register_apart() -> None:
    # once, because graphs are made for one function by this name
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for plain, function in {SDPA: sdpa_attention, EAGER: eager_attention}.items():
        AttentionInterface.register(APART[plain], torch.compiler.disable(function))
        AttentionMaskInterface.register(APART[plain], sdpa_mask)


def use(lm: nn.Module, name: str) -> None:
    """Make a text model look up its attention by this name in transformers' table."""
    text_config(lm)._attn_implementation = name


def keeps_scores(lm: nn.Module) -> bool:
    """Return whether attention stores a score for each pair of tokens, as it does without sdpa."""
    return _usual(inside_adapters(lm)) == "eager"


def turn_off(lm: nn.Module, why: str) -> None:
    """Restore the usual attention, with a [T, T] mask per pack; warns once."""
    model = inside_adapters(lm)
    use(model, _usual(model))
    _warn_of_mask(model, why)


def _warn_of_mask(model: nn.Module, why: str) -> None:
    warn_once(f"attention: packs of {type(model).__name__} take a [T, T] mask: {why}")


def bounds_of(lm: nn.Module, pack: Packed, *, share: bool = False) -> SequenceBounds | None:
    """Return the boundaries of a pack, for a model that is turned on; else None.

    None for a pack of one sequence, and for a model that is not turned on; warns once if it cannot be.
    With `share` they have the tokens that begin alike, if they are many. Costs one host sync.
    """
    if pack.num_seqs == 1:
        return None
    if text_config(lm)._attn_implementation not in OURS:
        why = unfit_model(lm)
        if why:  # else it was turned off, with a warning
            _warn_of_mask(inside_adapters(lm), why)
        return None
    return sequences(pack, share=share)


def sequences(pack: Packed, *, share: bool = False) -> SequenceBounds:
    """Return the boundaries of a pack, with `share` those tokens that begin alike, if they are many."""
    device = pack.seq.device
    if not share:
        counts = torch.unique_consecutive(pack.seq, return_counts=True)[1]
        return SequenceBounds(counts.tolist(), device)

    # what a device holds is read once, for all that is decided on the host
    seq, tokens, pos = torch.stack([pack.seq, pack.tokens, pack.pos]).cpu()
    sizes = torch.unique_consecutive(seq, return_counts=True)[1].tolist()
    found = find_prefixes(tokens, pos, sizes, None if pack.routing is None else pack.routing.cpu())
    if found is not None:
        found = found._replace(kept=found.kept.to(device), of=found.of.to(device))
    return SequenceBounds(sizes, device, prefixes=found)


def complete(lm: nn.Module, bounds: SequenceBounds) -> bool:
    """Return whether every layer got the boundaries."""
    return bounds.calls >= text_config(lm).num_hidden_layers
