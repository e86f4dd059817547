"""The requests and answers that reward servers for OpenRLHF have.

{"query": prompts with responses, "prompts": ..., "labels": ...} -> {"rewards": [...]}
"""

from typing import Any

from torch import Tensor

from rft_fn.data.rows import column_at
from rft_fn.reward.adapters.foreign import whole_texts
from rft_fn.reward.convention import text
from rft_fn.reward.remote import protocol
from rft_fn.reward.remote.protocol import Batch

__all__ = ["answer", "read_answer", "read_request", "request"]


def request(batch: Batch, label: str = "label") -> bytes:
    """The body of a request: `labels` is the column at the path `label`, null where a row has none.

    `query` holds prompt and response, with the special tokens of the chat template where the tokenizer is
    known; `prompts` the prompts alone.
    """
    asked = list(batch.given.get("prompt_texts") or [text(x) for x in batch.prompts])
    queries = whole_texts(batch.prompts, batch.completions, asked)
    labels = column_at(batch.columns, label, len(asked), default=None)
    return protocol.dump({"query": queries, "prompts": asked, "labels": labels})


def read_request(data: bytes) -> Batch:
    """The batch of a request; the labels are the column `label`. ValueError for anything else.

    Without prompts the whole query is the completion, as in OpenRLHF's first versions.
    """
    body = protocol.load(data)
    if not isinstance(body, dict) or not isinstance(body.get("query"), list) or not body["query"]:
        raise ValueError("request: expected an object with 'query', a list of texts")
    count = len(body["query"])
    asked = body.get("prompts")
    if asked is None:
        asked = [""] * count
    for name, column in (("query", body["query"]), ("prompts", asked)):
        for i, x in enumerate(protocol.entries(name, column, count)):
            if not isinstance(x, str):
                raise ValueError(f"{name}: expected texts, got {x!r:.40} at {i}")
    columns = {}
    if body.get("labels") is not None:
        columns["label"] = protocol.entries("labels", body["labels"], count)
    completions = [q.removeprefix(p) for q, p in zip(body["query"], asked, strict=True)]
    return Batch(asked, completions, columns)


def answer(total: Tensor, logs: dict[str, Tensor]) -> bytes:
    """The body of an answer: rewards, the same as `scores`, and further numbers as `extra_logs`."""
    rewards = protocol.plain(total.tolist())
    extra = {name: protocol.plain(x.tolist()) for name, x in logs.items()}
    return protocol.dump({"rewards": rewards, "scores": rewards, "extra_logs": extra})


def read_answer(data: bytes, count: int) -> dict[str, Any]:
    """The rewards of an answer; `scores` and numbers of `extra_logs` are metrics.

    `rewards` may be [B] or [B, 1]. ValueError for anything but finite numbers.
    """
    body = protocol.load(data)
    if not isinstance(body, dict) or "rewards" not in body:
        raise ValueError(f"expected an object with 'rewards', got {protocol.dump(body)[:40].decode()!r}")
    extra = body.get("extra_logs") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra_logs: expected an object, got {type(extra).__name__}")
    logs: dict[str, list[Any]] = {}
    if body.get("scores") is not None:
        logs["scores"] = _column("scores", body["scores"], count)
    for name, x in extra.items():
        if not isinstance(x, list):  # one number for the whole batch
            x = [x] * count
        logs[name] = _column(f"extra_logs.{name}", x, count)
    return {"rewards": _column("rewards", body["rewards"], count), "extra_logs": logs}


def _column(name: str, x: Any, count: int) -> list[float | None]:
    """[B] of [B] or [B, 1]."""
    if isinstance(x, list) and all(isinstance(row, list) and len(row) == 1 for row in x):
        x = [row[0] for row in x]
    return protocol.finite(name, x, count)
