r"""Parsers of a judge's answer: what it said -> a verdict in [0, 1], or None where there is none.

A parser is a frozen record and the inverse of its own `write`: parse(parse.write(v)) is v for every verdict v
that the form can express. All of them read the *last* verdict, alone: a judge that repeats one that it was
shown, and then gives its own, is taken at its own. One that is broken, not a number, or out of range is not
replaced by an earlier one.

Numbers are decimals in ASCII digits. `float` reads more: nan, inf, 1e9, 1_0 and digits of other scripts.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rft_fn import check

__all__ = ["Choice", "JsonNumber", "Parser", "TaggedNumber", "TerseNumber", "behind_thoughts", "number"]

_SPACES = " \t\r\n"
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Parser(Protocol):
    """Reads the verdict of a judge."""

    def __call__(self, said: str, /) -> float | None:
        """The verdict in [0, 1]: 1 is best, and for a pair 1 says that A is better.

        None for text without a verdict that can be read.
        """
        ...

    def write(self, verdict: float, /) -> str:
        """The text of a verdict in [0, 1], as a judge should say it."""
        ...


def number(text: str) -> float | None:
    """A decimal number in ASCII digits, such as -3 or 4.25; None for any other text."""
    if _NUMBER.fullmatch(text) is None:
        return None
    return float(text)


def behind_thoughts(said: str) -> str | None:
    """The answer behind the last </think>; None for thoughts that did not end."""
    answer = said.rpartition("</think>")[2]
    if "<think>" in answer:
        return None
    return answer


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`. ValueError unless both are finite and `low` is below."""

    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low, high: expected finite numbers, low < high, got {self.low}, {self.high}")

    def share(self, x: float | None) -> float | None:
        """(x - low) / (high - low); None for no number and for one out of range."""
        if x is None or not self.low <= x <= self.high:
            return None
        return (x - self.low) / (self.high - self.low)

    def shown(self, verdict: float) -> str:
        """The number of a verdict, to nine digits."""
        x = self.low + verdict * (self.high - self.low)
        return f"{x:.9f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class TaggedNumber(_Range):
    """A number in a tag: <score>7</score>."""

    tag: str = "score"

    def __call__(self, said: str, /) -> float | None:
        return self.share(number(_last_tag(said, self.tag)))

    def write(self, verdict: float, /) -> str:
        """The tag of a verdict."""
        return f"<{self.tag}>{self.shown(verdict)}</{self.tag}>"


def _last_tag(said: str, tag: str) -> str:
    """The content of the last tag, without spaces around it; "" unless it is whole."""
    behind = said.rpartition(f"<{tag}>")
    if not behind[1]:
        return ""
    content, closed, _ = behind[2].partition(f"</{tag}>")
    if not closed:
        return ""
    return content.strip(_SPACES)


@dataclass(frozen=True)
class Choice:
    """The better one of a pair, in a tag: <better>A</better>, B, or tie."""

    tag: str = "better"

    def __call__(self, said: str, /) -> float | None:
        return {"A": 1.0, "B": 0.0, "tie": 0.5}.get(_last_tag(said, self.tag))

    def write(self, verdict: float, /) -> str:
        """The tag of the side that a verdict is nearest to."""
        name = "tie"
        if verdict > 0.75:
            name = "A"
        elif verdict < 0.25:
            name = "B"
        return f"<{self.tag}>{name}</{self.tag}>"


@dataclass(frozen=True)
class TerseNumber(_Range):
    """A number behind a word, as the whole answer: score=1."""

    high: float = 1.0
    word: str = "score"

    def __call__(self, said: str, /) -> float | None:
        word, found, x = said.strip(_SPACES).partition("=")
        if not found or word != self.word:
            return None
        return self.share(number(x))

    def write(self, verdict: float, /) -> str:
        """The word and the number of a verdict."""
        return f"{self.word}={self.shown(verdict)}"


@dataclass(frozen=True)
class JsonNumber(_Range):
    """A number in a JSON object: {"score": 7}, with any other entries beside it."""

    key: str = "score"

    def __call__(self, said: str, /) -> float | None:
        # nothing that looks like a further verdict may stand behind the last whole one
        last = None
        rest = said
        for found, end in _objects(said):
            if self.key in found:
                last = found[self.key]
                rest = said[end:]
        if json.dumps(self.key) in rest:
            return None
        if isinstance(last, _Written):
            return self.share(number(last))
        return None

    def write(self, verdict: float, /) -> str:
        """The object of a verdict."""
        return f'{{"{self.key}": {self.shown(verdict)}}}'


class _Written(str):
    """A number of JSON as it was written."""


_DECODER = json.JSONDecoder(parse_int=_Written, parse_float=_Written, parse_constant=_Written)


def _objects(text: str) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The JSON objects of a text that stand in no other, each with the place where it ends."""
    at = text.find("{")
    while at >= 0:
        end = at + 1
        try:
            found, end = check.json_at(text, at, decoder=_DECODER)
        except ValueError:
            pass
        else:
            yield found, end
        at = text.find("{", end)
