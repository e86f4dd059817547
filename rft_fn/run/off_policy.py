"""The mismatch of trainer and sampler in a run: limited, and corrected by an option."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import collect, loss, precision, strategy, tree, weight
from rft_fn.run import options
from rft_fn.types import Apply, Engine, Packed, Rollout, Sampling, Strategy

__all__ = ["Corrected", "check_gap", "correct_mismatch", "correction_of"]


_SAME = 1e-4  # nats between entropies that differ by rounding


class Corrected(NamedTuple):
    """A rollout as the trainer sees it."""

    old_logp: Tensor  # [B, S] of the policy that the update starts from
    extra: dict[str, Tensor]  # "correction" [B, S], a factor of each weight, and "entropy" [B], the bonus'
    metrics: dict[str, float]
    entropy: float = 0.0  # coefficient of the entropy bonus that the next step begins with
    before: Tensor | None = None  # [B, S] by the trainer before the updates, with the option `update_kl`


def correction_of(cfg: options.Rollouts) -> str:
    """Return the correction that the option `mismatch` names.

    By default tis where rollouts are stale, else none.
    """
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
    bonus: float = 0.0,
) -> Corrected:
    """Return the log-probs that an update starts from, and what the options make of each token's weight.

    Without `mismatch` or a band, old_logp is the sampler's. With one the trainer scores the rollout, so that
    the loss has its ratio to the trainer's own policy, and the weights hold the ratio of that one to the
    sampler's. The trainer scores it too where the entropy chooses tokens, or steers the coefficient of its
    bonus, which is `bonus` at the start of the step. `version` is of the trainer's weights.
    """
    name = correction_of(cfg)
    corrected = name != "none" or cfg.geo_low > 0 or cfg.geo_high is not None
    how = options.of(options.Entropy, cfg)
    by_entropy = how.entropy_share < 1 or how.entropy_target > 0
    metrics = collect.staleness(rollout, version)
    factor, entropy = None, None
    old_logp, before = rollout.logp, None
    if corrected or cfg.update_kl or by_entropy:
        fields = ("logp", "entropy") if by_entropy else ("logp",)
        scored = st.score(apply, params, rollout, budget, fields=fields)
        before = scored.logp if cfg.update_kl else None
        old_logp = scored.logp if corrected else old_logp
        entropy = scored.entropy
    if corrected:
        high = math.inf if cfg.geo_high is None else cfg.geo_high
        factor, cut = collect.correction(
            name, old_logp, rollout, cap=cfg.cap, floor=cfg.floor, geo_low=cfg.geo_low, geo_high=high
        )
        metrics |= collect.mismatch_metrics(old_logp, rollout) | cut
    if entropy is not None and how.entropy_share < 1:
        chosen, threshold = high_entropy_tokens(entropy, rollout.mask, share=how.entropy_share)
        factor = chosen * (rollout.mask.to(old_logp.dtype) if factor is None else factor)
        metrics |= threshold

    # the coefficient of the bonus in this step, and at the start of the next one
    coef = later = how.entropy
    if entropy is not None and how.entropy_target:
        target, delta = how.entropy_target, how.entropy_delta
        coef, later = steered_entropy(bonus, entropy, rollout.mask, target=target, delta=delta)
        metrics["entropy/coef"] = coef
    extra = {} if factor is None else {"correction": factor}
    if coef or how.entropy_target:
        extra["entropy"] = torch.full((len(rollout.mask),), coef)
    return Corrected(old_logp, extra, metrics, later, before)


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


def kl_of_updates(
    st: Strategy, apply: Apply, params: Any, rollout: Rollout, own: Corrected, *, budget: int
) -> dict[str, float]:
    """Return the KL that the updates on a rollout made, and its quadratic prediction; {} if not asked for."""
    if own.before is None or not rollout.mask.any():
        return {}
    from rft_fn.analysis import update_kl  # above, and only for a run that asks

    found = update_kl(own.before, st.score(apply, params, rollout, budget).logp, rollout.mask)
    return {"policy/kl_update": found.kl, "policy/kl_quadratic": found.quadratic}


def check_gap(
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
) -> tuple[dict[str, float], float]:
    """Return (the numbers of `collect.MISMATCH` among `values`, their floor), within the limits.

    The first gap of a run is its noise floor, for later steps and for a resumed run; before it `floor` is 0.
    Unless max_gap is given, it is the rounding of the coarser of the types that both compute in, or of the
    trainer's where the engine does not tell its own.
    Stale rows differ by more than noise: where they are corrected or asked for they have no limit.
    ValueError, with an explanation, for a gap above the limit; an `engine` that is idle helps to find it.
    """
    found = {name: values[name] for name in collect.MISMATCH if name in values}
    if not found:  # no token is learned from, so nothing was measured
        return found, floor
    expected = correction_of(cfg) != "none" or cfg.ahead > 0 or cfg.partial > 0
    if expected and values["rollout/staleness_max"] > 0:
        return found, floor
    most = cfg.max_gap
    if most is None:
        most = precision.gap_by_rounding(_types(cfg, apply, params, engine))
    limit = collect.gap_limit(most, cfg.gap_factor, floor)
    idle = None if cfg.ahead else engine
    collect.check_mismatch(found, limit, rollout, sampling, apply, params, packs, engine=idle)
    return found, floor or collect.noise_floor(found["policy/logp_gap"], sampling)


def _types(cfg: options.Rollouts, apply: Apply, params: Any, engine: Engine | None) -> Iterator[torch.dtype]:
    """Yield the types that the trainer computes in, and the engine's where it tells it: servers do not."""
    config: strategy.StrategyConfig | None = getattr(cfg, "strategy", None)
    root = getattr(apply, "root", None)  # with adapters, the frozen weights are in it too
    weights = root.parameters() if isinstance(root, nn.Module) else tree.leaves(params)
    if config is not None and config.bf16:
        yield torch.bfloat16
    yield from (x.dtype for x in weights)
    if engine is not None and "computes" in (status := engine.status()):
        yield status["computes"]
