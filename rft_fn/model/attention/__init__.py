"""Exact attention for packs, without a [T, T] mask.

Each sequence attends to itself.

`turn_on` registers one attention function with transformers and names it in the module's config. The
`SequenceBounds` of a pack reach it as a keyword argument of the model's forward. Without that argument
(sampling with a cache, padded rows, a pack of one sequence) the model's attention is unchanged.
"""

from rft_fn.model.attention.interface import (
    bounds_of,
    complete,
    keeps_scores,
    leave_graphs,
    needs_all_tokens,
    turn_off,
    turn_on,
    unfit_model,
    use,
)
from rft_fn.model.attention.kernels import Device, by_sequence, by_varlen, choose, packed, warn_once
from rft_fn.model.bounds import SequenceBounds

__all__ = [
    "Device",
    "SequenceBounds",
    "bounds_of",
    "by_sequence",
    "by_varlen",
    "choose",
    "complete",
    "keeps_scores",
    "leave_graphs",
    "needs_all_tokens",
    "packed",
    "turn_off",
    "turn_on",
    "unfit_model",
    "use",
    "warn_once",
]
