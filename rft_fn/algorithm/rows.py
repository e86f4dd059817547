"""A row of the table: the functions that make an algorithm, and their signatures."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rft_fn.metric import Metric
from rft_fn.types import AdvantageFn, CriticAdvantageFn, LossFn, Packed, TokenOut, WeightFn

__all__ = ["ActorCritic", "Algorithm", "Evaluated", "LossWithMetrics", "Stopped"]


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


class LossWithMetrics(Protocol):
    """A `LossFn` with metrics and options.

    The options are those of the loss that it adapts.
    """

    def __call__(self, out: TokenOut, b: Packed, /, **options: Any) -> tuple[Tensor, dict[str, Metric]]:
        """(loss [T], metrics).

        TypeError for an option that the loss does not have.
        """
        ...


class Evaluated(NamedTuple):
    """A loss on a pack, and its inputs.

    Nothing carries a gradient.
    """

    loss: Tensor  # [T]
    ratio: Tensor  # [T], the probability ratio that the loss limits
    logp: Tensor  # [T]
    adv: Tensor  # [T]
    options: Mapping[str, Any]  # all options of the loss


class Stopped(Protocol):
    """Tells which tokens a loss keeps from learning more."""

    def __call__(self, at: Evaluated, /) -> Tensor:
        """[T] bool, True on the tokens that are stopped."""
        ...
