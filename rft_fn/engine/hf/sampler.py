"""Batched sampling with a cache: one uniform number per token by inverse CDF, from the sample's key.

So the same prompt and key give the same response in any company, order and batch size (up to the rounding of
a matrix product, which changes about one token in a million).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rft_fn import logprob, rng
from rft_fn.engine.hf.batch import Batch, Batching, start
from rft_fn.engine.requests import Response
from rft_fn.engine.stop import Stop
from rft_fn.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sampler"]


@dataclass
class _Rows:
    """The rows of one batch while they are sampled; `live` are those of `batch`, in the order of all."""

    batch: Batch
    live: Tensor  # [live] i64
    responses: list[Response]  # of each row, as far as it is sampled


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

    def responses(self, prompts: Sequence[Sequence[int]], keys: Sequence[int], n: int) -> list[Response]:
        """The n responses to each prompt, side by side."""
        most = self.batch
        if self.batching.single:
            most = 1
        done: dict[int, Response] = {}
        for part in split(prompts, self.batching, max(most // n, 1)):
            for first in range(0, n, most):  # more samples than fit into a batch
                wanted = range(first, min(first + most, n))
                found = self._sample([prompts[i] for i in part], [keys[i] for i in part], wanted)
                done |= zip([i * n + j for i in part for j in wanted], found)
        return [done[row] for row in range(len(prompts) * n)]

    def _sample(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], wanted: Sequence[int]
    ) -> list[Response]:
        """The samples of the numbers `wanted` of each prompt, in one batch."""
        size = len(prompts) * len(wanted)
        device = self.lm.device
        rows = _Rows(
            batch=start(self.lm, self.batching, prompts, len(wanted), self.pad),
            live=torch.arange(size, device=device),
            responses=[Response([], [], False) for _ in range(size)],
        )

        # all numbers of a row are drawn at once, so that no row depends on when another one ends
        longest = self.sampling.max_new
        generators = [rng.generator(rng.fold_in(key, j)) for key in keys for j in wanted]
        u = torch.stack([torch.rand(longest, generator=g, dtype=torch.float64) for g in generators])
        for t in range(longest):
            if not rows.live.numel():
                break
            self._step(rows, u[:, t].to(device))
        return rows.responses

    def _step(self, rows: _Rows, u: Tensor) -> None:
        """Sample one token for every live row, and run those that have not ended one token further."""
        token, logp = _draw(rows.batch.logits, u[rows.live], self.sampling)
        keep = []
        for k, (i, t, p) in enumerate(zip(rows.live.tolist(), token.tolist(), logp.tolist())):
            tokens = rows.responses[i].tokens
            tokens.append(t)
            rows.responses[i].logp.append(p)
            if self.stop.ends(tokens):
                rows.responses[i] = rows.responses[i]._replace(ended=True)
            elif len(tokens) < self.sampling.max_new:
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


def split(prompts: Sequence[Sequence[int]], batching: Batching, most: int) -> list[list[int]]:
    """The prompts of each batch, at most `most`: of similar length, or all of the same length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [order]
    if not batching.padded:
        groups = [list(group) for _, group in groupby(order, key=lambda i: len(prompts[i]))]
    return [group[at : at + most] for group in groups for at in range(0, len(group), most)]
