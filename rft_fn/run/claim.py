"""A claim to the folder of a run: writable, locked, with the same options and data."""

import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rft_fn import opened
from rft_fn.data import Dataset
from rft_fn.data.template_variables import fixed_day
from rft_fn.foreign_json import parse_json
from rft_fn.run import manifest
from rft_fn.run.earlier_run import FACTS, begun, settings
from rft_fn.run.files import append_row, differences, filled, write_whole
from rft_fn.text import printable

__all__ = ["Claim", "Inputs", "acquire", "check", "held", "lock_folder", "release"]


# ---------- one run per folder: a lock that the kernel releases when its process dies, however it dies


_held: dict[Path, int] = {}  # folder -> the open file that holds its lock; a process shares its own lock


def acquire(folder: Path) -> None:
    """Lock `folder` for this process.

    A ValueError names the holder of the lock: its host, its process and when it began.
    """
    folder = folder.resolve()
    if folder in _held:
        if _holds(folder):
            return
        release(folder)  # it was deleted, and made again
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 4096).decode(errors="replace")
        os.close(file)
        raise ValueError(
            f"run folder {folder} is in use by {_described(holder)}; wait for it, end it, or choose another "
            "folder with --out"
        ) from None
    except OSError as error:  # a file system without locks: the run is still worth starting
        os.close(file)
        print(f"warning: {folder}: not locked ({error.strerror}); start no second run here", flush=True)
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    os.ftruncate(file, 0)
    os.write(file, json.dumps(about).encode())
    _held[folder] = file


def check(folder: Path, *, whole: bool = True) -> None:
    """Raise ValueError if `folder` was deleted or moved away under this process, or is not `whole`.

    Also where there is another folder of that name by now.
    """
    if not (_holds(folder) and whole):
        raise ValueError(
            f"run folder {folder}: it was deleted or moved away during the run, and its rows and checkpoints "
            "with it; start the command again"
        )


def _holds(folder: Path) -> bool:
    """Return whether the lock in a folder is the one that this process took, if it could take one."""
    file = _held.get(folder.resolve())
    try:
        there = os.stat(folder / ".lock")
        return file is None or os.path.samestat(os.fstat(file), there)
    except OSError:
        return False


def held(folder: Path) -> bool:
    """Return whether a process of this machine holds the lock of `folder`, without taking it."""
    try:
        file = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def release(folder: Path) -> None:
    """Unlock `folder`, if this process holds its lock."""
    file = _held.pop(folder.resolve(), None)
    if file is not None:
        os.close(file)


def _described(text: str) -> str:
    try:
        about = parse_json(text)
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not written who it is yet
        return "another process"


# ---------- a claim to the folder of a run: writable, locked, with the same options and data


_ADDRESS = re.compile(r"(https?://)[^/\s'\",()]+")  # a host and its port
_ROWS = "rows.bin"  # the marks of the data
_SAMPLE = (
    "Hello, World! 3.14 + 1,000 = x_1\n\n\tdef f(n):  # äöü 你好 🙂"  # tokenizers split it in their own ways
)


class Inputs(NamedTuple):
    """What a run is made of, apart from its options."""

    datasets: Mapping[str, Dataset]  # by the option that names them
    tokenizer: Any = None

    def digests(self) -> dict[str, Any]:
        """Return the digests of all of it, as config.json has them."""
        found: dict[str, Any] = {}
        for name, dataset in self.datasets.items():
            parts = dataset.parts or (dataset,)
            found[name] = [{"name": x.name, "rows": x.size, "digest": x.digest} for x in parts]
        if self.tokenizer is not None:
            found["tokenizer"] = _tokenizer_digest(self.tokenizer)
            found["chat_template"] = _digest([repr(self.tokenizer.chat_template).encode()])
        return found

    def marks(self) -> bytes:
        """Return the marks of all rows, in the order of the digests."""
        parts = [part for dataset in self.datasets.values() for part in dataset.parts or (dataset,)]
        return b"".join(part.marks for part in parts)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of the vocabulary, the special tokens, and how a text is split."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = sorted(map(str, tokenizer.all_special_tokens))
    return _digest(repr(x).encode() for x in (vocabulary, special, tokenizer.encode(_SAMPLE)))


def _placeless(x: Any) -> Any:
    """Return the value of an option without the hosts and ports of addresses in it."""
    if isinstance(x, str):
        return _ADDRESS.sub(r"\1", x)
    return [_placeless(y) for y in x] if isinstance(x, (list, tuple)) else x


def lock_folder(folder: Path) -> None:
    """Make the folder of a run and lock it.

    ValueError where it cannot be written, or belongs to another process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / ".probe", "")
        (folder / ".probe").unlink()
    except OSError as error:
        raise ValueError(
            f"run folder {folder} cannot be written: {error.strerror}; choose another with --out"
        ) from error
    acquire(folder)


class Claim:
    """The folder of a run, for a command with the options `config` and the data of `inputs`.

    The steps in the folder may have other values of the `free` options. `defaults` are the values of options
    that an older version did not have. `made_by` names the script and the version of the library.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        free: Collection[str],
        *,
        defaults: Mapping[str, Any] | None = None,
        inputs: Inputs | None = None,
        made_by: Mapping[str, str] | None = None,
    ):
        self.folder = folder
        self.config = config
        self.free = free
        self.defaults = defaults or {}
        self.inputs = inputs
        self.facts: dict[str, Any] = {"made_by": made_by} if made_by else {}  # also the date and the digests
        self.changed: dict[str, tuple[Any, Any]] = {}  # name -> (old, new) of what is not free
        self.manifest: dict[str, Any] = {}  # of the files that were read before the first step
        self._stored_files: Mapping[str, str] = {}  # digests of the user's files in config.json

    def take(self, *, override: bool) -> None:
        """Make the folder and lock it.

        ValueError for a folder that cannot be written, that another process is using, or that holds steps
        with other options or other data, unless `override`. Changed tokenizers, chat templates and
        addresses of servers are announced; `compare_files` looks at files, once all were read.
        """
        lock_folder(self.folder)
        try:
            self._compare(override)
        except ValueError:
            release(self.folder)
            raise

    def _compare(self, override: bool) -> None:
        """Refuse options or data that differ from the ones of the steps that are here, if there are any."""
        if self.inputs is not None:
            day = fixed_day()
            self.facts |= {"date": day and day.isoformat(), "digests": self.inputs.digests()}
        path = self.folder / "config.json"
        # a command that stopped at its preflight has claimed nothing: the mended one may be another
        if not begun(self.folder):
            self.write_config()
            return
        if not path.exists():
            self._say("config.json is gone, so its steps go on with the options of this command")
            self.write_config()
            return
        stored = settings(self.folder)
        before = {name: stored.pop(name) for name in FACTS if name in stored}
        if self.inputs is None:
            self.facts = before | self.facts
        changed = differences(filled(stored, self.defaults), self.config)
        self.changed = {name: pair for name, pair in changed.items() if name not in self.free}
        others = {
            x: (old, new) for x, (old, new) in self.changed.items() if _placeless(old) != _placeless(new)
        }
        for name in self.changed.keys() - others.keys():
            self._say(f"{name} has servers at other addresses than in the steps before")
        if others and not override:
            named = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in others.items()]
            raise ValueError(
                f"run folder {self.folder} holds a run with other arguments: {'; '.join(named[:4])}; "
                "give --override to continue it with these, --out another folder, or delete this one to "
                "start again"
            )
        digests = dict(before.get("digests", {}))
        self._stored_files = digests.pop("files", {})
        self._compare_inputs(digests, override)

    def _compare_inputs(self, before: Mapping[str, Any], override: bool) -> None:
        """Refuse rows that differ from the ones of the steps that are here, and announce other changes."""
        if self.inputs is None:
            return
        # what one of the two does not have was not stored yet, or is an option that has changed
        found = differences(before, self.facts["digests"])
        found = {name: pair for name, pair in found.items() if None not in pair}
        self.changed |= {f"digests.{name}": pair for name, pair in found.items()}
        for name in found:
            if name not in self.inputs.datasets:
                self._say(f"{name} is another than in the steps before")

        # another tokenizer or template makes other prompts of the same rows
        read_alike = not found.keys() & {"tokenizer", "chat_template"}
        if (line := self._first_difference(before, read_alike)) and not override:
            raise ValueError(
                f"run folder {self.folder} holds a run with other data: {line}; give --override to continue "
                "it with these rows, --out another folder, or delete this one to start again"
            )

    def _first_difference(self, before: Mapping[str, Any], read_alike: bool) -> str:
        """Return which row differs, or how the number of rows does; an empty text if all are alike.

        With `read_alike` what is made of a row must be the same too, its media for example.
        """
        assert self.inputs is not None
        path = self.folder / _ROWS
        marks = path.read_bytes() if path.exists() else b""
        end = 0  # of the marks of a part
        for name, stored in before.items():
            dataset = self.inputs.datasets.get(name)
            if dataset is None:
                continue
            for was, part in zip(stored, dataset.parts or (dataset,)):
                begin, end = end, end + 8 * (was["rows"] or 0)
                if was["digest"] == part.digest:
                    continue
                if was["rows"] != part.size:
                    return f"{name}: {part.name} had {was['rows']} rows and has {part.size}"
                old = np.frombuffer(marks[begin:end], "<u4").reshape(-1, 2)
                new = np.frombuffer(part.marks, "<u4").reshape(-1, 2)
                if len(old) != len(new) or part.place is None:
                    return f"{name}: the rows of {part.name} are others than they were"
                other = old != new
                if other[:, 0].any():
                    return f"{name}: {part.place(int(other[:, 0].argmax()))} is another row than it was"
                if read_alike and other[:, 1].any():
                    place = part.place(int(other[:, 1].argmax()))
                    return f"{name}: {place} is the row that it was, and what is made of it is another"
        return ""

    def _say(self, text: str) -> None:
        print(printable(f"warning: {self.folder}: {text}"), flush=True)

    def compare_files(self, step: int, *, override: bool) -> None:
        """Compare the files that were read so far with those that the first `step` steps were made with.

        Announces what differs. ValueError for weights that do, unless `override`. Nothing where the run has
        no `inputs`, or its steps no manifest.
        """
        if self.inputs is None:
            return
        old = manifest.read(self.folder) if step else {}
        new = manifest.collect(old, [self.folder])
        opened.end()
        if step:
            self._tell_changes(old or manifest.of_digests(self._stored_files), new, override)
        self.manifest = manifest.joined(old, new)
        self.facts["digests"] = {**self.facts["digests"], "files": manifest.of_user(new)}

    def _tell_changes(self, old: Mapping[str, Any], new: Mapping[str, Any], override: bool) -> None:
        told = bool(self.changed.keys() & {"digests.tokenizer", "digests.chat_template"})
        found = manifest.compare(old, new, tokenizer_is_told=told)
        for name, what in (found.announced | (found.refused if override else {})).items():
            self._say(f"{name} {what} in the steps before")
        if found.refused and not override:
            release(self.folder)
            named = [f"{name} {what} in the steps before" for name, what in found.refused.items()]
            raise ValueError(
                f"run folder {self.folder} holds a run with other weights: {'; '.join(named[:2])}; give "
                "--override to continue it with these, --out another folder, or delete this one to start "
                "again"
            )
        for name in found.announced | found.refused:
            pair = [manifest.digest_in(x, name) for x in (old, new)]
            self.changed[f"digests.files.{name}"] = (pair[0], pair[1])

    def note_changes(self, step: int) -> None:
        """Write what changes in the options after `step` steps, and then the options of this command."""
        # a kill between the two notes the changes again, and loses none
        for name, (old, new) in self.changed.items():
            row = {"step": step, "name": name, "old": old, "new": new}
            append_row(self.folder / "overrides.jsonl", row)
        self.write_config()
        if self.manifest:
            manifest.write(self.folder, self.manifest)

    def write_config(self) -> None:
        """Write config.json and the bytes of the rows, unless the folder has these already."""
        path = self.folder / _ROWS
        if self.inputs is not None:
            marks = self.inputs.marks()
            if marks and (not path.exists() or path.read_bytes() != marks):
                write_whole(path, marks)
        path = self.folder / "config.json"
        text = json.dumps(self.config | self.facts, indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)

    def release(self) -> None:
        """Unlock the folder."""
        release(self.folder)
