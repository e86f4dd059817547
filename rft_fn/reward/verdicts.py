"""Read a judge's answers: what it said -> a verdict in [0, 1] or None; and vote over verdicts.

A parser is a frozen record and the inverse of its own `write`: parse(parse.write(v)) is v for every verdict v
that the form can express. All of them read only the *last* verdict: a judge that repeats one that it was
shown, and then gives its own, is taken at its own. One that is broken, not a number, or out of range is not
replaced by an earlier one.

Numbers are decimals in ASCII digits. `float` reads more: nan, inf, 1e9, 1_0 and digits of other scripts.
"""

import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rft_fn.foreign_json import json_at

__all__ = [
    "VOTES", "Choice", "JsonNumber", "Match", "Parser", "TaggedNumber", "TerseNumber", "Vote",
    "after_thoughts", "agreement", "check_count", "consistent", "majority", "mean", "median", "named",
    "number", "round_robin", "shares", "single", "spread", "temperature_for", "versus",
]  # fmt: skip


# ---------- parsers


_SPACES = " \t\r\n"
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Parser(Protocol):
    """Reads the verdict of a judge."""

    def __call__(self, said: str, /) -> float | None:
        """Return the verdict in [0, 1]: 1 is best, and for a pair 1 says that A is better.

        None for text without a verdict that can be read.
        """
        ...

    def write(self, verdict: float, /) -> str:
        """Return the text of a verdict in [0, 1], as a judge should say it."""
        ...


def number(text: str) -> float | None:
    """Read a decimal number in ASCII digits, such as -3 or 4.25; None for any other text."""
    return None if _NUMBER.fullmatch(text) is None else float(text)


def after_thoughts(said: str) -> str | None:
    """Return the answer after the last </think>; None for thoughts that did not end."""
    answer = said.rpartition("</think>")[2]
    return None if "<think>" in answer else answer


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`. ValueError unless both are finite and `low` is below."""

    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low, high: expected finite numbers, low < high, got {self.low}, {self.high}")

    def share(self, x: float | None) -> float | None:
        """Return (x - low) / (high - low); None for no number and for one out of range."""
        if x is None or not self.low <= x <= self.high:
            return None
        return (x - self.low) / (self.high - self.low)

    def shown(self, verdict: float) -> str:
        """Return the number of a verdict, to nine digits."""
        x = self.low + verdict * (self.high - self.low)
        return f"{x:.9f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class TaggedNumber(_Range):
    """A number in a tag: <score>7</score>."""

    tag: str = "score"

    def __call__(self, said: str, /) -> float | None:
        return self.share(number(_last_tag(said, self.tag)))

    def write(self, verdict: float, /) -> str:
        """Return the tag of a verdict."""
        return f"<{self.tag}>{self.shown(verdict)}</{self.tag}>"


def _last_tag(said: str, tag: str) -> str:
    """Return the content of the last tag, without spaces around it; "" unless it is whole."""
    _, opened, rest = said.rpartition(f"<{tag}>")
    content, closed, _ = rest.partition(f"</{tag}>")
    return content.strip(_SPACES) if opened and closed else ""


@dataclass(frozen=True)
class Choice:
    """The better one of a pair, in a tag: <better>A</better>, B, or tie."""

    tag: str = "better"

    def __call__(self, said: str, /) -> float | None:
        return {"A": 1.0, "B": 0.0, "tie": 0.5}.get(_last_tag(said, self.tag))

    def write(self, verdict: float, /) -> str:
        """Return the tag of the side that a verdict is nearest to."""
        name = "A" if verdict > 0.75 else "tie"
        return f"<{self.tag}>{'B' if verdict < 0.25 else name}</{self.tag}>"


@dataclass(frozen=True)
class TerseNumber(_Range):
    """A number after a word, as the whole answer: score=1."""

    high: float = 1.0
    word: str = "score"

    def __call__(self, said: str, /) -> float | None:
        word, equals, x = said.strip(_SPACES).partition("=")
        return self.share(number(x)) if equals and word == self.word else None

    def write(self, verdict: float, /) -> str:
        """Return the word and the number of a verdict."""
        return f"{self.word}={self.shown(verdict)}"


@dataclass(frozen=True)
class JsonNumber(_Range):
    """A number in a JSON object: {"score": 7}, with any other entries."""

    key: str = "score"

    def __call__(self, said: str, /) -> float | None:
        # nothing that looks like a further verdict may follow the last whole one
        last = None
        rest = said
        for entries, end in _objects(said):
            if self.key in entries:
                last = entries[self.key]
                rest = said[end:]
        if json.dumps(self.key) in rest or not isinstance(last, _Written):
            return None
        return self.share(number(last))

    def write(self, verdict: float, /) -> str:
        """Return the object of a verdict."""
        return f'{{"{self.key}": {self.shown(verdict)}}}'


class _Written(str):
    """A number of JSON as it was written."""


_DECODER = json.JSONDecoder(parse_int=_Written, parse_float=_Written, parse_constant=_Written)


def _objects(text: str) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the outermost JSON objects of a text, each with the place where it ends."""
    at = text.find("{")
    while at >= 0:
        end = at + 1
        try:
            entries, end = json_at(text, at, decoder=_DECODER)
            yield entries, end
        except ValueError:
            pass
        at = text.find("{", end)


# ---------- verdicts of several samples, orders and opponents, taken together


Vote = Callable[[Tensor], Tensor]
"""[Q, K] float64 -> [Q]: one verdict for the K samples of each question; NaN where all are."""


def mean(verdicts: Tensor) -> Tensor:
    """Return the mean: [Q, K] -> [Q]."""
    return verdicts.nanmean(-1)


def median(verdicts: Tensor) -> Tensor:
    """Return the middle one, or the mean of the two in the middle: [Q, K] -> [Q]."""
    return verdicts.nanquantile(0.5, dim=-1)


def majority(verdicts: Tensor) -> Tensor:
    """Return the most frequent one, or the mean of equally frequent ones: [Q, K] -> [Q]."""
    count = (verdicts[:, :, None] == verdicts[:, None, :]).sum(-1)  # NaN equals nothing: 0
    most = count.amax(-1, keepdim=True)
    # each value weighs as often as it occurs: equally often for all that are left
    return verdicts.where((count == most) & (count > 0), torch.nan).nanmean(-1)


VOTES: dict[str, Vote] = {"mean": mean, "majority": majority, "median": median}
"""The votes by their names on the command line."""


def named(name: str) -> Vote:
    """Return the vote of a name. ValueError for another, with the known ones."""
    if name not in VOTES:
        raise ValueError(f"vote: expected one of {', '.join(VOTES)}, got {name!r}")
    return VOTES[name]


def check_count(votes: int) -> None:
    """Raise ValueError unless `votes`, the samples of each question, is a whole number above 0."""
    if not isinstance(votes, int) or votes < 1:
        raise ValueError(f"votes: expected a whole number, at least 1, got {votes!r}")


def temperature_for(votes: int) -> float:
    """Return the usual temperature of the samples: 0 for one, 1 for several; as `check_count`."""
    check_count(votes)
    return float(votes > 1)


def spread(verdicts: Tensor) -> float:
    """Return the standard deviation of a question's samples, on average over the questions.

    verdicts [Q, K]; sqrt(mean((v - mean(v))^2)) over the samples with a verdict.
    """
    centred = verdicts - verdicts.nanmean(-1, keepdim=True)
    return float(centred.square().nanmean(-1).sqrt().nanmean())


def agreement(verdicts: Tensor) -> Tensor:
    """Return the share of the verdicts that are the most frequent one: [Q, K] -> [Q]; NaN for none."""
    count = (verdicts[:, :, None] == verdicts[:, None, :]).sum(-1).amax(-1)
    return count / (~verdicts.isnan()).sum(-1).double()


class Match(NamedTuple):
    """A question of a judge: which completion has which place."""

    a: int | None  # in the place of A, or the only one; None for the reference
    b: int | None  # in the place of B; None for the reference, and for nothing


def single(count: int) -> list[Match]:
    """Return each completion by itself: count questions."""
    return [Match(i, None) for i in range(count)]


def versus(count: int, *, both_orders: bool) -> list[Match]:
    """Return each completion against its reference, as A; with `both_orders` as B too."""
    second = [Match(None, i) for i in range(count)] if both_orders else []
    return single(count) + second


def round_robin(groups: Sequence[Hashable], *, both_orders: bool) -> list[Match]:
    """Return each completion against all others of its group.

    G (G - 1) questions for a group of G in both orders. In one order half as many, in which a completion is
    as often A as B, or once more or less.
    """
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    matches = []
    for own in members.values():
        for x, i in enumerate(own):
            for y, j in enumerate(own[:x]):
                match = Match(j, i) if (x - y) % 2 else Match(i, j)
                matches.append(match)
                if both_orders:
                    matches.append(Match(match.b, match.a))
    return matches


def shares(verdict: Tensor, matches: Sequence[Match], count: int) -> Tensor:
    """Return the mean of what each completion won: verdict [Q] -> [count] float64; NaN without a verdict.

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
    """Return the share of pairs with the same winner, or a tie, in both orders; None for no such pair."""
    known = {match: share for match, share in zip(matches, verdict.tolist(), strict=True) if share == share}
    same = []
    for match, share in known.items():
        turned = known.get(Match(match.b, match.a))
        if turned is not None:
            same.append((share > 0.5) == (turned < 0.5) and (share < 0.5) == (turned > 0.5))
    return sum(same) / len(same) if same else None
