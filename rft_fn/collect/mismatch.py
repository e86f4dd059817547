"""Mismatch of trainer and sampler: why two copies of one model disagree about the same tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rft_fn import model, packing, tree
from rft_fn.types import Apply, Engine, Packed, Rollout, Sampling

__all__ = ["check_mismatch", "explain_mismatch", "logp_mismatch"]


def logp_mismatch(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """Mean |a - b| over mask, in nats per token."""
    return _masked_mean((a - b).abs(), mask)


def _masked_mean(x: Tensor, mask: Tensor) -> float:
    return float((x * mask).double().sum() / mask.sum().clamp(min=1))


def _growth(x: Tensor, mask: Tensor) -> float:
    """Mean |x| in the second half of the responses over that in the first half."""
    order = mask.cumsum(-1)
    late = mask & (order * 2 > mask.sum(-1, keepdim=True))
    early = mask & ~late
    return _masked_mean(x.abs(), late) / max(_masked_mean(x.abs(), early), 1e-12)


def explain_mismatch(
    engine: Engine,
    rollout: Rollout,
    trainer: Tensor,
    sampling: Sampling,
    *,
    again: Tensor | None = None,
    limit: float,
) -> str:
    """One paragraph that names the cause of a mismatch above `limit` [nats per token].

    It tests instead of guessing: dropout, temperature, top_p, positions, then template or weights. `trainer`
    and `again` [B, S] are two scorings by the trainer, which differ only by dropout. An engine that can score
    does so as it sampled, without top_p / top_k and at temperature 1: the variant that agrees with the
    trainer shows the option that the trainer was not given.
    """
    mask = rollout.mask
    gap = logp_mismatch(trainer, rollout.logp, mask)
    head = f"policy/logp_gap is {gap:.3g} nats per token, above the limit of {limit:g}. "
    if again is not None and logp_mismatch(trainer, again, mask) > limit / 10:
        return head + "Look at dropout: the trainer gives the same tokens different log-probs on every call."

    # an option that only the sampler knows
    option = _unknown_option(engine, rollout, trainer, sampling, limit)
    if option:
        return head + f"Look at {option}: without it sampler and trainer agree; pass one Sampling to both."

    # wrong positions differ more and more along a response; wrong weights or templates everywhere
    growth = _growth(trainer - rollout.logp, mask)
    if math.isfinite(growth) and growth > 3:
        return (
            head + f"Look at positions: the gap is {growth:.0f} times larger late in a response than early."
        )
    version = sorted(set(rollout.version.tolist()))
    return head + (
        "Neither dropout, temperature nor top_p explains it. Look at the weights (the rollout is of version "
        f"{version}: were they loaded after the last update?), at the template (are these the tokens that "
        "the sampler was given?) and at positions."
    )


def _unknown_option(
    engine: Engine, rollout: Rollout, trainer: Tensor, sampling: Sampling, limit: float
) -> str:
    """The option of `sampling` without which the engine agrees with the trainer; empty if there is none."""
    if "score" not in engine.status()["supported"]:
        return ""

    # greedy tokens are scored at temperature 1
    warm = sampling.temperature or 1.0
    as_sampled = Sampling(temperature=warm, top_p=sampling.top_p, top_k=sampling.top_k)
    own = engine.score(rollout, sampling=as_sampled)

    variants = {
        "temperature": Sampling(temperature=1.0, top_p=sampling.top_p, top_k=sampling.top_k),
        "top_p / top_k": Sampling(temperature=warm),
        "temperature and top_p / top_k": Sampling(),
    }
    for name, other in variants.items():
        scored = engine.score(rollout, sampling=other)
        agrees = logp_mismatch(scored, trainer, rollout.mask) <= limit
        differs = logp_mismatch(scored, own, rollout.mask) > limit
        if agrees and differs:
            return name
    return ""


def check_mismatch(
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

    `packs` are all packs of the rollout, or this rank's. The trainer scores them, twice, only in that case.
    """
    if values["policy/logp_gap"] <= limit:
        return
    scores = [packing.unpack(model.score(apply, params, packs), packs, rollout.logp) for _ in range(2)]
    scored = packing.unpack([p.mask for p in packs], packs, rollout.mask)
    mine = tree.replace(rollout, mask=scored)
    raise ValueError(explain_mismatch(engine, mine, scores[0], sampling, again=scores[1], limit=limit))
