"""Plans of packs, from sizes in tokens and costs alone.

A plan tells which items share a pack, and which rank gets it.
"""

from collections.abc import Sequence

__all__ = ["assign", "bundle", "deal", "spread", "waste"]


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices of items, from the largest to the smallest.

    Those of size 0 are left out; ties go by index.
    """
    return sorted((i for i, n in enumerate(sizes) if n), key=lambda i: (-sizes[i], i))


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
    room: list[int] = []  # tokens that each pack still takes
    held: list[int] = []  # rows that each pack has
    rows = rows or [1] * len(sizes)
    for i in _largest_first(sizes):
        if sizes[i] > budget:
            raise ValueError(
                f"budget: expected at least {sizes[i]} tokens, the size of row {i}, got {budget}; "
                "raise the budget or shorten max_new"
            )

        # the fullest pack that takes the item leaves the larger gaps to others
        free = [k for k in range(len(packs)) if not most or held[k] + rows[i] <= most]
        fits = [(room[k] - sizes[i], k) for k in free if room[k] >= sizes[i]]
        if fits:
            _, k = min(fits)
            packs[k].append(i)
            room[k] -= sizes[i]
            held[k] += rows[i]
        else:
            packs.append([i])
            room.append(budget - sizes[i])
            held.append(rows[i])
    return packs


def bundle(
    sizes: Sequence[int],
    families: Sequence[int],
    budget: int,
    *,
    most: int = 0,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """Put items of one family together, in lists that each fit a pack.

    `families` has a number for each item. A list has at most `budget` tokens and `most` rows (see `assign`);
    an item that is larger has a list of its own. Items of size 0 are in no list.
    """
    rows = rows or [1] * len(sizes)
    lists: list[list[int]] = []
    last: dict[int, int] = {}  # family -> its list that is being filled
    for i, size in enumerate(sizes):
        if not size:
            continue
        k = last.get(families[i])
        if k is not None:
            tokens = sum(sizes[j] for j in lists[k]) + size
            held = sum(rows[j] for j in lists[k]) + rows[i]
            if tokens <= budget and (not most or held <= most):
                lists[k].append(i)
                continue
        last[families[i]] = len(lists)
        lists.append([i])
    return lists


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
    load = [0] * count
    held = [0] * count
    rows = rows or [1] * len(sizes)
    for i in _largest_first(costs):
        free = [k for k in range(count) if not most or held[k] + rows[i] <= most]
        free = [k for k in free if room[k] >= sizes[i]]
        if not free:
            return None
        k = min(free, key=lambda k: (load[k], k))
        packs[k].append(i)
        room[k] -= sizes[i]
        load[k] += costs[i]
        held[k] += rows[i]
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
    """The share of the packs that holds no token."""
    used = sum(sizes[i] for p in packs for i in p)
    return 1 - used / max(budget * len(packs), 1)
