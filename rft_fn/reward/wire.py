"""The wire format of reward servers: our requests and answers, as bytes of JSON.

docs/rewards.md shows them. The readers are functions on `border`, not models of pydantic, which were tried:
74 lines in place of 85, but a column could hold NaN, errors said where and not what was expected, and
a server took 0.4 s longer to start.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rft_fn import border
from rft_fn.data.medium import KINDS
from rft_fn.reward.signature import GIVEN, Columns, Scored, TrainerState
from rft_fn.reward.wire_values import dump, media_in, media_out, plain

__all__ = [
    "LISTS",
    "Batch",
    "ReadAnswer",
    "answer",
    "batch_of",
    "logs_of",
    "read_answer",
    "read_request",
    "request",
]


L = TypeVar("L")

LISTS = ("completion_ids", "prompt_ids", "prompt_texts", "truncated", "groups", "keys")
"""The further lists of a request, with an entry for each completion; `media` is one more."""


def _list(name: str, values: Any, count: int) -> list[Any]:
    """Return one of the further lists. ValueError for entries of another type."""
    if name in ("groups", "keys"):
        return border.integers(name, values, count=count)
    for i, x in enumerate(border.entries(name, values, count)):
        where = f"{name}[{i}]"
        if name in ("completion_ids", "prompt_ids"):
            border.integers(where, x, low=0)
        elif name == "prompt_texts":
            border.text(where, x)
        elif not isinstance(x, bool):
            raise ValueError(f"{where}: expected true or false, got {x!r:.40}")
    return values


class Batch(NamedTuple):
    """B completions to be scored."""

    prompts: Sequence[Any]  # texts, or lists of messages
    completions: Sequence[Any]
    columns: Columns
    given: Mapping[str, Sequence[Any]] = {}
    state: TrainerState | None = None

    def rows(self, part: slice) -> "Batch":
        """Return some of the completions."""
        columns = {name: x[part] for name, x in self.columns.items()}
        given = {name: x[part] for name, x in self.given.items()}
        return Batch(self.prompts[part], self.completions[part], columns, given, self.state)


ReadAnswer = Callable[[bytes, int], dict[str, Any]]
"""Reads the answer of a server for `count` completions.

Returns {"rewards": numbers or None, "extra_logs": further lists by name}, `count` entries each. ValueError
for anything but that many finite numbers.
"""


def batch_of(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    given: Mapping[str, Any],
    only: Sequence[str] | None = None,
) -> Batch:
    """Return the batch of a reward's arguments, its values as JSON can hold them.

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
            columns[name] = [plain(x) for x in column]
        except TypeError as error:
            raise TypeError(
                f"column {name!r}: {error}; name the columns to send: (columns=['answer'])"
            ) from None
    lists = {name: given[name] for name in (*LISTS, "media") if given.get(name) is not None}
    return Batch(prompts, completions, columns, lists, given.get("trainer_state"))


def request(batch: Batch) -> bytes:
    """Return the body of a request."""
    body: dict[str, Any] = {
        "prompts": [plain(x) for x in batch.prompts],
        "completions": [plain(x) for x in batch.completions],
        "columns": batch.columns,
    }
    for name in LISTS:
        if name in batch.given:
            body[name] = [plain(x) for x in batch.given[name]]
    if any(batch.given.get("media") or ()):
        body["files"], body["media"] = media_out(batch.given["media"])
    if batch.state is not None:
        state = dataclasses.asdict(batch.state)
        state.pop("log_history")  # grows with the run
        body["state"] = state
    return dump(body)


def read_request(data: bytes) -> Batch:
    """Read the batch of a request. ValueError, in one line, for anything else."""
    body = border.object_of("request", border.read_json(data))
    for name in ("prompts", "completions"):
        border.entries(name, body.get(name), None)
    count = len(body["completions"])
    if not count:
        raise ValueError("completions: expected at least one, got none")
    for name in ("prompts", "completions"):
        for i, x in enumerate(border.entries(name, body[name], count)):
            _check_text(name, x, i)

    # every list has an entry for each completion
    columns = border.object_of("columns", body.get("columns") or {})
    for name, column in columns.items():
        border.entries(f"columns.{name}", column, count)
        if name in GIVEN:
            raise ValueError(f"columns.{name}: expected another name, the reward's own argument has this one")
    given: dict[str, Any] = {}
    for name in LISTS:
        if body.get(name) is not None:
            given[name] = _list(name, body[name], count)
    if body.get("media") is not None:
        given["media"] = media_in(body.get("files"), body["media"], count)
    return Batch(body["prompts"], body["completions"], columns, given, _state(body.get("state")))


def _check_text(name: str, x: Any, i: int) -> None:
    """Raise ValueError unless x is a text or a list of messages."""
    if isinstance(x, str):
        return
    if isinstance(x, list) and all(isinstance(turn, dict) and "role" in turn for turn in x):
        return
    raise ValueError(f"{name}: expected texts, or lists of messages with a role, got {x!r:.40} at {i}")


def _state(x: Any) -> TrainerState | None:
    """Read the progress of a run; unknown entries are left out."""
    if x is None:
        return None
    border.object_of("state", x)
    known = {field.name for field in dataclasses.fields(TrainerState)} - {"log_history"}
    given = {name: value for name, value in x.items() if name in known}
    for name, value in given.items():
        if not isinstance(value, bool):
            border.number(f"state.{name}", value)
    return TrainerState(**given)


def answer(scored: Scored) -> bytes:
    """Return the body of an answer, without the parts where the only one is the reward."""
    body: dict[str, Any] = {"rewards": plain(scored.total)}
    parts = {name: plain(x) for name, x in scored.parts.items()}
    if list(parts.values()) != [body["rewards"]]:
        body["parts"] = parts
    if scored.metrics:
        body["metrics"] = {name: plain(x) for name, x in logs_of(scored, scored.metrics).items()}
    if scored.extra:
        body["extra"] = {name: plain(x) for name, x in logs_of(scored, scored.extra).items()}
    return dump(body)


def logs_of(scored: Scored, logs: Mapping[str, L]) -> dict[str, L]:
    """Return what the parts have logged, without the name of the part where it is the only one."""
    if len(scored.parts) != 1:
        return dict(logs)
    prefix = f"{next(iter(scored.parts))}/"
    return {name.removeprefix(prefix): x for name, x in logs.items()}


def read_answer(data: bytes, count: int) -> dict[str, Any]:
    """Read the rewards, parts, metrics and texts of an answer; see `ReadAnswer`."""
    body = border.read_json(data)
    if not isinstance(body, dict) or "rewards" not in body:
        raise ValueError(f"expected an object with 'rewards', got {dump(body)[:40].decode()!r}")
    logs: dict[str, list[Any]] = {}
    for kind in ("parts", "metrics", "extra"):
        for name, column in border.object_of(kind, body.get(kind) or {}).items():
            where = f"{kind}.{name}"
            if kind == "extra":
                logs[name] = border.entries(where, column, count)
            else:
                logs[name] = border.numbers_or_none(where, column, count=count)
    return {"rewards": border.numbers_or_none("rewards", body["rewards"], count=count), "extra_logs": logs}
