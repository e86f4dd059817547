"""Calls a LossFn as a train step does."""

import traceback
from typing import Any

from torch import Tensor

from rft_fn.types import LossFn, Packed, TokenOut

__all__ = ["REMEDY", "evaluate"]

_GIVEN = ("ref_logp", "old_value", "ret", "words", "extra")

# of each field that may be absent: who gives it
REMEDY = {
    "entropy": "bind or init the model with entropy=True",
    "value": "bind a model with a value head (model.Critic)",
    "score": "bind a scalar reward model (model.RewardModel)",
    "words_logp": "name the words: rft_fn.experience(..., words=ids [B, S, K])",
    "aux": "bind or init a mixture of experts with aux=True",
    "expert_share": "bind or init a mixture of experts with aux=True",
    "media": "give the prompts media: Media.of_prompts",
    **{x: f"give {x} to rft_fn.experience" for x in _GIVEN},
}


def evaluate(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, dict[str, Any]]:
    """Evaluate a LossFn on a pack: (loss [T], metrics).

    The metrics are empty if it returns none. If it fails, the error gets a note for each field that it
    reads and that is absent.
    """
    try:
        result = loss_fn(out, b)
    except (TypeError, AttributeError, KeyError) as error:
        _note_absent(error, out, b)
        raise
    if isinstance(result, tuple):
        return result
    return result, {}


def _note_absent(error: Exception, out: TokenOut, b: Packed) -> None:
    """Add a note to the error for each absent field that the loss reads.

    These are None, and their names occur in the code that was running.
    """
    frames = list(traceback.walk_tb(error.__traceback__))[1:]  # the first is `evaluate`
    names = {name for frame, _ in frames for name in frame.f_code.co_names}
    for kind, record in (("TokenOut", out), ("Packed", b)):
        for name in sorted(names & REMEDY.keys() & vars(record).keys()):
            if getattr(record, name) is None:
                error.add_note(f"{kind}.{name}: expected a value, got None; {REMEDY[name]}")
    if isinstance(error, KeyError) and error.args and b.extra is not None and error.args[0] not in b.extra:
        error.add_note(f"Packed.extra: expected {error.args[0]!r} among {sorted(b.extra)}; {REMEDY['extra']}")
