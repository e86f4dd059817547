"""What a command line says of a reward: its source, function, column, arguments and weight."""

import ast
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Called", "Spec", "arguments", "distinct", "split", "split_weight"]


class Spec(NamedTuple):
    """A reward as a command line names it: [ADAPTER:]SOURCE[:NAME][:COLUMN][(ARGUMENTS)]."""

    text: str  # all of it
    adapter: str  # "" for none
    source: str  # "math", "task", path/file.py or package.module
    name: str  # the function, or the task; "" for the named ones
    column: str  # of the answer; "" where it is not said
    call: ast.Call | None  # the arguments

    @property
    def short(self) -> str:
        """What the reward is called where no other one has this name."""
        if self.source == "task":
            return f"task:{self.name}"
        return self.name or self.source

    @property
    def long(self) -> str:
        """What it is called where another one has the short name."""
        parts = [self.source, self.name, self.column]
        if self.source.endswith(".py"):
            parts[0] = Path(self.source).stem
        return ":".join(part for part in parts if part)


def split_weight(spec: str) -> tuple[str, float]:
    """(name, weight) of NAME=WEIGHT; the weight is 1 where there is none."""
    name, equals, weight = spec.rpartition("=")
    if not equals or spec.endswith(")"):  # the "=" is one of an argument
        return spec, 1.0
    try:
        return name, float(weight)
    except ValueError:
        pass
    # an "=" within a path has the rest of the path behind it, and one within a URL a word of the query
    if ":" in weight or "/" in weight or "://" in spec:
        return spec, 1.0
    raise ValueError(f"reward {spec!r}: expected NAME=WEIGHT with a number, got {weight!r}")


def split(text: str, named: Collection[str], adapters: Collection[str]) -> Spec:
    """The parts of a spec without its weight. ValueError for one that is none.

    `named` are the rewards that have a name, `adapters` what may stand in front.
    """
    target, call = _split_call(text)
    first, _, rest = target.partition(":")
    adapter = ""
    if first in adapters:
        adapter, target = first, rest
        first, _, rest = rest.partition(":")
    if first in named:
        return Spec(text, adapter, first, "", rest, call)
    if first == "task" and call is None:
        return Spec(text, adapter, first, rest, "", call)
    found = re.fullmatch(r"(?P<source>.+\.py|[\w.]+):(?P<name>\w+)(?::(?P<column>.+))?", target)
    if found is None or (found["column"] and call):
        known = ", ".join(named)
        raise ValueError(
            f"reward {text!r}: expected one of {known}, task:NAME, path/file.py:function or "
            "package.module:function"
        )
    return Spec(text, adapter, found["source"], found["name"], found["column"] or "", call)


def _split_call(text: str) -> tuple[str, ast.Call | None]:
    """What stands in front of the arguments, and the arguments: None where there are none."""
    if not text.endswith(")"):
        return text, None
    for opening in re.finditer(r"(?<=\w)\(", text):  # a path may have parentheses too
        try:
            tree = ast.parse("f" + text[opening.start() :], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            return text[: opening.start()], tree
    raise ValueError(f"reward {text!r}: expected NAME(arguments), got parentheses that are no call")


def arguments(spec: Spec) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the call. ValueError for one that is no literal."""
    assert spec.call is not None
    named: dict[str, Any] = {}
    try:
        places = [ast.literal_eval(x) for x in spec.call.args]
        for keyword in spec.call.keywords:
            if keyword.arg is None:
                raise ValueError
            named[keyword.arg] = ast.literal_eval(keyword.value)
    except ValueError:
        raise ValueError(
            f"reward {spec.text!r}: expected arguments that are literals, such as 0.5, 'text', [1, 2] or "
            f"True, got {ast.unparse(spec.call)[1:]}"
        ) from None
    return places, named


class Called(NamedTuple):
    """The names that a reward may have."""

    short: str
    long: str


def distinct(names: Sequence[Called]) -> list[str]:
    """One name for each: the short one if no other has it, else the long one, numbered if need be."""
    short = [name.short for name in names]
    found: list[str] = []
    for name in names:
        chosen = base = name.short
        if short.count(chosen) > 1:
            chosen = base = name.long
        again = 1
        while chosen in found:
            again += 1
            chosen = f"{base}:{again}"
        found.append(chosen)
    return found
