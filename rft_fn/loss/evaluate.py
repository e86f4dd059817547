"""Calls of losses of any return type and with any record, and their gradient by token."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.types.batch import Packed, TokenOut
from rft_fn.types.functions import LossFn

__all__ = ["REMEDY", "evaluate", "token_gradient", "without_gradient"]


_GIVEN = ("ref_logp", "old_value", "ret", "words", "extra")

# of each field that may be absent: who gives it
REMEDY = {
    "entropy": "bind or init the model with entropy=True",
    "sum_p2": "bind the model with squares=True",
    "value": "bind a model with a value head (model.Critic)",
    "score": "bind a scalar reward model (model.RewardModel)",
    "words_logp": "name the words: rft_fn.experience(..., words=ids [B, S, K])",
    "aux": "bind or init a mixture of experts with aux=True",
    "expert_share": "bind or init a mixture of experts with aux=True",
    "hidden": "score within model.revealed(apply)",
    "top_words": "score within model.revealed(apply, top_k=K)",
    "divergence": "give the model a teacher: model.attach_teacher",
    "agreement": "give the model a teacher: model.attach_teacher",
    "media": "give the prompts media: Media.of_prompts",
    **{x: f"give {x} to rft_fn.experience" for x in _GIVEN},
}


def evaluate(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, dict[str, Any]]:
    """Evaluate a LossFn on a pack: (loss [T], metrics).

    The metrics are empty if it returns none. ValueError if it fails over a field that is absent, with who
    gives it, and for a result that is neither a tensor nor a pair of a tensor and metrics.
    """
    try:
        result = loss_fn(out, b)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        _name_absent(error, out, b)
        raise
    if isinstance(result, Tensor):
        return result, {}
    pair = result if isinstance(result, tuple) else (result,)
    if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Mapping):
        got = ", ".join("None" if x is None else type(x).__name__ for x in pair)
        raise ValueError(
            "loss: expected the function to return a tensor [T], or a tensor and a dict of metrics, got "
            f"{got}"
        )
    return pair[0], dict(pair[1])


def _name_absent(error: Exception, out: TokenOut, b: Packed) -> None:
    """Raise ValueError for an absent field that a loss failed over.

    It is None, and its name occurs in the code that was running.
    """
    if isinstance(error, KeyError) and error.args and b.extra is not None and error.args[0] not in b.extra:
        raise ValueError(
            f"Packed.extra: expected {error.args[0]!r} among {sorted(b.extra)}; {REMEDY['extra']}"
        ) from error
    if not re.search(r"\bNoneType\b|got None", str(error)):
        return
    frames = list(traceback.walk_tb(error.__traceback__))[1:]  # the first is `evaluate`
    names = {name for frame, _ in frames for name in frame.f_code.co_names}
    for kind, record in (("TokenOut", out), ("Packed", b)):
        for name in sorted(names & REMEDY.keys() & vars(record).keys()):
            if getattr(record, name) is None:
                raise ValueError(f"{kind}.{name}: expected a value, got None; {REMEDY[name]}") from error


# ---------- the gradient of a loss with respect to log-probs


def token_gradient(loss_fn: LossFn, out: TokenOut, b: Packed) -> Tensor:
    """Return the gradient of a pack's loss with respect to the log-prob of each token, [T].

        g_t = d sum_u w_u loss_u / d logp_t

    A step of gradient descent makes tokens with g < 0 more probable. Only log-probs are differentiated: other
    outputs of the model count as constants. It needs no backward pass through a model, and is 0 for a loss
    that does not read log-probs.
    """
    with torch.enable_grad():
        logp = out.logp.detach().requires_grad_()
        loss, _ = evaluate(loss_fn, tree.replace(out, logp=logp), b)
        total = (b.w * loss).sum()
        if not total.requires_grad:
            return torch.zeros_like(out.logp)
        (gradient,) = torch.autograd.grad(total, logp, materialize_grads=True)
    return gradient


def without_gradient(gradient: Tensor, adv: Tensor, w: Tensor) -> Tensor:
    """Return whether a token has no gradient despite an advantage and a weight, [*] bool.

    For clipped losses these are the tokens that are clipped.
    """
    return (gradient == 0) & (adv != 0) & (w != 0)
