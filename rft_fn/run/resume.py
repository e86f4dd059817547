"""An earlier run in a folder: its options, its model, and its rows up to a checkpoint."""

import json
from datetime import date
from pathlib import Path
from typing import Any

from rft_fn.run.files import keep_until, write_whole

__all__ = ["FACTS", "checkpoints", "cut_back", "first_day", "last_model", "mark_saved", "settings"]

FACTS = ("date", "digests")
"""What stands in config.json beside the options: the day of the first start, and what the run is made of."""

_SAVED = ".saved"  # exists once a checkpoint has existed
_ROWS = ("metrics.jsonl", "timing.jsonl", "trajectories.jsonl", "distributions.jsonl", "tokens.jsonl")


def checkpoints(folder: Path) -> Path:
    """The folder of a run's checkpoints."""
    return folder / "checkpoints"


def settings(folder: str | Path) -> dict[str, Any]:
    """The options of the run in a folder. ValueError if there is none, or if its config.json is damaged."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("expected an object")
        return found
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"run: expected the folder of a run, got {folder}: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"run folder {folder}: config.json is damaged ({error}); delete that file to continue with the "
            "options of this command, or put back a copy"
        ) from error


def first_day(folder: str | Path) -> date:
    """Return the day on which the run in a folder began; today where it has no step yet, or noted no day."""
    begun = all((Path(folder) / name).exists() for name in ("metrics.jsonl", "config.json"))
    stored = settings(folder).get("date") if begun else None
    return date.fromisoformat(stored) if stored else date.today()


def last_model(name: str) -> str:
    """The model that a run left in the folder `name`; any other name is returned as it is.

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
    if step == 0 and (folder / _SAVED).exists():
        raise ValueError(
            f"run folder {folder}: its steps are here, but no checkpoint is left in "
            f"{checkpoints(folder)}; put that folder back, give --out another folder, or delete this one to "
            "start again"
        )
    for name in _ROWS:
        keep_until(folder / name, step)
