"""The table of docs/models.md: every family of `families` x everything of `family_checks`.

    python tests/model/families_table.py                                  all that is not measured yet
    python tests/model/families_table.py --only Mixtral GptOss            these again
    python tests/model/families_table.py --columns fsdp2 zero3 --again    these columns of all
    python tests/model/families_table.py --failed                         what was not equal

Each cell is a separate process with a time limit, forked from one that has imported everything. Results are
kept in docs/results/families.json, which the page is made of.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import families_page
import family_checks
import ranks
from families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context("fork")


class Table(NamedTuple):
    """A table of families x measurements."""

    families: list[str]
    checks: Any  # a module like `family_checks`
    results: Path  # what is measured, as JSON
    page: Path
    write: Callable[[dict], str]  # the page of the results


TEXT = Table(
    families=list(FAMILIES),
    checks=family_checks,
    results=ROOT / "docs" / "results" / "families.json",
    page=ROOT / "docs" / "models.md",
    write=families_page.page,
)


class Cell(NamedTuple):
    """A measurement under way."""

    kind: str
    column: str
    process: multiprocessing.Process
    answer: multiprocessing.connection.Connection
    began: float


def forked(world, target, *args):
    """`ranks.run` without new interpreters: f(rank, *args) on forks of this process."""
    module, name = target.split(":")
    f = getattr(importlib.import_module(module), name)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port()), "WORLD_SIZE": str(world)}

    def one(rank, answer):
        os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        answer.send(told(f, rank, *args))

    pipes = [FORK.Pipe(duplex=False) for _ in range(world)]
    processes = [FORK.Process(target=one, args=(rank, ends[1])) for rank, ends in enumerate(pipes)]
    for process in processes:
        process.start()
    for ends in pipes:
        ends[1].close()
    answers = []
    for ends, process in zip(pipes, processes):
        answers.append(heard(ends[0], process))
        if isinstance(answers[-1], str):  # the others may wait for this one
            raise RuntimeError(answers[-1])
    return answers


def heard(answer, process):
    """What a process sent, or that it ended without a word."""
    try:
        return answer.recv()
    except EOFError:
        process.join()
        return f"a process ended with {process.exitcode}"


def told(f, *args):
    """f(*args), or in words why not."""
    try:
        return f(*args)
    except Exception as error:  # whatever a family does not take belongs in the table
        return f"{type(error).__name__}: {error}"


def measure(checks, kind, column, answer):
    """One cell, in its own process group."""
    os.setpgrp()
    warnings.simplefilter("ignore")
    if column in checks.BACKENDS:
        answer.send(told(checks.on_two, kind, column, forked))
    else:
        answer.send(told(checks.CHECKS[column], kind))


def begin(checks, kind, column):
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=measure, args=(checks, kind, column, there))
    process.start()
    there.close()  # the other end is the process's alone: it is seen to end
    return Cell(kind, column, process, here, time.monotonic())


def ended(checks, cell, limit):
    """The entry of a cell that is done, or has taken longer than `limit` seconds; else None."""
    seconds = time.monotonic() - cell.began
    if cell.answer.poll():
        answer = heard(cell.answer, cell.process)
    elif seconds > limit:
        answer = f"not done in {limit:.0f} s"
    else:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cell.process.pid, signal.SIGKILL)
    cell.process.join()
    entry = {"date": date.today().isoformat(), "seconds": round(seconds, 1)}
    if isinstance(answer, str):
        return entry | {"ok": False, "note": re.sub(r"/tmp/\w+", "FOLDER", answer)}
    return entry | {
        "ok": answer.value <= checks.BOUNDS[cell.column],
        "value": answer.value,
        "note": answer.note,
    }


def run(checks, cells, jobs, limit, keep):
    """Measure (family, column) pairs, `jobs` at a time; `keep(kind, column, entry)` gets each when done."""
    waiting, busy = list(cells), []
    while waiting or busy:
        while waiting and len(busy) < jobs:
            busy.append(begin(checks, *waiting.pop(0)))
        time.sleep(0.1)
        for cell in list(busy):
            entry = ended(checks, cell, limit)
            if entry is not None:
                busy.remove(cell)
                keep(cell.kind, cell.column, entry)


def about():
    """Where this was measured."""
    import deepspeed
    import peft
    import torch
    import transformers

    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, deepspeed)}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def main(table=TEXT, about_it=__doc__):
    columns = table.checks.COLUMNS
    parser = argparse.ArgumentParser(description=about_it, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=table.families, default=[], metavar="FAMILY")
    parser.add_argument("--columns", nargs="*", choices=columns, default=columns)
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--limit", type=float, default=240, help="s that a cell may take")
    parser.add_argument("--again", action="store_true", help="also what is measured")
    parser.add_argument("--failed", action="store_true", help="also what is measured and not equal")
    args = parser.parse_args()
    found = {}
    if table.results.exists():
        found = json.loads(table.results.read_text())["families"]

    def keep(kind, column, entry):
        found.setdefault(kind, {})[column] = entry
        table.results.write_text(json.dumps({"about": about(), "families": found}, indent=1, sort_keys=True))
        table.page.write_text(table.write(json.loads(table.results.read_text())))
        print(f"{kind:20} {column:10} {entry}", flush=True)

    def wanted(kind, column):
        entry = found.get(kind, {}).get(column)
        if entry is None or args.again or (args.only and not args.failed):
            return True
        return args.failed and not entry["ok"]

    cells = [(kind, column) for kind in args.only or table.families for column in args.columns]
    cells = [cell for cell in cells if wanted(*cell)]
    run(table.checks, cells, args.jobs, args.limit, keep)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    about()  # what is imported here is not imported by every cell
    sys.exit(main())
