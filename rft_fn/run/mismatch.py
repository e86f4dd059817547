"""The mismatch of trainer and sampler within a run: corrected by an option, and limited."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rft_fn import collect
from rft_fn.run import options
from rft_fn.types import Apply, Engine, Packed, Rollout, Sampling, Strategy

__all__ = ["Corrected", "check_gap", "correct_mismatch", "correction_of"]


class Corrected(NamedTuple):
    """A rollout as the trainer sees it."""

    old_logp: Tensor  # [B, S] of the policy that the update starts from
    extra: dict[str, Tensor]  # "correction" [B, S], the factor of each weight; empty without a correction
    metrics: dict[str, float]


def correction_of(cfg: options.Rollouts) -> str:
    """The correction that the option `mismatch` names, by default tis where rollouts are stale, else none."""
    if cfg.mismatch is not None:
        return cfg.mismatch
    if cfg.ahead or cfg.partial:
        return "tis"
    return "none"


def correct_mismatch(
    cfg: options.Rollouts,
    st: Strategy,
    apply: Apply,
    params: Any,
    rollout: Rollout,
    *,
    budget: int,
    version: int,
) -> Corrected:
    """`old_logp` and the correction of each token's weight by the option `mismatch`.

    Without one, old_logp is the sampler's. With one the trainer scores the rollout, so that the loss has its
    ratio to the trainer's own policy, and the weights hold the ratio of that one to the sampler's. `version`
    is of the trainer's weights.
    """
    metrics = collect.staleness(rollout, version)
    if correction_of(cfg) == "none":
        return Corrected(rollout.logp, {}, metrics)
    old_logp = st.score(apply, params, rollout, budget).logp
    factor, cut = collect.correction(correction_of(cfg), old_logp, rollout, cap=cfg.cap)
    metrics |= collect.mismatch_metrics(old_logp, rollout) | cut
    return Corrected(old_logp, {"correction": factor}, metrics)


def check_gap(
    cfg: options.Rollouts,
    extra: dict[str, Any],
    values: Mapping[str, float],
    rollout: Rollout,
    sampling: Sampling,
    apply: Apply,
    params: Any,
    packs: Sequence[Packed],
    *,
    engine: Engine | None = None,
) -> dict[str, float]:
    """The numbers of `collect.MISMATCH` among `values`, within the limits of the options.

    The first gap of a run is its noise floor, which `extra["floor"]` keeps for later steps and for a resumed
    run. Stale rows differ by more than noise: where they are corrected or asked for they have no limit.
    ValueError, with an explanation, for a gap above the limit; an `engine` that is idle helps to find it.
    """
    found = {name: values[name] for name in collect.MISMATCH}
    expected = correction_of(cfg) != "none" or cfg.ahead > 0 or cfg.partial > 0
    if expected and values["rollout/staleness_max"] > 0:
        return found
    floor = extra.get("floor", 0.0)
    limit = collect.gap_limit(cfg.max_gap, cfg.gap_factor, floor)
    idle = None if cfg.ahead else engine
    collect.check_mismatch(found, limit, rollout, sampling, apply, params, packs, engine=idle)
    extra["floor"] = floor or collect.noise_floor(found["policy/logp_gap"], sampling)
    return found
