"""The reward function of one or more servers."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from rft_fn.reward.convention import RewardFn
from rft_fn.reward.remote import openrlhf, protocol
from rft_fn.reward.remote.client import Client, Limits, Question
from rft_fn.reward.remote.connection import addresses
from rft_fn.reward.remote.protocol import ReadAnswer, batch_of

__all__ = ["TOKEN_ENV", "cuts", "served_at"]

TOKEN_ENV = "RFT_REWARD_TOKEN"
"""The environment variable with the token of reward servers."""


class _Form(NamedTuple):
    """How requests and answers look."""

    request: Any  # Batch -> bytes
    read: ReadAnswer


def served_at(
    hosts: str | Sequence[str],
    *,
    form: Literal["rft", "openrlhf"] = "rft",
    columns: Sequence[str] | None = None,
    label: str | None = None,
    name: str | None = None,
    batch: int = 64,
    connections: int = 8,
    deadline: float = 240.0,
    attempt: float = 60.0,
    tries: int = 8,
    max_bytes: int = 1 << 24,
    token_env: str = TOKEN_ENV,
) -> RewardFn:
    """The reward that servers compute: JSON over HTTP, as docs/remote_rewards.md shows it.

    `hosts` are addresses of servers that answer alike, as a list or with commas between them; the least busy
    one that answers is asked. `form` is that of the requests: ours, or the one of servers for OpenRLHF.
    `columns` names the columns of the data to send, and the data must have them; None sends all. `label` is
    the column that OpenRLHF's form sends as `labels`: None is "label", if the data has one. `name` is that of
    the part, by default HOST:PORT.

    A request holds about `batch` completions, and those of one prompt stay together; up to `connections`
    requests are under way. A call may take `deadline` seconds and each attempt `attempt`, from the first byte
    to the last. A broken connection, a status of 5xx, 408, 425 or 429 is tried again, `tries` times per host,
    with waits that double up to 30 s and have a random part; a server's Retry-After uses up no try. An answer
    may have `max_bytes`, unzipped. The token in the environment variable `token_env` is sent as a bearer, and
    stands in no file and no error.

    ValueError here for limits that are none. In a call: ValueError for a redirect, for any other status and
    for an answer that is not one finite number or null for each completion; ConnectionError after the last
    try; TimeoutError at the deadline. Requests may arrive twice, so servers should answer as pure functions.
    """
    limits = Limits(deadline, attempt, tries, connections, max_bytes)
    _check(limits, batch, form, label)
    found = addresses(hosts)
    how = _form(form, label or "label")
    client = Client(found, limits, token_env, how.read)

    # named, for what takes every argument does not get media
    async def reward(*, prompts: Any, completions: Any, media: Any = None, **given: Any) -> dict[str, Any]:
        whole = batch_of(prompts, completions, given | {"media": media}, columns)
        groups = given.get("groups") or prompts
        parts = [whole.rows(part) for part in cuts(groups, batch)]
        asked = [Question(how.request(part), len(part.completions)) for part in parts]
        return joined(await client.ask(asked), [question.rows for question in asked])

    reward.__name__ = name or urlsplit(found[0]).netloc
    reward.__dict__["deadline"] = deadline
    needed = list(columns or ())
    if label is not None:
        needed.append(label)
    reward.__dict__["columns"] = tuple(dict.fromkeys(needed))
    return reward


def _form(form: str, label: str) -> _Form:
    """The form of a name."""
    if form == "openrlhf":
        return _Form(partial(openrlhf.request, label=label), openrlhf.read_answer)
    return _Form(protocol.request, protocol.read_answer)


def _check(limits: Limits, batch: int, form: str, label: str | None) -> None:
    """ValueError for limits that are none."""
    given = {**limits._asdict(), "batch": batch}
    for name, x in given.items():
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not (0 < x < math.inf):
            raise ValueError(f"{name}: expected a number above 0, got {x!r}")
        if name not in ("deadline", "attempt") and not isinstance(x, int):
            raise ValueError(f"{name}: expected a whole number, got {x!r}")
    if form not in ("rft", "openrlhf"):
        raise ValueError(f"form: expected 'rft' or 'openrlhf', got {form!r}")
    if label is not None and form != "openrlhf":
        raise ValueError(
            f"label: expected it with form='openrlhf' alone, got it with form={form!r}; columns=[...] names "
            "what is sent"
        )


def cuts(groups: Sequence[Any], size: int) -> list[slice]:
    """Slices of about `size` rows, at most that where groups allow it.

    Rows that stand together with the same group, a number or a prompt, stay in one slice.
    """
    found: list[slice] = []
    start = 0
    end = 0
    for i in range(1, len(groups) + 1):
        if i < len(groups) and groups[i] == groups[i - 1]:
            continue
        if end > start and i - start > size:  # the group that ends here goes into the next slice
            found.append(slice(start, end))
            start = end
        end = i
    if end > start:
        found.append(slice(start, end))
    return found


def joined(answers: Sequence[dict[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """The answers to all parts as one; a list that a part does not have is null there."""
    rewards: list[float | None] = []
    names: dict[str, None] = {}
    for answer in answers:
        rewards += answer["rewards"]
        names |= dict.fromkeys(answer["extra_logs"])
    logs: dict[str, list[Any]] = {name: [] for name in names}
    for answer, count in zip(answers, counts, strict=True):
        for name, column in logs.items():
            column += answer["extra_logs"].get(name, [None] * count)
    return {"rewards": rewards, "extra_logs": logs}
