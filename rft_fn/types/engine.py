"""The engine, which samples from the policy: the record, and the signatures of its functions."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.types.batch import Rollout
from rft_fn.types.distribution import Sampling

__all__ = [
    "Delivered", "Drafts", "Engine", "EngineStatus", "Generate", "Load", "OnRow", "Score", "described",
    "record", "record_of_functions",
]  # fmt: skip

T = TypeVar("T")


class Delivered(NamedTuple):
    """The weights that an engine took in one load."""

    tensors: int
    bytes: int  # as they were sent, whatever type the engine keeps them in
    seconds: float
    version: int  # rollouts carry it from now on


class Drafts(NamedTuple):
    """What speculative decoding has drafted since an engine was built."""

    steps: int = 0  # of a row with drafts
    tokens: int = 0  # that were drafted
    accepted: int = 0  # of them


class EngineStatus(TypedDict):
    """The state of an engine."""

    engine: str  # its type
    alive: bool  # False once it is closed, or `generate` or `load` has failed
    version: int  # of its weights
    asleep: bool
    supported: frozenset[str]  # of "load", "score", "sleep", "start" and "rows" what does something
    dtype: NotRequired[torch.dtype]  # of its weights, where it is one: they are sent in it
    computes: NotRequired[torch.dtype]  # the type that it computes in, where it tells
    window: NotRequired[int | None]  # tokens of a prompt and its response; None without a limit
    placeholders: NotRequired[frozenset[int]]  # of media: no prompt may have one without its media
    drafts: NotRequired[Drafts]  # where it drafts and counts
    tied: NotRequired[bool]  # whether a tied weight must be sent under all of its names
    adapters: NotRequired[bool]  # whether it takes the matrices of trained adapters in place of whole weights
    base: NotRequired[str]  # low precision of the base below them: int8; it takes nothing else then


OnRow = Callable[[int, Sequence[int], bool], None]
"""Hears of row b that has ended: (b, the tokens that were sampled, whether an end token or text ended it)."""


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
        temperature: Sequence[float] | None = None,
        on_row: OnRow | None = None,
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

        `max_new`, `start` and `temperature` hold one number for each row. `max_new[b]` is the limit of row b,
        at most `sampling.max_new`. `start[b]` is the number of draws of its stream that are spent: one per
        token. So sample j of a prompt, cut anywhere, equals the uncut one when it is continued with its
        tokens after the prompt, the key (key, j), and `start` the number of its tokens. The last `start[b]`
        tokens of a prompt count as the response so far: a text of `sampling.stop` may begin in them.

        `temperature[b]` >= 0 is that of row b, in place of `sampling.temperature`. The rollout has them, and
        log-probs in training are of each row's distribution.

        `on_row` is told of each row as it ends, while others are sampled, in any order, from any thread, and
        again where an engine that died is built again. It must not raise. Only an engine with "rows" in
        `supported` takes it.

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
        attribute `weights.frozen` names weights that are not sent because they never change. Where there is a
        method `weights.lend`, an engine that calls it gets the names of tensors that come as the trainer's
        own, in place of copies, and change with the next update. Where an attribute `weights.adapters` is
        true, and only for an engine with `adapters` in its status, they are the matrices of adapters alone
        (`model.lora_alone`), which replace those of the last load; the base model is the one that the engine
        began with. ValueError for a name or a shape that the
        model does not have, and for a weight that is neither sent nor frozen.
        """
        ...


class MoveWeights(Protocol):
    """Moves the weights of an engine between the device and the host."""

    def __call__(self) -> None:
        """Move the weights: `sleep` to the host, `wake` back to the device.

        They do nothing where "sleep" is not in `status()["supported"]`.
        """
        ...


class Status(Protocol):
    """Tells the state of an engine."""

    def __call__(self) -> EngineStatus:
        """Return the state of the engine, a dict; also of one that is no longer alive."""
        ...


class CloseEngine(Protocol):
    """Ends an engine."""

    def __call__(self) -> None:
        """End the engine and free what it holds. Twice is once."""
        ...


def _signatures(kind: Any) -> dict[str, Callable[..., Any]]:
    """Return the signatures of a record's functions by their fields, as methods with a docstring."""
    calls = {name: vars(x).get("__call__") for name, x in kind.__annotations__.items() if isinstance(x, type)}
    return {name: call for name, call in calls.items() if inspect.isfunction(call)}


def record_of_functions(kind: type[T]) -> type[T]:
    """Make `help` of a NamedTuple of functions show its fields, and of a field its signature's docstring."""
    for name, call in _signatures(kind).items():
        getattr(kind, name).__doc__ = call.__doc__
    return tree.documented(kind)


def _nothing_to_close() -> None:
    """Close an engine that holds nothing."""


@record_of_functions
class Engine(NamedTuple):
    """Samples from the policy, with the weights that it was last given.

    After an exception out of `generate` or `load` an engine is dead: every later call but `status` and
    `close` raises, until another one is built. A request that is refused before anything ran (too long a
    prompt, say) leaves it alive.
    """

    generate: Generate
    score: Score
    load: Load
    sleep: MoveWeights  # to the host
    wake: MoveWeights  # and back
    status: Status
    close: CloseEngine = _nothing_to_close


def described(functions: T) -> T:
    """Give the functions of a record the docstrings and arguments of their signatures, for `help`."""
    for name, call in _signatures(type(functions)).items():
        value: Any = getattr(functions, name)
        full = inspect.signature(call)
        if inspect.ismethod(value):
            value.__func__.__doc__, value.__func__.__signature__ = call.__doc__, full
        elif inspect.isfunction(value):
            _, *arguments = full.parameters.values()
            value.__doc__, value.__signature__ = call.__doc__, full.replace(parameters=arguments)
    return functions


def record(kind: Callable[..., T], source: object) -> T:
    """Fill a NamedTuple with the attributes of an object that have its fields' names, `described`.

    A field that the object lacks has its default; TypeError names one that has none.
    """
    fields: Any = kind
    return described(
        kind(**{name: getattr(source, name) for name in fields._fields if hasattr(source, name)})
    )
