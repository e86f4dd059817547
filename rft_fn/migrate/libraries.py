"""The libraries that are read: each a table, and the functions for what needs arithmetic."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rft_fn.migrate import lightrft, openrlhf, prime_rl, tables, trl, verl
from rft_fn.migrate.rows import Library, Trainer

__all__ = ["LIBRARIES"]

# what a cell of a table may name: options that only have a meaning together, and a script that they decide
FUNCTIONS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "trl.rl": trl.rollouts,
    "trl.sft": partial(trl.examples, "sft"),
    "trl.dpo": partial(trl.examples, "dpo"),
    "trl.rm": partial(trl.examples, "rm"),
    "verl.rl": verl.rollouts,
    "verl.sft": verl.examples,
    "verl.script": verl.script,
    "openrlhf.rl": openrlhf.rollouts,
    "openrlhf.sft": partial(openrlhf.examples, "sft"),
    "openrlhf.dpo": partial(openrlhf.examples, "dpo"),
    "openrlhf.rm": partial(openrlhf.examples, "rm"),
    "openrlhf.script": openrlhf.script,
    "lightrft.rl": lightrft.combine,
    "lightrft.sft": partial(lightrft.examples, "sft"),
    "lightrft.rm": partial(lightrft.examples, "rm"),
    "lightrft.script": lightrft.script,
    "prime_rl.rl": prime_rl.rollouts,
    "prime_rl.sft": prime_rl.examples,
}


def _trainer(name: str, kind: str) -> Trainer:
    """Return a kind of training as the table of a library has it."""
    found = tables.table(name)
    given = found["trainers"][kind]
    rows, numbers = {}, [*found.get("numbers", ()), *given.get("numbers", ())]
    for other in (*given.get("with", ()), *given.get("with_undotted", ())):
        rows |= tables.rows_of(other, kind, dotted=other in given.get("with", ()))
        numbers += tables.table(other).get("numbers", ())
    script = given["script"]
    return Trainer(
        rows={**rows, **tables.rows_of(name, kind)},
        defaults=given.get("defaults", {}),
        combine=FUNCTIONS[given["combine"]],
        script=FUNCTIONS.get(script, lambda options: script),
        programs=tuple(given.get("programs", ())),
        tells=tuple(given.get("tells", ())),
        numbers=tuple(numbers),
    )


def _library(name: str) -> Library:
    """Return the library of a table."""
    found = tables.table(name)
    return Library(
        title=found["title"],
        trainers={kind: _trainer(name, kind) for kind in found["trainers"]},
        others=found.get("others", {}),
        packages=tuple(found["packages"]),
        modules=tuple(found.get("modules", ())),
        implied=found.get("implied", {}),
        told=found.get("told", {}),
        harmless=found.get("harmless", {}),
        releases=found.get("releases", {}),
    )


LIBRARIES: dict[str, Library] = {
    name: _library(name.replace("-", "_")) for name in ("trl", "verl", "openrlhf", "lightrft", "prime-rl")
}
