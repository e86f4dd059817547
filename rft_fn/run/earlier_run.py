"""An earlier run in a folder: its options, its model, and its rows up to a step."""

from collections.abc import Iterable, Mapping
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

from rft_fn import border, ckpt
from rft_fn.ckpt.folder import read_meta
from rft_fn.run.files import keep_until, write_whole

__all__ = [
    "FACTS",
    "begun",
    "checkpoints",
    "cut_back",
    "first_checkpoint",
    "first_day",
    "lacking",
    "last_model",
    "mark_saved",
    "renamed",
    "settings",
]


FACTS = ("date", "digests", "made_by")
"""What config.json has beyond the options: the day of the first start, digests, and the script."""

_LIMITS = {"clip_low": "low", "clip_high": "high", "dual": "dual"}
_SAVED = ".saved"  # exists once a checkpoint has existed
_ROWS = ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl", "distributions.jsonl", "tokens.jsonl")


def checkpoints(folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder / "checkpoints"


def begun(folder: Path) -> bool:
    """Return whether a folder holds steps of a run: rows of them, or a checkpoint."""
    return (folder / "metrics.jsonl").exists() or any(checkpoints(folder).glob("step_*"))


def settings(folder: str | Path) -> dict[str, Any]:
    """Return the options of the run in a folder.

    ValueError if there is none, or if its config.json is damaged.
    """
    path = Path(folder) / "config.json"
    try:
        return renamed(border.object_of("options", border.read_json(path.read_text())))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"run: expected the folder of a run, got {folder}: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"run folder {folder}: config.json is damaged ({error}); delete that file to continue with the "
            "options of this command, or put back a copy"
        ) from error


def first_checkpoint(folder: str | Path, source: str) -> tuple[str, int]:
    """Return the checkpoint of the run `source` that the run in a folder begins with, and its updates.

    It is the newest, or the one that is named itself. Once the run has begun it is the one in its
    config.json, which it needs until it has a checkpoint of its own. The updates are those of its optimizer
    state, the fewest of several. ValueError where there is none.
    """
    stored = settings(folder) if begun(Path(folder)) else {}
    path = Path(stored.get("from_checkpoint") or source)
    own = path if path.is_relative_to(source) else Path(source)  # another one is refused with the options
    if own == path and stored.get("from_updates") is not None and ckpt.steps(checkpoints(Path(folder))):
        return str(path), stored["from_updates"]
    if not (own / "meta.json").exists():
        own = next(reversed(ckpt.steps(checkpoints(own))), own)
    if not (own / "meta.json").exists():
        raise ValueError(f"from_checkpoint: expected a run with a checkpoint, or a checkpoint, got {own}")
    leaves = read_meta(own)["plain"].items()
    counts = [x for name, x in leaves if name.startswith("state/") and name.endswith("/count")]
    return str(own), min(counts, default=0)


def renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a config.json with the limits of a loss where they are now.

    Before rft_fn 0.2 those of PPO's clip were further options, with these names. Where `loss` is a text, as
    in distill.py, they still are.
    """
    if isinstance(options.get("loss"), str) or not options.keys() & _LIMITS.keys():
        return options
    short = {name: options[name] for name in _LIMITS if options.get(name) is not None}
    limits = {_LIMITS[name]: x for name, x in short.items()}
    rest = {name: x for name, x in options.items() if name not in _LIMITS}
    return {**rest, "loss": {**(options.get("loss") or {}), **limits}}


def first_day(folder: str | Path) -> date:
    """Return the day on which the run in a folder began.

    Today where it has no step yet, or noted no day.
    """
    continues = begun(Path(folder)) and (Path(folder) / "config.json").exists()
    stored = settings(folder).get("date") if continues else None
    return date.fromisoformat(stored) if stored else date.today()


def last_model(name: str) -> str:
    """Return the model that a run left in the folder `name`, or any other name unchanged.

    ValueError for a run that has left none.
    """
    folder = Path(name)
    if not (folder / "metrics.jsonl").is_file():
        return name
    if not (folder / "model").is_dir():
        raise ValueError(
            f"model: the run {folder} has left no model yet; rft export {folder} makes one of its newest "
            "checkpoint"
        )
    return str(folder / "model")


def mark_saved(folder: Path) -> None:
    """Note that a checkpoint exists: from then on the rows are worth more than a fresh start."""
    marker = folder / _SAVED
    if not marker.exists() and any(checkpoints(folder).glob("step_*")):
        write_whole(marker, "")


def cut_back(folder: Path, step: int) -> None:
    """Cut the files of rows back to the checkpoint that the run continues from: `step` steps are done.

    ValueError if there were checkpoints and none is left: the rows of the run are not wiped for that.
    """
    if step == 0 and ((folder / _SAVED).exists() or any(checkpoints(folder).glob("[!.]*"))):
        raise ValueError(
            f"run folder {folder}: its steps are here, but no checkpoint is left in "
            f"{checkpoints(folder)}; put that folder back, give --out another folder, or delete this one to "
            "start again"
        )
    for name in _ROWS:
        keep_until(folder / name, step)


def lacking(rows: Iterable[Mapping[str, Any]], step: int) -> str:
    """Return the steps before `step` that have no row, as "step 0" or "steps 0 to 3, 7"; "" for none."""
    there = {row["step"] for row in rows}
    missing = [i for i in range(step) if i not in there]
    parts = []
    for _, group in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
        run = [i for _, i in group]
        parts.append(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]))
    return f"step{'s' if len(missing) > 1 else ''} {', '.join(parts)}" if missing else ""
