"""Limits of options: a value outside of them is named, with what was expected."""

from dataclasses import dataclass, field
from math import inf, nan
from typing import Annotated, Literal

import pytest
from each_case import each

from rft_fn import limits


@dataclass(frozen=True)
class Part:
    size: limits.Free[limits.Count] = 1


@dataclass(frozen=True)
class Options:
    lr: limits.Positive = 1e-3
    end: limits.Share = 0.1
    decay: limits.Decay = 0.0
    steps: limits.Count = 1
    warmup: limits.Whole = 0
    shift: limits.Finite = 0.0
    angle: Annotated[float, limits.Range(-1, 1, open_low=True)] = 0.0
    high: limits.Positive | None = None
    shape: Literal["line", "cosine"] = "line"
    names: tuple[str, ...] = ()
    k: tuple[limits.Count, ...] = (1,)
    out: limits.Free[limits.Filled] = "runs/x"
    on: bool = False
    seed: limits.Seed = 0  # an integer of any size is compared, also one beyond all floats
    part: Part = field(default_factory=Part)

    __post_init__ = limits.fields


@each(
    ("options", "message"),
    [
        ({"lr": nan}, "lr: expected a number in (0, inf), got nan"),
        ({"lr": inf}, "lr: expected a number in (0, inf), got inf"),
        ({"lr": 0.0}, "lr: expected a number in (0, inf), got 0.0"),
        ({"lr": "1"}, "lr: expected a number in (0, inf), got '1'"),
        ({"end": 1.1}, "end: expected a number in [0, 1], got 1.1"),
        ({"decay": 1.0}, "decay: expected a number in [0, 1), got 1.0"),
        ({"steps": 0}, "steps: expected an integer in [1, inf), got 0"),
        ({"steps": 2.0}, "steps: expected an integer in [1, inf), got 2.0"),
        ({"steps": True}, "steps: expected an integer in [1, inf), got True"),
        ({"warmup": -1}, "warmup: expected an integer in [0, inf), got -1"),
        ({"shift": -inf}, "shift: expected a number in (-inf, inf), got -inf"),
        ({"angle": -1.0}, "angle: expected a number in (-1, 1], got -1.0"),
        ({"high": 0.0}, "high: expected a number in (0, inf), or None, got 0.0"),
        ({"shape": "curve"}, "shape: expected one of line, cosine, got 'curve'"),
        ({"names": "abc"}, "names: expected a tuple, got 'abc'"),
        ({"names": ("a", 1)}, "names[1]: expected a text, got 1"),
        ({"k": (1, 0)}, "k[1]: expected an integer in [1, inf), got 0"),
        ({"out": None}, "out: expected a text, got None"),
        ({"out": ""}, "out: expected a text that is not empty, got ''"),
        ({"out": " \t"}, r"out: expected a text that is not empty, got ' \t'"),
        ({"steps": 10**20}, f"steps: expected an integer of at most 64 bits, got {10**20}"),
        ({"lr": 1e308}, "lr: expected a number in [-3.4e+38, 3.4e+38], got 1e+308"),
        ({"shift": -(10**39)}, f"shift: expected a number in [-3.4e+38, 3.4e+38], got {-(10**39)}"),
        ({"k": (1, 2**63)}, f"k[1]: expected an integer of at most 64 bits, got {2**63}"),
        ({"on": "yes"}, "on: expected True or False, got 'yes'"),
        ({"part": Part(0)}, "part.size: expected an integer in [1, inf), got 0"),
        ({"seed": 10**400}, f"seed: expected an integer in [{-(2**63)}, {2**63 - 1}], got {10**400}"),
    ],
)
def test_an_option_outside_of_its_limits_is_named(options, message):
    with pytest.raises(ValueError) as error:
        Options(**options)
    assert str(error.value) == message


def test_limits_hold_what_is_inside_and_free_options_are_known():
    Options(lr=1, end=1.0, decay=0.99, warmup=0, angle=1.0, high=None, shape="cosine", k=(1, 8))
    Options(high=0.5, shift=-3.0, part=Part(7), steps=2**63 - 1, out="a b")
    assert limits.free(Options) == {"out", "part.size"}
