"""The gap between trainer and sampler: why two models that should be one disagree about the same tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rft_fn import model, packing, tree
from rft_fn.types import Apply, Engine, Packed, Rollout, Sampling

__all__ = ["check_gap", "explain_gap", "logp_gap"]


def logp_gap(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """Mean |a - b| over mask, nats a token."""
    return float(((a - b).abs() * mask).double().sum() / mask.sum().clamp(min=1))


def _slope(x: Tensor, mask: Tensor) -> float:
    """How much larger |gap| is in the second half of the responses than in the first, as a factor."""
    order = mask.cumsum(-1)
    late = mask & (order * 2 > mask.sum(-1, keepdim=True))
    early = mask & ~late
    mean = lambda m: float((x.abs() * m).double().sum() / m.sum().clamp(min=1))  # noqa: E731
    return mean(late) / max(mean(early), 1e-12)


def explain_gap(
    engine: Engine,
    rollout: Rollout,
    trainer: Tensor,
    sampling: Sampling,
    *,
    again: Tensor | None = None,
    limit: float,
) -> str:
    """One paragraph for a gap above `limit`: which of dropout, temperature, top_p, positions, template or
    weights to look at.

    It tests instead of guessing: `trainer` and `again` [B, S] are two scorings by the trainer (they differ
    only by dropout); the engine scores the same tokens at the sampling it used, without top_p / top_k and at
    temperature 1, and whichever of these agrees with the trainer is the option that the trainer does not know
    of.
    """
    gap = logp_gap(trainer, rollout.logp, rollout.mask)
    head = f"policy/logp_gap is {gap:.3g} nats a token, above the limit of {limit:g}. "
    if again is not None and logp_gap(trainer, again, rollout.mask) > limit / 10:
        return head + "Look at dropout: the trainer gives the same tokens different log-probs on every call."
    warm = sampling.temperature or 1.0
    own = engine.score(
        rollout, sampling=Sampling(temperature=warm, top_p=sampling.top_p, top_k=sampling.top_k)
    )
    variants = {
        "temperature": Sampling(temperature=1.0, top_p=sampling.top_p, top_k=sampling.top_k),
        "top_p / top_k": Sampling(temperature=warm),
        "temperature and top_p / top_k": Sampling(),
    }
    for name, other in variants.items():
        scored = engine.score(rollout, sampling=other)
        if logp_gap(scored, trainer, rollout.mask) <= limit < logp_gap(scored, own, rollout.mask):
            return head + f"Look at {name}: without it sampler and trainer agree; pass one Sampling to both."
    slope = _slope(trainer - rollout.logp, rollout.mask)
    if math.isfinite(slope) and slope > 3:
        return head + f"Look at positions: the gap is {slope:.0f} times larger late in a response than early."
    version = sorted(set(rollout.version.tolist()))
    return head + (
        "Neither dropout, temperature nor top_p explains it. Look at the weights (the rollout is of version "
        f"{version}: were they loaded after the last update?), at the template (are these the tokens that "
        "the sampler was given?) and at positions."
    )


def check_gap(
    values: Mapping[str, float],
    limit: float,
    engine: Engine,
    rollout: Rollout,
    sampling: Sampling,
    apply: Apply,
    params: Any,
    packs: Sequence[Packed],
) -> None:
    """ValueError with the explanation if `policy/logp_gap` of a step is above `limit` or NaN.

    `packs` are all packs of the rollout, or this rank's; only then the trainer scores them, twice.
    """
    if values["policy/logp_gap"] <= limit:
        return
    scores = [packing.unpack(model.score(apply, params, packs), packs, rollout.logp) for _ in range(2)]
    scored = packing.unpack([p.mask for p in packs], packs, rollout.mask)
    mine = tree.replace(rollout, mask=scored)
    raise ValueError(explain_gap(engine, mine, scores[0], sampling, again=scores[1], limit=limit))
