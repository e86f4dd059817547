"""Correct the weights of tokens for a sampler that is not the trainer's policy."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rft_fn import logprob, metric, weight
from rft_fn.types import Rollout

__all__ = ["CORRECTIONS", "correction"]

_BOUND = 20.0  # nats, within which the ratio of a response counts in a metric
_FAR = 1e6  # nats, beyond every log-ratio of tokens that both can draw


def _tis(w: Tensor, old_logp: Tensor, logp: Tensor, /, *, cap: float, floor: float = 0.0) -> Tensor:
    """Apply `weight.truncated_is`, with ratios below `floor` raised to it."""
    return torch.maximum(weight.truncated_is(w, old_logp, logp, cap=cap), floor * w)


def _icepop(
    w: Tensor, old_logp: Tensor, logp: Tensor, /, *, cap: float, floor: float | None = None
) -> Tensor:
    """Apply `weight.icepop` with the band [floor, cap], by default [1 / cap, cap]."""
    low = 1 / cap if floor is None else floor
    return weight.icepop(w, old_logp, logp, low=low, high=cap)


def _tis_seq(w: Tensor, old_logp: Tensor, logp: Tensor, /, *, cap: float) -> Tensor:
    """Apply `weight.truncated_is_seq` to the tokens with a weight."""
    return weight.truncated_is_seq(w, old_logp, logp, w != 0, cap=cap)


def _mis_seq(w: Tensor, old_logp: Tensor, logp: Tensor, /, *, cap: float) -> Tensor:
    """Apply `weight.masked_is_seq` to the tokens with a weight."""
    return weight.masked_is_seq(w, old_logp, logp, w != 0, cap=cap)


# (w [B, S], the trainer's log-probs, the sampler's, cap=) -> w times a function of their ratio
CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "tis": _tis,
    "mis": weight.masked_is,
    "icepop": _icepop,
    "tis_seq": _tis_seq,
    "mis_seq": _mis_seq,
}


def correction(
    name: str,
    old_logp: Tensor,
    rollout: Rollout,
    *,
    cap: float = 2.0,
    floor: float | None = None,
    geo_low: float = 0.0,
    geo_high: float = math.inf,
) -> tuple[Tensor, dict[str, float]]:
    """Return (the factor of each token's weight [B, S], metrics): a row of `CORRECTIONS` for a rollout.

    `old_logp` [B, S] is the trainer's, and of the policy that the update starts from. Every row multiplies w,
    so w times the factor is what it makes of w; the factor is 0 outside mask. The metrics are the mean factor
    and the share of tokens with a ratio that was capped or that were dropped; and of the ratios of whole
    responses the effective share and the chi-square divergence.

    tis: min(ratio, cap), as V-trace truncates it (arXiv 1802.01561), and no less than `floor`. mis: 0 where
    the ratio exceeds the cap (compared in arXiv 2510.26788). icepop: 0 outside [floor, cap] (arXiv
    2510.18855), by default [1 / cap, cap]. These work per token, which leaves a bias that
    `weight.importance_seq` does not have. tis_seq and mis_seq do the same with the ratio of the whole
    response, whose variance grows with the length. none: 1.

    In addition all tokens of a response get 0 unless the geometric mean of its ratios is in
    [geo_low, geo_high], a band that does not depend on the length (arXiv 2512.23075); the metrics then have
    the share of responses outside. ValueError for another name, and for a floor of one that has none.
    """
    if name != "none" and name not in CORRECTIONS:
        raise ValueError(f"mismatch: expected one of {', '.join(CORRECTIONS)}, got {name!r}")
    if floor is not None and name not in ("tis", "icepop"):
        raise ValueError(f"floor: expected None, {name} has none, got {floor}")
    mask = rollout.mask
    inside = mask.to(old_logp.dtype)
    factor = plain = inside
    if name != "none":
        row = CORRECTIONS[name] if floor is None else partial(CORRECTIONS[name], floor=floor)
        factor = row(inside, old_logp, rollout.logp, cap=cap)
        plain = weight.importance(inside, old_logp, rollout.logp)
    if name.endswith("_seq"):
        plain = weight.importance_seq(inside, old_logp, rollout.logp, mask)

    # ratios of whole responses [B, 1]; one without a token in mask does not count
    counts = mask.any(-1, keepdim=True)
    log_ratio = weight.row_sum(logprob.log_ratio(old_logp, rollout.logp, limit=_FAR), mask)
    near = log_ratio.clamp(-_BOUND, _BOUND)
    metrics = {
        "mismatch/ess_seq": metric.effective_share(near.exp(), counts),
        "mismatch/chi2_seq": metric.mean(torch.expm1(2 * near), counts),
    }
    if geo_low > 0 or geo_high < math.inf:
        kept = weight.geometric_mask(inside, old_logp, rollout.logp, mask, low=geo_low, high=geo_high)
        factor = factor * kept
        metrics["mismatch/outside_band"] = metric.mean((weight.row_max(kept, mask) == 0).double(), counts)
    metrics["mismatch/weight"] = metric.mean(factor, mask)
    metrics["mismatch/cut"] = metric.mean((factor != plain).double(), mask)
    return factor, metric.results(metrics)
