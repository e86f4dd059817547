"""Checks of what comes in from outside: JSON, numbers, samples, rollouts, foreign exceptions.

Every number that a server, a file or a user's function gives passes one of these functions before anything
computes with it. Each raises ValueError with one line, "name: expected X, got Y", and returns what it has
checked; a room that has an error of its own for it (a server's Fault, a file's path) puts that around it.
`tests/test_border.py` lists every reader of the package, and feeds each the same lies.
"""

from rft_fn.border.foreign_code import contained, is_ours, printed, quoted
from rft_fn.border.json_files import json_rows, read_json
from rft_fn.border.rollout_tensors import rollout_of
from rft_fn.border.sampled import LEAST_LOGP, MASS, ROUNDING, log_probs, sample, words
from rft_fn.border.values import (
    entries,
    finite,
    integer,
    integers,
    is_finite,
    number,
    numbers,
    numbers_or_none,
    object_of,
    text,
)

__all__ = [
    "LEAST_LOGP", "MASS", "ROUNDING", "contained", "entries", "finite", "integer", "integers", "is_finite",
    "is_ours", "json_rows", "log_probs", "number", "numbers", "numbers_or_none", "object_of", "printed",
    "quoted", "read_json", "rollout_of", "sample", "text", "words",
]  # fmt: skip
