"""Keeps keys and values of attention with room for more tokens and rows: a new token is one write.

transformers' own layer copies all keys and values for each new token. This one holds them in tensors that are
larger than their content: tokens are appended, rows that ended are overwritten by the last ones, and rows
that join are appended too. Until a buffer is full it stays where it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rft_fn.engine.hf.cache_rows import BufferedLayer
from rft_fn.precision import widen

__all__ = ["KVBuffers", "buffer_cache", "fits"]

_ROOM = 64  # tokens that a new buffer has room for, at least, where so many may come


def fits(layer: object) -> bool:
    """Return whether a layer holds only keys and values [R, H, W, D] of every token."""
    if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
        return False
    return layer.keys.dim() == layer.values.dim() == 4 and layer.keys.shape[:3] == layer.values.shape[:3]


def buffer_cache(cache: Any, max_tokens: int, *, wide: bool = False) -> None:
    """Put buffers in place of a cache's plain keys and values.

    They are for at most `max_tokens` more tokens of a row. With `wide` they hold 16 bits in float32.
    """
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list):
        layers[:] = [KVBuffers(layer, max_tokens, wide=wide) if fits(layer) else layer for layer in layers]


class KVBuffers(DynamicLayer, BufferedLayer):
    """A layer of R rows of W tokens in buffers [R', H, W', D], between the columns `first` and `end`."""

    def __init__(self, plain: DynamicLayer, max_tokens: int, *, wide: bool = False):
        super().__init__()
        self.max_tokens = max_tokens  # more tokens than this come to no row
        assert plain.keys is not None and plain.values is not None
        held = [widen(x) if wide else x for x in (plain.keys, plain.values)]
        self.dtype, self.device = held[0].dtype, held[0].device
        self.is_initialized = True
        self.at: Tensor | None = None  # [1], the column of the next token, where the buffers are `fix`ed

        # the first new token, or the samples of each prompt, will need more room than any that is made here
        self.buffers: list[Tensor] = held
        self.end = plain.keys.shape[-2]
        self._show(len(plain.keys), 0)

    def _hold(
        self, held: Sequence[Tensor], rows: int, width: int, more: int = 0, index: Tensor | None = None
    ) -> None:
        """Copy keys and values, or their rows `index`, into buffers for `rows` rows and `more` tokens."""
        self.at = None
        room = max(min(max(_ROOM, width // 2), self.max_tokens), more)
        count = len(held[0]) if index is None else len(index)
        self.buffers = []
        for x in held:
            buffer = x.new_empty(rows, x.shape[1], width + room, x.shape[3])
            place = buffer[:count, :, width - x.shape[2] : width]
            if index is None:
                place.copy_(x)
            else:
                _copy_rows(place, x, index)
            self.buffers.append(buffer)
        self.end = width
        self._show(count, width - held[0].shape[2])

    def _show(self, rows: int, first: int) -> None:
        """Set the keys and values to the part of the buffers that is in use."""
        self.first = first
        self.keys, self.values = (buffer[:rows, :, first : self.end] for buffer in self.buffers)

    def held(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values in use, as views."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens, and return all keys and values; of fixed buffers the empty places too."""
        if self.at is not None:
            for buffer, new in zip(self.buffers, (key_states, value_states)):
                buffer.index_copy_(2, self.at, new)
            return self.buffers[0], self.buffers[1]
        keys, values = self.held()
        size = key_states.shape[-2]
        if self.end + size > self.buffers[0].shape[-2]:
            self._hold((keys, values), rows=len(keys), width=keys.shape[-2], more=size)
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[: len(keys), :, self.end : self.end + size] = new
        self.end += size
        self._show(len(keys), self.first)
        return self.held()

    def fix(self, most: int, more: int, zeros: Callable[[int, Sequence[int], Tensor], Tensor]) -> None:
        """Make room for `more` tokens in lasting buffers of at most `most` rows, in powers of two.

        `zeros(k, shape, like)` gives buffer k its place, which is where it was before. What is empty holds
        finite numbers, for a mask does not hide others.
        """
        held = self.held()
        rows, width, columns = len(held[0]), held[0].shape[2], self.buffers[0].shape[2]
        if self.at is not None and self.end + more <= columns:
            return
        if self.at is not None and 4 * (width + more) <= 3 * columns:  # else it would move again soon
            for buffer, x in zip(self.buffers, held):
                buffer[:rows, :, :width] = x.clone()
        else:
            shape = min(_power(rows), most), _power(width + max(more, min(_ROOM, self.max_tokens)))
            for k, x in enumerate(held):
                if self.at is not None:
                    x = x.clone()
                self.buffers[k] = zeros(k, (shape[0], x.shape[1], shape[1], x.shape[3]), x)
                self.buffers[k][:rows, :, :width] = x
        self.end = width
        self._show(rows, 0)

    def advance(self, count: int) -> None:
        """Count the tokens that fixed buffers were given."""
        self.end += count
        self._show(len(self.held()[0]), self.first)

    def take(self, index: Tensor, moved: Tensor) -> None:
        """Keep the rows `index` [R']; `moved` are the places with a row of another place."""
        keys, values = self.held()
        most = len(self.buffers[0])
        if len(index) > most or 2 * len(index) <= most:
            self._hold((keys, values), rows=len(index), width=keys.shape[-2], index=index)
            return
        if len(moved):
            for x, buffer in zip((keys, values), self.buffers):
                buffer[moved, :, self.first : self.end] = x[index[moved]]
        self._show(len(index), self.first)

    def join(self, other: "KVBuffers") -> None:
        """Append the rows of another layer, with the last tokens of all side by side."""
        held, new = self.held(), other.held()
        rows, width = len(held[0]), held[0].shape[-2]
        total, widest = rows + len(new[0]), max(width, new[0].shape[-2])
        if total > len(self.buffers[0]) or widest > self.end:
            self._hold(held, rows=max(total, len(self.buffers[0])), width=widest)

        # zeros before the shorter rows: attention multiplies what it does not see by 0, which keeps NaN
        first = self.end - widest
        for buffer, x in zip(self.buffers, new):
            buffer[:rows, :, first : self.end - width] = 0
            buffer[rows:total, :, first : self.end - x.shape[2]] = 0
            buffer[rows:total, :, self.end - x.shape[2] : self.end] = x
        self._show(total, first)

    def take_prompt_cache(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all rows; leave `rows` rows without any."""
        lifted = self.held()
        self.buffers = [x.new_empty(rows, x.shape[1], 0, x.shape[3]) for x in lifted]
        self.end = 0
        self._show(rows, 0)
        return lifted

    def crop_left(self, count: int) -> None:
        """Drop the first `count` cache positions, which no row sees."""
        self._show(len(self.held()[0]), self.first + count)


def _power(count: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (count - 1).bit_length()


def _copy_rows(place: Tensor, x: Tensor, index: Tensor) -> None:
    """Set place[r] = x[index[r]] for every r; on a CPU rows that repeat one after the other are one write."""
    if index.device.type != "cpu":
        place.copy_(x[index])
        return
    row, count = torch.unique_consecutive(index, return_counts=True)
    if len(row) == len(index):
        place.copy_(x[index])
        return
    start = 0
    for number, size in zip(row.tolist(), count.tolist()):
        place[start : start + size] = x[number]
        start += size
