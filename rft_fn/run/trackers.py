"""Trackers by name: each makes a function that is given a step and its metrics."""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Track", "check", "identity", "start"]

Track = Callable[[int, Mapping[str, float]], None]


def identity(folder: Path) -> str:
    """The id of a run at a tracker: its folder's name, and a digest of the path that tells it from others."""
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
    import wandb

    run = wandb.init(**about, dir=str(pictures), id=identity(folder), resume="allow")
    return lambda step, metrics: run.log(dict(metrics), step=step)


def _trackio(folder: Path, pictures: Path, about: Mapping[str, Any]) -> Track:
    import trackio

    run = trackio.init(**about, resume="allow")
    return lambda step, metrics: run.log(dict(metrics), step=step)


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def check(names: Sequence[str]) -> None:
    """ValueError for a tracker that is not known or not installed."""
    for name in names:
        if name not in _TRACKERS:
            raise ValueError(f"trackers: expected some of {', '.join(_TRACKERS)}, got {name!r}")
        if not _installed(name):
            raise ValueError(
                f"trackers: {name} is not installed; pip install {name}, or leave it out of --trackers"
            )


def _installed(name: str) -> bool:
    import sys

    return name in sys.modules or importlib.util.find_spec(name) is not None


def start(
    names: Sequence[str], folder: Path, pictures: Path, config: Mapping[str, Any], project: str, name: str
) -> list[Track]:
    """The trackers of a run. Its name there is that of the folder unless another is given."""
    about = {"project": project, "name": name or folder.name, "config": dict(config)}
    return [_TRACKERS[x](folder, pictures, about) for x in names]
