"""What a shell or a terminal reads: words, commands and comments that hold texts of strangers.

A text from a config, a path or a name may hold new lines, quotes, `$(...)`, and sequences that steer a
terminal. Whatever a command prints for a shell goes through here, so that none of it runs.
"""

import re
import shlex
from collections.abc import Iterable
from typing import Any

from rft_fn.text import printable

__all__ = ["command", "comment", "line", "word"]

# variables, and a date of a format: nothing else of a value may mean something to a shell
_KEPT = re.compile(
    r"(?:[^$`\"\\!]|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}|\$\(date (?:\+[\w%:./-]*|\"\+[\w%:./ -]*\")\))*"
)
_ENDS = re.compile(r"[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")


def line(text: Any) -> str:
    """Return a text as one line: `\\n` and the like for what ends a line or steers a terminal."""
    return printable(_ENDS.sub(lambda found: ascii(found[0])[1:-1], str(text)))


def comment(text: Any) -> str:
    """Return a text as one comment of a shell."""
    return f"# {line(text)}"


def word(text: Any) -> str:
    """Return a text as one word of a shell, in which variables stay variables and nothing runs."""
    shown = printable(text)  # a new line within quotes is part of the word
    return f'"{shown}"' if "$" in shown and _KEPT.fullmatch(shown) else shlex.quote(shown)


def command(words: Iterable[Any]) -> str:
    """Return words as one command of a shell."""
    return " ".join(map(word, words))
