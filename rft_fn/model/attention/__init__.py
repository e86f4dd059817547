"""Exact attention for packs: each sequence attends to itself, and no [T, T] mask is made.

`turn_on` registers one attention function with transformers and names it in the module's config. The
`SequenceBounds` of a pack reach it as a keyword argument of the model's forward. Without that argument
(sampling with a cache, padded rows, a pack of one sequence) the model's attention is what it was.
"""

from rft_fn.model.attention.engines import Device, by_sequence, by_varlen, choose, warn_once
from rft_fn.model.attention.interface import (
    complete,
    keeps_scores,
    packs_of,
    turn_off,
    turn_on,
    unfit_model,
    use,
)
from rft_fn.model.attention.packs import SequenceBounds

__all__ = [
    "Device",
    "SequenceBounds",
    "by_sequence",
    "by_varlen",
    "choose",
    "complete",
    "keeps_scores",
    "packs_of",
    "turn_off",
    "turn_on",
    "unfit_model",
    "use",
    "warn_once",
]
