"""When something breaks: which process is gone and what it did last, and which sequence is not finite."""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import dist, tree
from rft_fn.types import Packed, TrainState

__all__ = ["NonFinite", "blame", "first_offender", "is_lost", "keep", "load", "watch"]

LOST = 3  # exit code of a process that lost others
QUIET = 3.0  # s without a beat that whoever is alive, and beats twice a second, does not have
_GLOO = re.compile(r"\[[^]\s]*gloo/[^]\s]+\.(cc|h):\d+\] ")  # the place in its source, in all that it raises
_watch: dict[str, Any] = {"beats": None, "folder": Path(".")}


class NonFinite(FloatingPointError):
    """Gradients were not finite in too many updates in a row."""


class Beats:
    """Each process writes what it does into the store of the group twice a second, and reads the others'.

    It has a client of its own, for a thread of its own: the main thread may be waiting in the other one.
    """

    BYE = "its exit"  # the phase of a process that is done: nobody waits for it any more

    def __init__(self, timeout: float):
        self.store, self.key = dist.client(min(timeout, 30)), f"{dist.session()}/beats"
        self.timeout, self.count, self.over = timeout, 0, threading.Event()
        self.heard = {r: (time.monotonic(), "start", "") for r in range(dist.world()) if r != dist.rank()}

    def beat(self) -> None:
        """Write this process's own, read all others'."""
        self.count += 1
        self.store.set(f"{self.key}/{dist.rank()}", f"{self.count} {dist.current_phase()}")
        for r, (_, _, last) in list(self.heard.items()):
            key = f"{self.key}/{r}"
            if not self.store.check([key]):
                continue  # it has not begun
            now = self.store.get(key).decode()
            if now != last:
                phase = now.partition(" ")[2]
                self.heard[r] = (time.monotonic(), phase, now)

    def silent(self, seconds: float) -> list[tuple[int, float, str]]:
        """(rank, seconds, its last phase) of the processes not heard of for so long."""
        now = time.monotonic()
        beats = [(r, now - t, phase) for r, (t, phase, _) in self.heard.items()]
        return [(r, age, phase) for r, age, phase in beats if age > seconds and phase != self.BYE]

    def phases(self, without: Sequence[int] = ()) -> list[str]:
        """What the others do, those `without` left out: "rank 1, 2 in forward of step 3" for each phase."""
        ranks: dict[str, list[str]] = {}
        for r, (_, phase, _) in self.heard.items():
            if r not in without:
                ranks.setdefault(phase, []).append(str(r))
        return [f"rank {', '.join(who)} in {phase}" for phase, who in ranks.items()]

    def run(self) -> None:
        while True:
            try:
                self.beat()
            except RuntimeError:  # the store went with the process that held it: the main thread will notice
                return
            if self.silent(self.timeout):
                leave(blame(0))
            if self.over.wait(min(0.5, self.timeout / 5)):
                return

    def begin(self) -> None:
        """Listen, until this process ends: its exit waits for the thread, which must not be inside of the
        store when the interpreter goes away."""
        thread = threading.Thread(target=self.run, daemon=True, name="rft_fn beats")
        thread.start()

        def end() -> None:
            self.over.set()
            thread.join(5)
            with suppress(RuntimeError):
                self.store.set(f"{self.key}/{dist.rank()}", f"{self.count + 1} {self.BYE}")

        atexit.register(end)


def watch(timeout: float) -> None:
    """Begin to listen to the other processes; one that is silent for `timeout` [s] ends this one, with a line
    that names it. Nothing for a single process, or where no store can be reached."""
    if dist.world() == 1 or _watch["beats"] is not None or not dist.session():
        return
    try:
        _watch["beats"] = Beats(timeout)
    except (RuntimeError, ValueError):
        return
    _watch["beats"].begin()


def is_lost(error: BaseException) -> bool:
    """Whether an error is one of torch.distributed's about other processes: by its type, or as gloo words
    it. A time limit or a connection of anybody else's is none."""
    if dist.world() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or _GLOO.search(str(error)) is not None


def blame(patience: float = 4.0, error: BaseException | None = None) -> str:
    """One line: who is gone, what each process did last, and the `error` that this one met. Waits `patience`
    [s] first, in which whoever is alive is heard."""
    here = f"rank {dist.rank()} was in {dist.current_phase()}"
    time.sleep(patience)
    who = "other processes"
    others: list[str] = []
    if beats := _watch["beats"]:
        gone = beats.silent(min(QUIET, beats.timeout))
        names = [f"rank {r} (last in {phase}, {age:.0f} s ago)" for r, age, phase in gone]
        who = ", ".join(names) or who
        others = beats.phases(without=[r for r, _, _ in gone])
    remedy = "the same command goes on from the last checkpoint (torchrun --max-restarts does so by itself)"
    line = [f"lost {who}", here, *others, remedy]
    if error:
        line.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    return "; ".join(line)


def leave(line: str) -> None:
    """Print the line and end this process at once: tidying up would wait for the others."""
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST)


def _units(packs: Sequence[Packed]) -> list[Packed]:
    """Each sequence as a pack of its own; each pair where two belong together."""
    out = []
    for b in packs:
        for first in range(0, b.num_seqs, b.unit):
            mine = (b.seq >= first) & (b.seq < first + b.unit)
            part = tree.map(lambda x: x[mine], tree.replace(b, media=None))  # noqa: B023
            rows = b.rows[first : first + b.unit]
            members = [first + i for i in range(len(rows))]  # a placeholder has no rows, and no media
            media = None if b.media is None else b.media.take(members)
            out.append(tree.replace(part, seq=part.seq - first, num_seqs=b.unit, rows=rows, media=media))
    return out


def _silent_pack(b: Packed) -> Packed:
    """A pack of one unit that adds nothing: masked tokens, with finite data."""
    part = tree.map(lambda x: x.new_zeros(b.unit, *x.shape[1:]), tree.replace(b, media=None))
    media = None if b.media is None else b.media.take([])
    seq = torch.arange(b.unit, device=b.seq.device)
    tokens = b.tokens[:1].repeat(b.unit)
    return tree.replace(part, tokens=tokens, seq=seq, num_seqs=b.unit, rows=(), padding=0, media=media)


def _smallest(count: int, bad: Callable[[int], bool]) -> int | None:
    """The smallest n <= count with bad(n), if bad stays so once it is; None if bad(count) is not."""
    if not bad(count):
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if bad(middle):
            high = middle
        else:
            low = middle
    return high


def first_offender(
    probe: Callable[[Sequence[Packed]], bool], packs: Sequence[Packed]
) -> tuple[int, Packed] | None:
    """(rank, pack of one sequence): the first sequence whose gradient is not finite, in the order of ranks,
    packs and sequences; None if none is alone. Called by all ranks alike; the result is the same on each.

    `probe(packs)` says on every rank whether the summed gradient of these packs of all ranks is not finite.
    By bisection: a NaN in a sum stays.
    """
    found: tuple[int, Packed] | None = None
    parts: list[Packed] = list(packs)
    for cut in (list, _units):
        parts = cut(parts)
        counts = dist.all_gather_object(len(parts))
        starts = [sum(counts[:r]) for r in range(len(counts))]
        start = starts[dist.rank()]
        most = max(counts)

        def bad(n: int) -> bool:
            mine = [b if start + i < n else _silent_pack(b) for i, b in enumerate(parts)]  # noqa: B023
            return probe(mine + [_silent_pack(packs[0])] * (most - len(mine)))  # noqa: B023

        n = _smallest(sum(counts), bad)
        if n is None:
            return None
        owner = max(r for r, s in enumerate(starts) if s < n)
        one = []
        if owner == dist.rank():
            one = [parts[n - 1 - start]]
        found = (owner, dist.all_gather_object(tree.map(lambda x: x.cpu(), one))[owner][0])
        parts = one
    return found


def keep(folder: str | Path) -> None:
    """Where the files of a fault go: the folder of the run."""
    _watch["folder"] = Path(folder)


def write(state: TrainState, offender: tuple[int, Packed] | None, weights: dict[str, Tensor]) -> Path:
    """fault_STEP/: the offending sequence, the weights that it met, and what is known, for `load`."""
    from safetensors.torch import save_file

    folder = _watch["folder"] / f"fault_{state.step + 1:08d}"
    if not dist.is_main():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"step": state.step + 1, "rank": None, "row": None}
    if offender is not None:
        rank, pack = offender
        about |= {"rank": rank, "row": next(iter(pack.rows), None), "num_seqs": pack.num_seqs}
        named = {n: x.contiguous() for n, x in tree.leaves_with_path(tree.replace(pack, media=None))}
        save_file(named, folder / "sequence.safetensors")
    save_file({n: x.contiguous() for n, x in weights.items()}, folder / "weights.safetensors")
    (folder / "fault.json").write_text(json.dumps(about) + "\n")
    return folder


def load(folder: str | Path) -> tuple[Packed, dict[str, Tensor], dict[str, Any]]:
    """(the sequence as a pack, the weights by name, what is known) of a folder that a fault left. ValueError
    for a folder without a sequence."""
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / "sequence.safetensors").is_file():
        raise ValueError(f"fault: expected a folder fault_STEP with sequence.safetensors, got {folder}")
    flat = load_file(folder / "sequence.safetensors")
    extra = {}
    for name in [n for n in flat if n.startswith("extra/")]:
        extra[name.removeprefix("extra/")] = flat.pop(name)
    about = json.loads((folder / "fault.json").read_text())
    unit = about.get("num_seqs", 1)  # 2 where a loss of pairs broke
    pack = Packed(**flat, extra=extra or None, num_seqs=unit, unit=unit, rows=())
    return pack, load_file(folder / "weights.safetensors"), about
