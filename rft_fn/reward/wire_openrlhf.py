"""The requests and answers that reward servers for OpenRLHF have, as bytes of JSON."""

from typing import Any

from torch import Tensor

from rft_fn import border
from rft_fn.data.row_paths import column_at
from rft_fn.reward.foreign import whole_texts
from rft_fn.reward.signature import text
from rft_fn.reward.wire import Batch
from rft_fn.reward.wire_values import dump, plain

__all__ = ["openrlhf_answer", "openrlhf_request", "read_openrlhf_answer", "read_openrlhf_request"]


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
