"""Families of rows that begin alike: samples of a prompt, branches of a response, turns of an episode.

A model that computes equal beginnings once reads a family as a trie over its tokens. In the order of the trie
each row adds what it does not have in common with the row before it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rft_fn.types import Experience

__all__ = ["Families", "find_families"]

LEAST = 0.1  # share of the shorter of two rows that they must have in common, where their prompts differ
BLOCK = 64  # tokens that samples of one prompt may have in common by chance: only whole blocks count


class Families(NamedTuple):
    """Units that begin alike. Those of size 0 are in no family."""

    members: list[list[int]]  # the units of each family, in the order of their trie
    saved: list[int]  # tokens of each unit that it has in common with the one before it in its family


def find_families(exp: Experience, sizes: Sequence[int], rows: Sequence[int]) -> Families:
    """Return the families of units, given the inputs and the rows of each.

    Of a unit its first row is compared. Units of one prompt, which is what precedes the first sampled token,
    are a family. So are units of one group whose rows have a tenth of their tokens in common, whatever was
    sampled of these: a context that was rewritten, or read again with another turn behind it.
    """
    starts = [0, *itertools.accumulate(rows)][: len(rows)]
    first = torch.tensor(starts, dtype=torch.long, device=exp.tokens.device)
    prompts = exp.mask[first].int().argmax(-1).tolist()
    lengths = exp.length[first].tolist()
    tokens = [row[:n] for row, n in zip(exp.tokens[first].cpu().numpy(), lengths)]
    filled = [i for i, size in enumerate(sizes) if size]

    # a unit without a prompt is its own family
    known: dict[bytes | int, int] = {}
    family = {i: known.setdefault(tokens[i][: prompts[i]].tobytes() or i, len(known)) for i in filled}
    into = list(range(len(known)))

    def joined(number: int) -> int:
        while into[number] != number:
            number = into[number]
        return number

    group = range(len(rows)) if exp.group is None else exp.group[first].tolist()
    groups: dict[int, list[int]] = {}
    for i in filled:
        groups.setdefault(group[i], []).append(i)
    for units in groups.values():
        if len({family[i] for i in units}) == 1:
            continue
        for a, b in itertools.pairwise(_in_order(tokens, units)):
            if _alike(tokens[a], tokens[b]) >= LEAST * min(lengths[a], lengths[b]):
                into[joined(family[b])] = joined(family[a])

    members: dict[int, list[int]] = {}
    for i in filled:
        members.setdefault(joined(family[i]), []).append(i)

    saved = [0] * len(sizes)
    ordered = []
    for units in members.values():
        order = _in_order(tokens, units)
        saved[order[0]] = prompts[order[0]]
        for a, b in itertools.pairwise(order):
            alike = _alike(tokens[a], tokens[b])
            read = min(alike, max(prompts[a], prompts[b]))
            saved[b] = read + (alike - read) // BLOCK * BLOCK
        # samples of one prompt and nothing else in common: no order is better than that of the batch
        one_prompt = len({family[i] for i in units}) == 1
        ordered.append(units if one_prompt and all(saved[i] == prompts[i] for i in units) else order)
    return Families(ordered, [min(n, size) for n, size in zip(saved, sizes)])


def _in_order(tokens: Sequence[Any], units: Sequence[int]) -> list[int]:
    """Return units in an order in which each has its longest common beginning with the one before it."""
    return sorted(units, key=lambda i: tokens[i].tobytes())


def _alike(a: Any, b: Any) -> int:
    """Return how many tokens two rows begin with alike."""
    size = min(len(a), len(b))
    same = a[:size] == b[:size]
    return size if same.all() else int(same.argmin())
