"""What a chat template is given beside the messages: from the command line, and what it reads."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

__all__ = ["MARK", "literals", "reads"]

MARK = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""The tags around what the assistant says, which only transformers knows."""


def literals(pairs: Sequence[str]) -> dict[str, Any]:
    """What a command line gives to a chat template: ("enable_thinking=False",) -> {"enable_thinking": False}.

    ValueError for a pair that is not NAME=LITERAL, where a literal is a number, True, None, a text in quotes.
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
                f"with quotes of its own around a text, got {pair!r}"
            ) from None
    return found


@cache
def reads(template: str) -> frozenset[str]:
    """The names that a template reads before it makes them, less those that it has from the library."""
    from jinja2 import Environment, meta

    env = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = env.parse(MARK.sub("", template))
    first: dict[str, str] = {}
    for name, use in _uses(tree):
        first.setdefault(name, use)
    # a name that is made in one branch counts as undeclared in the others, also where none reads it
    found = {name for name in meta.find_undeclared_variables(tree) if first.get(name) == "load"}
    return frozenset(found) - set(env.globals) - {"raise_exception", "strftime_now"}


def _uses(node: Any) -> Iterator[tuple[str, str]]:
    """(name, "load" or "store") of each variable below a node of a template, in the order of its run."""
    from jinja2 import nodes

    parts = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        parts.reverse()  # the value, then the name that gets it
    for part in parts:
        if isinstance(part, nodes.Name):
            yield part.name, part.ctx
        yield from _uses(part)
