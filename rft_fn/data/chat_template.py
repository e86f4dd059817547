"""The variables of a chat template: their names, and values from the command line."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

__all__ = ["MARK", "literals", "reads"]

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
    """The names of the variables that a template expects.

    It reads them before it sets them, and they are none of the library's own.
    """
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
    """(name, "load" or "store") of each variable below a node, in order of execution."""
    from jinja2 import nodes

    parts = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        parts.reverse()  # the value, then the name that gets it
    for part in parts:
        if isinstance(part, nodes.Name):
            yield part.name, part.ctx
        yield from _uses(part)
