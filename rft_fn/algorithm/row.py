"""A row of the table of algorithms: the functions that it is made of, and GRPO's row."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rft_fn.advantage.groups import grpo
from rft_fn.algorithm.with_metrics import per_token
from rft_fn.loss.policy import ppo_clip
from rft_fn.types.batch import Rollout
from rft_fn.types.functions import AdvantageFn, LossFn, WeightFn
from rft_fn.weight.averages import seq_mean

__all__ = ["GRPO", "Algorithm", "per_group", "rows"]


def rows(adv: Tensor, rollout: Rollout) -> Tensor:
    """Reshape one number per row, [N, G] -> [B, 1]. ValueError unless N G are the rows of the rollout."""
    rows = len(rollout.mask)
    if adv.dim() != 2 or adv.numel() != rows:
        raise ValueError(
            f"reward: expected [N, G] with N G = {rows} rows of the rollout, got {list(adv.shape)}"
        )
    return adv.reshape(-1, 1)


def per_group(estimator: Callable[[Tensor], Tensor]) -> AdvantageFn:
    """Adapt an estimator that reads only rewards [N, G]."""

    def advantage_fn(reward: Tensor, rollout: Rollout, /) -> Tensor:
        return rows(estimator(reward), rollout)

    return advantage_fn


class Algorithm(NamedTuple):
    """An algorithm without a critic."""

    advantage: AdvantageFn
    loss: LossFn
    weight: WeightFn
    paper: str  # arXiv id
    group: int = 1  # fewest responses per prompt for which the advantage is defined
    greedy: bool = False  # whether `advantage` also takes greedy_reward [N]
    reference: bool = False  # whether `loss` reads the initial model's log-probs, b.ref_logp
    together: bool = False  # whether all rows of a group share a pack, because `loss` compares them


GRPO = Algorithm(
    advantage=per_group(grpo),
    loss=per_token(ppo_clip),
    weight=seq_mean,
    paper="2402.03300",
    group=2,
)
