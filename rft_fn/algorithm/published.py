"""The table of published algorithms, its rows by name, and their advantages."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import advantage, loss, weight
from rft_fn.algorithm.more_losses import (
    a_star,
    beyond_clip,
    online_dpo,
    outside_weights,
    per_sequence,
    reinforce,
    value_clip,
)
from rft_fn.algorithm.row import GRPO, Algorithm, per_group, rows
from rft_fn.algorithm.with_metrics import per_token, token_ratio
from rft_fn.reward_shaping import last_token, on_last_token
from rft_fn.types import CriticAdvantageFn, LossFn, Rollout, WeightFn
from rft_fn.weight import get_weight

__all__ = [
    "TABLE", "ActorCritic", "Algorithm", "configured", "configured_actor_critic", "get_actor_critic",
    "get_algorithm",
]  # fmt: skip

R = TypeVar("R")


def raw(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Return the rewards themselves, [B, 1]."""
    return rows(reward, rollout).clone()


def remax(reward: Tensor, rollout: Rollout, /, *, greedy_reward: Tensor) -> Tensor:
    """Return `advantage.remax` of each row, [B, 1]."""
    return rows(advantage.remax(reward, greedy_reward), rollout)


def opo(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Return `advantage.opo` of each row, [B, 1], by the tokens that were sampled."""
    rows(reward, rollout)  # an error about the rewards comes before one about their lengths
    length = rearrange(rollout.mask.sum(-1), "(n g) -> n g", n=len(reward))
    return rows(advantage.opo(reward, length.to(reward.dtype)), rollout)


def reinforce_pp(reward: Tensor, rollout: Rollout, /, *, gamma: float = 1.0) -> Tensor:
    """Return whitened returns [B, S] of rewards on last tokens."""
    token_reward = on_last_token(rows(reward, rollout)[:, 0], rollout.mask)
    returns = advantage.reinforce_pp(token_reward, rollout.mask, gamma=gamma)
    return advantage.whiten(returns, rollout.mask)


def reinforce_pp_baseline(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Return rewards less their group's mean, whitened over the tokens of the batch, [B, S]."""
    centred = rows(advantage.reinforce_pp_baseline(reward), rollout)
    return advantage.whiten(centred * rollout.mask, rollout.mask)


def _discount(token_reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return discounts [B, S]: 0 on the last token in mask of each row, gamma on all others."""
    return torch.where(last_token(mask), 0.0, gamma).to(token_reward.dtype)


def ppo(
    token_reward: Tensor,
    value: Tensor,
    mask: Tensor,
    /,
    *,
    gamma: float = 1.0,
    lambda_: float | Tensor = 0.95,
) -> tuple[Tensor, Tensor]:
    """Return GAE with one lambda for actor and critic: (adv, ret), [B, S]."""
    discount = _discount(token_reward, mask, gamma)
    return advantage.gae(token_reward, value, discount, lambda_, mask=mask)


def vapo(
    token_reward: Tensor, value: Tensor, mask: Tensor, /, *, gamma: float = 1.0, alpha: float = 0.05
) -> tuple[Tensor, Tensor]:
    """Return GAE with a lambda by length for the actor, 1 for the critic: (adv, ret), [B, S]."""
    length = mask.sum(-1, keepdim=True)
    policy_lambda = advantage.length_adaptive_lambda(length, alpha=alpha)
    discount = _discount(token_reward, mask, gamma)
    return advantage.decoupled_gae(token_reward, value, discount, policy_lambda=policy_lambda, mask=mask)


class ActorCritic(NamedTuple):
    """An algorithm with a critic."""

    advantage: CriticAdvantageFn
    loss: LossFn  # of the actor
    value_loss: LossFn  # of the critic
    weight: WeightFn
    paper: str  # arXiv id


_dr_grpo = per_group(partial(advantage.grpo, scale=False))
_rloo = per_group(advantage.rloo)
_cpgd = per_group(advantage.cpgd)
_best = per_group(advantage.best_minus_second)
_centred = reinforce_pp_baseline

_grpo, _clip = GRPO.advantage, per_token(loss.ppo_clip)
_clip_higher = partial(_clip, high=0.28)
_gspo = per_sequence(loss.gspo)
_gspo_token = per_sequence(loss.gspo_token)
_gmpo = per_sequence(loss.gmpo, ratio=token_ratio)
_cispo = per_token(loss.cispo, outside_weights)
_sapo = per_token(loss.sapo, beyond_clip)
_cpgd_loss = per_token(loss.cpgd, beyond_clip)
_dppo_tv = per_token(loss.dppo_tv)
_dppo_kl = per_token(loss.dppo_kl)

_luspo = partial(_gspo, low=2e-3, high=2.5e-3)
_vespo = per_sequence(loss.vespo, beyond_clip)
_dro = per_token(loss.dro, beyond_clip)

_constant = partial(weight.constant, length=1024)  # any fixed length: it only scales the loss

TABLE: dict[str, Algorithm | ActorCritic] = {
    "grpo": GRPO,
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
    "maxrl": Algorithm(per_group(advantage.maxrl), _clip, weight.token_mean, "2602.02710", 2),
    "lite_ppo": Algorithm(per_group(advantage.lite_ppo), _clip, weight.token_mean, "2508.08221", 2),
    "luspo": Algorithm(_grpo, _luspo, weight.seq_sum, "2602.05261", 2),
    "vespo": Algorithm(_grpo, _vespo, weight.seq_sum, "2602.10693", 2),
    "dro": Algorithm(_dr_grpo, _dro, weight.token_mean, "2405.19107", 2),
    "gpg": Algorithm(per_group(advantage.gpg), reinforce, weight.token_mean, "2504.02546", 2),
    "best_minus_second": Algorithm(_best, reinforce, weight.seq_sum, "2503.19595", 2),
    "a_star_po": Algorithm(
        per_group(advantage.a_star), a_star, weight.seq_mean, "2505.20686", 2, reference=True
    ),
    "online_dpo": Algorithm(
        per_group(advantage.best_against_worst),
        online_dpo,
        weight.seq_mean,
        "2402.04792",
        2,
        reference=True,
        together=True,
    ),
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
    # of names that are as near, the one with the same letters: two of them were exchanged
    near = sorted(get_close_matches(name, TABLE), key=lambda x: sorted(x) != sorted(name))
    if row is not None:
        message += elsewhere
    elif near:
        message += f"; did you mean {near[0]}?"
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
    advantage: str | None = None,
    weight: str | None = None,
    limits: Mapping[str, float | None] | None = None,
) -> Algorithm:
    """Return the row of a name, without a critic, with what is given in place of its own; None is its own.

    `advantage` names the row that the advantage is taken from, `weight` is a name of `weight.get_weight`,
    `limits` are limits of the loss by their names. ValueError as of `get_algorithm`, and for a limit that the
    loss does not have.
    """
    row = get_algorithm(name)
    if advantage is not None:
        source = _row(advantage, Algorithm, ", which has a critic", option="advantage")
        row = row._replace(advantage=source.advantage, group=source.group, greedy=source.greedy)
    row = _grouped(advantage or name, row, group)
    row = _limited(name, row, limits or {})
    return row if weight is None else row._replace(weight=get_weight(weight))


def configured_actor_critic(
    name: str,
    *,
    gamma: float | None = None,
    lambda_: float | None = None,
    alpha: float | None = None,
    value_clip: float | None = None,
    weight: str | None = None,
    limits: Mapping[str, float | None] | None = None,
) -> ActorCritic:
    """Return the row of a name, with a critic, with the options that are given; None is the row's own.

    `gamma`, `lambda_` and `alpha` are of the advantage, the limits of the actor's loss, `value_clip` of the
    critic's. `weight` and `limits` as of `configured`. ValueError as of `get_actor_critic`.
    """
    row = _limited(name, get_actor_critic(name), limits or {})
    return row._replace(
        advantage=_given(row.advantage, gamma=gamma, lambda_=lambda_, alpha=alpha),
        value_loss=_given(row.value_loss, clip=value_clip),
        weight=row.weight if weight is None else get_weight(weight),
    )


def _limited(name: str, row: Row, limits: Mapping[str, float | None]) -> Row:
    """Return a row with other limits in its loss."""
    own = [p.name for p in signature(row.loss).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    has = f"{name} has {', '.join(own)}" if own else f"{name} has no limits"
    given = {limit: x for limit, x in limits.items() if x is not None}
    for limit, x in given.items():
        if limit not in own:
            raise ValueError(f"loss.{limit}: expected None, {has}, got {x}")
    return row._replace(loss=_given(row.loss, **given))


def _given(function: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Return a function with the options that are not None; it has defaults for the others."""
    return partial(function, **{name: x for name, x in options.items() if x is not None})
