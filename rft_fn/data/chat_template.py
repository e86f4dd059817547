"""The variables of a chat template: their names, and values from the command line."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from functools import cache
from typing import Any

__all__ = ["MARK", "dated", "fix_day", "fixed_day", "literals", "reads"]

MARK = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""The tags around the assistant's text, which only transformers knows."""


def literals(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse the values for a chat template: ("enable_thinking=False",) -> {"enable_thinking": False}.

    ValueError for a pair that is not NAME=LITERAL. Literals are numbers, True, None, texts in quotes.
    """
    found = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            if not name.isidentifier():
                raise ValueError
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"chat_template_kwargs: expected NAME=LITERAL as enable_thinking=False, or effort='\"low\"' "
                f"with a text in quotes, got {pair!r}"
            ) from None
    return found


@cache
def reads(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads before it sets them."""
    from jinja2 import Environment, meta

    env = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = env.parse(MARK.sub("", template))

    # the first use of each name decides: one that is set first is the template's own variable
    first: dict[str, str] = {}
    for name, use in _uses(tree):
        first.setdefault(name, use)

    # jinja counts a name that is set in one branch as undeclared in the others, also where none reads it
    undeclared = meta.find_undeclared_variables(tree)
    found = {name for name in undeclared if first.get(name) == "load"}
    return frozenset(found) - set(env.globals) - {"raise_exception", "strftime_now"}


def _uses(node: Any) -> Iterator[tuple[str, str]]:
    """Return (name, "load" or "store") of each variable below a node, in order of execution."""
    from jinja2 import nodes

    parts = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        parts.reverse()  # the value, then the name that gets it
    for part in parts:
        if isinstance(part, nodes.Name):
            yield part.name, part.ctx
        yield from _uses(part)


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
