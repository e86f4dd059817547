"""What an objective is in options of our scripts, and how far objectives of others are from ours.

The errors were measured on gradients of their own code: tests/golden/objectives.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rft_fn.migrate import tables

__all__ = ["ERRORS", "ROWS", "Objective", "arguments", "constant", "differs", "is_true", "number"]


class Objective(NamedTuple):
    """What a run maximises, in our words."""

    advantage: str  # a row of rft_fn.algorithm.TABLE that has it
    loss: str  # a function of rft_fn.loss
    weight: str  # as --weight takes it
    limits: Mapping[str, Any] = {}  # of the loss, by their names here; None is left out


# the rows of rft_fn.algorithm.TABLE as objectives
ROWS: dict[str, Objective] = {
    "grpo": Objective("grpo", "ppo_clip", "seq_mean"),
    "dr_grpo": Objective("dr_grpo", "ppo_clip", "constant:1024"),
    "dapo": Objective("grpo", "ppo_clip", "token_mean"),
    "gspo": Objective("grpo", "gspo", "seq_mean"),
    "gspo_token": Objective("grpo", "gspo_token", "seq_mean"),
    "cispo": Objective("grpo", "cispo", "token_mean"),
    "sapo": Objective("grpo", "sapo", "seq_mean"),
    "gmpo": Objective("grpo", "gmpo", "seq_mean"),
    "vespo": Objective("grpo", "vespo", "seq_sum"),
    "cpgd": Objective("cpgd", "cpgd", "token_mean"),
    "dppo_tv": Objective("grpo", "dppo_tv", "token_mean"),
    "dppo_kl": Objective("grpo", "dppo_kl", "token_mean"),
    "reinforce": Objective("reinforce", "reinforce", "seq_sum"),
    "rloo": Objective("rloo", "reinforce", "seq_sum"),
    "opo": Objective("opo", "reinforce", "seq_sum"),
    "remax": Objective("remax", "reinforce", "seq_sum"),
    "reinforce_pp": Objective("reinforce_pp", "ppo_clip", "token_mean"),
    "reinforce_pp_baseline": Objective("reinforce_pp_baseline", "ppo_clip", "token_mean"),
    "ppo": Objective("gae", "ppo_clip", "token_mean"),
}
_OLDER = {"low": "--clip-low", "high": "--clip-high", "dual": "--dual"}


def arguments(wanted: Objective) -> list[str]:
    """Return the options of an objective: the nearest row, and what differs from it."""

    # among the rows with this loss, the one that differs in the fewest parts
    like = {name: row for name, row in ROWS.items() if row.loss == wanted.loss}
    if wanted.advantage == "gae":
        like = {"ppo": ROWS["ppo"]}
    else:
        like.pop("ppo", None)
    name = min(
        like, key=lambda x: (like[x].advantage != wanted.advantage) + (like[x].weight != wanted.weight)
    )
    row = like[name]
    found = [f"--algorithm {name}"]
    if row.advantage != wanted.advantage:
        found.append(f"--advantage {wanted.advantage}")
    if row.weight != wanted.weight:
        found.append(f"--weight {wanted.weight}")

    # the short names, as one knows them, unless a limit is negative
    limits = {limit: x for limit, x in wanted.limits.items() if x is not None}
    negative = any((number(x) or 0) < 0 for x in limits.values())
    for limit, x in limits.items():
        flag = f"--loss.{limit.replace('_', '-')}" if negative or limit not in _OLDER else _OLDER[limit]
        found.append(f"{flag} {x}")
    return found


def number(x: Any) -> float | None:
    """Return the number in a value of a config; None for a variable of the shell and other texts."""
    try:
        return None if isinstance(x, bool) or "_" in str(x) else float(x)
    except (TypeError, ValueError):
        return None


def is_true(x: Any) -> bool:
    """Return whether a value of a config is true, also as a text."""
    return str(x).lower() == "true"


# |theirs - ours| / |theirs| at log-ratios of 0.05, 0.3 and 1.5, by config of tests/golden/objectives.py
ERRORS: dict[str, str] = tables.plain("objectives")["errors"]


def differs(what: str, key: str) -> str:
    """Return the note of an objective that we have not: what differs, and the error of the gradient."""
    return f"objective: {what}; error of the gradient at log-ratios of 0.05, 0.3, 1.5: {ERRORS[key]}"


def constant(length: Any) -> str:
    """Return the weight that divides by a length."""
    whole = number(length)
    return f"constant:{length if whole is None else int(whole)}"
