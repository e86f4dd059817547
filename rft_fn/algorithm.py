"""Published algorithms as rows of one table. A row is plain functions: index it,
change an entry, or ignore it.

    algo = algorithm.TABLE["grpo"]
    mine = algo._replace(loss=my_loss)            # a new algorithm is a changed row, not a subclass
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import advantage, loss, metric, weight
from rft_fn.logprob import log_ratio
from rft_fn.reward_shaping import kl_in_reward
from rft_fn.types import LossFn, Packed, Rollout, TokenOut

__all__ = [
    "TABLE", "ActorCritic", "Algorithm", "cispo", "cpgd", "dppo_kl", "dppo_tv", "get_actor_critic",
    "get_algorithm", "gmpo", "gspo", "gspo_token", "ppo_clip", "reinforce", "sapo", "value_clip",
]  # fmt: skip


class Algorithm(NamedTuple):
    """What makes an algorithm without a critic: three functions, and where to read of it."""

    advantage: Callable[..., Tensor]  # (reward [N, G], rollout) -> [B, 1] or [B, S]
    loss: LossFn  # (TokenOut, Packed) -> (loss [T], metrics)
    weight: Callable[[Tensor], Tensor]  # mask [B, S] -> w [B, S]
    paper: str  # arXiv id
    group: int = 1  # the fewest responses a prompt that the advantage is defined for
    greedy: bool = False  # whether `advantage` also takes greedy_reward [N], of each prompt's greedy answer


class ActorCritic(NamedTuple):
    """What makes an algorithm with a critic."""

    advantage: Callable[..., tuple[Tensor, Tensor]]  # (token_reward, value, mask, all [B, S]) -> (adv, ret)
    loss: LossFn  # of the actor
    value_loss: LossFn  # of the critic
    weight: Callable[[Tensor], Tensor]  # mask [B, S] -> w [B, S]
    paper: str  # arXiv id


# ---------- losses as LossFn: (TokenOut, Packed) -> (loss [T], metrics)


def _metrics(out: TokenOut, b: Packed, rho: Tensor, stopped: Tensor) -> dict[str, metric.Metric]:
    """The share of tokens whose gradient is stopped, KL to the old policy, largest ratio."""
    return {
        "policy/clip_frac": metric.mean(stopped.double(), b.mask),
        "policy/kl_old": metric.mean(loss.kl_k3(b.old_logp, out.logp.detach()), b.mask),
        "policy/ratio_max": metric.max(rho, b.mask),
    }


def _beyond(rho: Tensor, adv: Tensor, low: float, high: float) -> Tensor:
    """Where a step that the advantage asks for would leave [low, high]."""
    return ((rho > high) & (adv > 0)) | ((rho < low) & (adv < 0))


def _per_token(
    fn: Callable[..., Tensor], out: TokenOut, b: Packed, low: float, high: float, **options: Any
) -> Any:
    rho = loss.ratio(out.logp.detach(), b.old_logp)
    stopped = _beyond(rho, b.adv, low, high)
    return fn(out.logp, b.old_logp, b.adv, **options), _metrics(out, b, rho, stopped)


def _per_sequence(fn: Callable[..., Tensor], out: TokenOut, b: Packed, low: float, high: float) -> Any:
    where = (b.mask, b.seq, b.num_seqs)
    rho = loss.seq_ratio(out.logp.detach(), b.old_logp, *where)
    stopped = _beyond(rho, b.adv, 1 - low, 1 + high)
    return fn(out.logp, b.old_logp, b.adv, *where, low=low, high=high), _metrics(out, b, rho, stopped)


def ppo_clip(
    out: TokenOut, b: Packed, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Any:
    """`loss.ppo_clip` as a LossFn, with the metrics that one reads: the clipped share, KL
    to the old policy, largest ratio."""
    options = {"low": low, "high": high, "dual": dual}
    return _per_token(partial(loss.ppo_clip, **options), out, b, 1 - low, 1 + high)


def reinforce(out: TokenOut, b: Packed) -> Any:
    """`loss.reinforce` as a LossFn, which has no metrics of its own."""
    return loss.reinforce(out.logp, b.adv), {}


def gspo(out: TokenOut, b: Packed, *, low: float = 3e-4, high: float = 4e-4) -> Any:
    """`loss.gspo` as a LossFn; its ratios are those of sequences."""
    return _per_sequence(loss.gspo, out, b, low, high)


def gspo_token(out: TokenOut, b: Packed, *, low: float = 3e-4, high: float = 4e-4) -> Any:
    """`loss.gspo_token` as a LossFn; its ratios are those of sequences."""
    return _per_sequence(loss.gspo_token, out, b, low, high)


def gmpo(out: TokenOut, b: Packed, *, low: float = 0.4, high: float = 0.4) -> Any:
    """`loss.gmpo` as a LossFn; a token is clipped when its own log-ratio is."""
    d = log_ratio(out.logp.detach(), b.old_logp)
    x = loss.gmpo(out.logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, low=low, high=high)
    return x, _metrics(out, b, d.clamp(max=20).exp(), _beyond(d, b.adv, -low, high))


def cispo(out: TokenOut, b: Packed, *, low: float = 1.0, high: float = 4.0) -> Any:
    """`loss.cispo` as a LossFn; "clipped" are tokens whose weight is, they keep a gradient."""
    rho = loss.ratio(out.logp.detach(), b.old_logp)
    outside = (rho > 1 + high) | (rho < 1 - low)
    return loss.cispo(out.logp, b.old_logp, b.adv, low=low, high=high), _metrics(out, b, rho, outside)


def sapo(out: TokenOut, b: Packed, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Any:
    """`loss.sapo` as a LossFn; nothing is clipped, "clipped" are tokens outside [0.8, 1.2]."""
    return _per_token(partial(loss.sapo, tau_pos=tau_pos, tau_neg=tau_neg), out, b, 0.8, 1.2)


def cpgd(out: TokenOut, b: Packed, *, low: float = 0.2, high: float = 0.2, drift: float = 0.1) -> Any:
    """`loss.cpgd` as a LossFn."""
    return _per_token(partial(loss.cpgd, low=low, high=high, drift=drift), out, b, 1 - low, 1 + high)


def _trust_region(fn: Callable[..., Tensor], out: TokenOut, b: Packed, limit: float) -> Any:
    x = fn(out.logp, b.old_logp, b.adv, limit=limit)
    rho = loss.ratio(out.logp.detach(), b.old_logp)
    return x, _metrics(out, b, rho, (x.detach() == 0) & (b.adv != 0) & (out.logp.detach() != 0))


def dppo_tv(out: TokenOut, b: Packed, *, limit: float = 0.15) -> Any:
    """`loss.dppo_tv` as a LossFn."""
    return _trust_region(loss.dppo_tv, out, b, limit)


def dppo_kl(out: TokenOut, b: Packed, *, limit: float = 0.05) -> Any:
    """`loss.dppo_kl` as a LossFn."""
    return _trust_region(loss.dppo_kl, out, b, limit)


def value_clip(out: TokenOut, b: Packed, *, clip: float = 0.2) -> Any:
    """`loss.value_clip` as a LossFn of a critic, with the share of values that moved beyond the clip."""
    x = loss.value_clip(out.value, b.old_value, b.ret, clip=clip)  # type: ignore[arg-type]
    moved = (out.value.detach() - b.old_value).abs() > clip  # type: ignore[union-attr]
    return x, {"value/loss": metric.mean(x, b.mask), "value/clip_frac": metric.mean(moved.double(), b.mask)}


# ---------- advantages as a row has them


def _by_row(adv: Tensor, rollout: Rollout) -> Tensor:
    """[N, G] -> [B, 1]. ValueError unless N G is the number of rows."""
    if adv.numel() != len(rollout.mask):
        rows = len(rollout.mask)
        raise ValueError(
            f"reward: expected [N, G] with N G = {rows} rows of the rollout, got {list(adv.shape)}"
        )
    return adv.reshape(-1, 1)


def _per_group(estimator: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Rollout], Tensor]:
    return lambda reward, rollout: _by_row(estimator(reward), rollout)


def _raw(reward: Tensor, rollout: Rollout) -> Tensor:
    return _by_row(reward, rollout).clone()


def _remax(reward: Tensor, rollout: Rollout, *, greedy_reward: Tensor) -> Tensor:
    return _by_row(advantage.remax(reward, greedy_reward), rollout)


def _opo(reward: Tensor, rollout: Rollout) -> Tensor:
    _by_row(reward, rollout)
    return advantage.opo(reward, rollout.mask.sum(-1).view_as(reward).to(reward.dtype)).reshape(-1, 1)


def _reinforce_pp(reward: Tensor, rollout: Rollout, *, gamma: float = 1.0) -> Tensor:
    """The reward on the last token; its return on every token, whitened over the batch."""
    token_reward = kl_in_reward(
        _by_row(reward, rollout)[:, 0], rollout.logp, rollout.logp, rollout.mask, coef=0.0
    )
    return advantage.whiten(advantage.reinforce_pp(token_reward, rollout.mask, gamma=gamma), rollout.mask)


def _reinforce_pp_baseline(reward: Tensor, rollout: Rollout) -> Tensor:
    adv = _by_row(advantage.reinforce_pp_baseline(reward), rollout) * rollout.mask
    return advantage.whiten(adv, rollout.mask)


def _discount(mask: Tensor, gamma: float) -> Tensor:
    """[B, S]: gamma on every token but the last in mask of its row, where the sequence ends."""
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, 0.0, gamma).to(torch.get_default_dtype())


def _ppo(
    token_reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float = 1.0, lambda_: float = 0.95
) -> tuple[Tensor, Tensor]:
    discount = _discount(mask, gamma).to(token_reward.dtype)
    return advantage.gae(token_reward, value, discount, lambda_, mask=mask)


def _vapo(
    token_reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float = 1.0, alpha: float = 0.05
) -> tuple[Tensor, Tensor]:
    policy_lambda = advantage.length_adaptive_lambda(mask.sum(-1, keepdim=True), alpha=alpha)
    discount = _discount(mask, gamma).to(token_reward.dtype)
    return advantage.decoupled_gae(token_reward, value, discount, policy_lambda=policy_lambda, mask=mask)


# ---------- the table

_grpo, _dr_grpo = _per_group(advantage.grpo), _per_group(partial(advantage.grpo, scale=False))
_rloo, _cpgd = _per_group(advantage.rloo), _per_group(advantage.cpgd)
_higher = partial(ppo_clip, low=0.2, high=0.28)
_constant = partial(weight.constant, length=1024)  # any fixed length: it only scales the loss

TABLE: dict[str, Algorithm | ActorCritic] = {
    "grpo": Algorithm(_grpo, ppo_clip, weight.seq_mean, "2402.03300", 2),
    "dr_grpo": Algorithm(_dr_grpo, ppo_clip, _constant, "2503.20783", 2),
    "dapo": Algorithm(_grpo, _higher, weight.token_mean, "2503.14476", 2),
    "gspo": Algorithm(_grpo, gspo, weight.seq_mean, "2507.18071", 2),
    "gspo_token": Algorithm(_grpo, gspo_token, weight.seq_mean, "2507.18071", 2),
    "cispo": Algorithm(_grpo, cispo, weight.token_mean, "2506.13585", 2),
    "sapo": Algorithm(_grpo, sapo, weight.seq_mean, "2511.20347", 2),
    "gmpo": Algorithm(_grpo, gmpo, weight.seq_mean, "2507.20673", 2),
    "cpgd": Algorithm(_cpgd, cpgd, weight.token_mean, "2505.12504", 2),
    "dppo_tv": Algorithm(_grpo, dppo_tv, weight.token_mean, "2602.04879", 2),
    "dppo_kl": Algorithm(_grpo, dppo_kl, weight.token_mean, "2602.04879", 2),
    "rloo": Algorithm(_rloo, reinforce, weight.seq_sum, "2402.14740", 2),
    "opo": Algorithm(_opo, reinforce, weight.seq_sum, "2505.23585", 2),
    "remax": Algorithm(_remax, reinforce, weight.seq_sum, "2310.10505", greedy=True),
    "reinforce": Algorithm(_raw, reinforce, weight.seq_sum, "Williams 1992"),
    "reinforce_pp": Algorithm(_reinforce_pp, ppo_clip, weight.token_mean, "2501.03262"),
    "reinforce_pp_baseline": Algorithm(
        _reinforce_pp_baseline, ppo_clip, weight.token_mean, "2501.03262", 2
    ),
    "ppo": ActorCritic(_ppo, ppo_clip, value_clip, weight.token_mean, "1707.06347"),
    "vapo": ActorCritic(_vapo, _higher, value_clip, weight.token_mean, "2504.05118"),
}  # fmt: skip


def _row(name: str, kind: type, elsewhere: str) -> Any:
    row = TABLE.get(name)
    if isinstance(row, kind):
        return row
    names = ", ".join(n for n, r in TABLE.items() if isinstance(r, kind))
    raise ValueError(f"algorithm: expected one of {names}, got {name!r}{elsewhere if row else ''}")


def get_algorithm(name: str, *, group: int | None = None) -> Algorithm:
    """The row of that name, of those without a critic. ValueError that lists the names there are, or says
    that `group` responses are too few for it."""
    row = _row(name, Algorithm, ", which has a critic: see train_scripts/ppo.py")
    if group is not None and group < row.group:
        raise ValueError(
            f"group: expected >= {row.group} responses a prompt for {name}, whose advantage "
            f"compares the responses of a group, got {group}; raise it, or take an "
            "algorithm without groups (reinforce)"
        )
    return row


def get_actor_critic(name: str) -> ActorCritic:
    """The row of that name, of those with a critic. ValueError that lists the names there are."""
    return _row(name, ActorCritic, ", which has no critic: see train_scripts/grpo.py")
