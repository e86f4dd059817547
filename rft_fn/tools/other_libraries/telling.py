"""Which trainer of another system a config is for."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft_fn.tools.other_libraries.rows import System

__all__ = ["KINDS", "kind_of"]

KINDS = {
    "sft": "supervised fine-tuning",
    "dpo": "preference pairs",
    "rm": "a reward model",
    "rl": "GRPO, PPO and others that sample",
}


def kind_of(
    system: System, options: Mapping[str, Any], programs: Sequence[str] = (), named: str | None = None
) -> str:
    """The kind of a config's trainer: as named, by its programs, or by its options.

    Options tell a trainer if no other one has them. ValueError where the system has no such trainer, and
    where neither programs nor options tell one.
    """
    kinds = ", ".join(system.trainers)
    if named is not None:
        if named not in system.trainers:
            raise ValueError(f"trainer: expected one of {kinds} for {system.title}, got {named}")
        return named
    if len(system.trainers) == 1:
        return kinds
    for name in programs:
        if name in system.others:
            raise ValueError(f"trainer: expected one of {kinds}, got {name}; {system.others[name]}")
    found = [kind for kind, x in system.trainers.items() if set(programs) & set(x.programs)]
    if not found:
        found = [kind for kind in system.trainers if _is_told(system, kind, options)]
    if len(found) != 1:
        told = ", ".join(found) or "none"
        raise ValueError(
            f"trainer: expected options of one of {kinds}, or --trainer to name it, got those of {told}"
        )
    return found[0]


def _is_told(system: System, kind: str, options: Mapping[str, Any]) -> bool:
    """Whether there is an option that only this trainer has."""
    others = {name for other, x in system.trainers.items() if other != kind for name in x.rows}
    trainer = system.trainers[kind]
    if set(options) & (set(trainer.rows) - others):
        return True
    return any(f"{name}={value}".startswith(trainer.tells) for name, value in options.items())
