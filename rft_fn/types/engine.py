"""The engine, which samples from the policy: the record, and the signatures of its functions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from rft_fn.types.batch import Rollout, Sampling

__all__ = ["Delivered", "Engine", "EngineStatus", "Generate", "Load", "Score", "record"]

T = TypeVar("T")


class Delivered(NamedTuple):
    """The weights that an engine took in one load."""

    tensors: int
    bytes: int  # as they were sent, whatever type the engine keeps them in
    seconds: float
    version: int  # rollouts carry it from now on


class EngineStatus(TypedDict):
    """The state of an engine."""

    engine: str  # its type
    alive: bool  # False once it is closed, or `generate` or `load` has failed
    version: int  # of its weights
    asleep: bool
    supported: frozenset[str]  # of "load", "score", "sleep" and "start" what does something
    dtype: NotRequired[torch.dtype]  # of its weights, where it is one: they are sent in it
    window: NotRequired[int | None]  # tokens of a prompt and its response; None without a limit
    placeholders: NotRequired[frozenset[int]]  # of media: no prompt may have one without its media
    tied: NotRequired[bool]  # whether a tied weight must be sent under all of its names


class Generate(Protocol):
    """Samples responses."""

    def __call__(
        self,
        prompts: Sequence[Any],
        keys: Sequence[Any],
        *,
        n: int = 1,
        sampling: Sampling,
        max_new: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample n responses to each prompt: B = len(prompts) n rows, prompt by prompt.

        `prompts` are lists of token ids, objects with `.ids`, or texts where the engine has a tokenizer. A
        text is a question, encoded as `data` encodes one. No prompts give a rollout without rows: B = S = 0.
        An object may have `.media`, the processor's tensors of what it shows, with placeholders expanded
        among its ids, and `.sampled`, which of its tokens the policy has sampled: these are text whatever
        they say. The rollout has the media once a prompt. A sampled placeholder ends a response.

        There is one key per prompt, an int; sample j draws from the stream fold_in(key, j), so that samples
        do not depend on how prompts are batched or shared out. A pair (key, j) in place of a key numbers the
        samples of that prompt from j on.

        `max_new` and `start` hold one number for each row. `max_new[b]` is the limit of row b, at most
        `sampling.max_new`. `start[b]` is the number of draws of its stream that are spent: one per token.
        So sample j of a prompt, cut anywhere, equals the uncut one when it is continued with its tokens
        after the prompt, the key (key, j), and `start` the number of its tokens. The last `start[b]` tokens
        of a prompt count as the response so far: a text of `sampling.stop` may begin in them.

        BadRequest, before anything ran, names the prompt or the row that is refused: text without a
        tokenizer, no tokens, more than fit into the model with the row's limit, media without placeholders or
        placeholders without media, media that the model does not take, another count, a number out of range.
        An engine that cannot do `start` refuses it, and does not have it in `supported`.
        """
        ...


class Score(Protocol):
    """Computes the log-probs of given tokens."""

    def __call__(self, rollout: Rollout, *, sampling: Sampling | None = None) -> Tensor:
        """Return log-probs [B, S] float32 of the rollout's tokens, 0 outside mask.

        They are under the engine's weights, of the distribution that `sampling` draws from, by default the
        model's softmax.
        """
        ...


class Load(Protocol):
    """Gives an engine new weights."""

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Delivered:
        """Take full tensors by the plain model's names; rollouts carry `version` from now on.

        On several ranks `weights` (`Strategy.export`) puts tensors together, so every rank must call it. An
        attribute `weights.frozen` names weights that are not sent because they never change. ValueError for a
        name or a shape that the model does not have, and for a weight that is neither sent nor frozen.
        """
        ...


def _nothing_to_close() -> None:
    """Close an engine that holds nothing."""


class Engine(NamedTuple):
    """Samples from the policy, with the weights that it was last given.

    After an exception out of `generate` or `load` an engine is dead: every later call but `status` and
    `close` raises, until another one is built. A request that is refused before anything ran (too long a
    prompt, say) leaves it alive.
    """

    generate: Generate
    score: Score
    load: Load
    sleep: Callable[[], None]  # moves the weights to the host
    wake: Callable[[], None]  # and back
    status: Callable[[], EngineStatus]  # also of an engine that is no longer alive
    close: Callable[[], None] = _nothing_to_close  # ends the engine and frees what it holds


def record(kind: Callable[..., T], source: object) -> T:
    """Fill a NamedTuple with the attributes of an object that have its fields' names.

    A field that the object lacks has its default; TypeError names one that has none.
    """
    fields: Any = kind
    return kind(**{name: getattr(source, name) for name in fields._fields if hasattr(source, name)})
