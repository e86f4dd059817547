"""Published algorithms as rows of one table of plain functions.

Index a row, change an entry, or ignore the table:

    algo = algorithm.TABLE["grpo"]
    mine = algo._replace(loss=my_loss)            # a new algorithm is a changed row, not a subclass

`per_token` and `per_sequence` adapt a function of `rft_fn.loss` to a `LossFn` with metrics. The adapted
loss takes the options of that function, with its defaults: a row states only the settings that its paper
changes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import advantage, check, loss, metric, weight
from rft_fn.metric import Metric
from rft_fn.reward_shaping import last_token, on_last_token
from rft_fn.types import AdvantageFn, CriticAdvantageFn, LossFn, Packed, Rollout, TokenOut, WeightFn
from rft_fn.weight import get_weight

__all__ = [
    "TABLE", "ActorCritic", "Algorithm", "configured", "configured_actor_critic", "get_actor_critic",
    "get_algorithm", "per_sequence", "per_token",
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


# ---------- advantages of rows: rewards [N, G] to [B, 1] of responses, or [B, S] of tokens


def _rows(adv: Tensor, rollout: Rollout) -> Tensor:
    """Reshape one number per row, [N, G] -> [B, 1]. ValueError unless N G are the rows of the rollout."""
    rows = len(rollout.mask)
    if adv.dim() != 2 or adv.numel() != rows:
        raise ValueError(
            f"reward: expected [N, G] with N G = {rows} rows of the rollout, got {list(adv.shape)}"
        )
    return rearrange(adv, "n g -> (n g) 1")


def per_group(estimator: Callable[[Tensor], Tensor]) -> AdvantageFn:
    """Adapt an estimator that reads only rewards [N, G]."""

    def advantage_fn(reward: Tensor, rollout: Rollout, /) -> Tensor:
        return _rows(estimator(reward), rollout)

    return advantage_fn


def raw(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Return the rewards themselves, [B, 1]."""
    return _rows(reward, rollout).clone()


def remax(reward: Tensor, rollout: Rollout, /, *, greedy_reward: Tensor) -> Tensor:
    """Return `advantage.remax` of each row, [B, 1]."""
    return _rows(advantage.remax(reward, greedy_reward), rollout)


def opo(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Return `advantage.opo` of each row, [B, 1], by the tokens that were sampled."""
    _rows(reward, rollout)  # an error about the rewards comes before one about their lengths
    length = rearrange(rollout.mask.sum(-1), "(n g) -> n g", n=len(reward))
    return _rows(advantage.opo(reward, length.to(reward.dtype)), rollout)


@with_options_of(advantage.reinforce_pp)
def reinforce_pp(reward: Tensor, rollout: Rollout, /, **options: Any) -> Tensor:
    """Return whitened returns [B, S] of rewards on last tokens."""
    token_reward = on_last_token(_rows(reward, rollout)[:, 0], rollout.mask)
    returns = advantage.reinforce_pp(token_reward, rollout.mask, **options)
    return advantage.whiten(returns, rollout.mask)


def reinforce_pp_baseline(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Return rewards less their group's mean, whitened over the tokens of the batch, [B, S]."""
    centred = _rows(advantage.reinforce_pp_baseline(reward), rollout)
    return advantage.whiten(centred * rollout.mask, rollout.mask)


def _discount(token_reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return discounts [B, S]: 0 on the last token in mask of each row, gamma on all others."""
    return torch.where(last_token(mask), 0.0, gamma).to(token_reward.dtype)


@with_options_of(advantage.gae, "lambda_")
def ppo(
    token_reward: Tensor, value: Tensor, mask: Tensor, /, *, gamma: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return GAE with one lambda for actor and critic: (adv, ret), [B, S]."""
    discount = _discount(token_reward, mask, gamma)
    return advantage.gae(token_reward, value, discount, mask=mask, **options)


@with_options_of(advantage.length_adaptive_lambda)
def vapo(
    token_reward: Tensor, value: Tensor, mask: Tensor, /, *, gamma: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return GAE with a lambda by length for the actor, 1 for the critic: (adv, ret), [B, S]."""
    length = mask.sum(-1, keepdim=True)
    policy_lambda = advantage.length_adaptive_lambda(length, **options)
    discount = _discount(token_reward, mask, gamma)
    return advantage.decoupled_gae(token_reward, value, discount, policy_lambda=policy_lambda, mask=mask)


# ---------- a row of the table: the functions that make an algorithm, and their signatures


class Algorithm(NamedTuple):
    """An algorithm without a critic."""

    advantage: AdvantageFn
    loss: LossFn
    weight: WeightFn
    paper: str  # arXiv id
    group: int = 1  # fewest responses per prompt for which the advantage is defined
    greedy: bool = False  # whether `advantage` also takes greedy_reward [N]


class ActorCritic(NamedTuple):
    """An algorithm with a critic."""

    advantage: CriticAdvantageFn
    loss: LossFn  # of the actor
    value_loss: LossFn  # of the critic
    weight: WeightFn
    paper: str  # arXiv id


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


# ---------- the table of published algorithms, and its rows by name


_grpo = per_group(advantage.grpo)
_dr_grpo = per_group(partial(advantage.grpo, scale=False))
_rloo = per_group(advantage.rloo)
_cpgd = per_group(advantage.cpgd)
_centred = reinforce_pp_baseline

_clip = per_token(loss.ppo_clip, beyond_clip)
_clip_higher = partial(_clip, high=0.28)
_gspo = per_sequence(loss.gspo, beyond_clip)
_gspo_token = per_sequence(loss.gspo_token, beyond_clip)
_gmpo = per_sequence(loss.gmpo, beyond_log_clip, ratio=token_ratio)
_cispo = per_token(loss.cispo, outside_clip)
_sapo = per_token(loss.sapo, outside_default_clip)
_cpgd_loss = per_token(loss.cpgd, beyond_clip)
_dppo_tv = per_token(loss.dppo_tv, outside_trust_region)
_dppo_kl = per_token(loss.dppo_kl, outside_trust_region)

_constant = partial(weight.constant, length=1024)  # any fixed length: it only scales the loss

TABLE: dict[str, Algorithm | ActorCritic] = {
    "grpo": Algorithm(_grpo, _clip, weight.seq_mean, "2402.03300", 2),
    "dr_grpo": Algorithm(_dr_grpo, _clip, _constant, "2503.20783", 2),
    "dapo": Algorithm(_grpo, _clip_higher, weight.token_mean, "2503.14476", 2),
    "gspo": Algorithm(_grpo, _gspo, weight.seq_mean, "2507.18071", 2),
    "gspo_token": Algorithm(_grpo, _gspo_token, weight.seq_mean, "2507.18071", 2),
    "cispo": Algorithm(_grpo, _cispo, weight.token_mean, "2506.13585", 2),
    "sapo": Algorithm(_grpo, _sapo, weight.seq_mean, "2511.20347", 2),
    "gmpo": Algorithm(_grpo, _gmpo, weight.seq_mean, "2507.20673", 2),
    "cpgd": Algorithm(_cpgd, _cpgd_loss, weight.token_mean, "2505.12504", 2),
    "dppo_tv": Algorithm(_grpo, _dppo_tv, weight.token_mean, "2602.04879", 2),
    "dppo_kl": Algorithm(_grpo, _dppo_kl, weight.token_mean, "2602.04879", 2),
    "rloo": Algorithm(_rloo, reinforce, weight.seq_sum, "2402.14740", 2),
    "opo": Algorithm(opo, reinforce, weight.seq_sum, "2505.23585", 2),
    "remax": Algorithm(remax, reinforce, weight.seq_sum, "2310.10505", greedy=True),
    "reinforce": Algorithm(raw, reinforce, weight.seq_sum, "Williams 1992"),
    "reinforce_pp": Algorithm(reinforce_pp, _clip, weight.token_mean, "2501.03262"),
    "reinforce_pp_baseline": Algorithm(_centred, _clip, weight.token_mean, "2501.03262", 2),
    "ppo": ActorCritic(ppo, _clip, value_clip, weight.token_mean, "1707.06347"),
    "vapo": ActorCritic(vapo, _clip_higher, value_clip, weight.token_mean, "2504.05118"),
}  # fmt: skip

Row = TypeVar("Row", Algorithm, ActorCritic)


def _row(name: str, kind: type[Row], elsewhere: str, *, option: str = "algorithm") -> Row:
    """Return the row of a name and a kind; ValueError that lists the names, and `elsewhere`."""
    row = TABLE.get(name)
    if isinstance(row, kind):
        return row
    names = ", ".join(n for n, r in TABLE.items() if isinstance(r, kind))
    message = f"{option}: expected one of {names}, got {name!r}"
    if row is not None:
        message += elsewhere
    raise ValueError(message)


def get_algorithm(name: str, *, group: int | None = None) -> Algorithm:
    """Return the row of a name, without a critic.

    ValueError that lists the names there are, or if `group` responses per prompt are too few for it.
    """
    return _grouped(name, _row(name, Algorithm, ", which has a critic: see train_scripts/ppo.py"), group)


def _grouped(name: str, row: Algorithm, group: int | None) -> Algorithm:
    """Return a row; ValueError if `group` responses per prompt are too few for its advantage."""
    if group is not None and group < row.group:
        raise ValueError(
            f"group: expected >= {row.group} responses per prompt for {name}, whose advantage "
            f"compares the responses of a group, got {group}; raise it, or take an "
            "algorithm without groups (reinforce)"
        )
    return row


def get_actor_critic(name: str) -> ActorCritic:
    """Return the row of a name, with a critic; ValueError that lists the names there are."""
    return _row(name, ActorCritic, ", which has no critic: see train_scripts/grpo.py")


def configured(
    name: str,
    *,
    group: int | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual: float | None = None,
    advantage: str | None = None,
    weight: str | None = None,
    limits: Mapping[str, float | None] | None = None,
) -> Algorithm:
    """Return the row of a name, without a critic, with what is given in place of its own; None is its own.

    `advantage` names the row that the advantage is taken from, `weight` is a name of `weight.get_weight`,
    `limits` are limits of the loss by their names; `clip_low`, `clip_high` and `dual` are three of them.
    ValueError as of `get_algorithm`, and for a limit that the loss does not have.
    """
    row = get_algorithm(name)
    if advantage is not None:
        source = _row(advantage, Algorithm, ", which has a critic", option="advantage")
        row = row._replace(advantage=source.advantage, group=source.group, greedy=source.greedy)
    row = _grouped(advantage or name, row, group)
    row = _limited(name, row, (clip_low, clip_high, dual), limits or {})
    return row if weight is None else row._replace(weight=get_weight(weight))


def configured_actor_critic(
    name: str,
    *,
    gamma: float | None = None,
    lambda_: float | None = None,
    alpha: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual: float | None = None,
    value_clip: float | None = None,
    weight: str | None = None,
    limits: Mapping[str, float | None] | None = None,
) -> ActorCritic:
    """Return the row of a name, with a critic, with the options that are given; None is the row's own.

    `gamma`, `lambda_` and `alpha` are of the advantage, the limits of the actor's loss, `value_clip` of the
    critic's. `weight` and `limits` as of `configured`. ValueError as of `get_actor_critic`.
    """
    row = _limited(name, get_actor_critic(name), (clip_low, clip_high, dual), limits or {})
    return row._replace(
        advantage=_given(row.advantage, gamma=gamma, lambda_=lambda_, alpha=alpha),
        value_loss=_given(row.value_loss, clip=value_clip),
        weight=row.weight if weight is None else get_weight(weight),
    )


def _limited(name: str, row: Row, clips: Sequence[float | None], limits: Mapping[str, float | None]) -> Row:
    """Return a row with other limits in its loss; `clips` are low, high, dual as older options."""
    own = [p.name for p in signature(row.loss).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    has = f"{name} has {', '.join(own)}" if own else f"{name} has no limits"
    given = {limit: x for limit, x in limits.items() if x is not None}
    for limit, x in given.items():
        if limit not in own:
            raise ValueError(f"loss.{limit}: expected None, {has}, got {x}")
    for option, limit, x in zip(("clip_low", "clip_high", "dual"), ("low", "high", "dual"), clips):
        if x is None:
            continue
        if limit not in own:
            raise ValueError(f"{option}: expected None, {name} has no such limit, got {x}")
        if limit in given:
            raise ValueError(f"loss.{limit}: expected None, as {option} is {x}, got {given[limit]}")
        given[limit] = x
    return row._replace(loss=_given(row.loss, **given))


def _given(function: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Return a function with the options that are not None; it has defaults for the others."""
    return partial(function, **{name: x for name, x in options.items() if x is not None})
