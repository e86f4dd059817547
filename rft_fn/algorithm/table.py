"""The table of published algorithms, and its rows by name."""

from functools import partial
from typing import TypeVar

from rft_fn import advantage, loss, weight
from rft_fn.algorithm import advantages, losses, stopped
from rft_fn.algorithm.losses import per_sequence, per_token
from rft_fn.algorithm.rows import ActorCritic, Algorithm

__all__ = ["TABLE", "get_actor_critic", "get_algorithm"]

_grpo = advantages.per_group(advantage.grpo)
_dr_grpo = advantages.per_group(partial(advantage.grpo, scale=False))
_rloo = advantages.per_group(advantage.rloo)
_cpgd = advantages.per_group(advantage.cpgd)
_centred = advantages.reinforce_pp_baseline

_clip = per_token(loss.ppo_clip, stopped.beyond_clip)
_clip_higher = partial(_clip, high=0.28)
_gspo = per_sequence(loss.gspo, stopped.beyond_clip)
_gspo_token = per_sequence(loss.gspo_token, stopped.beyond_clip)
_gmpo = per_sequence(loss.gmpo, stopped.beyond_log_clip, ratio=losses.token_ratio)
_cispo = per_token(loss.cispo, stopped.outside_clip)
_sapo = per_token(loss.sapo, stopped.beyond_a_fifth)
_cpgd_loss = per_token(loss.cpgd, stopped.beyond_clip)
_dppo_tv = per_token(loss.dppo_tv, stopped.outside_trust_region)
_dppo_kl = per_token(loss.dppo_kl, stopped.outside_trust_region)

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
    "rloo": Algorithm(_rloo, losses.reinforce, weight.seq_sum, "2402.14740", 2),
    "opo": Algorithm(advantages.opo, losses.reinforce, weight.seq_sum, "2505.23585", 2),
    "remax": Algorithm(advantages.remax, losses.reinforce, weight.seq_sum, "2310.10505", greedy=True),
    "reinforce": Algorithm(advantages.raw, losses.reinforce, weight.seq_sum, "Williams 1992"),
    "reinforce_pp": Algorithm(advantages.reinforce_pp, _clip, weight.token_mean, "2501.03262"),
    "reinforce_pp_baseline": Algorithm(_centred, _clip, weight.token_mean, "2501.03262", 2),
    "ppo": ActorCritic(advantages.ppo, _clip, losses.value_clip, weight.token_mean, "1707.06347"),
    "vapo": ActorCritic(advantages.vapo, _clip_higher, losses.value_clip, weight.token_mean, "2504.05118"),
}  # fmt: skip

Row = TypeVar("Row", Algorithm, ActorCritic)


def _row(name: str, kind: type[Row], elsewhere: str) -> Row:
    """The row of a name and a kind.

    ValueError that lists the names of that kind, and `elsewhere`.
    """
    row = TABLE.get(name)
    if isinstance(row, kind):
        return row
    names = ", ".join(n for n, r in TABLE.items() if isinstance(r, kind))
    message = f"algorithm: expected one of {names}, got {name!r}"
    if row is not None:
        message += elsewhere
    raise ValueError(message)


def get_algorithm(name: str, *, group: int | None = None) -> Algorithm:
    """The row of that name, without a critic.

    ValueError that lists the names there are, or if `group` responses per prompt are too few for it.
    """
    row = _row(name, Algorithm, ", which has a critic: see train_scripts/ppo.py")
    if group is not None and group < row.group:
        raise ValueError(
            f"group: expected >= {row.group} responses per prompt for {name}, whose advantage "
            f"compares the responses of a group, got {group}; raise it, or take an "
            "algorithm without groups (reinforce)"
        )
    return row


def get_actor_critic(name: str) -> ActorCritic:
    """The row of that name, with a critic.

    ValueError that lists the names there are.
    """
    return _row(name, ActorCritic, ", which has no critic: see train_scripts/grpo.py")
