"""Fills templates such as "Q: {question}" from the columns of a row.

The filled-in text may be rendered as the first turn of a chat.
"""

import re
import string
from collections.abc import Mapping
from typing import Any

from rft_fn import check
from rft_fn.data.chat import Chat
from rft_fn.data.messages import advice, opened
from rft_fn.data.processing import Processing
from rft_fn.data.rows import Row, Unfit

__all__ = ["columns_in", "fill", "is_empty", "prompt_ids", "render"]

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
            raise Unfit("", f"the row has no column {column!r}; it has {known}")
        value, first = super().get_field(field_name, args, kwargs)
        if _is_hole(value):
            raise Unfit("", f"column {field_name!r} is empty")
        self.at = field_name
        return value, first

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Return the text of a value. Unfit for a list or an object, as Python's form is hardly meant."""
        if isinstance(value, (Mapping, list, tuple)) or hasattr(value, "tolist"):
            kind = "an object" if isinstance(value, Mapping) else "a list"
            raise Unfit("", f"column {self.at!r} holds {kind}, which no template prints")
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
    except Unfit as error:
        # the row does not tell whether the template or the option is wrong: advise on both
        reason = error.reason
        if reason.startswith("the row"):
            reason += advice(row) or f" (template {template!r}: {_HINT})"
        elif reason.endswith("prints"):
            reason += advice(row) or (
                f": name an entry of it, or write {{{filler.at}!s}} to have it as Python writes it"
            )
        raise Unfit(source, reason) from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise Unfit(source, f"the template {template!r} cannot be filled: {error}; {_HINT}") from None
    try:
        check.check_text(text)  # of the template: rows are asked when they are read
    except ValueError as error:
        raise Unfit(source, str(error)) from None
    return text


def columns_in(*templates: str | None) -> set[str]:
    """Return the columns that templates name. None of a broken one: filling it is an error."""
    found = set()
    for template in templates:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template or "") if name]
        except ValueError:
            continue
        found |= {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}
    return found


def render(
    tokenizer: Any,
    question: str,
    *,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processing: Processing | None = None,
) -> list[int]:
    """Return the ids of a question as a chat's first turn, ready for the answer.

    They are made by the tokenizer's own template. The bare text where a tokenizer has no template. An empty
    `system` leaves out a default of the template's; one that the template refuses is put before the question.
    ValueError for a template that fails, and with `processing` for text that has the place of a medium.
    """
    if tokenizer.chat_template:
        turns = opened([{"role": "user", "content": question}], system)
        return Chat(tokenizer, chat_template_kwargs or {}, processing).ids(turns, ask=True)
    text = f"{system}\n{question}" if system else question
    if processing is not None:
        processing.check_places(text, ())
    return prompt_ids(tokenizer, text)


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a prompt that no chat template renders, with the tokenizer's own beginning.

    Some tokenizers put their end of sequence after every text. It is left out, as nothing is to be said
    after it.
    """
    ids = list(tokenizer.encode(text))
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids
