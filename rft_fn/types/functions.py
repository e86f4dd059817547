"""The signatures of a model as a function, and of what an algorithm is made of.

Rows of the table of algorithms differ in the options that their functions take, so the signatures leave
options open.
"""

from typing import Any, Protocol

from torch import Tensor

from rft_fn.types.batch import Packed, Rollout, TokenOut

__all__ = ["AdvantageFn", "Apply", "CriticAdvantageFn", "LossFn", "WeightFn"]


class Apply(Protocol):
    """A model as a function."""

    def __call__(self, params: Any, pack: Packed, /) -> TokenOut:
        """Return the log-prob [T] of each target of a pack, and what else the model was bound with.

        Under FSDP2 and ZeRO only with the parameters of its own module; ValueError for others.
        """
        ...


class LossFn(Protocol):
    """A loss, one number per token."""

    def __call__(self, out: TokenOut, pack: Packed, /) -> Any:
        """Return loss [T], or (loss [T], {name: Metric}).

        It must not reduce: the average is in `pack.w`, and the total is (pack.w * loss).sum().
        """
        ...


class AdvantageFn(Protocol):
    """Turns the rewards of a rollout into advantages."""

    def __call__(self, reward: Tensor, rollout: Rollout, /, *args: Any, **options: Any) -> Tensor:
        """Return advantages [B, 1] or [B, S], per response or token.

        `reward` is [N, G] with N G = B. ReMax also takes `greedy_reward` [N], the rewards of the prompts'
        greedy responses. ValueError if the rewards do not fit the rollout.
        """
        ...


class CriticAdvantageFn(Protocol):
    """Turns rewards and values of tokens into advantages and returns."""

    def __call__(
        self, token_reward: Tensor, value: Tensor, mask: Tensor, /, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (adv, ret) for actor and critic, [B, S], 0 outside mask."""
        ...


class WeightFn(Protocol):
    """Turns the mask of a batch into weights."""

    def __call__(self, mask: Tensor, /) -> Tensor:
        """Return the weights w [B, S] of tokens in the total loss, 0 outside mask [B, S] bool."""
        ...
