"""The signatures of rewards: `RewardFn`, which users write, `Score`, which `judge` calls.

The convention of reward functions is TRL's (`GRPOTrainer` of trl 1.9): keyword arguments, lists with one
value per completion, and the form of the data. A prompt that is a list of messages has completions that are
lists of messages. `reward.results` reads the values that they return.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from rft_fn.types import Rollout

__all__ = [
    "GIVEN",
    "Columns",
    "JointReward",
    "Judged",
    "Messages",
    "RewardFn",
    "Score",
    "Scored",
    "TrainerState",
    "as_messages",
    "stateless",
    "text",
    "trainer_state",
]


Messages = Sequence[Mapping[str, Any]]
"""The turns of a conversation, each with a "role" and a "content"."""

Columns = Mapping[str, Sequence[Any]]
"""The columns of the data: name -> one value per completion."""

GIVEN = (
    "prompts",  # texts, or lists of messages
    "completions",  # the same form; the response only
    "completion_ids",  # the tokens of each response
    "prompt_texts",  # the prompts as the model read them, special tokens included
    "prompt_ids",  # the tokens of each prompt
    "truncated",  # whether each response was cut at max_new, before an end token
    "groups",  # an int for each response: which prompt of the batch it answers, also where texts are equal
    "keys",  # an int for each response: what a judge draws by; the same on any number of processes
    "media",  # the media of each prompt, as `media_records` makes them; for a function that names it
    "trainer_state",
    "log_metric",  # log_metric(name, value): a number for the batch
    "log_extra",  # log_extra(column, values): one value per completion, for trajectories.jsonl
)
"""The arguments that a reward function may name; all other names are columns of the data."""


class RewardFn(Protocol):
    """Scores completions; users write it: a plain or async function, a model, a judge or a service."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Return one value for each of the B completions of a batch.

        It is called once per batch, with keywords only: the arguments of `GIVEN` and the columns of the data
        that it names, or all of them if it takes **kwargs. Every list has B values, grouped by prompt. A rank
        scores only its share of the prompts, and the values are then shared.

        Returns a list, an array or a tensor [B] of finite numbers, with None where the reward does not apply;
        `read_result` has the other forms. Awaitables of all rewards are awaited together. Whatever it raises
        stops the run, with a note that names it.

        An attribute `columns` names the columns that it cannot do without; without one they are its
        parameters that have no default. `as_reward` has the other attributes, and reads them all once.
        """
        ...


class JointReward(Protocol):
    """A reward that all ranks compute together, such as that of a sharded model."""

    @property
    def together(self) -> bool:
        """Return True."""
        ...

    def __call__(self, rollout: Rollout, prompts: Sequence[Any], tokenizer: Any, /) -> Tensor:
        """Return the values [B] of a rollout, the same on every rank; NaN where the reward does not apply.

        All ranks call it alike, in the main thread, with the whole rollout, its prompts and its tokenizer:
        row b answers `prompts[rollout.group[b]]`. A function `prepare` with the same arguments, if there is
        one, is called first, and its errors on one rank are raised on all.
        """
        ...


class Scored(NamedTuple):
    """The rewards of B completions."""

    total: Tensor  # [B] float32: the weighted sum of the parts
    parts: dict[str, Tensor]  # name -> [B] float32, before its weight; NaN where a part does not apply
    # PART/NAME -> [B] float32: further numbers, NaN where there is none; PART/NAME -> B: values to be read
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  never written to
    extra: dict[str, list[Any]] = {}  # noqa: RUF012


class Judged(NamedTuple):
    """A scored rollout."""

    reward: Tensor  # [N, G]
    parts: dict[str, Tensor]  # name -> [N, G], before its weight; NaN where a part does not apply
    texts: list[str]  # B responses
    # PART/NAME -> [N, G]: further numbers, NaN where there is none; PART/NAME -> B: values to be read
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  never written to
    extra: dict[str, list[Any]] = {}  # noqa: RUF012


class Score(Protocol):
    """Scores a batch; `weighted` makes one of reward functions."""

    def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        columns: Columns,
        /,
        *args: Any,
        **given: Any,
    ) -> Scored:
        """Return the rewards of B completions; every list has B values.

        `judge` calls it once for a rollout, on each rank for its share of the prompts. It may name further
        arguments of `GIVEN`, by keyword, but for the logs. ValueError for values that are no finite numbers,
        and for lists of other lengths.
        """
        ...


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run: the fields of transformers' TrainerState that reward functions read."""

    global_step: int = 0  # steps done
    max_steps: int = 1  # steps of the whole run
    epoch: float = 0.0  # passes over the data
    num_train_epochs: int = 1
    log_history: tuple[Mapping[str, float], ...] = ()
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


def trainer_state(step: int, total: int, *, prompts: int = 1, size: int | None = None) -> TrainerState:
    """Return the state after `step` of `total` steps.

    `prompts` are drawn per step from a data set of `size` rows. Without a size, as of a generator, the whole
    run is the first pass.
    """
    if size is None:
        return TrainerState(step, total, epoch=step / max(total, 1))
    epochs = -(-total * prompts // size)  # rounded up
    return TrainerState(step, total, epoch=step * prompts / size, num_train_epochs=epochs)


def text(x: str | Messages) -> str:
    """Return the text of a prompt or a completion; of messages, one line each."""
    return x if isinstance(x, str) else "\n".join(_content(message) for message in x)


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of one message, all parts together."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())


def as_messages(x: str | Messages, role: str) -> list[Any]:
    """Return a prompt or a completion as messages; a text is one message."""
    return [{"role": role, "content": x}] if isinstance(x, str) else list(x)


Fn = TypeVar("Fn", bound=Callable[..., Any])


def stateless(fn: Fn) -> Fn:
    """Declare that a reward does not read `trainer_state`, though it takes any keyword, as a decorator."""
    fn.__dict__["stateless"] = True
    return fn
