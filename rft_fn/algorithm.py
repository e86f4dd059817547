"""Published algorithms as rows of one table. A row is plain functions: index it,
change an entry, or ignore it.

    algo = algorithm.TABLE["grpo"]
    mine = algo._replace(loss=my_loss)            # a new algorithm is a changed row, not a subclass
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from rft_fn import advantage, loss, metric, weight
from rft_fn.types import LossFn, Packed, Rollout, TokenOut

__all__ = ["TABLE", "Algorithm", "get_algorithm", "ppo_clip", "reinforce"]


class Algorithm(NamedTuple):
    """What makes one algorithm: three functions, and where to read of it."""

    advantage: Callable[[Tensor, Rollout], Tensor]  # (reward [N, G], rollout) -> [B, 1] or [B, S]
    loss: LossFn  # (TokenOut, Packed) -> (loss [T], metrics)
    weight: Callable[[Tensor], Tensor]  # mask [B, S] -> w [B, S]
    paper: str  # arXiv id
    group: int = 1  # the fewest responses a prompt that the advantage is defined for


def ppo_clip(
    out: TokenOut, b: Packed, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Any:
    """`loss.ppo_clip` as a LossFn, with the metrics that one reads: the clipped share, KL
    to the old policy, largest ratio."""
    rho = loss.ratio(out.logp.detach(), b.old_logp)
    clipped = ((rho > 1 + high) & (b.adv > 0)) | ((rho < 1 - low) & (b.adv < 0))
    metrics = {
        "policy/clip_frac": metric.mean(clipped.double(), b.mask),
        "policy/kl_old": metric.mean(loss.kl_k3(b.old_logp, out.logp.detach()), b.mask),
        "policy/ratio_max": metric.max(rho, b.mask),
    }
    return loss.ppo_clip(out.logp, b.old_logp, b.adv, low=low, high=high, dual=dual), metrics


def reinforce(out: TokenOut, b: Packed) -> Any:
    """`loss.reinforce` as a LossFn, which has no metrics of its own."""
    return loss.reinforce(out.logp, b.adv), {}


def _per_group(estimator: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Rollout], Tensor]:
    return lambda reward, rollout: estimator(reward).reshape(-1, 1)


def _raw(reward: Tensor, rollout: Rollout) -> Tensor:
    return reward.reshape(-1, 1).clone()


TABLE: dict[str, Algorithm] = {
    "grpo": Algorithm(_per_group(advantage.grpo), ppo_clip, weight.seq_mean, "2402.03300", 2),
    "dr_grpo": Algorithm(
        _per_group(partial(advantage.grpo, scale=False)),
        ppo_clip,
        partial(weight.constant, length=1024),  # any fixed length: it only scales the loss
        "2503.20783",
        2,
    ),
    "dapo": Algorithm(
        _per_group(advantage.grpo), partial(ppo_clip, low=0.2, high=0.28), weight.token_mean, "2503.14476", 2
    ),
    "rloo": Algorithm(_per_group(advantage.rloo), reinforce, weight.seq_sum, "2402.14740", 2),
    "reinforce": Algorithm(_raw, reinforce, weight.seq_sum, "Williams 1992"),
}


def get_algorithm(name: str, *, group: int | None = None) -> Algorithm:
    """The row of that name. ValueError that lists the names there are, or says that `group`
    responses are too few for it."""
    if name not in TABLE:
        raise ValueError(f"algorithm: expected one of {', '.join(TABLE)}, got {name!r}")
    if group is not None and group < TABLE[name].group:
        raise ValueError(
            f"group: expected >= {TABLE[name].group} responses a prompt for {name}, whose advantage "
            f"compares the responses of a group, got {group}; raise it, or take an "
            "algorithm without groups (reinforce)"
        )
    return TABLE[name]
