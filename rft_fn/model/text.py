"""What a text model of transformers is called with for a pack, each sequence as if it were alone."""

from typing import Any

import torch
from torch import nn

from rft_fn import check
from rft_fn.model import attention
from rft_fn.types import Packed

__all__ = ["ALONE", "BOUNDARIES", "POSITIONS", "decoder", "inner", "run", "text_inputs"]

# how a model takes a pack of several sequences
POSITIONS = "positions"  # told apart by their positions, or by `attention.SequenceBounds`
BOUNDARIES = "boundaries"  # and by the keywords that recurrent layers and convolutions read
ALONE = "alone"  # not at all: one sequence at a time


def inner(lm: nn.Module) -> Any:
    """The model of transformers inside of adapters."""
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm


def decoder(lm: nn.Module) -> nn.Module:
    """The part of a causal language model that gives hidden states (adapters stay inside it)."""
    whole = inner(lm)
    if whole.base_model is not whole:
        return whole.base_model
    # the name that the class gives is not that of its attribute, as in Llama 4: the one model inside it
    models = [m for m in whole.children() if hasattr(m, "base_model")]
    return models[0] if len(models) == 1 else whole


def text_inputs(
    lm: nn.Module, pack: Packed, packs: attention.SequenceBounds | None = None, *, way: str = POSITIONS
) -> dict[str, Any]:
    """What a text model of transformers is called with for a pack, the boundaries of its sequences (`packs`,
    or its own) among it where `attention.turn_on` took effect; with BOUNDARIES also those of its states.

    ValueError for media, which it cannot see, or for shapes that disagree.
    """
    check.shapes(tokens=(pack.tokens, "T"), target=(pack.target, "T"), pos=(pack.pos, "T"))
    if pack.media is not None:
        raise ValueError(f"media: expected None, {type(lm).__name__} is bound as a text model")
    inputs = {"input_ids": pack.tokens[None], "position_ids": pack.pos[None], "use_cache": False}
    packs = packs or attention.packs_of(lm, pack)
    if packs is not None:
        inputs["rft_packs"] = packs
    if pack.num_seqs == 1 or packs is not None:
        # said, so that transformers does not look for more by the values of pos, which vmap does not have
        inputs["attention_mask"] = torch.ones(1, pack.tokens.shape[0], device=pack.tokens.device)
    if way == BOUNDARIES and pack.num_seqs > 1:
        inputs |= _state_boundaries(pack)
    return inputs


def _state_boundaries(pack: Packed) -> dict[str, Any]:
    """The sequences of a pack by the names that transformers' kernels for states read."""
    sizes = torch.unique_consecutive(pack.seq, return_counts=True)[1].tolist()
    cu = attention.SequenceBounds(sizes, pack.seq.device).cu
    longest = max(sizes)
    return {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": pack.seq[None].to(torch.int32),
    }


def run(
    module: nn.Module, pack: Packed, packs: attention.SequenceBounds | None = None, *, way: str = POSITIONS
) -> Any:
    """The output of a text model of transformers, or of the decoder of one, for a pack. A model that loses
    the boundaries on the way is run again with a mask.

    `packs` are the boundaries of a pack of which `pack` is this process's part (sequence parallelism);
    ValueError for a model that loses these.
    """
    inputs = text_inputs(module, pack, packs, way=way)
    out = module(**inputs)
    given = inputs.get("rft_packs")
    if given is None or attention.complete(module, given):
        return out
    if packs is not None:
        why = attention.unfit_model(module) or "not all of its layers get the boundaries of sequences"
        raise ValueError(f"sp_size: expected 1 for {type(module).__name__}: {why}")
    attention.turn_off(module, "not all of its layers got the boundaries")
    return module(**text_inputs(module, pack, way=way))
