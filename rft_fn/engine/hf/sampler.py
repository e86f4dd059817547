"""Batched sampling with a cache: each token is drawn by numbers of its sample's own stream.

Where a model's cache allows it, the next prompts join the batch as rows end, so that a few long responses do
not run alone. The same prompt and key give the same response in any company, order and batch size, in one
piece or in several. What is left is the rounding of the products, which may decide between two tokens
(`draw`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rft_fn import logprob, rng
from rft_fn.engine.hf.batch import Batch, Batching, draw, numbers_per_draw, start
from rft_fn.engine.prompt_media import Shown
from rft_fn.engine.requests import Response, Row, Stop
from rft_fn.model.media_inputs import placeholders
from rft_fn.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sampler", "draw_token", "uniform_numbers"]


_SHARE = 8  # prompts join when one in so many rows is free, so that few are read at a time of one row


@dataclass(slots=True)
class _Growing:
    """A response while it is sampled."""

    text: list[int]  # the tokens that a stop text is looked for in: those before the response, and its own
    before: int  # tokens of `text` that are not its own
    most: int  # tokens of `text` at the row's limit
    logp: list[float]
    row: Row
    ended: bool = False


class _Job(NamedTuple):
    """Rows of one prompt, which is read once for all of them."""

    prompt: Sequence[int]
    shown: Shown
    responses: Sequence[_Growing]


@dataclass
class _Rows:
    """The rows that are sampled together, in the order of `batch`."""

    batch: Batch
    live: list[_Growing]
    u: Tensor  # [R', W, D], for each of W tokens that a row may get, also of rows that have left
    places: Tensor  # [R], the row of `u` of each


def draw_token(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token [B], logp [B]) drawn by uniform numbers u [B, D]; the likeliest token at temperature 0."""
    z = logprob.process_logits(logits, sampling)
    if sampling.temperature == 0:
        largest, token = z.max(-1)
        return token, largest - z.logsumexp(-1)
    p = z.softmax(-1)
    token = draw(p, u)
    return token, p.gather(-1, token.unsqueeze(-1)).squeeze(-1).log()


class Sampler(NamedTuple):
    """Samples the batches of one call of `generate`."""

    lm: "PreTrainedModel"
    batching: Batching
    sampling: Sampling
    stop: Stop
    pad: int
    batch: int  # rows at a time

    def responses(
        self, prompts: Sequence[Sequence[int]], shown: Sequence[Shown], rows: Sequence[Row]
    ) -> list[Response]:
        """The response of each of B = N G rows, the G rows of each of N prompts side by side."""
        n = len(rows) // len(prompts)
        most = self.batch
        if self.batching.single:
            most = 1
        growing = [self._begun(prompts[b // n], row) for b, row in enumerate(rows)]
        longest = max(row.max_new for row in rows)
        parts = [
            [_Job(prompts[i], shown[i], growing[i * n : (i + 1) * n][first : first + most]) for i in part]
            for part in split(prompts, self.batching, max(most // n, 1))
            for first in range(0, n, most)  # more samples than fit into a batch
        ]
        if self._joins():
            parts = [[job for part in parts for job in part]]
        for part in parts:
            self._run(deque(part), most, longest)
        return [Response(x.text[x.before :], x.logp, x.ended) for x in growing]

    def _joins(self) -> bool:
        """Whether prompts may join rows that are sampled."""
        return self.batching.joins and not placeholders(self.lm.config)

    def _run(self, waiting: "deque[_Job]", most: int, longest: int) -> None:
        """Sample the responses of all jobs, at most `most` rows at a time, of at most `longest` tokens."""
        rows = None
        while waiting or rows is not None:
            rows = self._admitted(rows, waiting, most, longest)
            rows = self._step(rows)

    def _admitted(self, rows: _Rows | None, waiting: "deque[_Job]", most: int, longest: int) -> _Rows:
        """The rows with those of the next jobs for which there is room."""
        room = most
        if rows is not None:
            room -= len(rows.live)
            if not self._joins() or room * _SHARE < most:
                return rows
        jobs: list[_Job] = []
        while waiting and len(waiting[0].responses) <= room:
            jobs.append(waiting.popleft())
            room -= len(jobs[-1].responses)
        if not jobs and rows is not None:
            return rows

        prompts = [job.prompt for job in jobs]
        shown = [job.shown for job in jobs]
        counts = [len(job.responses) for job in jobs]
        batch = start(self.lm, self.batching, prompts, counts, self.pad, shown, most=longest)
        live = [x for job in jobs for x in job.responses]
        u = uniform_numbers([x.row for x in live], longest, batch.logits.shape[-1]).to(self.lm.device)
        if rows is None:
            return _Rows(batch, live, u, torch.arange(len(u), device=u.device))
        rows.batch.join(batch)
        u = torch.cat([rows.u[rows.places], u])
        return _Rows(rows.batch, [*rows.live, *live], u, torch.arange(len(u), device=u.device))

    def _begun(self, prompt: Sequence[int], row: Row) -> _Growing:
        """A response without tokens; a stop text may begin in those that its stream gave before."""
        before = self.stop.unfinished(prompt[max(len(prompt) - row.start, 0) :])
        return _Growing(before, len(before), len(before) + row.max_new, [], row)

    def _step(self, rows: _Rows) -> _Rows | None:
        """Sample one token for every row, and run those that have not ended one token further."""
        drawn = torch.tensor([len(x.logp) for x in rows.live], device=rows.u.device)
        u = rows.u[rows.places, drawn]
        token, logp = draw_token(rows.batch.logits, u, self.sampling)
        keep = []
        for k, (response, t, p) in enumerate(zip(rows.live, token.tolist(), logp.tolist())):
            response.text.append(t)
            response.logp.append(p)
            response.ended = self.stop.ends(response.text)
            if not response.ended and len(response.text) < response.most:
                keep.append(k)
        if not keep:
            return None

        # a row that ended leaves the batch at once: it would cost as much as the others
        if len(keep) < len(token):
            keep = filled(keep)
            index = torch.tensor(keep, dtype=torch.long, device=token.device)
            token = token[index]
            rows.batch.take(index)
            rows = _Rows(rows.batch, [rows.live[k] for k in keep], rows.u, rows.places[index])
        rows.batch.append(self.lm, token)
        return rows


def uniform_numbers(rows: Sequence[Row], longest: int, vocab: int) -> Tensor:
    """The uniform numbers of each row's tokens: [R, `longest`, D] float64, D for each token.

    Those of the row's stream from its start to its limit, then 0. They are drawn at once, so that no row
    depends on when another one ends.
    """
    depth = numbers_per_draw(vocab)
    drawn = max(row.start + row.max_new for row in rows)
    streams = rng.uniform([row.key for row in rows], drawn * depth)
    u = torch.zeros(len(rows), longest, depth, dtype=torch.float64)
    for r, (row, stream) in enumerate(zip(rows, streams.unflatten(-1, (drawn, depth)))):
        u[r, : row.max_new] = stream[row.start : row.start + row.max_new]
    return u


def filled(keep: Sequence[int]) -> list[int]:
    """The rows `keep`, of which the last fill the places of the rows that leave, so that few rows move."""
    found = list(range(len(keep)))
    behind = [k for k in keep if k >= len(keep)]
    for gap, k in zip(sorted(set(found) - set(keep)), behind):
        found[gap] = k
    return found


def split(prompts: Sequence[Sequence[int]], batching: Batching, most: int) -> list[list[int]]:
    """The prompts of each batch, at most `most`: of similar length, or all of the same length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [order]
    if not batching.padded:
        groups = [list(group) for _, group in groupby(order, key=lambda i: len(prompts[i]))]
    return [group[at : at + most] for group in groups for at in range(0, len(group), most)]
