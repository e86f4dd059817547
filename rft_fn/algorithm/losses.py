"""Functions of `rft_fn.loss` as losses with metrics."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rft_fn import check, loss, metric
from rft_fn.algorithm.options import with_options_of
from rft_fn.algorithm.rows import Evaluated, LossWithMetrics, Stopped
from rft_fn.metric import Metric
from rft_fn.types import Packed, TokenOut

__all__ = ["per_sequence", "per_token", "reinforce", "token_ratio", "value_clip"]


def token_ratio(out: TokenOut, b: Packed) -> Tensor:
    """The probability ratio of each token [T], without gradient."""
    return loss.ratio(out.logp.detach(), b.old_logp)


def _sequence_ratio(out: TokenOut, b: Packed) -> Tensor:
    """The geometric mean of a sequence's ratios, on each of its tokens [T]."""
    return loss.seq_ratio(out.logp.detach(), b.old_logp, b.mask, b.seq, b.num_seqs)


def _metrics(at: Evaluated, b: Packed, stopped: Stopped) -> dict[str, Metric]:
    """Stopped share, KL to the old policy, largest ratio."""
    return {
        "policy/clip_frac": metric.mean(stopped(at).double(), b.mask),
        "policy/kl_old": metric.mean(loss.kl_k3(b.old_logp, at.logp), b.mask),
        "policy/ratio_max": metric.max(at.ratio, b.mask),
    }


def per_token(fn: Callable[..., Tensor], stopped: Stopped) -> LossWithMetrics:
    """Adapt a loss of tokens to a LossFn with metrics.

    `fn` takes (logp, old_logp, adv), all [T], and options.
    """

    @with_options_of(fn)
    def loss_fn(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
        x = fn(out.logp, b.old_logp, b.adv, **options)
        at = Evaluated(x.detach(), token_ratio(out, b), out.logp.detach(), b.adv, options)
        return x, _metrics(at, b, stopped)

    return loss_fn


def per_sequence(
    fn: Callable[..., Tensor],
    stopped: Stopped,
    *,
    ratio: Callable[[TokenOut, Packed], Tensor] = _sequence_ratio,
) -> LossWithMetrics:
    """Adapt a loss of sequences to a LossFn with metrics.

    `fn` takes (logp, old_logp, adv, mask, seq, num_seqs) and options. `ratio(out, b)` gives the ratios [T]
    that the loss limits.
    """

    @with_options_of(fn)
    def loss_fn(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
        x = fn(out.logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, **options)
        at = Evaluated(x.detach(), ratio(out, b), out.logp.detach(), b.adv, options)
        return x, _metrics(at, b, stopped)

    return loss_fn


def reinforce(out: TokenOut, b: Packed, /) -> tuple[Tensor, dict[str, Metric]]:
    """REINFORCE's loss, which has no ratio."""
    return loss.reinforce(out.logp, b.adv), {}


@with_options_of(loss.value_clip)
def value_clip(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's critic loss, with the clipped share."""
    value, old_value, ret = check.given(value=out.value, old_value=b.old_value, ret=b.ret)
    x = loss.value_clip(value, old_value, ret, **options)
    moved = (value.detach() - old_value).abs() > options["clip"]
    return x, {"value/loss": metric.mean(x, b.mask), "value/clip_frac": metric.mean(moved.double(), b.mask)}
