"""Code that is run: the share of the unit tests that a response passes, each in a sandbox of its own.

A cell of the column holds tests, or their text in JSON, in one of three forms:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                   # standard input and output
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}       # calls
    ["assert add(1, 2) == 3", ...], or one text with several               # asserts

Outputs of programs are compared here, where they are known; calls and asserts are run by
`sandbox.call_tests`, outside of the process that runs the response. Tests of a response begin as it ends,
where others are still sampled; see `early`.
"""

import ast
import asyncio
import json
import math
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn import cores, sandbox
from rft_fn.data.row_paths import column_at
from rft_fn.reward.event_loop import EventLoop, in_thread
from rft_fn.reward.reward_record import Reward, as_reward, column_names
from rft_fn.reward.signature import Messages, text
from rft_fn.sandbox import call_tests

__all__ = ["code", "extract_code"]

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


class Case(NamedTuple):
    """One test."""

    stdin: str  # of the program; of `call_tests` the tests
    stdout: str | None  # None for `call_tests`


def extract_code(text: str) -> str | None:
    """Return the content of the last closed fenced block of a text; None where there is none."""
    found = _FENCE.findall(text)
    return found[-1] if found else None


def code(
    column: str = "tests",
    *,
    seconds: float = 10.0,
    memory: float = 1.0,
    all_or_nothing: bool = False,
    deadline: float = 240.0,
) -> Reward:
    """Return the share of unit tests that the last fenced block passes, as Python; 0 without a block.

    Each test has `seconds` and `memory` [GiB], all of a call have `deadline` seconds: what has not run by
    then has failed, with a warning. With `all_or_nothing` a response that fails one test scores 0, and the
    rest of its tests are not run. ValueError for tests of another form than those of this module.
    """
    for name, value in (("seconds", seconds), ("memory", memory), ("deadline", deadline)):
        if not value > 0:
            raise ValueError(f"reward 'code': {name}: expected a number above 0, got {value!r}")

    def tested(
        completions: Sequence[str | Messages], columns: Mapping[str, Sequence[Any]]
    ) -> list[list[_Run] | None]:
        """Return the runs that each completion needs; None without a block."""
        try:
            cells = column_at(columns, column, len(completions))
        except KeyError:
            raise ValueError(
                f"column {column!r}: not in the dataset; its columns are: {column_names(columns)}"
            ) from None
        tests = [cases_of(cell, column) for cell in cells]
        programs = [extract_code(text(x)) for x in completions]
        limits = sandbox.Limits(seconds=seconds, memory=int(memory * 2**30))
        return [
            None if x is None else [_Run(x, part, limits) for part in _parts(of, all_or_nothing)]
            for x, of in zip(programs, tests)
        ]

    def reward(
        prompts: Sequence[Any], completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> list[float]:
        asked = tested(completions, columns)
        passed = _passed(list(dict.fromkeys(run for of in asked for run in of or ())), deadline)
        return [0.0 if of is None else sum(passed[run] for run in of) / len(of) for of in asked]

    def begin(completions: Sequence[str | Messages], **columns: Sequence[Any]) -> None:
        _begun.begin([run for of in tested(completions, columns) for run in of or ()])

    return replace(as_reward(reward), columns=(column,), state=False, begin=begin)


# ---------- tests


def cases_of(cell: Any, column: str) -> list[Case]:
    """Return the tests in a cell. ValueError, with the column, for what is none."""
    if isinstance(cell, str):
        with suppress(ValueError):
            cell = json.loads(cell)
    if isinstance(cell, str):
        found = _of_text(cell, column)
    elif isinstance(cell, dict):
        found = _of_columns(cell, column)
    elif isinstance(cell, (list, tuple)) and all(isinstance(x, str) for x in cell):
        found = [case for x in cell for case in _of_text(x, column)]
    elif isinstance(cell, (list, tuple)) and all(isinstance(x, dict) for x in cell):
        both = {f"{key}s": [x.get(key) for x in cell] for key in ("input", "output")}
        found = _of_columns(both, column)
    else:
        raise _refused(column, type(cell).__name__)
    if not found:
        raise _refused(column, "none")
    return found


def _refused(column: str, got: str) -> ValueError:
    return ValueError(
        f"column {column!r}: expected tests, as texts with assert or a dict of inputs and outputs, got {got}"
    )


def _of_columns(cell: dict[str, Any], column: str) -> list[Case]:
    """Return the tests of inputs and outputs."""
    inputs, outputs, name = cell.get("inputs"), cell.get("outputs"), cell.get("fn_name")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
        raise _refused(column, f"a dict of {', '.join(map(str, cell))}")
    if len(inputs) != len(outputs):
        raise ValueError(
            f"column {column!r}: expected as many outputs as inputs, got {len(outputs)} and {len(inputs)}"
        )
    if name:
        return [Case(_call(name, x, y, column), None) for x, y in zip(inputs, outputs)]
    if not all(isinstance(x, str) for x in (*inputs, *outputs)):
        raise ValueError(
            f"column {column!r}: expected texts as inputs and outputs of a program, or fn_name for calls"
        )
    return [Case(x, y) for x, y in zip(inputs, outputs)]


def _call(name: str, arguments: Any, expected: Any, column: str) -> str:
    """Return the test of a call; JSON has no tuples, so a list is equal to one."""
    if not re.fullmatch(r"\w+(\.\w+)*", str(name)) or not isinstance(arguments, (list, tuple)):
        raise ValueError(
            f"column {column!r}: expected fn_name and lists of arguments as inputs, got {name!r}"
        )
    return (
        "def _plain(x):\n"
        "    return [_plain(y) for y in x] if isinstance(x, (list, tuple)) else x\n"
        f"assert _plain({name}(*{list(arguments)!r})) == _plain({expected!r})"
    )


@lru_cache(maxsize=4096)
def _of_text(tests: str, column: str) -> list[Case]:
    """Return a test for each assert at the top of a text, after the other statements before it.

    A text without one is one test, such as a function that is called.
    """
    try:
        body = ast.parse(tests).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(column, f"{tests[:60]!r}, which is no Python ({type(error).__name__})") from None
    found = []
    before: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            found.append(Case(ast.unparse(ast.Module([*before, statement], [])), None))
        else:
            before.append(statement)
    return found or ([Case(tests, None)] if body else [])


# ---------- running


class _Run(NamedTuple):
    """A program with the tests that it has to pass together, one after the other."""

    program: str
    cases: tuple[Case, ...]
    limits: sandbox.Limits

    def __call__(self, until: float = math.inf) -> bool | None:
        """Return whether it passes all of them; None where no time is left for one."""
        for case in self.cases:
            left = until - time.monotonic()
            if left <= 0:
                return None
            if not _passes(self.program, case, self.limits._replace(seconds=min(self.limits.seconds, left))):
                return False
        return True


def _parts(cases: Sequence[Case], all_or_nothing: bool) -> Iterator[tuple[Case, ...]]:
    """Yield the tests of which each has a share of the score."""
    yield from [tuple(cases)] if all_or_nothing else ((case,) for case in cases)


def _passed(runs: Sequence[_Run], deadline: float) -> dict[_Run, bool]:
    """Return whether each run passes, side by side on the cores of this rank; a late one does not."""
    until = time.monotonic() + deadline
    early = _begun.take(runs)
    rest = [run for run in runs if run not in early]
    with ThreadPoolExecutor(cores.of_rank()) as threads:
        found = dict(zip(rest, threads.map(lambda run: run(until), rest)))
    for run, future in early.items():
        try:
            found[run] = future.result(max(until - time.monotonic(), 0))
        except TimeoutError:
            future.cancel()
            found[run] = None
    late = sum(x is None for x in found.values())
    if late:
        warnings.warn(
            f"reward 'code': {late} tests were not run within {deadline:g} s, and fail", stacklevel=2
        )
    return {run: bool(x) for run, x in found.items()}


_BEGUN = 100_000  # runs that were begun and nobody has asked for, at most: of rollouts that were lost


class _Begun:
    """Runs that began before they are asked for, in threads that nobody waits for."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # a process that is forked has none of the threads

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._loop = EventLoop()
        self._free: asyncio.Semaphore | None = None
        self._runs: dict[_Run, Future[bool | None]] = {}

    def begin(self, runs: Sequence[_Run]) -> None:
        """Begin runs, as many at a time as this rank has cores."""
        with self._lock:
            if self._free is None:
                self._free = asyncio.Semaphore(cores.of_rank())
            for run in runs:
                if run not in self._runs:
                    self._runs[run] = self._loop.start(self._one(run, self._free))
            for run in list(self._runs)[: max(len(self._runs) - _BEGUN, 0)]:
                self._runs.pop(run).cancel()

    async def _one(self, run: _Run, free: asyncio.Semaphore) -> bool | None:
        async with free:
            return await in_thread(run, lambda: None)

    def take(self, runs: Sequence[_Run]) -> "dict[_Run, Future[bool | None]]":
        """Return those of the runs that were begun, and forget them."""
        with self._lock:
            return {run: self._runs.pop(run) for run in runs if run in self._runs}


_begun = _Begun()


@cache
def _calls() -> str:
    """Return the text of the program that tests calls."""
    return Path(call_tests.__file__).read_text()


def _passes(program: str, case: Case, limits: sandbox.Limits) -> bool:
    """Return whether a program passes a test."""
    python = [sys.executable, "-I", "main.py"]
    if case.stdout is not None:
        outcome = sandbox.run(python, case.stdin, limits, files={"main.py": program})
        return outcome.ok and _same(outcome.stdout, case.stdout)
    given = b"".join(
        len(x).to_bytes(8, "big") + x for x in (y.encode(errors="replace") for y in (program, case.stdin))
    )
    outcome = sandbox.run(python, given, limits, files={"main.py": _calls()})
    return outcome.ok and outcome.stdout == call_tests.PASSED


def _same(given: bytes, expected: str) -> bool:
    """Return whether two outputs are equal, but for white space at the ends of lines and of the whole."""
    lines = given.decode(errors="replace").rstrip().splitlines(), expected.rstrip().splitlines()
    return [x.rstrip() for x in lines[0]] == [x.rstrip() for x in lines[1]]
