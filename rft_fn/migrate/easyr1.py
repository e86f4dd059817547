"""Options of EasyR1, a relative of verl, by verl's names."""

from collections.abc import Mapping
from typing import Any

from rft_fn.migrate import tables
from rft_fn.migrate.objective_rows import is_true
from rft_fn.migrate.verl import ACTOR

__all__ = ["as_verl", "is_easyr1"]

_TABLE = tables.plain("easyr1")


def is_easyr1(options: Mapping[str, Any]) -> bool:
    """Return whether options are EasyR1's, by names that verl has not."""
    return any(x.startswith(("worker.actor.", "worker.rollout.", "data.rollout_batch_size")) for x in options)


def as_verl(options: Mapping[str, Any], missing: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the options by verl's names, and notes. `missing` is the file of options that is not here."""
    example = _TABLE["example"] if missing.endswith("examples/config.yaml") else {}
    given = {name: x for name, x in options.items() if str(x) not in ("None", "null")}
    example = {name: x for name, x in example.items() if name in given or name not in options}
    whole = {**_TABLE["defaults"], **example, **given}
    notes = []
    if missing.endswith("examples/config.yaml"):
        notes.append(f"{missing}: it is not here; the values that EasyR1 has in it are taken")

    # the KL: in the loss, or in the reward, or none
    found: dict[str, Any] = {}
    in_loss, off = is_true(whole.pop("algorithm.use_kl_loss")), is_true(whole.get("algorithm.disable_kl"))
    coefficient, penalty = whole.pop("algorithm.kl_coef"), whole.pop("algorithm.kl_penalty")
    whole.pop("algorithm.disable_kl", None)
    found[ACTOR + "use_kl_loss"], found["algorithm.use_kl_in_reward"] = (
        in_loss and not off,
        not in_loss and not off,
    )
    if in_loss and not off:
        found |= {ACTOR + "kl_loss_coef": coefficient, ACTOR + "kl_loss_type": penalty}
    elif not off:
        found |= {"algorithm.kl_ctrl.kl_coef": coefficient, "algorithm.kl_penalty": penalty}

    # prompts are texts; a reward gets dicts
    found["easyr1.prompt_key"], found["easyr1.answer_key"] = (
        whole.pop("data.prompt_key"),
        whole.pop("data.answer_key"),
    )
    if whole.get("data.format_prompt"):
        notes.append(
            f"--template: theirs is the file {whole.pop('data.format_prompt')} around the column; write its "
            f"words around {{{found['easyr1.prompt_key']}}}"
        )
    if reward := whole.pop("worker.reward.reward_function", None):
        notes.append(
            f"--reward: theirs, {reward}, takes a list of dicts, which no reward here does: math compares "
            "the answers; write a function of the columns in its place"
        )
    for name, x in whole.items():
        if x in _TABLE["off"].get(name.rpartition(".")[2], ()):
            continue
        head = max((head for head in _TABLE["names"] if name.startswith(head)), key=len, default="")
        theirs = _TABLE["names"][head] + name.removeprefix(head) if head else name
        x = _TABLE["values"].get(theirs, {}).get(str(x), x)
        if x != "":
            found[theirs] = x
    return found, notes
