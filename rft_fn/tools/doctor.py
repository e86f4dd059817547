"""`rft doctor`: a look at everything that a run may need here, with a remedy for each fault."""

import json
import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rft_fn.tools.fact import Fact
from rft_fn.tools.machine import devices, engines, network, room, without_password
from rft_fn.tools.packages import optional, required

__all__ = ["as_json", "examine", "show", "wrong"]


_MARKS = {
    "ok": ("ok", "green"),
    "off": ("-", "dim"),
    "note": ("note", "yellow"),
    "wrong": ("WRONG", "bold red"),
}
_TOLD = (
    "CUDA_VISIBLE_DEVICES",
    "HF_",
    "MKL_",
    "OMP_",
    "PYTORCH_",
    "RFT_FN_",
    "TORCH",
    "TRANSFORMERS_",
    "VLLM_",
)
_SECRET = ("KEY", "PASSWORD", "SECRET", "TOKEN")


def examine(*, imports: bool = False) -> dict[str, list[Fact]]:
    """Return all facts by section; with `imports`, import packages to find broken ones."""
    return {
        "versions": required(imports=imports),
        "devices": devices(),
        "engines": engines(),
        "optional packages": optional(imports=imports),
        "room": room(),
        "network": network(),
        "environment": _environment(),
    }


def wrong(found: dict[str, list[Fact]]) -> list[Fact]:
    """Return the required parts that are missing or do not work."""
    return [fact for facts in found.values() for fact in facts if fact.state == "wrong"]


def as_json(found: dict[str, list[Fact]]) -> str:
    """Return the facts as JSON for a bug report: by section and name, the value, state and remedy."""
    sections = {}
    for section, facts in found.items():
        sections[section] = {f.name: {"value": f.value, "state": f.state, "remedy": f.remedy} for f in facts}
    return json.dumps(sections, indent=1)


def show(found: dict[str, list[Fact]], console: Console | None = None) -> None:
    """Print the facts as tables, and what is wrong once more at the end."""
    console = console or Console()
    for section, facts in found.items():
        if facts:
            console.print(Text(section, "bold"), _table(facts, min(console.width, 100)))
    for fact in wrong(found):
        console.print(Text(f"WRONG  {fact.name}: {fact.value}; {fact.remedy}", "bold red"))


def _table(facts: list[Fact], width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), width=width)
    table.add_column(width=5)
    table.add_column(width=16, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for fact in facts:
        mark, style = _MARKS[fact.state]
        value = Text(fact.value)
        if fact.remedy:
            value.append(f"\n{fact.remedy}", "cyan")
        table.add_row(Text(mark, style), fact.name, value)
    return table


def _environment() -> list[Fact]:
    """Return variables that change what happens; of a possible secret, only that it is set."""
    facts = []
    for name, value in sorted(os.environ.items()):
        if not name.startswith(_TOLD):
            continue
        if any(word in name for word in _SECRET):
            value = "set"
        facts.append(Fact(name, without_password(value)))
    return facts
