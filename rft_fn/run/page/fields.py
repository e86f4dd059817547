"""The numbers of a token that it can be coloured by, on the page and in a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["FIELDS", "Field", "Name", "full_scale", "hue", "level"]

Name = Literal[
    "push", "adv", "ratio", "clipped", "entropy", "mismatch", "w", "change", "logp", "ref_gap"
]  # in the order of a menu


class Field(NamedTuple):
    """How a number is called and coloured, and what it is."""

    label: str
    kind: Literal["signed", "ratio", "flag", "amount", "surprise"]
    meaning: str


FIELDS: dict[Name, Field] = {
    "push": Field(
        "push of the loss",
        "signed",
        "how the first update pushed the log-prob: - w dloss/dlogp; blue makes the token more probable",
    ),
    "adv": Field("advantage", "signed", "blue is better than the rest of the group"),
    "ratio": Field("ratio", "ratio", "probability after the updates over that before them; blue grew"),
    "clipped": Field(
        "clipped or not",
        "flag",
        "the loss has no gradient left at this token, though it has an advantage",
    ),
    "entropy": Field("entropy", "amount", "of the distribution that the token was drawn from [nats]"),
    "mismatch": Field(
        "mismatch with the sampler",
        "signed",
        "log-prob of the trainer less the sampler's, at equal weights",
    ),
    "w": Field("weight", "amount", "share of the token in the loss of the batch"),
    "change": Field("change of the log-prob", "signed", "through the updates of this step"),
    "logp": Field("surprise", "surprise", "- log-prob before the updates [nats]"),
    "ref_gap": Field("distance from the reference", "signed", "log-prob less the initial model's"),
}
"""Every number by its name in tokens.jsonl. The page's script reads this table too."""


def level(name: Name, value: float) -> float:
    """The size of the colour of a token with this number, 0 for none; its sign tells two colours apart."""
    kind = FIELDS[name].kind
    if kind == "ratio":
        return math.log(max(value, 1e-9))
    if kind == "surprise":
        return -value
    return value


def full_scale(rows: Sequence[Mapping[str, Any]], name: Name) -> float:
    """The level that has the full colour: larger than 95 of 100 others."""
    values = [x for row in rows for x in row.get(name, ()) if x is not None]
    sizes = sorted(abs(level(name, x)) for x in values)
    if not sizes:
        return 1.0
    return sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0


def hue(name: Name, size: float) -> Literal["good", "bad", "much"]:
    """The colour of a level: blue or orange for what has two directions, purple for what has one."""
    kind = FIELDS[name].kind
    if kind in ("amount", "surprise"):
        return "much"
    if kind == "flag" or size < 0:
        return "bad"
    return "good"
