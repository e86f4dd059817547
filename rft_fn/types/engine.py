"""What samples from the policy: the record, and the signatures of its functions."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rft_fn.types.batch import Rollout
from rft_fn.types.sampling import Sampling

__all__ = ["Engine", "Generate", "Load", "Score"]


class Generate(Protocol):
    """Samples responses."""

    def __call__(
        self, prompts: Sequence[Any], keys: Sequence[int], *, n: int = 1, sampling: Sampling
    ) -> Rollout:
        """n responses to each prompt: B = len(prompts) n rows, those of a prompt side by side.

        `prompts` are lists of token ids, or objects with `.ids`. There is one key a prompt; sample j draws
        from fold_in(key, j), so that samples do not depend on how prompts are batched or shared out.
        ValueError for a prompt that is empty or too long for the model.
        """
        ...


class Score(Protocol):
    """Computes the log-probs of given tokens."""

    def __call__(self, rollout: Rollout, *, sampling: Sampling) -> Tensor:
        """[B, S] float32: log-probs of the rollout's tokens under the engine's weights, 0 outside mask."""
        ...


class Load(Protocol):
    """Gives an engine new weights."""

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take full tensors by the plain model's names; rollouts carry `version` from now on.

        On several ranks `weights` (`Strategy.export`) puts tensors together, so every rank has to call it.
        ValueError for a name or a shape that the model does not have.
        """
        ...


class Move(Protocol):
    """Moves an engine's weights between the device and the host."""

    def __call__(self) -> None: ...


class Status(Protocol):
    """Tells what an engine is and does."""

    def __call__(self) -> dict[str, Any]:
        """{"engine": its type, "version": of its weights, "asleep": bool}."""
        ...


class Engine(NamedTuple):
    """What samples from the policy, with the weights that it was last given."""

    generate: Generate
    score: Score
    load: Load
    sleep: Move
    wake: Move
    status: Status
