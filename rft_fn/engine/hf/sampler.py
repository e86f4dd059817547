"""Batched sampling with a cache, by inverse CDF: one uniform number of the sample's stream per token.

So the same prompt and key give the same response in any company, order and batch size, in one piece or in
several (up to the rounding of a matrix product, which changes about one token in a million).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rft_fn import logprob, rng
from rft_fn.engine.hf.batch import Batch, Batching, start
from rft_fn.engine.prompt_media import Shown
from rft_fn.engine.requests import Response, Row
from rft_fn.engine.stop import Stop
from rft_fn.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sampler"]


@dataclass(slots=True)
class _Growing:
    """A response while it is sampled."""

    text: list[int]  # the tokens that a stop text is looked for in: those before the response, and its own
    before: int  # tokens of `text` that are not its own
    most: int  # tokens of `text` at the row's limit
    logp: list[float]
    ended: bool = False


@dataclass
class _Rows:
    """The rows of one batch while they are sampled; `live` are those of `batch`, in the order of all."""

    batch: Batch
    live: Tensor  # [live] i64
    responses: list[_Growing]  # of each row


def _draw(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token [B], logp [B]) drawn by uniform numbers u [B]; the likeliest token at temperature 0."""
    z = logprob.process_logits(logits, sampling)
    logp = z.log_softmax(-1)
    if sampling.temperature == 0:
        token = z.argmax(-1)
    else:
        cdf = logp.double().exp().cumsum(-1)
        token = torch.searchsorted(cdf, (u * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        token = token.clamp(max=z.shape[-1] - 1)
    return token, logp.gather(-1, token.unsqueeze(-1)).squeeze(-1)


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
        done: dict[int, Response] = {}
        for part in split(prompts, self.batching, max(most // n, 1)):
            for first in range(0, n, most):  # more samples than fit into a batch
                numbers = [i * n + j for i in part for j in range(first, min(first + most, n))]
                own = [prompts[i] for i in part]
                found = self._sample(own, [shown[i] for i in part], [rows[b] for b in numbers])
                done |= zip(numbers, found)
        return [done[b] for b in range(len(rows))]

    def _sample(
        self, prompts: Sequence[Sequence[int]], shown: Sequence[Shown], wanted: Sequence[Row]
    ) -> list[Response]:
        """The responses of the rows `wanted`, those of a prompt side by side, in one batch."""
        n = len(wanted) // len(prompts)
        device = self.lm.device
        rows = _Rows(
            batch=start(self.lm, self.batching, prompts, n, self.pad, shown),
            live=torch.arange(len(wanted), device=device),
            responses=[self._begun(prompts[b // n], row) for b, row in enumerate(wanted)],
        )

        # one step for every token, until no row is left
        u = _uniform(wanted)
        for t in range(u.shape[1]):
            if not rows.live.numel():
                break
            self._step(rows, u[:, t].to(device))
        return [Response(x.text[x.before :], x.logp, x.ended) for x in rows.responses]

    def _begun(self, prompt: Sequence[int], row: Row) -> _Growing:
        """A response without tokens; a stop text may begin in those that its stream gave before."""
        before = self.stop.unfinished(prompt[max(len(prompt) - row.start, 0) :])
        return _Growing(before, len(before), len(before) + row.max_new, [])

    def _step(self, rows: _Rows, u: Tensor) -> None:
        """Sample one token for every live row, and run those that have not ended one token further."""
        token, logp = _draw(rows.batch.logits, u[rows.live], self.sampling)
        keep = []
        for k, (i, t, p) in enumerate(zip(rows.live.tolist(), token.tolist(), logp.tolist())):
            response = rows.responses[i]
            response.text.append(t)
            response.logp.append(p)
            response.ended = self.stop.ends(response.text)
            if not response.ended and len(response.text) < response.most:
                keep.append(k)

        # a row that ended leaves the batch at once: it would cost as much as the others
        if len(keep) < len(token):
            index = torch.tensor(keep, dtype=torch.long, device=token.device)
            rows.live = rows.live[index]
            token = token[index]
            if keep:
                rows.batch.take(index)
        if keep:
            rows.batch.append(self.lm, token)


def _uniform(rows: Sequence[Row]) -> Tensor:
    """[R, W] float64: the numbers of each row's stream from its start to its limit, then 0.

    They are drawn at once, so that no row depends on when another one ends.
    """
    u = torch.zeros(len(rows), max(row.max_new for row in rows), dtype=torch.float64)
    for r, row in enumerate(rows):
        stream = torch.rand(row.start + row.max_new, generator=rng.generator(row.key), dtype=torch.float64)
        u[r, : row.max_new] = stream[row.start :]
    return u


def split(prompts: Sequence[Sequence[int]], batching: Batching, most: int) -> list[list[int]]:
    """The prompts of each batch, at most `most`: of similar length, or all of the same length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [order]
    if not batching.padded:
        groups = [list(group) for _, group in groupby(order, key=lambda i: len(prompts[i]))]
    return [group[at : at + most] for group in groups for at in range(0, len(group), most)]
