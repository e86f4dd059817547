"""The requests and answers of this library's own form, as docs/remote_rewards.md shows them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from rft_fn.data.media import KINDS
from rft_fn.reward.convention import GIVEN, Columns, Scored, TrainerState
from rft_fn.reward.remote import values

__all__ = [
    "LISTS", "Batch", "ReadAnswer", "answer", "batch_of", "logs_of", "read_answer", "read_request", "request",
]  # fmt: skip

L = TypeVar("L")

LISTS = ("completion_ids", "prompt_ids", "prompt_texts", "truncated", "groups", "keys")
"""The lists beside prompts and completions, with an entry for each completion; `media` is one more."""


class Batch(NamedTuple):
    """B completions to be scored."""

    prompts: Sequence[Any]  # texts, or lists of messages
    completions: Sequence[Any]
    columns: Columns
    given: Mapping[str, Sequence[Any]] = {}
    state: TrainerState | None = None

    def rows(self, part: slice) -> "Batch":
        """Those completions alone."""
        columns = {name: x[part] for name, x in self.columns.items()}
        given = {name: x[part] for name, x in self.given.items()}
        return Batch(self.prompts[part], self.completions[part], columns, given, self.state)


class ReadAnswer(Protocol):
    """Reads the answer of a server."""

    def __call__(self, data: bytes, count: int, /) -> dict[str, Any]:
        """{"rewards": numbers or None, "extra_logs": further lists by name}, `count` entries each.

        ValueError for anything but that many finite numbers.
        """
        ...


def batch_of(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    given: Mapping[str, Any],
    only: Sequence[str] | None = None,
) -> Batch:
    """The batch of a reward's arguments, its values as JSON can hold them.

    `only` names the columns to keep; None keeps all but those of media that are given as `media`. TypeError
    for a column that JSON cannot hold.
    """
    left_out = {*GIVEN, *LISTS, "media"}
    if any(given.get("media") or ()):
        left_out |= {*KINDS, *(f"{kind}s" for kind in KINDS)}
    columns: dict[str, list[Any]] = {}
    for name, column in given.items():
        if name in left_out or (only is not None and name not in only):
            continue
        try:
            columns[name] = [values.plain(x) for x in column]
        except TypeError as error:
            raise TypeError(
                f"column {name!r}: {error}; name the columns to send: (columns=['answer'])"
            ) from None
    lists = {name: given[name] for name in (*LISTS, "media") if given.get(name) is not None}
    return Batch(prompts, completions, columns, lists, given.get("trainer_state"))


def request(batch: Batch) -> bytes:
    """The body of a request."""
    body: dict[str, Any] = {
        "prompts": [values.plain(x) for x in batch.prompts],
        "completions": [values.plain(x) for x in batch.completions],
        "columns": batch.columns,
    }
    for name in LISTS:
        if name in batch.given:
            body[name] = [values.plain(x) for x in batch.given[name]]
    if any(batch.given.get("media") or ()):
        body["files"], body["media"] = values.media_out(batch.given["media"])
    if batch.state is not None:
        state = dataclasses.asdict(batch.state)
        state.pop("log_history")  # grows with the run
        body["state"] = state
    return values.dump(body)


def read_request(data: bytes) -> Batch:
    """The batch of a request. ValueError, in one line, for anything else."""
    body = values.load(data)
    if not isinstance(body, dict):
        raise ValueError(f"request: expected an object, got {type(body).__name__}")
    for name in ("prompts", "completions"):
        if not isinstance(body.get(name), list):
            raise ValueError(f"{name}: expected a list, got {type(body.get(name)).__name__}")
    count = len(body["completions"])
    if not count:
        raise ValueError("completions: expected at least one, got none")
    for name in ("prompts", "completions"):
        for i, x in enumerate(values.entries(name, body[name], count)):
            _check_text(name, x, i)

    # every list has an entry for each completion
    columns = body.get("columns") or {}
    if not isinstance(columns, dict):
        raise ValueError(f"columns: expected an object, got {type(columns).__name__}")
    for name, column in columns.items():
        values.entries(f"columns.{name}", column, count)
        if name in GIVEN:
            raise ValueError(f"columns.{name}: expected another name, the reward's own argument has this one")
    given: dict[str, Any] = {}
    for name in LISTS:
        if body.get(name) is not None:
            given[name] = values.entries(name, body[name], count)
    if body.get("media") is not None:
        given["media"] = values.media_in(body.get("files"), body["media"], count)
    return Batch(body["prompts"], body["completions"], columns, given, _state(body.get("state")))


def _check_text(name: str, x: Any, i: int) -> None:
    """ValueError unless x is a text or a list of messages."""
    if isinstance(x, str):
        return
    if isinstance(x, list) and all(isinstance(turn, dict) and "role" in turn for turn in x):
        return
    raise ValueError(f"{name}: expected texts, or lists of messages with a role, got {x!r:.40} at {i}")


def _state(x: Any) -> TrainerState | None:
    """The progress of a run; what is unknown of it is left out."""
    if x is None:
        return None
    if not isinstance(x, dict):
        raise ValueError(f"state: expected an object, got {type(x).__name__}")
    known = {field.name for field in dataclasses.fields(TrainerState)} - {"log_history"}
    given = {name: value for name, value in x.items() if name in known}
    for name, value in given.items():
        if not isinstance(value, (bool, int, float)):
            raise ValueError(f"state.{name}: expected a number, got {value!r:.40}")
    return TrainerState(**given)


def answer(scored: Scored) -> bytes:
    """The body of an answer, without the parts where the only one is the reward."""
    body: dict[str, Any] = {"rewards": numbers_of(scored.total)}
    parts = {name: numbers_of(x) for name, x in scored.parts.items()}
    if list(parts.values()) != [body["rewards"]]:
        body["parts"] = parts
    if scored.metrics:
        body["metrics"] = {name: numbers_of(x) for name, x in logs_of(scored, scored.metrics).items()}
    if scored.extra:
        body["extra"] = {name: values.plain(x) for name, x in logs_of(scored, scored.extra).items()}
    return values.dump(body)


def logs_of(scored: Scored, logs: Mapping[str, L]) -> dict[str, L]:
    """What the parts have logged, without the name of the part where it is the only one.

    The client puts the name of its reward in front of everything.
    """
    if len(scored.parts) != 1:
        return dict(logs)
    prefix = f"{next(iter(scored.parts))}/"
    return {name.removeprefix(prefix): x for name, x in logs.items()}


def numbers_of(x: Tensor) -> list[float | None]:
    """Numbers as JSON holds them: None for NaN."""
    return values.plain(x.tolist())


def read_answer(data: bytes, count: int) -> dict[str, Any]:
    """The rewards, parts, metrics and texts of an answer; see `ReadAnswer`."""
    body = values.load(data)
    if not isinstance(body, dict) or "rewards" not in body:
        raise ValueError(f"expected an object with 'rewards', got {values.dump(body)[:40].decode()!r}")
    logs: dict[str, list[Any]] = {}
    for kind in ("parts", "metrics", "extra"):
        lists = body.get(kind) or {}
        if not isinstance(lists, dict):
            raise ValueError(f"{kind}: expected an object of lists, got {type(lists).__name__}")
        for name, column in lists.items():
            check = values.finite
            if kind == "extra":
                check = values.entries
            logs[name] = check(f"{kind}.{name}", column, count)
    return {"rewards": values.finite("rewards", body["rewards"], count), "extra_logs": logs}
