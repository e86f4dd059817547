"""Training on samples of another policy: corrections, choices by entropy, and the limited gap."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import check, collect, loss, metric, precision, strategy, tree, weight
from rft_fn.rollout import token_versions
from rft_fn.run import options
from rft_fn.run.setup import Setup
from rft_fn.types import Apply, Engine, Packed, Rollout, Sampling, TokenOut, TrainState

__all__ = [
    "Corrected", "Correction", "check_gap", "high_entropy_tokens", "limited_gap", "steered_entropy",
    "trainer_logp", "update_kl",
]  # fmt: skip


_SAME = 1e-4  # nats between entropies that differ by rounding


@dataclass(frozen=True)
class Correction:
    """The correction of weights for a sampler that is not the policy, with its limits."""

    name: str = "none"  # of `collect.CORRECTIONS`
    cap: float = 2.0
    floor: float | None = None
    geo_low: float = 0.0
    geo_high: float = math.inf

    @classmethod
    def of(cls, cfg: options.Rollouts) -> "Correction":
        """Return the correction that the options ask for: by default tis where rollouts are stale."""
        stale = cfg.ahead > 0 or cfg.partial > 0
        name = cfg.mismatch if cfg.mismatch is not None else "tis" if stale else "none"
        high = math.inf if cfg.geo_high is None else cfg.geo_high
        return cls(name, cap=cfg.cap, floor=cfg.floor, geo_low=cfg.geo_low, geo_high=high)

    @property
    def changes(self) -> bool:
        """Return whether any weight may change, for which the trainer scores the rollout."""
        return self.name != "none" or self.geo_low > 0 or self.geo_high < math.inf

    def apply(self, logp: Tensor, rollout: Rollout) -> tuple[Tensor, dict[str, float]]:
        """Return (the factor of each weight [B, S], metrics) by the trainer's log-probs [B, S]."""
        factor, cut = collect.correction(
            self.name,
            logp,
            rollout,
            cap=self.cap,
            floor=self.floor,
            geo_low=self.geo_low,
            geo_high=self.geo_high,
        )
        return factor, collect.mismatch_metrics(logp, rollout) | cut


class Corrected(NamedTuple):
    """A rollout as the trainer sees it."""

    old_logp: Tensor  # [B, S] of the policy that the update starts from
    extra: dict[str, Tensor]  # "correction" [B, S], a factor of each weight, and "entropy" [B], the bonus'
    metrics: dict[str, float]
    entropy: float = 0.0  # coefficient of the entropy bonus that the next step begins with
    before: Tensor | None = None  # [B, S] by the trainer before the updates, with the option `update_kl`


def trainer_logp(
    env: Setup, state: TrainState, rollout: Rollout, step: int, *, entropy: float = 0.0
) -> Corrected:
    """Return the log-probs that an update starts from, and what the options make of each token.

    They are the sampler's unless a `Correction` changes weights: then the trainer scores the rollout, so that
    the loss has its ratio to the trainer's own policy, and the weights hold the ratio of that one to the
    sampler's. The trainer scores it too for `update_kl`, and for tokens and a coefficient that go by the
    entropy; `entropy` is this coefficient at the start of the step.
    """
    cfg, how = options.of(options.Rollouts, env.cfg), options.of(options.Entropy, env.cfg)
    correction = Correction.of(cfg)
    by_entropy = how.entropy_share < 1 or how.entropy_target > 0
    own = TokenOut(logp=rollout.logp)
    with env.phase("score"):
        if correction.changes or cfg.update_kl or by_entropy:
            fields = ("logp", "entropy") if by_entropy else ("logp",)
            own = env.st.score(env.policy.apply, state.params, rollout, env.cfg.budget, fields=fields)
    metrics = collect.staleness(rollout, step)
    extra: dict[str, Tensor] = {}
    if correction.changes:
        extra["correction"], found = correction.apply(own.logp, rollout)
        metrics |= found
    if cfg.max_lag:
        fresh = rollout.mask & (token_versions(rollout) >= step - cfg.max_lag)
        extra["correction"] = fresh * extra.get("correction", rollout.mask.to(own.logp.dtype))
        metrics["mismatch/too_old"] = 1 - float(fresh.sum()) / max(int(rollout.mask.sum()), 1)
    if how.entropy_share < 1:
        (each,) = check.given(entropy=own.entropy)
        chosen, found = high_entropy_tokens(each, rollout.mask, share=how.entropy_share)
        extra["correction"] = chosen * extra.get("correction", rollout.mask.to(own.logp.dtype))
        metrics |= found
    bonus = later = how.entropy
    if how.entropy_target:
        (each,) = check.given(entropy=own.entropy)
        target, delta = how.entropy_target, how.entropy_delta
        bonus, later = steered_entropy(entropy, each, rollout.mask, target=target, delta=delta)
        metrics["entropy/coef"] = bonus
    if bonus or how.entropy_target:
        extra["entropy"] = torch.full((len(rollout.mask),), bonus)
    old_logp = own.logp if correction.changes else rollout.logp
    return Corrected(old_logp, extra, metrics, later, before=own.logp if cfg.update_kl else None)


def high_entropy_tokens(entropy: Tensor, mask: Tensor, *, share: float) -> tuple[Tensor, dict[str, float]]:
    """Return (the tokens of highest entropy [B, S] bool, {the least entropy among them}).

    They are a `share` of all. What has the same tokens before it has the same entropy but for rounding, and
    is chosen together.
    """
    top = entropy[weight.top_share(entropy, mask, share=share)]
    if not len(top):
        return torch.zeros_like(mask), {}
    least = float(top.min())
    return mask & (entropy >= least - _SAME), {"entropy/threshold": least}


def steered_entropy(
    coef: float, entropy: Tensor, mask: Tensor, *, target: float, delta: float
) -> tuple[float, float]:
    """Return the coefficients of the entropy bonus in a step and in the next, by its tokens' mean entropy.

    Both are `coef` where no token is learned from.
    """
    if not mask.any():
        return coef, coef
    mean = float((entropy * mask).double().sum() / mask.sum())
    return loss.adaptive_entropy(coef, mean, target=target, delta=delta)


def update_kl(env: Setup, state: TrainState, rollout: Rollout, own: Corrected) -> dict[str, float]:
    """Return the KL that the updates of a step made and its prediction, with --update-kl; else {}."""
    if own.before is None or not rollout.mask.any():
        return {}
    from rft_fn import analysis  # only for a run that asks

    found = analysis.update_kl(own.before, env.score(env.policy, state, rollout).logp, rollout.mask)
    return {"policy/kl_update": found.kl, "policy/kl_quadratic": found.quadratic}


def check_gap(
    env: Setup,
    floor: float,
    metrics: Mapping[str, metric.Metric],
    own: Corrected,
    rollout: Rollout,
    state: TrainState,
    packs: Sequence[Packed],
) -> tuple[dict[str, float], float]:
    """Return (the gap of trainer and sampler before the first update, its floor), within the limits.

    Both have the same weights then. `metrics` are of the first gradient, which is of `packs`; `own` are the
    trainer's log-probs, with metrics that come along. ValueError as `limited_gap` raises it.
    """
    assert env.samples is not None and env.sampling is not None, "nothing is sampled"
    gap, floor = limited_gap(
        options.of(options.Rollouts, env.cfg),
        floor,
        metric.results(metrics) | own.metrics,
        rollout,
        env.sampling,
        env.policy.apply,
        state.params,
        packs,
        engine=env.samples.engine,
        config=env.cfg.strategy,
    )
    return own.metrics | gap, floor


def limited_gap(
    cfg: options.Rollouts,
    floor: float,
    values: Mapping[str, float],
    rollout: Rollout,
    sampling: Sampling,
    apply: Apply,
    params: Any,
    packs: Sequence[Packed],
    *,
    engine: Engine | None = None,
    config: strategy.StrategyConfig | None = None,
) -> tuple[dict[str, float], float]:
    """Return (the numbers of a mismatch among `values`, also by depth; their floor), within limits.

    The first gap of a run is its noise floor, for later steps and for a resumed run; before it `floor` is 0.
    Unless max_gap is given, it is the rounding of the coarser of the types that both compute in, or of the
    trainer's where the engine does not tell its own.
    Stale rows differ by more than noise: where they are corrected or asked for they have no limit.
    ValueError, with an explanation, for a gap above the limit; an `engine` that is idle helps to find it.
    """
    found = {
        name: x for name, x in values.items() if name in collect.MISMATCH or name.startswith(metric.GAP_AT)
    }
    if not found:  # no token is learned from, so nothing was measured
        return found, floor
    expected = Correction.of(cfg).name != "none" or cfg.ahead > 0 or cfg.partial > 0
    if expected and values["rollout/staleness_max"] > 0:
        return found, floor
    most = cfg.max_gap
    if most is None:
        most = precision.gap_by_rounding(_types(config, apply, params, engine))
    limit = collect.gap_limit(most, cfg.gap_factor, floor)
    idle = None if cfg.ahead else engine
    collect.check_mismatch(found, limit, rollout, sampling, apply, params, packs, engine=idle)
    return found, floor or collect.noise_floor(found["policy/logp_gap"], sampling)


def _types(
    config: strategy.StrategyConfig | None, apply: Apply, params: Any, engine: Engine | None
) -> Iterator[torch.dtype]:
    """Yield the types that the trainer computes in, and the engine's where it tells it: servers do not."""
    root = getattr(apply, "root", None)  # with adapters, the frozen weights are in it too
    weights = root.parameters() if isinstance(root, nn.Module) else tree.leaves(params)
    if config is not None and config.bf16:
        yield torch.bfloat16
    yield from (x.dtype for x in weights)
    if engine is not None and "computes" in (status := engine.status()):
        yield status["computes"]
