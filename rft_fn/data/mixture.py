"""The order in which several sources are drawn from, by their shares."""

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

__all__ = ["Mixture"]


_LONGEST = 100_000  # places, at most, after which the order repeats


class Mixture:
    """The order of places of sources with these shares.

    Shares are relative: 7 and 3 are 0.7 and 0.3. ValueError for shares that are not above 0, and whose order
    would not repeat within 100,000 places.
    """

    def __init__(self, shares: Sequence[Fraction]):
        if any(share <= 0 for share in shares):
            raise ValueError(f"shares: expected each above 0, got {', '.join(map(str, shares))}")

        # the smallest whole numbers of the same proportions
        denominator = math.lcm(*(share.denominator for share in shares))
        whole = [int(share * denominator) for share in shares]
        self.weights = tuple(w // math.gcd(*whole) for w in whole)
        if sum(self.weights) > _LONGEST:
            raise ValueError(
                f"shares: expected the proportions of whole numbers that add up to at most {_LONGEST}, got "
                f"{':'.join(map(str, self.weights))}; round them"
            )

        self._period = sum(self.weights)
        self._order, self._before, self._places = _pattern(self.weights)

    def source(self, place: int) -> tuple[int, int]:
        """Return (k, j): a place holds row j drawn from source k, from 0."""
        turn, at = divmod(place, self._period)
        k = self._order[at]
        return k, turn * self.weights[k] + self._before[at]

    def place(self, k: int, j: int) -> int:
        """Return the place of row j drawn from source k: the inverse of `source`."""
        turn, at = divmod(j, self.weights[k])
        return turn * self._period + self._places[k][at]

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n places each source has."""
        turns, rest = divmod(n, self._period)
        last = self._order[:rest]
        return [turns * w + last.count(k) for k, w in enumerate(self.weights)]

    def first(self, n: int, sizes: Sequence[int | None]) -> list[int]:
        """Return the first n places of rows that exist. Source k has sizes[k] rows; None is without end."""
        # no more places than there are rows in all
        count = n if None in sizes else min(n, sum(size or 0 for size in sizes))
        kept: list[int] = []
        place = 0
        while len(kept) < count:
            k, j = self.source(place)
            size = sizes[k]
            if size is None or j < size:
                kept.append(place)
            place += 1
        return kept


@cache
def _pattern(weights: tuple[int, ...]) -> tuple[array, array, tuple[array, ...]]:
    """Return (source of each place, its earlier places in the period, places of each source).

    Row j of a source with share w belongs into the places floor(j / w) to ceil((j + 1) / w) - 1. Of the rows
    whose first place has come, the one with the earliest last place is next: that meets every last place, so
    the count of any source in the first n places is between n w - 1 and n w + 1, both excluded (Baruah et
    al., Proportionate progress, 1996, with one resource).
    """
    period = sum(weights)
    drawn = [0] * len(weights)
    order = array("q")
    before = array("q")
    places = tuple(array("q") for _ in weights)
    for at in range(period):
        # the sources with a next row that may come here
        ready = [k for k, w in enumerate(weights) if drawn[k] < w and drawn[k] * period // w <= at]

        # of them the one with the earliest last place, rounded up
        k = min(ready, key=lambda k: -(-(drawn[k] + 1) * period // weights[k]))
        order.append(k)
        before.append(drawn[k])
        places[k].append(at)
        drawn[k] += 1
    return order, before, places
