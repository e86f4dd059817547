"""Computes the rewards of requests, several at a time; an error is that of its own request alone."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rft_fn.engine.time_limit import time_limit
from rft_fn.reward import Scored
from rft_fn.reward.combine import Weighted
from rft_fn.reward.convention import taken
from rft_fn.reward.remote.protocol import Batch
from rft_fn.run.serving.jobs import Job, Jobs, join
from rft_fn.run.serving.models import joint_values

__all__ = ["Partial", "rows_of", "score_jobs", "work"]


class Partial(Weighted):
    """A weighted sum that is NaN, and no error, for rows to which no part applies.

    The trainer that asks may have other rewards for them.
    """

    def _total(
        self, parts: Mapping[str, Tensor], weights: Mapping[str, Tensor], prompts: Sequence[Any]
    ) -> Tensor:
        nothing = torch.stack(list(parts.values())).isnan().all(0)
        filled = {name: torch.where(nothing, 0.0, x) for name, x in parts.items()}
        return torch.where(nothing, math.nan, super()._total(filled, weights, prompts))


def work(
    jobs: Jobs,
    score: Any,
    *,
    rows: int,
    wait: float,
    timeout: float,
    alive: Callable[[], bool],
    observe: Callable[[int], None],
) -> None:
    """Score what waits, until the queue is closed and empty, or nobody is alive who fills it.

    `rows` is the most completions of a call that several requests share, `wait` the time in s to wait for
    more of them, and `timeout` the limit of a call in s. `observe` is told the completions of each call.
    """
    while alive():
        found = jobs.take(rows, wait)
        if not found and jobs.closed:
            return
        found = [job for job in found if job.future.set_running_or_notify_cancel()]
        if found:
            began = time.monotonic()
            score_jobs(score, found, timeout)
            count = sum(job.rows for job in found)
            jobs.done(count, time.monotonic() - began)
            observe(count)


def score_jobs(score: Any, found: Sequence[Job], timeout: float) -> None:
    """Give each request its rewards, or its error.

    A call for several requests that fails is made again for each of them.
    """
    try:
        scored = _score(score, join([job.batch for job in found]), timeout)
    except Exception as error:
        if len(found) == 1:
            found[0].future.set_exception(error)
            return
        for job in found:
            score_jobs(score, [job], timeout)
        return

    start = 0
    for job in found:
        job.future.set_result(rows_of(scored, slice(start, start + job.rows)))
        start += job.rows


def _score(score: Any, batch: Batch, timeout: float) -> Scored:
    """The rewards of a batch. TimeoutError beyond the limit."""

    def name() -> str:
        return f"reward {getattr(score, 'running', '')!r}"

    given: dict[str, Any] = {**batch.given, "trainer_state": batch.state}
    given["known"] = partial(joint_values, score, batch)
    with time_limit(timeout, name):
        return score(batch.prompts, batch.completions, batch.columns, **taken(score, given))


def rows_of(scored: Scored, part: slice) -> Scored:
    """The rewards of some of the completions."""
    return Scored(
        scored.total[part],
        {name: x[part] for name, x in scored.parts.items()},
        {name: x[part] for name, x in scored.metrics.items()},
        {name: x[part] for name, x in scored.extra.items()},
    )
