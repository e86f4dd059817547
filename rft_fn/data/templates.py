"""Templates of texts and of chats, and which of the tokens that they give are learned."""

import ast
import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from rft_fn import check
from rft_fn.data.messages import advice
from rft_fn.data.table import InvalidRow, Row

__all__ = [
    "MARK", "Lesson", "columns_in", "cut", "dated", "fill", "fix_day", "fixed_day", "is_empty",
    "literals", "runs", "shared_prefix", "span", "special_tokens",
]  # fmt: skip


# ---------- texts filled from the columns of a row


_HINT = "name columns as {question}, and write {{ and }} for braces"


def is_empty(value: Any) -> bool:
    """Return whether a cell holds nothing: None, NaN or only spaces. NaN is a hole in a column of numbers."""
    return _is_hole(value) or (isinstance(value, str) and not value.strip())


def _is_hole(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


class _Filler(string.Formatter):
    """Formats as str.format does, and refuses places without a value."""

    at = ""  # the place that was filled last

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        column = re.split(r"[.\[]", field_name, maxsplit=1)[0]
        if column not in kwargs:
            known = ", ".join(map(repr, kwargs))
            raise InvalidRow("", f"the row has no column {column!r}; it has {known}")
        value, first = super().get_field(field_name, args, kwargs)
        if _is_hole(value):
            raise InvalidRow("", f"column {field_name!r} is empty")
        self.at = field_name
        return value, first

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Return the text of a value. InvalidRow for a list, an object or an infinity: hardly meant."""
        if isinstance(value, (Mapping, list, tuple)) or hasattr(value, "tolist"):
            kind = "an object" if isinstance(value, Mapping) else "a list"
            raise InvalidRow("", f"column {self.at!r} holds {kind}, which no template prints")
        if isinstance(value, float) and math.isinf(value):  # also 1e999
            raise InvalidRow("", f"column {self.at!r}: expected a finite number, got {value}")
        return super().format_field(value, format_spec)


def fill(template: str, row: Row, source: str) -> str:
    """Fill the {places} of `template` from the columns of a row.

    `source` is the row's place in errors. A list or an object is printed as Python writes it where a
    conversion asks for that: {numbers!s}. ValueError for one without a conversion, for a column that is
    missing, None or NaN, and for a broken template. Where columns hold messages it names the option to use.
    """
    filler = _Filler()
    try:
        text = filler.vformat(template, (), row)
    except InvalidRow as error:
        # the row does not tell whether the template or the option is wrong: advise on both
        reason = error.reason
        if reason.startswith("the row"):
            reason += advice(row) or f" (template {template!r}: {_HINT})"
        elif reason.endswith("prints"):
            reason += advice(row) or (
                f": name an entry of it, or write {{{filler.at}!s}} to have it as Python writes it"
            )
        raise InvalidRow(source, reason) from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise InvalidRow(source, f"the template {template!r} cannot be filled: {error}; {_HINT}") from None
    try:
        check.check_text(text)  # of the template: rows are asked when they are read
    except ValueError as error:
        raise InvalidRow(source, str(error)) from None
    return text


def columns_in(*templates: str | None) -> set[str]:
    """Return the columns that templates name. None of a broken one: filling it is an error."""
    columns = set()
    for template in templates:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template or "") if name]
        except ValueError:
            continue
        columns |= {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}
    return columns


# ---------- the variables of a chat template, and their values from the command line


MARK = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""The tags around the assistant's text, which only transformers knows."""


def literals(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse the values for a chat template: ("enable_thinking=False",) -> {"enable_thinking": False}.

    ValueError for a pair that is not NAME=LITERAL. Literals are numbers, True, None, texts in quotes.
    """
    values = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            if not name.isidentifier():
                raise ValueError
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(
                f"chat_template_kwargs: expected NAME=LITERAL as enable_thinking=False, or effort='\"low\"' "
                f"with a text in quotes, got {pair!r:.80}"
            ) from None
    return values


# ------------------------------------------------------------------------------------------------- the date

_CODES = "aAbBcdDeFGhHIjmMprRSTuUVwWxXyYzZ"  # of strftime
_SHORT = "dHIjmMSy"  # those that "%-d" writes without zeros in front
_day: date | None = None  # of the run in this process


def fix_day(day: date | None) -> None:
    """Let the chat templates of this process take `day` for today; None is the day that it is."""
    global _day
    _day = day


def fixed_day() -> date | None:
    """Return the day that chat templates take for today, None for the day that it is."""
    return _day


def dated(tokenizer: Any, tools: Any = None) -> str | None:
    """Return a tokenizer's chat template with the fixed day in it, None where it asks for no date.

    A function among the arguments of a template is replaced by its name, so the date goes into its text.
    """
    if _day is None or "strftime_now" not in str(tokenizer.chat_template):
        return None
    return _macro(_day) + tokenizer.get_chat_template(tools=tools)


@cache
def _macro(day: date) -> str:
    """Return `strftime_now` of a day, at midnight, in the language of templates."""
    at = datetime.combine(day, time())
    codes = [f"%{code}" for code in _CODES] + [f"%-{code}" for code in _SHORT] + ["%%"]
    written = "".join(f".replace({json.dumps(code)}, {json.dumps(at.strftime(code))})" for code in codes)
    # the line ends here: a template that begins with spaces stays at the start of one
    return "{%- macro strftime_now(format) -%}{{- format" + written + " -}}{%- endmacro %}\n"


# ---------- which tokens of a sequence are learned: lessons, and spans of their masks


class Lesson(NamedTuple):
    """One sequence to learn from."""

    ids: list[int]
    mask: list[bool]  # [ids] True for the tokens that are learned
    media: Mapping[str, Tensor] | None = None  # the processor's tensors


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of elements that two sequences begin with in common."""
    same = 0
    for x, y in zip(a, b):
        if x != y:
            break
        same += 1
    return same


@lru_cache(8)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens, with those that were added later."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each run of ones."""
    at = 0
    for one, group in groupby(mask):
        size = len(list(group))
        if one:
            yield at, at + size
        at += size


def span(size: int, start: int, end: int) -> list[bool]:
    """Return [size] True in [start, end)."""
    return [start <= i < end for i in range(size)]


def cut(ids: Sequence[int], mask: Sequence[bool]) -> Lesson:
    """Cut off the tokens after the last learned one."""
    size = len(mask)
    while not mask[size - 1]:
        size -= 1
    return Lesson(list(ids[:size]), list(mask[:size]))
