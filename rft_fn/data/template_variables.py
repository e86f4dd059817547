"""The variables of a chat template, and the day that it writes."""

import ast
import json
import re
from collections.abc import Sequence
from datetime import date, datetime, time
from functools import cache
from typing import Any

__all__ = ["MARK", "dated", "fix_day", "fixed_day", "literals"]


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
