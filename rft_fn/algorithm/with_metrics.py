"""Functions of `rft_fn.loss` as losses with metrics, and the tokens that they stop."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rft_fn import check, loss, metric, packing
from rft_fn.metric import Metric
from rft_fn.types import Packed, TokenOut

__all__ = [
    "Evaluated", "a_star", "beyond_clip", "beyond_log_clip", "online_dpo", "outside_clip",
    "outside_default_clip", "outside_trust_region", "per_sequence", "per_token", "reinforce",
    "token_ratio", "value_clip", "with_options_of",
]  # fmt: skip


# ---------- options of one function, taken over by another


R = TypeVar("R")


def with_options_of(
    source: Callable[..., Any], *names: str
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a function the options of another one.

    Decorates a function of `**options` to receive all options of `source`, with its defaults. Options are
    the keyword-only parameters, or those in `names`. They appear in the decorated signature, so a caller
    can look up which ones there are.
    """
    parameters = signature(source).parameters.values()
    if not names:
        names = tuple(p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY)

    # callers name options, whatever kind of parameter they are in `source`
    options = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters if p.name in names]
    defaults = {p.name: p.default for p in options}

    def decorate(f: Callable[..., R]) -> Callable[..., R]:
        @wraps(f)
        def complete(*args: Any, **given: Any) -> R:
            return f(*args, **defaults | given)

        # `inspect.signature` reads this attribute
        own = [p for p in signature(f).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        complete.__dict__["__signature__"] = Signature([*own, *options])
        return complete

    return decorate


# ---------- a loss on a pack, as its metrics see it


# a `LossFn` with metrics: (out, b, **options of the loss that it adapts) -> (loss [T], metrics)
LossWithMetrics = Callable[..., tuple[Tensor, dict[str, Metric]]]


class Evaluated(NamedTuple):
    """A loss on a pack, and its inputs, without gradient."""

    loss: Tensor  # [T]
    ratio: Tensor  # [T], the probability ratio that the loss limits
    logp: Tensor  # [T]
    adv: Tensor  # [T]
    options: Mapping[str, Any]  # all options of the loss


Stopped = Callable[[Evaluated], Tensor]  # [T] bool, the tokens that a loss keeps from learning more


# ---------- functions of `rft_fn.loss` as losses with metrics


def token_ratio(out: TokenOut, b: Packed) -> Tensor:
    """Return the probability ratio of each token [T], without gradient."""
    return loss.ratio(out.logp.detach(), b.old_logp)


def _sequence_ratio(out: TokenOut, b: Packed) -> Tensor:
    """Return the geometric mean of a sequence's ratios, on each of its tokens [T]."""
    return loss.seq_ratio(out.logp.detach(), b.old_logp, b.mask, b.seq, b.num_seqs)


def _metrics(at: Evaluated, b: Packed, stopped: Stopped) -> dict[str, Metric]:
    """Return the stopped share, the KL to the old policy and the largest ratio."""
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
    """Return REINFORCE's loss, which has no ratio."""
    return loss.reinforce(out.logp, b.adv), {}


@with_options_of(loss.a_star)
def a_star(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
    """Return A*-PO's regression on the advantage, by the reference's log-probs."""
    (ref_logp,) = check.given(ref_logp=b.ref_logp)
    return loss.a_star(out.logp, ref_logp, b.adv, b.mask, b.seq, b.num_seqs, **options), {}


@with_options_of(loss.online_dpo)
def online_dpo(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
    """Return DPO's loss on the best and the worst response of each group; its rows share a pack."""
    (ref_logp,) = check.given(ref_logp=b.ref_logp)
    if b.num_seqs > 1 and max(packing.sizes_of(b)) == 1:
        raise ValueError("unit: expected packs of whole groups, shard(..., unit=group), got unit = 1")
    unit = packing.unit_of(b)
    return loss.online_dpo(out.logp, ref_logp, b.adv, b.mask, b.seq, b.num_seqs, unit, **options), {}


@with_options_of(loss.value_clip)
def value_clip(out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
    """Return PPO's critic loss, with the clipped share."""
    value, old_value, ret = check.given(value=out.value, old_value=b.old_value, ret=b.ret)
    x = loss.value_clip(value, old_value, ret, **options)
    moved = (value.detach() - old_value).abs() > options["clip"]
    return x, {"value/loss": metric.mean(x, b.mask), "value/clip_frac": metric.mean(moved.double(), b.mask)}


# ---------- the tokens that a loss stops


def _leaves(x: Tensor, adv: Tensor, low: Any, high: Any) -> Tensor:
    """Mark where the advantage pushes x out of [low, high]."""
    return ((x > high) & (adv > 0)) | ((x < low) & (adv < 0))


def beyond_clip(at: Evaluated, /) -> Tensor:
    """Mark ratios that would leave [1 - low, 1 + high]."""
    return _leaves(at.ratio, at.adv, 1 - at.options["low"], 1 + at.options["high"])


def beyond_log_clip(at: Evaluated, /) -> Tensor:
    """Mark log-ratios that would leave [-low, high]."""
    return _leaves(at.ratio.log(), at.adv, -at.options["low"], at.options["high"])


def outside_clip(at: Evaluated, /) -> Tensor:
    """Mark ratios outside [1 - low, 1 + high], which CISPO limits without losing their gradient."""
    return (at.ratio > 1 + at.options["high"]) | (at.ratio < 1 - at.options["low"])


def outside_default_clip(at: Evaluated, /) -> Tensor:
    """Mark ratios that would leave [0.8, 1.2]; SAPO's soft gate stops no token altogether."""
    return _leaves(at.ratio, at.adv, 0.8, 1.2)


def outside_trust_region(at: Evaluated, /) -> Tensor:
    """Mark tokens that DPPO's trust region stops: loss 0 where neither advantage nor log-prob is."""
    return (at.loss == 0) & (at.adv != 0) & (at.logp != 0)
