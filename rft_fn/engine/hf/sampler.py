"""Samples batches with a KV cache; each token is drawn by numbers of its sample's own stream.

Where a model's cache allows it, the next prompts join the batch as rows end, so that a few long responses do
not run by themselves. The same prompt and key give the same response in any company, order and batch size, in
one piece or in several, up to the rounding of products, which may decide between two tokens (`draw`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rft_fn.engine.hf.draws import draw_token, kept_words, uniform_numbers
from rft_fn.engine.hf.fixed_steps import FixedSteps
from rft_fn.engine.hf.row_batch import Batch, CacheSupport, prefill
from rft_fn.engine.hf.step_memory import StepMemory
from rft_fn.engine.prompt_media import PromptMedia
from rft_fn.engine.requests import Response, Row, Stop
from rft_fn.model.placeholders import placeholders
from rft_fn.model.routing import Recorder
from rft_fn.types import Sampling
from rft_fn.types.engine import OnRow

__all__ = ["Sampler"]


if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARE = 8  # prompts join when one in so many rows is free, so that few are read at a time of one row


@dataclass(slots=True)
class _Sequence:
    """A response while it is sampled."""

    number: int  # of its row
    text: list[int]  # the tokens that may hold a stop text: some before the response, and its own
    before: int  # tokens of `text` that are not its own
    most: int  # tokens of `text` at the row's limit
    logp: list[float]
    row: Row
    ended: bool = False
    routing: list[Tensor] = field(default_factory=list)  # [n, M, k] of each forward that read some of the row
    kept: list[Tensor] = field(default_factory=list)  # the words that were left at each token
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    version: int = 0  # of the weights that the next token is drawn by

    def tokens(self) -> list[int]:
        """Return the response so far."""
        return self.text[self.before :]


class _SequenceGroup(NamedTuple):
    """The rows of one prompt, which is read once for all of them."""

    prompt: Sequence[int]
    media: PromptMedia
    responses: Sequence[_Sequence]


@dataclass
class _Rows:
    """The rows that are sampled together, in the order of `batch`."""

    batch: Batch
    live: list[_Sequence]
    u: Tensor  # [R', W, D], for each of W tokens that a row may get, also of rows that have left
    places: Tensor  # [R], the row of `u` of each
    ends: Tensor  # [V] bool, tokens that end a row
    steps: FixedSteps | None = None


class Sampler(NamedTuple):
    """Samples the batches of one call of `generate`."""

    lm: "PreTrainedModel"
    batching: CacheSupport
    sampling: Sampling
    stop: Stop
    pad: int
    batch: int  # rows at a time
    check_every: int = 1  # tokens after which the host looks which rows have ended
    memory: StepMemory | None = None  # that steps of fixed shapes are kept in
    on_row: OnRow | None = None
    recorder: Recorder | None = None  # of the experts that tokens go to; it listens
    kept: bool = False  # whether responses have the words that were left; without steps of fixed shapes
    # lets new weights in, and returns their version; where it is given, responses have the versions of tokens
    look: Callable[[], int] | None = None

    def responses(
        self, prompts: Sequence[Sequence[int]], media: Sequence[PromptMedia], rows: Sequence[Row]
    ) -> list[Response]:
        """Sample the responses of B = N G rows, the G rows of each of N prompts side by side."""
        n = len(rows) // len(prompts)
        most = 1 if self.batching.single else self.batch
        longest = max(row.max_new for row in rows)
        sequences = []
        for b, row in enumerate(rows):
            # a stop text may begin in what the row's stream gave before
            prompt = prompts[b // n]
            before = self.stop.unfinished(prompt[max(len(prompt) - row.start, 0) :])
            sequences.append(_Sequence(b, before, len(before), len(before) + row.max_new, [], row))
        parts = [
            [
                _SequenceGroup(prompts[i], media[i], sequences[i * n : (i + 1) * n][first : first + most])
                for i in part
            ]
            for part in split(prompts, self.batching, max(most // n, 1))
            for first in range(0, n, most)  # more samples than fit into a batch
        ]
        if self._joins():
            parts = [[job for part in parts for job in part]]
        for part in parts:
            waiting = deque(part)
            live = None
            while waiting or live is not None:
                live = self._step(self._admit(live, waiting, max_rows=most, max_tokens=longest))
        return [
            Response(
                x.tokens(),
                x.logp,
                x.ended,
                self._routing(x, len(prompts[x.number // n])),
                x.kept if self.kept else None,
                x.versions if self.look is not None else None,
            )
            for x in sequences
        ]

    def _routing(self, x: _Sequence, prompt: int) -> Tensor | None:
        """Return the routing [S - 1, M, k] of all tokens of a row but the last, after `prompt` tokens."""
        return None if self.recorder is None else torch.cat(x.routing)[: prompt + len(x.logp) - 1].cpu()

    def _record(self, read: Sequence[Sequence[_Sequence]], counts: Sequence[int]) -> None:
        """Add to sequences how the last forward routed the last tokens of its rows, `counts` of each."""
        if self.recorder is None:
            return
        of_rows = self.recorder.take().unflatten(0, (len(read), -1))
        for routing, sequences, count in zip(of_rows, read, counts):
            for x in sequences:
                x.routing.append(routing[len(routing) - count :])

    def _joins(self) -> bool:
        """Return whether prompts may join rows that are sampled."""
        return self.batching.joins and not placeholders(self.lm.config)

    def _admit(
        self, rows: _Rows | None, waiting: "deque[_SequenceGroup]", *, max_rows: int, max_tokens: int
    ) -> _Rows:
        """Prefill the next prompts that fit among `max_rows` rows, and add their rows."""
        room = max_rows
        if rows is not None:
            room -= len(rows.live)
            if not self._joins() or room * _SHARE < max_rows:
                return rows
        jobs: list[_SequenceGroup] = []
        while waiting and len(waiting[0].responses) <= room:
            jobs.append(waiting.popleft())
            room -= len(jobs[-1].responses)
        if not jobs and rows is not None:
            return rows

        version = 0 if self.look is None else self.look()
        batch = prefill(
            self.lm,
            self.batching,
            [job.prompt for job in jobs],
            [len(job.responses) for job in jobs],
            self.pad,
            [job.media for job in jobs],
            max_tokens=max_tokens,
        )
        self._record([job.responses for job in jobs], [len(job.prompt) for job in jobs])
        live = [x for job in jobs for x in job.responses]
        for x in live:
            x.version = version
        vocab = batch.logits.shape[-1]
        u = uniform_numbers([x.row for x in live], max_tokens, vocab).to(self.lm.device)
        if rows is None:
            ends = torch.zeros(vocab, dtype=torch.bool)
            ends[[x for x in self.stop.ids if x < vocab]] = True
            ends = ends.to(u.device)
            steps = None
            if self.batching.fixed and self._joins():
                steps = FixedSteps(
                    self.lm,
                    self.sampling,
                    pad=self.pad,
                    ends=ends,
                    check_every=self.check_every,
                    rows=max_rows,
                    memory=self.memory,
                    fused=self.batching.fused,
                )
            return _Rows(batch, live, u, torch.arange(len(u), device=u.device), ends, steps)
        rows.batch.join(batch)
        rows.live = [*rows.live, *live]
        rows.u = torch.cat([rows.u[rows.places], u])
        rows.places = torch.arange(len(rows.u), device=u.device)
        return rows

    def _step(self, rows: _Rows) -> _Rows | None:
        """Sample the next tokens of every row, and decode those that have not ended one step further."""
        version = 0 if self.look is None else self.look()
        # no row passes its limit, so that all positions are the model's
        count = min(self.check_every, min(x.most - len(x.text) for x in rows.live))
        u, temperature = self._numbers(rows, count)
        kept: list[Tensor] = []
        if rows.steps is None:
            token, logp, kept = self._drawn(rows, u, temperature)
        else:
            token, logp = rows.steps.run(rows.batch, u, temperature)
        keep = []
        unsure = 0
        drawn, scores = torch.stack([token.double(), logp.double()]).cpu()
        for k, (response, tokens, logps) in enumerate(zip(rows.live, drawn.long().tolist(), scores.tolist())):
            if min(tokens) < 0:  # a row that is not sure of its next token waits
                unsure += 1
                tokens = tokens[: next(i for i, t in enumerate(tokens) if t < 0)]
            before = len(response.text)
            response.ended = self.stop.extend(response.text, tokens)
            size = len(response.text) - before
            response.logp += logps[:size]
            response.kept += [words[k].nonzero().flatten() for words in kept[:size]]
            if size:
                # the first token is of the weights that read all before it
                response.versions += [response.version, *[version] * (size - 1)]
                response.version = version
            if not response.ended and len(response.text) < response.most:
                keep.append(k)
            elif self.on_row is not None:
                self.on_row(response.number, response.tokens(), response.ended)
        if not keep:
            return None

        if rows.steps is not None:
            rows.steps.count_unsure(unsure)

        # a row that ended leaves the batch at once: it would cost as much as the others
        token = token[:, -1]
        if len(keep) < len(token):
            keep = filled(keep)
            index = torch.tensor(keep, dtype=torch.long, device=token.device)
            token = token[index]
            rows.batch.take(keep)
            rows.live = [rows.live[k] for k in keep]
            rows.places = rows.places[index]
        if rows.steps is None:
            self._decode(rows, token)
        return rows

    def _decode(self, rows: _Rows, token: Tensor) -> None:
        """Read one more token [R] of each row."""
        rows.batch.decode_step(self.lm, token)
        self._record([[x] for x in rows.live], [1] * len(rows.live))

    def _numbers(self, rows: _Rows, count: int) -> tuple[Tensor, Tensor | None]:
        """Return uniform numbers [R, `count`, D] of the next tokens, and temperatures [R] that differ."""
        device = rows.u.device
        first = torch.tensor([len(x.logp) for x in rows.live], device=device)
        own = [x.row.temperature for x in rows.live]
        differ = any(x != self.sampling.temperature for x in own)
        temperature = torch.tensor(own, device=device) if differ else None
        return rows.u[rows.places[:, None], first[:, None] + torch.arange(count, device=device)], temperature

    def _drawn(
        self, rows: _Rows, u: Tensor, temperature: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return tokens drawn by u [R, N, D], all read but the last, and their log-probs: both [R, N].

        Then, where they are asked for, the words that were left at each of N tokens: [R, V] bool.

        The host looks at them only afterwards: what a row gets after its end is ignored.
        """
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        kept: list[Tensor] = []
        ended = torch.zeros(len(u), dtype=torch.bool, device=u.device)
        for numbers in u.unbind(1):
            if self.kept:
                kept.append(kept_words(rows.batch.logits, self.sampling, temperature).cpu())
            token, logp = draw_token(rows.batch.logits, numbers, self.sampling, temperature)
            tokens.append(token)
            logps.append(logp)
            if len(tokens) < u.shape[1]:
                # a placeholder ends a row, and the model would look for its media
                ended |= rows.ends[token]
                self._decode(rows, torch.where(ended, self.pad, token))
        return torch.stack(tokens, -1), torch.stack(logps, -1), kept


def filled(keep: Sequence[int]) -> list[int]:
    """Compact `keep`: move the last rows into the gaps, so that few rows move."""
    order = list(range(len(keep)))
    last = [k for k in keep if k >= len(keep)]
    for gap, k in zip(sorted(set(order) - set(keep)), last):
        order[gap] = k
    return order


def split(prompts: Sequence[Sequence[int]], batching: CacheSupport, most: int) -> list[list[int]]:
    """Return the prompts of each batch, at most `most`: of similar length, or all of the same length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [order]
    if not batching.padded:
        groups = [list(group) for _, group in groupby(order, key=lambda i: len(prompts[i]))]
    return [group[at : at + most] for group in groups for at in range(0, len(group), most)]
