"""Runs decoding steps whose shapes stay the same, so that a CUDA graph can replay them.

A step draws a token of every row and reads it. Its tensors have a place for more rows and more tokens than
there are, a power of two of each; a mask hides what is empty. All that moves from step to step (the column
to write, positions, the numbers to draw by) is in tensors too: the host starts steps, and waits for none.
Tensors and graphs are those of a `StepMemory`, so that a later call captures no shape again.

How many tokens make up top_p is not known ahead. Steps look at some of the likeliest; a row whose set may be
larger waits, and its next token is drawn from all of them before the next steps.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from rft_fn import logprob
from rft_fn.engine.hf import cache_rows
from rft_fn.engine.hf.draws import draw, draw_token
from rft_fn.engine.hf.fused_steps import Step, fused_draw, next_logits
from rft_fn.engine.hf.row_batch import Batch
from rft_fn.engine.hf.shared_prefix import OPTION, SharedPrefixes, shared_attention
from rft_fn.engine.hf.step_memory import StepMemory
from rft_fn.model.packed_attention import warn_once
from rft_fn.sampling import truncated_on_device
from rft_fn.types import Sampling

__all__ = ["FixedSteps"]


if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RANKS = 1024  # tokens that are looked at for top_p
_MANY = 8  # more are looked at once one row in so many had to wait
_UNCAPTURED: "WeakSet[PreTrainedModel]" = WeakSet()  # models whose step no graph can hold


class FixedSteps:
    """The steps of one batch as its rows end and others join, in tensors for R rows and W columns."""

    def __init__(
        self,
        lm: "PreTrainedModel",
        sampling: Sampling,
        *,
        pad: int,
        ends: Tensor,
        check_every: int,
        rows: int,
        memory: StepMemory | None = None,
        fused: bool = False,
    ):
        self.lm = lm
        self.sampling = sampling
        self.pad = pad
        self.memory = memory or StepMemory()
        self.check_every = check_every  # steps at a time, at most
        self.rows = rows  # at a time, at most
        self.fused = fused
        self.captures = lm.device.type == "cuda" and lm not in _UNCAPTURED
        self.shape: tuple[Any, ...] = ()
        self.prompts: SharedPrefixes | None = None  # where rows share them
        self.ranks = _RANKS
        self.exact = False  # whether the next token is drawn from all
        zeros = self.memory.zeros
        self.ends = zeros("ends", ends.shape, ends).copy_(ends)  # [V] bool, tokens that end a row
        self.at = zeros("at", (1,), ends, torch.long)  # the column of the next token
        self.step = zeros("step", (1,), ends, torch.long)

    def run(self, batch: Batch, u: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw and read the next tokens by u [R, N, D]; return them and their log-probs, both [R, N].

        A row that has ended reads padding from then on, and one that waits gets -1. `temperature` [R] is one
        for each row, in place of that of the sampling.
        """
        rows, count = u.shape[:2]
        self._load(batch, count, u.shape[-1], temperature is not None)
        self.u[:rows, :count] = u
        if self.temperature is not None and temperature is not None:
            self.temperature[:rows] = temperature
        left = count
        if self.exact:
            self._step(logprob.process_logits)
            left -= 1
        if left > 1 and self.captures and self._key not in self.memory.graphs:
            self._step(self._process)
            left -= 1
            self._capture()
        graph = self.memory.graphs.get(self._key) if self.captures else None
        for _ in range(left):
            if graph is None:
                self._step(self._process)
            else:
                graph.replay()
        self._store(batch, count)
        return self.tokens[:rows, :count].clone(), self.logp[:rows, :count].clone()

    def count_unsure(self, rows: int) -> None:
        """Note how many rows wait."""
        self.exact = rows > 0
        if rows * _MANY > self.rows:
            self.ranks *= 16

    def read(self, batch: Batch, token: Tensor) -> None:
        """Read one given token [R] of every row."""
        self._load(batch, 1, 1, False)
        given = self.tokens.new_full((len(self.tokens), 1), self.pad)
        given[: len(token), 0] = token
        self._read(given)
        self._store(batch, 1)
        batch.logits = batch.logits.clone()

    def _load(self, batch: Batch, count: int, depth: int, warm: bool) -> None:
        """Copy the state of a batch into tensors that stay where they are, for `count` more tokens."""
        parts: list[Any] = cache_rows.buffered_layers(batch.cache)
        for layer, part in enumerate(parts):
            part.fix(self.rows, count, partial(self._buffer, layer))
            part.at = self.at
        rows, _, columns = parts[0].buffers[0].shape[:3]
        shape = (rows, columns, depth, warm)
        if shape != self.shape:
            self.shape = shape
            batch.logits = batch.logits.clone()  # they may be in the place of the new ones
            self._allocate(rows, columns, batch, depth, warm)
        self.name, self.cache = batch.name, batch.cache
        if batch.prompts is not None:
            prompts = batch.prompts.fix(self.memory.prompts, self.rows)
            self.memory.keep_prompts(prompts)
            self.prompts = prompts.of_rows(rows)

        live = len(batch.logits)
        self.logits[:live] = batch.logits
        seen = self.bias[:live, 0, 0, parts[0].first : parts[0].end]
        self.bias.fill_(-torch.inf)
        seen.masked_fill_(batch.seen, 0)
        self.position[:live, 0] = batch.before + batch.seen.sum(-1)
        self.first.copy_((self.bias[:, 0, 0] == 0).int().argmax(-1))
        self.ended.zero_()
        self.waits.zero_()
        self.at.fill_(parts[0].end)
        self.step.zero_()

    def _buffer(self, layer: int, k: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a layer's buffer of keys or of values."""
        return self.memory.zeros((layer, k), shape, like)

    def _allocate(self, rows: int, columns: int, batch: Batch, depth: int, warm: bool) -> None:
        """Make the tensors of steps; rows that nobody has draw and read too, and nobody looks."""
        z, count = batch.logits, self.check_every
        zeros = self.memory.zeros
        self.logits = zeros("logits", (rows, z.shape[-1]), z)
        self.bias = zeros("bias", (rows, 1, 1, columns), z, self.lm.dtype)  # 0 where a row sees, else -inf
        self.first = zeros("first", (rows,), batch.before)  # column that a row sees
        self.position = zeros("position", (rows, 1), batch.before)
        self.ended = zeros("ended", (rows,), self.ends)
        self.waits = zeros("waits", (rows,), self.ends)
        self.u = zeros("u", (rows, count, depth), z, torch.float64)
        self.temperature = zeros("temperature", (rows,), z, torch.float32).fill_(1) if warm else None
        self.tokens = zeros("tokens", (rows, count), batch.tokens)
        self.logp = zeros("logp", (rows, count), z, torch.promote_types(z.dtype, torch.float32))

    @property
    def _key(self) -> Hashable:
        """Return all that a captured step depends on, beside the content of its tensors."""
        distribution = replace(self.sampling, stop=(), max_new=1)
        return (
            self.shape,
            self.rows,
            self.check_every,
            self.pad,
            self.ranks,
            distribution,
            self.prompts is None,
            self.fused,
        )

    def _process(self, logits: Tensor, sampling: Sampling, *, temperature: Tensor | None = None) -> Tensor:
        """Return logits as `logprob.process_logits` does; rows that are not sure of them wait."""
        z = logprob.process_logits(
            logits, Sampling(temperature=sampling.temperature), temperature=temperature
        )
        if not sampling.truncates:
            return z
        z, unsure = truncated_on_device(z, sampling, self.ranks)
        self.waits |= unsure
        return z

    def _step(self, process: Callable[..., Tensor]) -> None:
        """Draw a token of every row, and read it."""
        u = self.u.index_select(1, self.step).squeeze(1)
        token, logp = draw_token(
            self.logits, u, self.sampling, self.temperature, process, fused_draw if self.fused else draw
        )
        self.tokens.index_copy_(1, self.step, torch.where(self.waits, -1, token).unsqueeze(-1))
        self.logp.index_copy_(1, self.step, logp.unsqueeze(-1))
        self.ended |= self.ends[token]
        self.step += 1
        self._read(torch.where(self.ended | self.waits, self.pad, token).unsqueeze(-1))

    def _read(self, tokens: Tensor) -> None:
        """Read one token of every row, [R, 1]; rows that wait will not see it."""
        hidden = torch.where(self.waits, -torch.inf, 0).to(self.bias.dtype)
        self.bias.index_copy_(-1, self.at, hidden[:, None, None, None])
        options: dict[str, Any] = {self.name: self.cache}
        if self.prompts is not None:
            self.prompts.forget_places()
            options[OPTION] = self.prompts
        if self.fused:
            step = Step(tokens, self.position, self.bias, self.first, self.at, self.prompts)
            logits = next_logits(self.lm, self.cache, step)
        else:
            with shared_attention(self.lm):
                out = self.lm(
                    input_ids=tokens,
                    attention_mask=self.bias,
                    position_ids=self.position,
                    use_cache=True,
                    **options,
                )
            logits = out.logits[:, -1]
        if self.sampling.truncates:
            logits = torch.where(self.waits.unsqueeze(-1), self.logits, logits)
        self.logits.copy_(logits)
        self.position += ~self.waits.unsqueeze(-1)
        self.at += 1

    def _capture(self) -> None:
        """Record a step; without it where the model or the device does not allow that, said once."""
        try:
            graph = torch.cuda.CUDAGraph()
            # they run one after the other and leave nothing in memory of their own: one pool will do for all
            others = list(self.memory.graphs.values())
            capture = torch.cuda.graph(
                graph, pool=others[0].pool() if others else None, capture_error_mode="thread_local"
            )
            # torch leaves the stream of a capture that fails as the current one
            with torch.cuda.stream(_current_stream()), capture:
                self._step(self._process)
            self.memory.keep(self._key, graph)
        except (RuntimeError, AssertionError) as error:
            self.captures = False
            _UNCAPTURED.add(self.lm)
            reason = str(error).partition("\n")[0]
            warn_once(f"sampling: {type(self.lm).__name__} runs without a CUDA graph: {reason}")

    def _store(self, batch: Batch, count: int) -> None:
        """Write back what a batch has got by `count` tokens of every row."""
        live = len(batch.logits)
        batch.logits = self.logits[:live]
        batch.tokens = self.tokens[:live, count - 1 : count].clone()
        batch.seen = torch.cat([batch.seen, self.tokens[:live, :count] >= 0], -1)
        batch.length = [size + count for size in batch.length]
        parts: list[Any] = cache_rows.buffered_layers(batch.cache)
        for part in parts:
            part.advance(count)


def _current_stream() -> "torch.cuda.Stream | None":
    """Return the current stream of the device; None without one."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None
