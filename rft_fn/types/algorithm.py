"""The signatures of the functions that an algorithm is made of.

A loss is a `LossFn`. Rows of the table of algorithms differ in the options that their functions take, so the
signatures leave options open.
"""

from typing import Any, Protocol

from torch import Tensor

from rft_fn.types.batch import Rollout

__all__ = ["AdvantageFn", "CriticAdvantageFn", "WeightFn"]


class AdvantageFn(Protocol):
    """Turns the rewards of a rollout into advantages."""

    def __call__(self, reward: Tensor, rollout: Rollout, /, *args: Any, **options: Any) -> Tensor:
        """Advantages [B, 1], one per response, or [B, S], one per token, from rewards [N, G] with N G = B.

        ReMax also takes `greedy_reward` [N], the rewards of the prompts' greedy responses. ValueError if the
        rewards do not fit the rollout.
        """
        ...


class CriticAdvantageFn(Protocol):
    """Turns rewards and values of tokens into advantages and returns."""

    def __call__(
        self, token_reward: Tensor, value: Tensor, mask: Tensor, /, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """(adv, ret), all [B, S]: what the actor and the critic learn from, 0 outside mask."""
        ...


class WeightFn(Protocol):
    """Turns the mask of a batch into the weights of its tokens."""

    def __call__(self, mask: Tensor, /) -> Tensor:
        """The weight of each token in the total loss, from mask [B, S] bool to w [B, S], 0 outside mask."""
        ...
