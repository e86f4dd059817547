"""Losses of rows with metrics: of whole sequences, of references and groups, and of critics."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from rft_fn import check, loss, metric, packing
from rft_fn.algorithm.with_metrics import LossWithMetrics, Stopped, policy_metrics, stopped
from rft_fn.metric import Metric
from rft_fn.types import Packed, TokenOut

__all__ = [
    "a_star", "beyond_clip", "online_dpo", "outside_weights", "per_sequence", "reinforce", "value_clip",
]  # fmt: skip


def _sequence_ratio(out: TokenOut, b: Packed) -> Tensor:
    """Return the geometric mean of a sequence's ratios, on each of its tokens [T]."""
    return loss.seq_ratio(out.logp.detach(), b.old_logp, b.mask, b.seq, b.num_seqs)


def per_sequence(
    fn: Callable[..., Tensor],
    held: Stopped | None = None,
    *,
    ratio: Callable[[TokenOut, Packed], Tensor] = _sequence_ratio,
) -> LossWithMetrics:
    """Adapt a loss of sequences to a LossFn with metrics.

    `fn` takes (logp, old_logp, adv, mask, seq, num_seqs) and options. `ratio(out, b)` gives the ratios [T]
    that the loss limits; `held` as in `per_token`.
    """

    @wraps(fn)
    def loss_fn(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
        def of(logp: Tensor) -> Tensor:
            return fn(logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, **options)

        rho = ratio(out, b)
        tokens = stopped(of, out, b) if held is None else held(rho, b.adv, **options)
        return of(out.logp), policy_metrics(out, b, rho, tokens)

    return loss_fn


def beyond_clip(ratio: Tensor, adv: Tensor, /, *, low: Any = 0.2, high: Any = 0.2, **others: Any) -> Tensor:
    """Mark ratios that the advantage pushes out of [1 - low, 1 + high], for losses that stop no token."""
    return ((ratio > 1 + high) & (adv > 0)) | ((ratio < 1 - low) & (adv < 0))


def outside_weights(ratio: Tensor, adv: Tensor, /, *, low: Any = 1.0, high: Any = 4.0) -> Tensor:
    """Mark ratios outside [1 - low, 1 + high], which CISPO limits without losing their gradient."""
    return (ratio > 1 + high) | (ratio < 1 - low)


def reinforce(out: TokenOut, b: Packed, /) -> tuple[Tensor, dict[str, Metric]]:
    """Return REINFORCE's loss, which has no ratio."""
    return loss.reinforce(out.logp, b.adv), {}


def a_star(out: TokenOut, b: Packed, /, *, beta: Any = 1e-3) -> tuple[Tensor, dict[str, Metric]]:
    """Return A*-PO's regression on the advantage, by the reference's log-probs."""
    (ref_logp,) = check.given(ref_logp=b.ref_logp)
    return loss.a_star(out.logp, ref_logp, b.adv, b.mask, b.seq, b.num_seqs, beta=beta), {}


def online_dpo(out: TokenOut, b: Packed, /, *, beta: Any = 0.1) -> tuple[Tensor, dict[str, Metric]]:
    """Return DPO's loss on the best and the worst response of each group; its rows share a pack."""
    (ref_logp,) = check.given(ref_logp=b.ref_logp)
    if b.num_seqs > 1 and max(packing.sizes_of(b)) == 1:
        raise ValueError("unit: expected packs of whole groups, shard(..., unit=group), got unit = 1")
    unit = packing.unit_of(b)
    return loss.online_dpo(out.logp, ref_logp, b.adv, b.mask, b.seq, b.num_seqs, unit, beta=beta), {}


def value_clip(out: TokenOut, b: Packed, /, *, clip: Any = 0.2) -> tuple[Tensor, dict[str, Metric]]:
    """Return PPO's critic loss, with the clipped share."""
    value, old_value, ret = check.given(value=out.value, old_value=b.old_value, ret=b.ret)
    x = loss.value_clip(value, old_value, ret, clip=clip)
    moved = (value.detach() - old_value).abs() > clip
    return x, {"value/loss": metric.mean(x, b.mask), "value/clip_frac": metric.mean(moved.double(), b.mask)}
