"""The part of the prompts that a rank samples and judges."""

from rft_fn.types import Strategy

__all__ = ["part_of_rank"]


def part_of_rank(strategy: Strategy, count: int) -> slice:
    """The prompts of this rank, in order: equally many on each, fewer or none on the last ones."""
    size = -(-count // strategy.world)  # rounded up
    first = min(strategy.rank * size, count)
    return slice(first, min(first + size, count))
