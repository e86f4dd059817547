"""Processes that look at rows: started fresh, in order, with a bounded number of rows on their way.

They import nothing of the script, so scripts need no `__main__` guard, and nothing is forked from a process
with threads or a GPU. They end with the block that started them, also when their parent is killed.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from rft_fn.text import error_text

__all__ = ["main", "map_rows"]

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rft_fn.data.row_workers import main; main(int(sys.argv[2]))"
)
_AHEAD = 4  # chunks of each worker that may be done before the first one that is not


class _Worker(NamedTuple):
    """A process that looks at rows, and the pipe to it."""

    process: "subprocess.Popen[bytes]"
    pipe: Any  # a connection


def _started(begin: bytes) -> _Worker:
    pipe, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    with suppress(OSError):  # one that has ended already is told where its answer is missing
        pipe.send_bytes(begin)
    return _Worker(process, pipe)


def map_rows(
    function: Callable[[Any], Any],
    rows: Iterable[Any],
    *,
    workers: int,
    chunk: int,
    begin: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Yield function(row) of each row, in their order, computed by `workers` processes.

    Both functions are pickled, and `begin` is called first in each process; a process gets `chunk` rows at a
    time. What a call raises is raised here. RuntimeError for a process that was killed.
    """
    first = pickle.dumps((begin, function))
    left = iter(rows)
    chunks = enumerate(iter(lambda: list(islice(left, chunk)), []))
    started: list[_Worker] = []
    busy: dict[Connection, int] = {}  # the chunk that each worker has
    done: dict[int, list[Any]] = {}
    turn = 0  # the chunk that is yielded next
    ended = False
    try:
        while True:
            # each free worker gets a chunk; one worker more is started while there are rows for it
            free = [x.pipe for x in started if x.pipe not in busy]
            while not ended and len(busy) + len(done) < _AHEAD * workers:
                if not free and len(started) == workers:
                    break
                given = next(chunks, None)
                if given is None:
                    ended = True
                    break
                if not free:
                    started.append(_started(first))
                    free.append(started[-1].pipe)
                pipe = free.pop()
                busy[pipe] = given[0]
                with suppress(BrokenPipeError):
                    pipe.send(given[1])
            while turn in done:
                yield from done.pop(turn)
                turn += 1
            if not busy:
                if ended:
                    return
                continue
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                try:
                    found, error = pipe.recv()
                except (EOFError, ConnectionError):
                    raise RuntimeError(_how_ended(started, pipe)) from None
                if error is not None:
                    raise error
                done[busy.pop(pipe)] = found
    finally:
        for worker in started:
            worker.pipe.close()
            worker.process.kill()
            worker.process.wait()


def _how_ended(started: list[_Worker], pipe: Connection) -> str:
    code = next(x.process for x in started if x.pipe is pipe).wait()
    how = (
        f"was killed by signal {-code}, as where memory is short" if code < 0 else f"ended with status {code}"
    )
    return f"data: a worker process {how}; start again, with fewer --media-workers if there are any"


def main(descriptor: int) -> None:
    """Answer chunks of rows on a socket until the parent closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    try:
        begin, function = pipe.recv()
        if begin is not None:
            begin()
        while True:
            pipe.send(_answer(function, pipe.recv()))
    except (EOFError, ConnectionError):
        return


def _answer(function: Callable[[Any], Any], rows: list[Any]) -> tuple[list[Any], BaseException | None]:
    try:
        return [function(row) for row in rows], None
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except BaseException:  # how it is pickled is foreign code
            return [], RuntimeError(f"{type(error).__name__}: {error_text(error)}")
        return [], error
