"""The signatures of an algorithm's functions.

A loss is a `LossFn`. Rows of the table of algorithms differ in the options that their functions take, so
the signatures leave options open.
"""

from typing import Any, Protocol

from torch import Tensor

from rft_fn.types.batch import Rollout

__all__ = ["AdvantageFn", "CriticAdvantageFn", "WeightFn"]


class AdvantageFn(Protocol):
    """Turns the rewards of a rollout into advantages."""

    def __call__(self, reward: Tensor, rollout: Rollout, /, *args: Any, **options: Any) -> Tensor:
        """Advantages [B, 1] or [B, S], per response or token.

        `reward` is [N, G] with N G = B. ReMax also takes `greedy_reward` [N], the rewards of the prompts'
        greedy responses. ValueError if the rewards do not fit the rollout.
        """
        ...


class CriticAdvantageFn(Protocol):
    """Turns rewards and values of tokens into advantages and returns."""

    def __call__(
        self, token_reward: Tensor, value: Tensor, mask: Tensor, /, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """(adv, ret) for actor and critic, all [B, S].

        Both are 0 outside mask.
        """
        ...


class WeightFn(Protocol):
    """Turns the mask of a batch into weights."""

    def __call__(self, mask: Tensor, /) -> Tensor:
        """Weights w [B, S] of tokens in the total loss.

        `mask` is [B, S] bool; the weights are 0 outside it.
        """
        ...
