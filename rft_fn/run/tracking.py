"""Trackers by name: each is a function that takes a step and its metrics."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

__all__ = ["TRACKERS", "Track", "check", "identity", "start"]


Track = Callable[[int, Mapping[str, float]], None]


def identity(folder: Path) -> str:
    """Return the id of a run at a tracker: its folder's name and a digest of the folder's path."""
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=5).hexdigest()
    return f"{folder.resolve().name}-{digest}"


def _tensorboard(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(pictures / "tensorboard"))

    def track(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    client = importlib.import_module("wandb")
    return _logged(client.init(**about, dir=str(pictures), id=identity(folder), resume="allow"))


def _trackio(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    client = importlib.import_module("trackio")
    return _logged(client.init(**about, resume="allow"))


def _logged(run: Any) -> Track:
    """Return the Track of a client's run; wandb and trackio share their interface."""

    def track(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return track


# the packages are optional, so each is imported when it is asked for
TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def check(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"trackers: expected some of {', '.join(TRACKERS)}, got {name!r}")
        if not _installed(name):
            raise ValueError(
                f"trackers: {name} is not installed; pip install {name}, or leave it out of --trackers"
            )


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def start(
    names: Sequence[str], folder: Path, pictures: Path, config: Mapping[str, Any], project: str, name: str
) -> list[Track]:
    """Start the trackers of a run, under `name` or else the name of its folder."""
    about = {"project": project, "name": name or folder.name, "config": dict(config)}
    return [TRACKERS[x](folder, pictures, about) for x in names]
