"""From the columns of a row to text, and from text to the ids of a chat's first turn."""

import re
import string
from collections.abc import Mapping
from typing import Any

from rft_fn.data.rows import Unfit

__all__ = ["fill", "is_empty", "render"]

_HINT = "name columns as {question}, and write {{ and }} for braces"


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: None, NaN (a hole of a table of numbers) or only spaces."""
    return _is_hole(value) or (isinstance(value, str) and not value.strip())


def _is_hole(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


class _Filler(string.Formatter):
    """Formats as str.format does, and refuses places for which a row has nothing."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        column = re.split(r"[.\[]", field_name, maxsplit=1)[0]
        if column not in kwargs:
            known = ", ".join(map(repr, kwargs))
            raise Unfit("", f"the row has no column {column!r}; it has {known}")
        value, first = super().get_field(field_name, args, kwargs)
        if _is_hole(value):
            raise Unfit("", f"column {field_name!r} is empty")
        return value, first


def fill(template: str, row: Mapping[str, Any], source: str) -> str:
    """`template` with the columns of a row in its {places}; `source` says in errors where the row stands.

    ValueError for a column that is not there, that is None or NaN, and for a template that is broken.
    """
    try:
        return _Filler().vformat(template, (), row)
    except Unfit as error:
        reason = error.reason
        if reason.startswith("the row"):
            reason += f" (template {template!r}: {_HINT})"
        raise Unfit(source, reason) from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise Unfit(source, f"the template {template!r} cannot be filled: {error}; {_HINT}") from None


def render(tokenizer: Any, question: str, *, system: str | None = None) -> list[int]:
    """The ids of a question as a chat's first turn, by the tokenizer's own template, ready for the answer.

    The bare text where a tokenizer has no template. An empty `system` leaves out a default that the template
    would put in. ValueError for a template that fails.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode((system + "\n" if system else "") + question))
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": question})
    try:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # a template is a program: it may raise anything
        roles = " and ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"chat template: expected the tokenizer's to render a turn of {roles}, got "
            f"{type(error).__name__}: {error}; mend it, or leave out the system prompt if it refuses that"
        ) from error
