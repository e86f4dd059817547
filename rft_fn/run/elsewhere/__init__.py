"""Options by the names that they have elsewhere: what an unknown flag of another library is called here."""

import re
from collections.abc import Collection, Mapping, Sequence

from rft_fn.run.elsewhere.openrlhf import DOTTED, LIGHTRFT, OPENRLHF, SHARED
from rft_fn.run.elsewhere.rows import Row, To
from rft_fn.run.elsewhere.trl import TRL
from rft_fn.run.elsewhere.verl import VERL

__all__ = ["SYSTEMS", "Row", "To", "answer", "check"]

SYSTEMS: dict[str, Mapping[str, Row]] = {
    "TRL": TRL,
    "verl": VERL,
    "OpenRLHF and LightRFT": SHARED,
    "OpenRLHF": OPENRLHF | DOTTED,
    "LightRFT": LIGHTRFT,
}
"""Names elsewhere, with underscores, by system."""


def answer(written: str, name: str, own: Collection[str]) -> str | None:
    """One line about an option of another library, for a script that has the options `own`; None if unknown.

    `written` is how it was given, `name` the same without dashes in front and with underscores.
    """
    systems = [system for system, rows in SYSTEMS.items() if name in rows]
    if not systems:
        return None
    known = f"{written} of {', '.join(systems)}"
    for system in systems:
        row = SYSTEMS[system][name]
        if isinstance(row, str):
            return f"{known}: {row}"
        for to in row:
            if to.option in own and (not to.needs or to.needs in own):
                flag = f"--{to.option.replace('_', '-')}"
                return f"{known} is {flag} here" + f" ({to.remark})" * bool(to.remark)
    return f"{known} has no counterpart in this script"


def check(args: Sequence[str], own: Collection[str]) -> None:
    """ValueError, in one line, for options that are not the script's and that are known elsewhere.

    `own` are the names of the script's options, with underscores. verl's options have no dashes in front.
    """
    lines = []
    for arg in args:
        found = re.match(r"(--|\+{0,2})([A-Za-z][\w.-]*)(=|$)", arg)
        if found is None or not (found[1] == "--" or ("." in found[2] and found[3])):
            continue
        name = found[2].replace("-", "_")
        line = answer(found[1] + found[2], name, own) or answer(
            found[1] + found[2], name.removeprefix("no_"), own
        )
        if line and name not in own:
            lines.append(line)
    if lines:
        raise ValueError(f"{'; '.join(lines)}; --help lists the options")
