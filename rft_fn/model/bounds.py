"""The boundaries of a pack's sequences, and the axis that splits its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from rft_fn.types import Packed, TokenOut

__all__ = ["COUNTS", "Prefixes", "SequenceAxis", "SequenceBounds", "find_prefixes", "take_rows"]


# ---------- tokens of a pack that begin alike: the hidden states of all of them are computed once


LEAST = 0.1  # share of a pack's tokens that must be saved: attention gathers what the others save


@dataclass
class Counts:
    """Tokens of the packs that models of this process have read, and those that they computed."""

    read: int = 0
    computed: int = 0


COUNTS = Counts()


class Prefixes(NamedTuple):
    """Which tokens of a pack are computed, and where the others get their hidden state."""

    kept: Tensor  # [U] i64, the tokens that are computed, in order
    of: Tensor  # [T] i64, the place among `kept` of a token with the same beginning
    own: list[int]  # how many of `kept` are in each sequence: its last ones


def find_prefixes(
    tokens: Tensor, pos: Tensor, sizes: Sequence[int], routing: Tensor | None = None
) -> Prefixes | None:
    """Return the tokens [T] of a pack to compute, given its positions [T] and sizes of sequences.

    Two tokens share a hidden state if they are at the same place of their sequences, after equal tokens; with
    a `routing` [T, M, k] only if they and those before them go to the same experts too. None if that saves
    less than a tenth of the tokens. Reads the tokens: they should be on the host.
    """
    starts = [0, *accumulate(sizes)]
    ids = np.array(tokens.tolist())  # inside a transform of functions a tensor has no array
    if routing is not None:
        bytes_of = [ids.reshape(-1, 1).view(np.uint8), routing.flatten(1).contiguous().numpy().view(np.uint8)]
        both = np.concatenate(bytes_of, 1)
        ids = np.unique(both.view(np.dtype((np.void, both.shape[1]))), return_inverse=True)[1].ravel()
    at = np.array(pos.tolist())

    # Padding after a sequence is at position 0: it is no continuation.
    rows = []
    for start, size in zip(starts, sizes):
        counted = at[start : start + size] == np.arange(size)
        rows.append(ids[start : start + _leading(counted)])

    # In the order of their bytes, a row has its longest common beginning with the row before it.
    owner = np.arange(len(ids))
    order = sorted(range(len(rows)), key=lambda k: rows[k].tobytes())
    for before, k in pairwise(order):
        size = min(len(rows[before]), len(rows[k]))
        size = _leading(rows[before][:size] == rows[k][:size])
        owner[starts[k] : starts[k] + size] = owner[starts[before] : starts[before] + size]

    kept = np.flatnonzero(owner == np.arange(len(ids)))
    if len(kept) > (1 - LEAST) * len(ids):
        return None
    place = np.zeros(len(ids), dtype=np.int64)
    place[kept] = np.arange(len(kept))
    own = [int(np.sum((kept >= start) & (kept < start + size))) for start, size in zip(starts, sizes)]
    return Prefixes(torch.from_numpy(kept), torch.from_numpy(place[owner]), own)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] of rows x [U, ...], with a gradient that adds rows up in one order.

    The gradient of plain indexing adds them as threads come along, and is not the same bits twice.
    """
    return embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])


def _leading(true: np.ndarray) -> int:
    """Return how many values are true before the first that is not."""
    return len(true) if true.all() else int(true.argmin())


# ---------- the boundaries of a pack's sequences, and the axis that splits its tokens


class SequenceAxis(Protocol):
    """Processes that share the tokens of each pack (sequence parallelism)."""

    size: int  # number of processes k
    rank: int  # this process's place among them

    def split(self, pack: Packed) -> "tuple[Packed, SequenceBounds]":
        """Return (this process's tokens [T / k] of the pack, the boundaries of all T)."""
        ...

    def join(self, out: TokenOut, size: int) -> TokenOut:
        """Join values [T / k] of each process -> [size] of all, with a gradient."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the processes, in place and without a gradient."""
        ...

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange all heads of [T / k] tokens -> some heads of all T tokens."""
        ...

    def share(self, x: Tensor) -> Tensor:
        """Return numbers of all heads [H] -> numbers of this process's heads [H / k]."""
        ...

    def tokens(self, x: Tensor) -> Tensor:
        """Exchange some heads of all T tokens -> all heads of [T / k] tokens."""
        ...


class Tail(NamedTuple):
    """Sequences of one size with their last tokens computed, and the first shared with others."""

    queries: Tensor  # [n, own] i64, among the kept tokens of the pack
    keys: Tensor  # [n, size] i64, among the kept tokens of the pack
    mask: Tensor | None  # [own, size] bool, the keys of each query; None if all tokens are its own


class RaggedTails(NamedTuple):
    """The sequences that compute a token, one after another: their kept tokens, and all their tokens."""

    keys: Tensor  # [S] i64, among the kept tokens of the pack, which are the queries
    cu_queries: Tensor  # [K + 1] i32, cumulative numbers of kept tokens
    cu_keys: Tensor  # [K + 1] i32, cumulative numbers of all tokens
    longest_queries: int
    longest_keys: int


class SequenceBounds:
    """Where the sequences of a pack lie: their sizes in tokens, in order.

    `runs` are (sequences, tokens of each) of neighbours of one size; `groups` are the sequences of each
    size, if it pays to bring them together first. `calls` counts the attention layers that got the
    boundaries, so that a model that drops them is noticed. `sequence` is the axis over which the tokens of
    the pack are split, if they are. `whole` is the pack itself, if it has media: every process looks at
    all of them. With `prefixes` a model computes only the tokens that these keep, and `refused` is what
    one of its layers asks for that needs them all.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        sequence: SequenceAxis | None = None,
        whole: Packed | None = None,
        prefixes: Prefixes | None = None,
    ):
        self.sizes = list(sizes)
        self.sequence = sequence
        self.whole = whole
        self.prefixes = prefixes
        self.refused: str | None = None
        self.device = device
        self.longest = max(self.sizes)
        self.calls = 0
        self._cut: tuple[Tensor | None, bool, Tensor] | None = None

        by_length: dict[int, list[int]] = {}
        for i, size in enumerate(self.sizes):
            by_length.setdefault(size, []).append(i)
        self.runs = [(len(list(run)), size) for size, run in groupby(self.sizes)]

        # Reordering copies q, k and v, so it pays only where many sequences have the same length, apart.
        pays = 2 * len(by_length) <= len(self.sizes) and len(by_length) < len(self.runs)
        self.groups = by_length if pays else None

    @cached_property
    def cu(self) -> Tensor:
        """Return cumulative sizes [K + 1] i32: each sequence's start, and the end."""
        return torch.tensor([0, *self.sizes]).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def order(self) -> Tensor:
        """Return the tokens [T] i64, sequences of one length together."""
        starts = [0, *accumulate(self.sizes)]
        members = [i for group in (self.groups or {}).values() for i in group]
        tokens = [t for i in members for t in range(starts[i], starts[i + 1])]
        return torch.tensor(tokens).to(self.device)

    @cached_property
    def inverse(self) -> Tensor:
        """Return the place [T] i64 of each token in `order`."""
        return self.order.argsort()

    @cached_property
    def batches(self) -> list[list[int]]:
        """Return the sequences in batches, the longest first, which padding at most doubles."""
        found: list[list[int]] = []
        for i in sorted(range(len(self.sizes)), key=lambda i: -self.sizes[i]):
            if not found or 2 * self.sizes[i] < self.sizes[found[-1][0]]:
                found.append([])
            found[-1].append(i)
        return found

    @cached_property
    def tails(self) -> list[Tail]:
        """Return the sequences that keep a token, by their size and number of kept tokens."""
        assert self.prefixes is not None
        _, of, own = self.prefixes
        starts = [0, *accumulate(self.sizes)]
        firsts = [0, *accumulate(own)]
        kinds: dict[tuple[int, int], list[int]] = {}
        for i, kind in enumerate(zip(self.sizes, own)):
            if kind[1]:
                kinds.setdefault(kind, []).append(i)

        tails = []
        for (size, count), members in kinds.items():
            keys = torch.tensor([starts[i] for i in members])[:, None] + torch.arange(size)
            queries = torch.tensor([firsts[i] for i in members])[:, None] + torch.arange(count)
            mask = None
            if count < size:
                mask = torch.ones(count, size, dtype=torch.bool, device=self.device).tril(size - count)
            tails.append(Tail(queries.to(self.device), of[keys.to(self.device)], mask))
        return tails

    @cached_property
    def ragged_tails(self) -> RaggedTails:
        """Return the sequences that keep a token, in their order."""
        assert self.prefixes is not None
        counts, sizes = torch.tensor(self.prefixes.own), torch.tensor(self.sizes)
        computes = counts > 0
        keys = computes.repeat_interleave(sizes).nonzero()[:, 0].to(self.device)
        counts, sizes = counts[computes], sizes[computes]
        return RaggedTails(
            keys=self.prefixes.of[keys],
            cu_queries=pad(counts.cumsum(0), (1, 0)).to(self.device, torch.int32),
            cu_keys=pad(sizes.cumsum(0), (1, 0)).to(self.device, torch.int32),
            longest_queries=int(counts.max()),
            longest_keys=int(sizes.max()),
        )

    @cached_property
    def unpermute(self) -> Tensor:
        """Return the inverse permutation [U] i64 of the queries of all `tails`."""
        return torch.cat([tail.queries.flatten() for tail in self.tails]).argsort()

    @cached_property
    def same(self) -> Tensor:
        """Return whether two tokens are in one sequence, [T, T] bool, for layers that need a whole mask."""
        seq = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes)).to(self.device)
        return seq[:, None] == seq

    def cut(self, mask: Tensor | None, *, causal: bool) -> Tensor:
        """Return `mask` [1, 1, T, T] without the pairs of tokens of two sequences.

        A `mask` of None means a causal one, or without `causal` for a full one. The result is kept
        for the next layer, which mostly has the same mask.
        """
        if self._cut is not None and self._cut[0] is mask and self._cut[1] == causal:
            return self._cut[2]
        same = self.same[None, None]
        if mask is None and causal:
            new = same.tril()
        elif mask is None:
            new = same
        elif mask.dtype == torch.bool:
            new = mask & same
        else:
            new = mask.masked_fill(~same, torch.finfo(mask.dtype).min)
        self._cut = (mask, causal, new)
        return new
