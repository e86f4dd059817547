"""Verdicts of several samples, orders and opponents, taken together: pure functions.

NaN is a sample without a verdict, and is left out.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "VOTES", "Match", "Vote", "alone", "check_count", "consistent", "majority", "mean", "median", "named",
    "round_robin", "shares", "spread", "temperature_for", "versus",
]  # fmt: skip


class Vote(Protocol):
    """Puts the verdicts of a question together."""

    def __call__(self, verdicts: Tensor, /) -> Tensor:
        """[Q, K] float64 -> [Q]: one verdict for the K samples of each question; NaN where all are."""
        ...


def mean(verdicts: Tensor) -> Tensor:
    """[Q, K] -> [Q]: the mean."""
    return verdicts.nanmean(-1)


def median(verdicts: Tensor) -> Tensor:
    """[Q, K] -> [Q]: the middle one; the mean of the two in the middle of an even number."""
    return verdicts.nanquantile(0.5, dim=-1)


def majority(verdicts: Tensor) -> Tensor:
    """[Q, K] -> [Q]: the most frequent one; the mean of those that are equally frequent."""
    count = (verdicts[:, :, None] == verdicts[:, None, :]).sum(-1)  # NaN equals nothing: 0
    most = count.amax(-1, keepdim=True)
    # each value weighs as often as it occurs, which is equally often for all that are left
    return verdicts.where((count == most) & (count > 0), torch.nan).nanmean(-1)


VOTES: dict[str, Vote] = {"mean": mean, "majority": majority, "median": median}
"""The votes by their names on the command line."""


def named(name: str) -> Vote:
    """The vote of a name. ValueError for another, with those that there are."""
    if name not in VOTES:
        raise ValueError(f"vote: expected one of {', '.join(VOTES)}, got {name!r}")
    return VOTES[name]


def check_count(votes: int) -> None:
    """ValueError unless `votes`, the samples of each question, is a whole number above 0."""
    if not isinstance(votes, int) or votes < 1:
        raise ValueError(f"votes: expected a whole number, at least 1, got {votes!r}")


def temperature_for(votes: int) -> float:
    """The usual temperature of the samples: 0 for one, 1 for several. ValueError for no such number."""
    check_count(votes)
    return float(votes > 1)


def spread(verdicts: Tensor) -> float:
    """[Q, K] -> the standard deviation of a question's samples, on average over the questions.

    sqrt(mean((v - mean(v))^2)) over the samples with a verdict.
    """
    centred = verdicts - verdicts.nanmean(-1, keepdim=True)
    return float(centred.square().nanmean(-1).sqrt().nanmean())


class Match(NamedTuple):
    """A question of a judge: which completion stands where."""

    a: int | None  # in the place of A, or the only one; None for the reference
    b: int | None  # in the place of B; None for the reference, and for nothing


def alone(count: int) -> list[Match]:
    """Each completion by itself: count questions."""
    return [Match(i, None) for i in range(count)]


def versus(count: int, *, both_orders: bool) -> list[Match]:
    """Each completion against its reference: count questions, or 2 count in both orders.

    In one order alone the completion is A.
    """
    found = [Match(i, None) for i in range(count)]
    if both_orders:
        found += [Match(None, i) for i in range(count)]
    return found


def round_robin(groups: Sequence[Hashable], *, both_orders: bool) -> list[Match]:
    """Each completion against all others of its group.

    G (G - 1) questions for a group of G in both orders. In one order half as many, in which a completion is
    as often A as B, or once more or less.
    """
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    found = []
    for own in members.values():
        for x, i in enumerate(own):
            for y, j in enumerate(own[:x]):
                first, second = i, j
                if (x - y) % 2:
                    first, second = j, i
                found.append(Match(first, second))
                if both_orders:
                    found.append(Match(second, first))
    return found


def shares(verdict: Tensor, matches: Sequence[Match], count: int) -> Tensor:
    """verdict [Q] -> [count] float64: the mean of what a completion won; NaN where it has no verdict.

    The one in the place of A wins the verdict, the one in the place of B what is left of 1.
    """
    won = torch.zeros(count, dtype=torch.float64)
    played = torch.zeros(count, dtype=torch.float64)
    for share, match in zip(verdict.tolist(), matches, strict=True):
        if share != share:
            continue
        if match.a is not None:
            won[match.a] += share
            played[match.a] += 1
        if match.b is not None:
            won[match.b] += 1 - share
            played[match.b] += 1
    return won / played


def consistent(verdict: Tensor, matches: Sequence[Match]) -> float | None:
    """The share of pairs that have the same winner, or a tie, in both orders.

    None where no pair has a verdict in both.
    """
    known = {match: share for match, share in zip(matches, verdict.tolist(), strict=True) if share == share}
    same = []
    for match, share in known.items():
        turned = known.get(Match(match.b, match.a))
        if turned is not None:
            same.append((share > 0.5) == (turned < 0.5) and (share < 0.5) == (turned > 0.5))
    if not same:
        return None
    return sum(same) / len(same)
