"""Rewards over the ranks of a strategy: each rank scores its share, and all have the same numbers."""

import faulthandler
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rft_fn import dist
from rft_fn.reward import Judged, Score, Scored, TrainerState, check, concat, judge
from rft_fn.types import Rollout, Strategy

__all__ = ["check_reward", "gather_and_judge"]

_GRACE = 10.0  # seconds that a reward has to give way once it has been interrupted
_FAILED = 2  # exit code of an error of the user's
# nobody else's on Linux, unlike SIGALRM, which math-verify sets; None where a system has neither
_SIGNAL = getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", None))


def gather_and_judge(
    strategy: Strategy,
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    timeout: float = 300.0,
    state: TrainerState | None = None,
) -> Judged:
    """`reward.judge` of the global batch, the same on every rank: each rank scores its share of the groups.

    Whole groups stay on one rank, in order, as in `gather_and_generate`, and rewards, parts and texts are
    shared: a reward that differs from rank to rank cannot make the ranks differ, and a remote judge is asked
    once for each response. Equal to `reward.judge` on one process, to the bit, for a reward that looks at one
    response, or one group, at a time. Called by all ranks alike.

    A reward that has not answered after `timeout` [s] is interrupted, and TimeoutError names it and the
    limit; one that cannot be interrupted ends the process with that line. Keep `timeout` below the
    strategy's, which bounds how long the others wait. Rewards run in the calling thread; outside of the main
    thread nothing can be interrupted: the line is printed, and the reward is waited for.

    What a reward raises on one rank is raised there as it is, and on all others as ValueError with its text,
    the reward's name and the rank. ValueError for what `reward.judge` refuses, for ranks whose prompts
    differ, and for a timeout that is not above 0.
    """

    def work() -> Judged | None:
        size = -(-len(prompts) // strategy.world)
        mine = slice(strategy.rank * size, (strategy.rank + 1) * size)
        if prompts and mine.start >= len(prompts):  # more ranks than prompts
            return None
        return judge(score, rollout, prompts, tokenizer, part=mine, state=state)

    everyone = _together(strategy, score, work, timeout, digest=_digest(prompts))
    return concat([judged for judged in everyone if judged is not None])


def check_reward(
    strategy: Strategy, score: Score, rows: Sequence[Mapping[str, Any]], *, timeout: float = 300.0
) -> dict[str, Scored]:
    """`reward.check` by rank 0, its result on every rank: a remote judge is asked once.

    The limit and the errors are those of `gather_and_judge`.
    """

    def work() -> dict[str, Scored] | None:
        return check(score, rows) if strategy.rank == 0 else None

    return _together(strategy, score, work, timeout)[0]


class _Share(NamedTuple):
    """What a rank tells the others."""

    result: Any
    error: str  # what went wrong, in a line; "" for nothing
    digest: str  # of the prompts, as this rank knows them


def _together(
    strategy: Strategy, score: Score, work: Callable[[], Any], timeout: float, *, digest: str = ""
) -> list[Any]:
    """What work() gave on each rank, within the limit; an error of one rank is raised on all."""
    if not timeout > 0:
        raise ValueError(f"timeout: expected > 0 seconds, got {timeout}")
    result, failed, line = None, None, ""
    names = ", ".join(getattr(score, "components", {})) or "score"
    try:
        with strategy.session.phase(f"reward {names}"), _time_limit(timeout, lambda: _name(score)):
            result = work()
    except Exception as error:  # raised below, once the others know
        failed, line = error, _describe(score, error)

    everyone = [_Share(result, line, digest)]
    if strategy.world > 1:
        with strategy.session.phase("gather of rewards"):
            everyone = dist.all_gather_object(everyone[0])
    if failed is not None:
        raise failed
    for rank, share in enumerate(everyone):
        if share.error:
            raise ValueError(f"rank {rank}: {share.error}")
        if share.digest != digest:
            raise ValueError(
                f"prompts: expected the same on every rank, got others on rank {rank} than on rank "
                f"{strategy.rank}; give all ranks the same data file and options"
            )
    return [share.result for share in everyone]


def _digest(prompts: Sequence[Any]) -> str:
    """A name of these prompts: the same for the same rows, texts and order."""
    found = hashlib.blake2b(digest_size=16)
    for p in prompts:
        found.update(repr((getattr(p, "index", None), getattr(p, "text", None))).encode())
    return found.hexdigest()


def _name(score: Score) -> str:
    """The reward that a score is computing, as it stands in front of a line."""
    running = getattr(score, "running", "")
    return f"reward {running!r}" if running else "reward"


def _describe(score: Score, error: Exception) -> str:
    """An error as the other ranks tell it: the reward, and what it raised."""
    text = " ".join(str(error).split())
    if not isinstance(error, (ValueError, TimeoutError)):
        text = f"{type(error).__name__}: {text}"
    head = f"{_name(score)}: "
    if head == "reward: " or text.startswith(head):  # no reward of its own failed, or the text names it
        return text
    return head + text


class _Expired(BaseException):
    """Raised inside a reward at its time limit. No `Exception`: rewards catch those and try the next one."""


@contextmanager
def _time_limit(seconds: float, name: Callable[[], str]) -> Iterator[None]:
    """Interrupts the block after `seconds`; it then raises TimeoutError with name() and the limit.

    A thread watches the clock and sends this one a signal, whose handler raises: that ends a sleep, a wait
    for a lock or a blocked read. A block that runs for `_GRACE` seconds more ends the process. Where C code
    keeps the interpreter from running any thread at all, faulthandler's own thread ends the process after
    another `_GRACE` seconds, with the stack of the reward.
    """
    over = threading.Event()
    late: list[str] = []  # the line, made at the limit: later the score may be at its next reward
    owner = threading.current_thread()
    can_interrupt = _SIGNAL is not None and owner is threading.main_thread()

    def line() -> str:
        return (
            f"{name()}: expected a result within {seconds:g} s, the limit for a batch, got none; "
            "make it faster, or raise the limit"
        )

    def watch() -> None:
        if over.wait(min(seconds, threading.TIMEOUT_MAX)):
            return
        late.append(line())
        if not can_interrupt:
            print(f"warning: {late[0]}", file=sys.stderr, flush=True)
            return
        signal.pthread_kill(owner.ident, _SIGNAL)
        if not over.wait(_GRACE):
            print(f"error: {late[0]} (it cannot be interrupted)", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(_FAILED)

    def interrupt(*_: Any) -> None:
        if not over.is_set():
            raise _Expired

    before = None
    if can_interrupt:
        before = signal.signal(_SIGNAL, interrupt)
        faulthandler.dump_traceback_later(min(seconds, 1e6) + 2 * _GRACE, exit=True, file=2)
    thread = threading.Thread(target=watch, daemon=True, name="rft_fn reward limit")
    thread.start()
    try:
        try:
            yield
        except BaseException as error:
            if late and can_interrupt:  # whatever the reward has made of the interruption
                raise TimeoutError(late[0]) from error
            raise
        finally:
            over.set()
    finally:
        # the handler stays until the thread is done: a late signal must not meet the default one, which kills
        over.set()
        thread.join()
        if can_interrupt:
            faulthandler.cancel_dump_traceback_later()
        if before is not None:  # None: a handler that is not Python's
            signal.signal(_SIGNAL, before)
    if late and can_interrupt:  # the reward has caught even this, and made up a result
        raise TimeoutError(late[0])
