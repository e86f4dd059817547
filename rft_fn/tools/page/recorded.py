"""Runs as their folders hold them, also while they go on, and the groups that differ only in seed."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = [
    "FIELDS", "Field", "Name", "Recorded", "config_differences", "flattened", "full_scale", "grouped",
    "hue", "level", "read", "read_all",
]  # fmt: skip


# ---------- runs as their folders hold them


_PICTURES = ("samples.png", "reliability.png", "estimators.png")  # what the page does not draw itself
_APART = ("seed", "strategy.seed", "out", "override", "run_name", "project", "strategy.log_dir")


class Recorded(NamedTuple):
    """What a run has written so far."""

    folder: Path
    name: str
    config: dict[str, Any]  # flat: "strategy.fsdp"
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    distributions: list[dict[str, Any]]
    trajectories: list[dict[str, Any]]
    tokens: list[dict[str, Any]]
    pictures: list[Path]


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the options of a nested config by their dotted names."""
    found: dict[str, Any] = {}
    for name, x in config.items():
        if isinstance(x, Mapping) and x:
            found |= flattened(x, f"{prefix}{name}.")
        else:
            found[prefix + name] = x
    return found


def read(folder: str | Path, name: str = "") -> Recorded:
    """Return the run in a folder; raise ValueError if it has no config or no finished step."""
    from rft_fn.border import json_rows  # loads torch, which the command's help does without
    from rft_fn.run.earlier_run import FACTS, settings

    folder = Path(folder)
    config = flattened({name: x for name, x in settings(folder).items() if name not in FACTS})
    metrics = json_rows(folder / "metrics.jsonl")
    if not metrics:
        raise ValueError(f"run: expected a run with at least one finished step, got {folder}")
    places = dict.fromkeys([folder, Path(config.get("strategy.log_dir") or folder)])
    # a page goes to others: a link in a folder that came from somewhere may lead to any file of this machine
    found = [p / file for file in _PICTURES for p in places]
    pictures = [path for path in found if path.is_file() and not path.is_symlink()]
    return Recorded(
        folder=folder,
        name=name or folder.resolve().name,
        config=config,
        metrics=metrics,
        timing=json_rows(folder / "timing.jsonl"),
        distributions=json_rows(folder / "distributions.jsonl"),
        trajectories=json_rows(folder / "trajectories.jsonl"),
        tokens=json_rows(folder / "tokens.jsonl"),
        pictures=pictures[: len(_PICTURES)],
    )


def read_all(folders: Sequence[str | Path]) -> list[Recorded]:
    """Return the runs in some folders, each named by the shortest end of its path that is unique."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"run: expected different folders, got {', '.join(map(str, folders))}")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [read(path, "/".join(path.parts[-depth:])) for path in paths]


def grouped(runs: Sequence[Recorded]) -> list[list[int]]:
    """Group the numbers of runs with configs that differ only in seed, folder and name."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        same = {name: x for name, x in run.config.items() if name not in _APART}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(i)
    return list(groups.values())


def config_differences(runs: Sequence[Recorded]) -> list[tuple[str, list[str]]]:
    """Return (option, its value in each run as text) of the options that differ between runs."""
    names = sorted({name for run in runs for name in run.config})
    found = []
    for name in names:
        values = [json.dumps(run.config[name]) if name in run.config else "" for run in runs]
        if len(set(values)) > 1:
            found.append((name, values))
    return found


# ---------- the numbers of a token that it can be coloured by, on the page and in a terminal


Name = Literal[
    "push", "adv", "ratio", "clipped", "entropy", "mismatch", "w", "change", "logp", "ref_gap"
]  # in the order of a menu


class Field(NamedTuple):
    """How a number is called and coloured, and what it is."""

    label: str
    kind: Literal["signed", "ratio", "flag", "amount", "surprise"]
    meaning: str


FIELDS: dict[Name, Field] = {
    "push": Field(
        "push of the loss",
        "signed",
        "how the first update pushed the log-prob: - w dloss/dlogp; blue makes the token more probable",
    ),
    "adv": Field("advantage", "signed", "blue is better than the rest of the group"),
    "ratio": Field("ratio", "ratio", "probability after the updates over that before them; blue grew"),
    "clipped": Field(
        "clipped or not",
        "flag",
        "the loss has no gradient left at this token, though it has an advantage",
    ),
    "entropy": Field("entropy", "amount", "of the distribution that the token was drawn from [nats]"),
    "mismatch": Field(
        "mismatch with the sampler",
        "signed",
        "log-prob of the trainer less the sampler's, at equal weights",
    ),
    "w": Field("weight", "amount", "share of the token in the loss of the batch"),
    "change": Field("change of the log-prob", "signed", "through the updates of this step"),
    "logp": Field("surprise", "surprise", "- log-prob before the updates [nats]"),
    "ref_gap": Field("distance from the reference", "signed", "log-prob less the initial model's"),
}
"""Every number by its name in tokens.jsonl. The page's script reads this table too."""


def level(name: Name, value: float) -> float:
    """Return the intensity of a token's colour for this number, 0 for none; the sign chooses the colour."""
    kind = FIELDS[name].kind
    if kind == "ratio":
        return math.log(max(value, 1e-9))
    if kind == "surprise":
        return -value
    return value


def full_scale(rows: Sequence[Mapping[str, Any]], name: Name) -> float:
    """Return the level that has the full colour: larger than 95 of 100 others."""
    values = [x for row in rows for x in row.get(name, ()) if x is not None]
    sizes = sorted(abs(level(name, x)) for x in values)
    if not sizes:
        return 1.0
    return sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0


def hue(name: Name, size: float) -> Literal["good", "bad", "much"]:
    """Return the colour of a level: blue or orange if it has two directions, purple if it has one."""
    kind = FIELDS[name].kind
    if kind in ("amount", "surprise"):
        return "much"
    if kind == "flag" or size < 0:
        return "bad"
    return "good"
