"""Python's names in other libraries: where the same thing is here."""

import re
from collections.abc import Mapping
from typing import NoReturn

from rft_fn.migrate import tables

__all__ = ["CONFIG", "ROOT", "STRATEGY", "unknown"]

_NAMES = tables.plain("names")
STRATEGY: dict[str, str] = _NAMES["strategy"]
ROOT: dict[str, str] = _NAMES["root"]

# options of LightRFT that lead to one of the scripts, and names that are no option there or another here
_ROWS = tables.rows_of("openrlhf_and_lightrft", "rl", dotted=False) | tables.rows_of("lightrft", "rl")
_FLAGS = {name: re.search(r"--(?!strategy\.)[a-z][a-z0-9-]*", row.ours) for name, row in _ROWS.items()}
_OPTIONS = {name: flag[0] for name, flag in _FLAGS.items() if flag} | _NAMES["script_options"]
CONFIG: dict[str, str] = {
    name: f"an option of the scripts, since it is not about processes: {flag}"
    for name, flag in _OPTIONS.items()
} | _NAMES["config"]


def unknown(owner: str, hints: Mapping[str, str], name: str) -> NoReturn:
    """Raise AttributeError, with a hint for a name that another library has."""
    hint = f"; {hints[name]}" if name in hints else ""
    raise AttributeError(f"{owner} has no attribute {name!r}{hint}")
