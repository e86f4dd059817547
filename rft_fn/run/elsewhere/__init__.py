"""Options by their names in other libraries: TRL, verl, OpenRLHF and LightRFT."""

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
"""The options of each library, by name with underscores."""


def answer(written: str, name: str, own: Collection[str]) -> str | None:
    """One line that leads from an option of another library to that of ours; None for an unknown one.

    `written` is the option as it was given, `name` the same without dashes in front and with underscores.
    `own` are the options of the script.
    """
    systems = [system for system, rows in SYSTEMS.items() if name in rows]
    if not systems:
        return None
    known = f"{written} of {', '.join(systems)}"

    # the first meaning that this script has an option for
    for system in systems:
        row = SYSTEMS[system][name]
        if isinstance(row, str):
            return f"{known}: {row}"
        for to in row:
            meant = not to.needs or to.needs in own
            if to.option in own and meant:
                flag = f"--{to.option.replace('_', '-')}"
                remark = ""
                if to.remark:
                    remark = f" ({to.remark})"
                return f"{known} is {flag} here{remark}"
    return f"{known} has no counterpart in this script"


def check(args: Sequence[str], own: Collection[str]) -> None:
    """Refuse, in one line, options that other libraries have and the script has not.

    ValueError for such options. `own` are the names of the script's options, with underscores.
    """
    lines = []
    for arg in args:
        found = re.match(r"(--|\+{0,2})([A-Za-z][\w.-]*)(=|$)", arg)
        if found is None:
            continue

        # verl's options have no dashes in front: dotted names with a value
        dashes, written, value = found[1], found[2], found[3]
        dotted = "." in written and bool(value)
        if dashes != "--" and not dotted:
            continue
        name = written.replace("-", "_")
        if name in own:
            continue
        line = answer(dashes + written, name, own)
        if line is None:
            line = answer(dashes + written, name.removeprefix("no_"), own)
        if line:
            lines.append(line)
    if lines:
        raise ValueError(f"{'; '.join(lines)}; --help lists the options")
