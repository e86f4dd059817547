"""Quotes the texts that a judge is shown, so that none of them can end its own quotation.

A policy that is rewarded by a judge learns whatever moves it. What the policy wrote is data: it may hold the
delimiters of the question, a verdict, or the special tokens of the judge's chat template. A quote takes the
first two out of reach; `asking` sees to the tokens.
"""

import json
from typing import Protocol

__all__ = ["Quote", "as_json", "flat", "markup"]


class Quote(Protocol):
    """Quotes a text."""

    def __call__(self, text: str, /) -> str:
        """The text with none of the characters that delimit it in a form's template."""
        ...


def markup(text: str) -> str:
    """The text as XML writes it, with &amp; for & and &lt; for <, so that it has no tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def as_json(text: str) -> str:
    r"""The text as a JSON string, in quotation marks, with \u003c for <."""
    return json.dumps(text, ensure_ascii=False).replace("<", "\\u003c")


def flat(text: str) -> str:
    """The text with "," for ":", which ends each part of a terse question."""
    return text.replace(":", ",")
