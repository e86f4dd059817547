"""From rows to packs and back.

This is the only place where anything is shifted by one. `Experience` is [B, S] and token-aligned, `Packed`
is flat [T] and label-aligned: a row of L tokens gives the L - 1 inputs tokens[:-1] with targets tokens[1:],
and every auxiliary field moves with its target. Everything here is a pure function of the global batch, so
every rank computes the same plan and takes its part of it.
"""

from rft_fn.packing.flat_rows import drop_flat
from rft_fn.packing.ids import conversations, scored, supervised
from rft_fn.packing.media import (
    counts,
    drop_borrowed,
    fill,
    owners,
    pack,
    placeholder,
    single_unit,
)
from rft_fn.packing.packs import pad, real, reset_position_ids, sides, stack, unpack
from rft_fn.packing.plan import assign, waste
from rft_fn.packing.shards import (
    Halves,
    cut,
    halves,
    left_out,
    minibatch_units,
    minibatches,
    shard,
    take,
)
from rft_fn.packing.units import common_size, count_filled, members_of, sizes_of, unit_of, units_of

__all__ = [
    "conversations", "drop_flat", "minibatch_units", "minibatches", "pack", "real", "reset_position_ids",
    "scored", "shard", "sides", "stack", "supervised", "take", "unit_of", "unpack",
]  # fmt: skip
