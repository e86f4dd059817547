"""Calls a model of transformers with a pack, as if each sequence were the only one."""

from typing import Any

import torch
from torch import nn

from rft_fn import check, modality
from rft_fn.model import attention, packed_states, routing
from rft_fn.model.bounds import COUNTS, SequenceBounds, take_rows
from rft_fn.model.media_inputs import described, media_inputs
from rft_fn.model.parts import inside_adapters
from rft_fn.model.placeholders import sees_or_hears
from rft_fn.types import Packed

__all__ = [
    "BOUNDARIES", "MASKED_ROWS", "ONE_SEQUENCE", "POSITIONS", "ROWS", "forget_lengths", "rope_grows",
    "rope_kinds", "rope_switch", "run", "text_inputs",
]  # fmt: skip

# The modes in which a model takes a pack of several sequences.
POSITIONS = "positions"  # told apart by their positions, or by `SequenceBounds`
BOUNDARIES = "boundaries"  # and by the keywords that the kernels of recurrent layers and convolutions read
ROWS = "rows"  # told apart by each layer (`packed_states.apart`): those with states read rows of a batch
MASKED_ROWS = "masked_rows"  # the same, but attention has a [T, T] mask
ONE_SEQUENCE = "one_sequence"  # not at all: one sequence at a time


def text_inputs(
    lm: nn.Module,
    pack: Packed,
    bounds: SequenceBounds | None = None,
    *,
    mode: str = POSITIONS,
    blind: bool = False,
    share: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments with which a model of transformers takes a pack.

    They include the boundaries of its sequences (`bounds`, or the pack's) if `attention.turn_on`
    took effect, and with BOUNDARIES the keywords that states read. A model that sees or hears also gets
    `media_inputs`; `blind` takes placeholders without their media. With `share` tokens that begin alike
    are there once, if the model is a text model that tells sequences apart by their boundaries; with ROWS
    if the `bounds` that its layers keep to have some. ValueError for media of a text model, and for shapes
    that disagree.
    """
    # The towers look at a whole pack; `cut_before` leaves the text model this process's part of it.
    if bounds is not None and bounds.whole is not None:
        pack = bounds.whole

    # The pack is a batch of one row.
    check.shapes(tokens=(pack.tokens, "T"), target=(pack.target, "T"), pos=(pack.pos, "T"))
    both = sees_or_hears(lm)
    if pack.media is not None:
        kind = modality.of_config(inside_adapters(lm).config)
        modality.check_parameters(kind, pack.media.tensors)
    if pack.media is not None and not both:
        raise ValueError(f"media: expected None, {type(lm).__name__} is bound as a text model")

    # The boundaries, so that each sequence attends only to itself.
    tokens = pack.tokens
    pos = pack.pos
    if bounds is None and mode != ROWS:
        bounds = attention.bounds_of(lm, pack, share=share and mode == POSITIONS and not both)
    if bounds is not None and bounds.prefixes is not None:
        tokens = tokens[bounds.prefixes.kept]
        pos = pos[bounds.prefixes.kept]
    inputs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": pos[None], "use_cache": False}
    if bounds is not None and mode != ROWS:
        inputs["rft_bounds"] = bounds
    if pack.num_seqs == 1 or bounds is not None or mode == ROWS:
        # With a mask transformers does not look for sequences in the values of pos, which vmap does not have.
        inputs["attention_mask"] = torch.ones(1, tokens.shape[0], device=tokens.device)
    if mode == BOUNDARIES and pack.num_seqs > 1:
        # the sequences by the names that transformers' kernels for states read
        states = attention.sequences(pack)
        inputs |= {"cu_seq_lens_q": states.cu, "cu_seq_lens_k": states.cu}
        inputs |= {"max_length_q": states.longest, "max_length_k": states.longest}
        inputs["seq_idx"] = pack.seq[None].to(torch.int32)
    if both:
        inputs |= media_inputs(lm, pack, blind=blind)
    return inputs


def run(
    module: nn.Module,
    pack: Packed,
    bounds: SequenceBounds | None = None,
    *,
    mode: str = POSITIONS,
    blind: bool = False,
    share: bool = False,
) -> Any:
    """Return the output of a model, or of its decoder, for a pack.

    A model that loses the boundaries on the way runs again, with a mask. `bounds` are given if `pack` is
    this process's part of a pack (sequence parallelism); ValueError for a model that loses these. With
    `share` a decoder computes tokens that begin alike once; its hidden states are of all tokens.
    ValueError for one with a layer that needs them all.
    """
    states = None
    if mode in (ROWS, MASKED_ROWS) and pack.num_seqs > 1:
        states = attention.sequences(pack, share=share and mode == ROWS)
    of_layers = states if mode == ROWS else None
    inputs = text_inputs(module, pack, bounds or of_layers, mode=mode, blind=blind, share=share)
    given = inputs.get("rft_bounds", of_layers)
    experts = pack.routing
    if experts is not None and given is not None and given.prefixes is not None:
        experts = experts[given.prefixes.kept]
    COUNTS.read += pack.tokens.shape[0]
    COUNTS.computed += inputs["input_ids"].shape[1]
    try:
        with packed_states.apart(states), routing.replayed(experts):
            out = module(**inputs)
    except ValueError as error:
        if pack.media is None:
            raise
        # It compares the sums of a pack; whoever reads this needs to know which sequence.
        raise ValueError(f"media: {error}: {described(module, pack)}") from error
    if given is None:
        return out
    if mode == ROWS or attention.complete(module, given):
        if given.refused:
            raise ValueError(
                f"share_prefixes: expected False for {type(module).__name__}: it asks for {given.refused}"
            )
        if given.prefixes is not None:
            out.last_hidden_state = take_rows(out.last_hidden_state[0], given.prefixes.of)[None]
        return out

    # A mask over only this process's tokens would be wrong.
    if bounds is not None:
        why = attention.unfit_model(module) or "not all of its layers get the boundaries of sequences"
        raise ValueError(f"sp_size: expected 1 for {type(module).__name__}: {why}")
    attention.turn_off(module, "not all of its layers got the boundaries")
    return run(module, pack, mode=mode, blind=blind)


# ---------- rotary factors that depend on the length


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a text model's config; several if types of layers have their own."""
    found = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    return [x for x in (found, *found.values()) if isinstance(x, dict) and "rope_type" in x]


def rope_switch(config: Any) -> int | None:
    """Return after how many tokens a sequence gets other rotary factors (LongRoPE), or None."""
    kinds = [kind for kind in rope_kinds(config) if kind["rope_type"] == "longrope"]
    return min((kind["original_max_position_embeddings"] for kind in kinds), default=None)


def rope_grows(config: Any) -> bool:
    """Return whether rotary factors change with every token after max_position_embeddings (dynamic NTK)."""
    return any("dynamic" in str(kind["rope_type"]) for kind in rope_kinds(config))


def forget_lengths(lm: nn.Module) -> None:
    """Make rotary factors that grow with the longest sequence so far depend on the call only."""
    for m in lm.modules():
        grows = hasattr(m, "original_max_seq_len") and "dynamic" in str(getattr(m, "rope_type", None))
        if grows and _forget not in m._forward_pre_hooks.values():
            m.register_forward_pre_hook(_forget)


def _forget(rotary: Any, _: Any) -> None:
    """Restore the factors that a rotary layer began with."""
    for name in [x for x in (*vars(rotary), *rotary._buffers) if x.endswith("original_inv_freq")]:
        grown = name.replace("original_inv_freq", "inv_freq")
        now = getattr(rotary, grown)
        setattr(rotary, grown, getattr(rotary, name).to(now.device))
    for name in [x for x in vars(rotary) if x.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)
