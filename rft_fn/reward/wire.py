"""The wire format of reward servers: requests and answers, ours and OpenRLHF's, as bytes of JSON.

docs/rewards.md shows both.
"""

import base64
import binascii
import dataclasses
import datetime
import decimal
import io
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from rft_fn import border, check
from rft_fn.data.medium import KINDS
from rft_fn.data.row_paths import column_at
from rft_fn.reward.foreign import whole_texts
from rft_fn.reward.signature import GIVEN, Columns, Scored, TrainerState, text

__all__ = [
    "LISTS", "Batch", "ReadAnswer", "answer", "batch_of", "dump", "logs_of", "media_in", "media_out",
    "openrlhf_answer", "openrlhf_request", "plain", "read_answer", "read_openrlhf_answer",
    "read_openrlhf_request", "read_request", "request",
]  # fmt: skip


# ---------- values as JSON


_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, Path)


def dump(x: Any) -> bytes:
    """Return JSON of plain values, with U+FFFD in place of halves of surrogate pairs."""
    text = json.dumps(x, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return check.writable(text).encode()


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it. TypeError for one of a type that it cannot.

    Arrays become lists, bytes {"base64"}, images of PIL {"mime", "base64"}, dates and decimals text. JSON has
    no numbers that are not finite: they become null.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": _encoded(bytes(value))}
    if isinstance(value, _AS_TEXT):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and tensors
        return plain(value.tolist())
    if hasattr(value, "convert") and hasattr(value, "save"):  # an image of PIL, without loss
        file = io.BytesIO()
        value.save(file, "PNG")
        return {"mime": "image/png", "base64": _encoded(file.getvalue())}
    raise TypeError(f"expected a value that JSON can hold, got {type(value).__name__}")


# ---------- media


def media_out(media: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, str]], list[list[int]]]:
    """Return (the files, each once; the numbers of each completion's files, in order).

    The completions of a prompt share its media, which are so sent once. `media` holds the records of each
    completion, as `media_records` makes them; a file is {"kind", "mime", "base64" or "url"}.
    """
    files: list[dict[str, str]] = []
    known: dict[tuple[str, Any], int] = {}
    of: list[list[int]] = []
    for records in media:
        places: list[int] = []
        for record in records:
            key = (record["kind"], record.get("url", record.get("bytes")))
            if key not in known:
                known[key] = len(files)
                file = {name: record[name] for name in ("kind", "mime", "url") if name in record}
                if "bytes" in record:
                    file["base64"] = _encoded(record["bytes"])
                files.append(file)
            places.append(known[key])
        of.append(places)
    return files, of


def media_in(files: Any, of: Any, count: int) -> list[list[dict[str, Any]]]:
    """Return the records of `count` completions; see `media_out`. ValueError for anything else."""
    read = [_record(file, i) for i, file in enumerate(border.entries("files", files, None))]
    records: list[list[dict[str, Any]]] = []
    for i, places in enumerate(border.entries("media", of, count)):
        numbers = border.integers(f"media[{i}]: numbers of files", places, low=0, high=len(read) - 1)
        records.append([read[at] for at in numbers])
    return records


def _record(file: Any, i: int) -> dict[str, Any]:
    """Return the record of a file. ValueError for another thing."""
    if not isinstance(file, dict) or not {"kind", "mime"} <= set(file) or not {"url", "base64"} & set(file):
        raise ValueError(
            f"files: expected objects with 'kind', 'mime' and 'base64' or 'url', got another at {i}"
        )
    names = [name for name in ("kind", "mime", "url") if name in file]
    record: dict[str, Any] = {name: border.text(f"files[{i}]: {name}", file[name]) for name in names}
    if record["kind"] not in KINDS:
        raise ValueError(f"files[{i}]: kind: expected one of {', '.join(KINDS)}, got {record['kind']!r:.40}")
    if "base64" in file:
        try:
            record["bytes"] = base64.b64decode(file["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"files: expected base64, got another text at {i}") from None
    return record


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


# ---------- our requests and answers


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


# ---------- the requests and answers that reward servers for OpenRLHF have


def openrlhf_request(batch: Batch, label: str = "label") -> bytes:
    """Return the body of a request: `labels` is the column at the path `label`, null in rows without one.

    `query` holds prompt and response, with the special tokens of the chat template where the tokenizer is
    known; `prompts` only the prompts.
    """
    asked = list(batch.given.get("prompt_texts") or [text(x) for x in batch.prompts])
    queries = whole_texts(batch.prompts, batch.completions, asked)
    labels = column_at(batch.columns, label, len(asked), default=None)
    return dump({"query": queries, "prompts": asked, "labels": labels})


def read_openrlhf_request(data: bytes) -> Batch:
    """Read the batch of a request; the labels are the column `label`. ValueError for anything else.

    Without prompts the whole query is the completion, as in OpenRLHF's first versions.
    """
    body = border.read_json(data)
    if not isinstance(body, dict) or not isinstance(body.get("query"), list) or not body["query"]:
        raise ValueError("request: expected an object with 'query', a list of texts")
    count = len(body["query"])
    asked = body.get("prompts")
    if asked is None:
        asked = [""] * count
    for name, column in (("query", body["query"]), ("prompts", asked)):
        for i, x in enumerate(border.entries(name, column, count)):
            border.text(f"{name}[{i}]", x)
    columns: dict[str, list[Any]] = {}
    if body.get("labels") is not None:
        columns["label"] = border.entries("labels", body["labels"], count)
    completions = [q.removeprefix(p) for q, p in zip(body["query"], asked, strict=True)]
    return Batch(asked, completions, columns)


def openrlhf_answer(total: Tensor, logs: dict[str, Tensor]) -> bytes:
    """Return the body of an answer: rewards, the same as `scores`, and numbers as `extra_logs`."""
    rewards = plain(total)
    extra = {name: plain(x) for name, x in logs.items()}
    return dump({"rewards": rewards, "scores": rewards, "extra_logs": extra})


def read_openrlhf_answer(data: bytes, count: int) -> dict[str, Any]:
    """Read the rewards of an answer; `scores` and numbers of `extra_logs` are metrics.

    `rewards` may be [B] or [B, 1]. ValueError for anything but finite numbers.
    """
    body = border.read_json(data)
    if not isinstance(body, dict) or "rewards" not in body:
        raise ValueError(f"expected an object with 'rewards', got {dump(body)[:40].decode()!r}")
    extra = border.object_of("extra_logs", body.get("extra_logs") or {})
    logs: dict[str, list[Any]] = {}
    if body.get("scores") is not None:
        logs["scores"] = _column("scores", body["scores"], count)
    for name, x in extra.items():
        if not isinstance(x, list):  # one number for the whole batch
            x = [x] * count
        logs[name] = _column(f"extra_logs.{name}", x, count)
    return {"rewards": _column("rewards", body["rewards"], count), "extra_logs": logs}


def _column(name: str, x: Any, count: int) -> list[float | None]:
    """Read [B] of [B] or [B, 1]."""
    if isinstance(x, list) and all(isinstance(row, list) and len(row) == 1 for row in x):
        x = [row[0] for row in x]
    return border.numbers_or_none(name, x, count=count)
