"""A claim to the folder of a run: it is writable, locked, and holds steps with the same options."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rft_fn.run import lock
from rft_fn.run.files import append_row, differences, write_whole
from rft_fn.run.resume import settings

__all__ = ["Claim"]


class Claim:
    """The folder of a run, for a command with the options `config`.

    It may differ in the options `free` from those of the steps that are in the folder.
    """

    def __init__(self, folder: Path, config: dict[str, Any], free: Collection[str]):
        self.folder = folder
        self.config = config
        self.free = free
        self.changed: dict[str, tuple[Any, Any]] = {}  # name -> (old, new) of options that are not free

    def take(self, *, override: bool) -> None:
        """Make the folder and lock it.

        ValueError for a folder that cannot be written, that another process is using, or that holds steps
        with other options, unless `override`.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / ".probe", "")
            (self.folder / ".probe").unlink()
        except OSError as error:
            raise ValueError(
                f"run folder {self.folder} cannot be written: {error.strerror}; choose another with --out"
            ) from error
        lock.acquire(self.folder)
        try:
            self._compare(override)
        except ValueError:
            lock.release(self.folder)
            raise

    def _compare(self, override: bool) -> None:
        """Refuse other options than those of the steps that are here; write them where there are none."""
        path = self.folder / "config.json"
        # a command that stopped at its preflight has claimed nothing: the mended one may be another
        if not (self.folder / "metrics.jsonl").exists() or not path.exists():
            self.write_config()
            return
        changed = differences(settings(self.folder), self.config)
        self.changed = {name: pair for name, pair in changed.items() if name not in self.free}
        if self.changed and not override:
            named = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in self.changed.items()]
            raise ValueError(
                f"run folder {self.folder} holds a run with other arguments: {'; '.join(named[:4])}; "
                "give --override to continue it with these, --out another folder, or delete this one to "
                "start again"
            )

    def note_changes(self, step: int) -> None:
        """Write the options of this command, and before that, what changes with them after `step` steps."""
        # a kill between the two notes the changes again, and loses none
        for name, (old, new) in self.changed.items():
            row = {"step": step, "name": name, "old": old, "new": new}
            append_row(self.folder / "overrides.jsonl", row)
        self.write_config()

    def write_config(self) -> None:
        """Write config.json, unless it has these options already."""
        path = self.folder / "config.json"
        text = json.dumps(self.config, indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)

    def release(self) -> None:
        """Unlock the folder."""
        lock.release(self.folder)
