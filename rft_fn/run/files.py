"""Small files of a run, written whole by one rename, and what an earlier run left in a folder."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_fn import border, tree
from rft_fn.types import Rollout, Sampling

__all__ = [
    "FACTS", "append_row", "begun", "checkpoints", "cut_back", "defaults_of", "differences", "filled",
    "first_day", "jsonable", "keep_until", "lacking", "last_model", "mark_saved",
    "read_rollout", "settings", "write_rollout", "write_whole",
]  # fmt: skip


# ---------- small files of a run: written whole by one rename, and cut back to a step


def jsonable(x: Any) -> Any:
    """Return a value as JSON can hold it: dataclasses as dicts, tuples as lists."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: jsonable(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, tuple):
        return list(x)
    return x


def defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass as JSON can hold them, without the fields that have none."""
    found = {}
    for f in dataclasses.fields(config):
        if f.default is not dataclasses.MISSING:
            found[f.name] = jsonable(f.default)
        elif f.default_factory is not dataclasses.MISSING:
            found[f.name] = jsonable(f.default_factory())
    return found


def filled(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config with the defaults of the options that it does not have."""
    found = {**defaults, **stored}
    for name, x in defaults.items():
        if isinstance(x, Mapping) and isinstance(found[name], Mapping):
            found[name] = filled(found[name], x)
    return found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file by one rename.

    Its readers find the old content or the new one, also after a full disk.
    """
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise _named(error, path) from error


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file.

    OSError with its name, also for a full disk.
    """
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def keep_until(path: Path, step: int) -> None:
    """Cut a file back to the rows before `step`, without a last line that a kill cut short."""
    if not path.exists():
        return
    lines = path.read_text().split("\n")
    kept = [line + "\n" for line, row in zip(lines, border.json_rows(path)) if row["step"] < step]
    write_whole(path, "".join(kept))


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return {"part.name": (old, new)} of the options that differ between two nested configs."""
    out: dict[str, tuple[Any, Any]] = {}
    for name in sorted(set(old) | set(new)):
        a = old.get(name)
        b = new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out |= differences(a, b, f"{prefix}{name}.")
        elif a != b:
            out[prefix + name] = (a, b)
    return out


# ---------- an earlier run in a folder: its options, its model, and its rows up to a checkpoint


FACTS = ("date", "digests", "made_by")
"""What config.json has beyond the options: the day of the first start, digests, and the script."""

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
        return border.object_of("options", border.read_json(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"run: expected the folder of a run, got {folder}: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"run folder {folder}: config.json is damaged ({error}); delete that file to continue with the "
            "options of this command, or put back a copy"
        ) from error


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
    if step == 0 and (folder / _SAVED).exists():
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


# ---------- the responses of a step


def write_rollout(path: Path, rollout: Rollout, reward: Tensor) -> None:
    """Write a rollout and its rewards [N, G] into one file of safetensors, without images and audio."""
    from safetensors.torch import save

    tensors = {name: x for name, x in vars(rollout).items() if isinstance(x, Tensor)} | {"reward": reward}
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    about = {"sampling": json.dumps(jsonable(rollout.sampling)), "media": str(rollout.media is not None)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _ordered(save(tensors, metadata=about)))


def _ordered(content: bytes) -> bytes:
    """Return a file of safetensors with its header in order: the library writes metadata in any."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[end:]


def read_rollout(path: str | Path, *, vocabulary: int | None = None) -> tuple[Rollout, Tensor]:
    """Return the rollout and the rewards [N, G] of a file that a run wrote with `rollouts_every`.

    ValueError for another file, for numbers that no run writes (see `border.rollout_of`), tokens beyond
    `vocabulary` among them, and for responses about images or audio, which the file does not have.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("media") != "False":
                raise ValueError("they are about images or audio, which it does not have")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sampling = border.read_json(about.get("sampling", ""))
        if sampling is not None:
            given = border.object_of("sampling", sampling)
            given["stop"] = tuple(border.entries("stop", given.get("stop"), None))
            sampling = Sampling(**given)
        rollout, reward = border.rollout_of(tensors, vocabulary=vocabulary)
        return tree.replace(rollout, sampling=sampling), reward
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"rollouts: expected a file that --rollouts-every wrote, got {path}: {why}"
        ) from error
