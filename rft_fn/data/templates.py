"""Templates of texts, filled from the columns of a row."""

import math
import re
import string
from collections.abc import Mapping
from typing import Any

from rft_fn.data.messages import advice
from rft_fn.data.table import InvalidRow, Row
from rft_fn.text import check_text

__all__ = ["columns_in", "fill", "is_empty"]


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
        check_text(text)  # of the template: rows are asked when they are read
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
