"""Parts of a shell's language that need no state: brackets, changes of a value, arithmetic."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["changed", "closed", "nested", "number"]


def nested(words: Sequence[str]) -> str | None:
    """Return the text of commands that a command runs: eval TEXT, bash -c TEXT, srun ... bash -c TEXT."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for k, word in enumerate(words[:-2]):
        if word in ("bash", "sh", "/bin/bash") and re.fullmatch(r"-\w*c", words[k + 1]):
            return words[k + 2]
    return None


def closed(text: str, start: int, opening: str, closing: str) -> int:
    """Return the place after the bracket that closes the one at `start`."""
    depth = 0
    quote = ""
    for k in range(start, len(text)):
        c = text[k]
        if quote:
            quote = "" if c == quote and text[k - 1] != "\\" else quote
        elif c in "'\"" and text[k - 1] != "\\":
            quote = c
        elif c == opening:
            depth += 1
        elif c == closing:
            depth -= 1
            if not depth:
                return k + 1
    raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: {opening} without its {closing}")


def changed(x: str, rest: str, *, partial_of: Callable[[str], str]) -> str | None:
    """Return a value as the end of ${NAME...} changes it; None for an end that is not known."""
    if match := re.fullmatch(r":(\d+)(?::(\d+))?", rest):
        start = int(match[1])
        return x[start : start + int(match[2])] if match[2] else x[start:]
    if rest in (",,", "^^"):
        return x.lower() if rest == ",," else x.upper()
    if match := re.fullmatch(r"(//?)((?:\\.|[^/])+)/?(.*)", rest, re.S):
        old, new = (partial_of(part).replace("\\", "") for part in (match[2], match[3]))
        return x.replace(old, new) if match[1] == "//" else x.replace(old, new, 1)
    if match := re.fullmatch(r"(##?|%%?)(.+)", rest, re.S):
        mark, pattern = match[1], partial_of(match[2])
        ends = range(len(x) + 1)
        if mark in ("##", "%"):
            ends = range(len(x), -1, -1)
        for k in ends:
            if fnmatchcase(x[:k] if "#" in mark else x[k:], pattern):
                return x[k:] if "#" in mark else x[:k]
        return x
    return None


def _power(base: int, exponent: int) -> int:
    """Return a power. ValueError for a negative exponent, and for one whose result nothing could hold."""
    if not 0 <= exponent < 64:
        raise ValueError("no number")
    return base**exponent


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Pow: _power,
}  # fmt: skip


def number(text: str, variables: Mapping[str, Any]) -> int | None:
    """Return the whole number of an arithmetic expression; None where it is none that is known."""

    def of(node: Any, depth: int = 0) -> int:
        if depth > 50:
            raise ValueError("too deep")
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand, depth + 1)
        if isinstance(node, ast.Name) and isinstance(variables.get(node.id), str):
            return int(str(variables[node.id]))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found = _OPERATORS[type(node.op)](of(node.left, depth + 1), of(node.right, depth + 1))
            if abs(found) < 1 << 63:
                return found
        raise ValueError("no number")

    try:
        return of(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
