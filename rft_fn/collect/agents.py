"""Agents: programs of any kind, one for each episode, that speak to the policy through an endpoint.

A program finds the address in OPENAI_BASE_URL, as clients of OpenAI's do, and its task in the file that
RFT_TASK names. It runs in a folder of its own, and whatever becomes of it is its episode's: one that fails,
or does not end, or gives no reward has the reward of a failure.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rft_fn import dist, sandbox
from rft_fn.collect.calls import Call, Calls, answer
from rft_fn.collect.episodes import Conversation, Played, of_episodes
from rft_fn.collect.recorder import Limits, Session
from rft_fn.engine.global_batch import shard_prompts
from rft_fn.types import Engine, Sampling, Strategy

__all__ = ["Address", "Agents", "Endpoint", "play_agents"]

_TICK = 0.02  # s between looks at programs that run
_MORE = 0.005  # s that further requests have to come after the first
_SHOWN = 300  # characters of what a program that failed wrote last


class Address(NamedTuple):
    """Where a session is."""

    name: str
    url: str  # of the session; the endpoint is URL/v1, its reward goes to URL/reward
    secret: str  # that a reward needs; "" where the run gives it


class Endpoint(Protocol):
    """What gives sessions an address."""

    calls: Calls

    def open(self, session: Session, *, rewarded: bool) -> Address:
        """Give a session an address."""
        ...

    def shut(self, address: Address) -> None:
        """Take no further request of it."""
        ...


@dataclass(frozen=True)
class Agents:
    """How programs are run."""

    command: tuple[str, ...]  # of one episode
    seconds: float = 300.0  # that an episode may take
    memory: float = 4.0  # GiB of addresses that each process of it may take; 0 is any
    at_once: int = 16  # programs of a rank that run at a time
    failed: float = 0.0  # the reward of an episode whose program failed


@dataclass
class _Running:
    """A program that runs."""

    session: Session
    address: Address
    process: subprocess.Popen[bytes]
    folder: Path
    ends: float  # when it is too late, by time.monotonic


class _Ended(NamedTuple):
    """What became of an episode."""

    rows: list[Conversation]
    reward: float | None
    cut: str
    failure: str  # "" for none; "late", "exit 3", "no reward"


def play_agents(
    engine: Engine,
    strategy: Strategy,
    endpoint: Endpoint,
    agents: Agents,
    prompts: Sequence[Any],
    keys: Sequence[int],
    *,
    n: int,
    sampling: Sampling,
    max_turns: int,
    max_tokens: int,
    pad: int,
    rewarded: bool = True,
    warn: Callable[[str], None] = print,
) -> Played:
    """Run n programs for each prompt of the global batch, and return their conversations.

    A rank runs those of its own prompts, `agents.at_once` at a time, and samples what they ask for together.
    An answer is drawn by fold_in(key of the prompt, sample, row, turn), so a program that asks one thing
    after another has the same answers however programs are shared out. A row has at most `max_tokens`, an
    episode `max_turns` answers: beyond them requests are refused.

    Where episodes are `rewarded` the reward is what the program sends, once; else it can send none, and the
    rewards are 0, but for failures.

    The result is the same on every rank. `warn` is told of the first program that failed.
    """
    mine = shard_prompts(strategy, len(prompts))
    sessions = [
        Session(i, j, keys[i], Limits(max_tokens, max_turns), sampling)
        for i in range(mine.start, mine.stop)
        for j in range(n)
    ]
    strategy.make_room()
    engine.wake()
    own, said = _run(engine, strategy, endpoint, agents, prompts, sessions, rewarded=rewarded)
    engine.sleep()

    # the same on every rank
    parts = [(own, said)] if strategy.world == 1 else dist.all_gather_object((own, said))
    episodes = [x for part, _ in parts for x in part]
    if line := next((text for _, text in parts if text), ""):
        failures = sum(bool(x.failure) for x in episodes)
        warn(f"agents: {failures} of {len(episodes)} episodes failed; the first: {line}")
    rewards = [agents.failed if x.failure else x.reward or 0.0 for x in episodes]
    numbers = {
        "agent_failed": [float(bool(x.failure)) for x in episodes],
        "agent_late": [float(x.failure == "late") for x in episodes],
    }
    return of_episodes(
        [x.rows for x in episodes],
        rewards,
        [x.cut for x in episodes],
        prompts,
        pad=pad,
        sampling=sampling,
        numbers=numbers,
    )


def _run(
    engine: Engine,
    strategy: Strategy,
    endpoint: Endpoint,
    agents: Agents,
    prompts: Sequence[Any],
    sessions: Sequence[Session],
    *,
    rewarded: bool,
) -> tuple[list[_Ended], str]:
    """Run the programs of this rank, and answer them: (their episodes, a line of the first failure)."""
    waiting = deque(sessions)
    running: list[_Running] = []
    ended: dict[int, _Ended] = {}
    said = ""
    calls: list[Call] = []
    folder = Path(tempfile.mkdtemp(prefix="rft_agents_"))
    try:
        while True:
            while waiting and len(running) < agents.at_once:
                session = waiting.popleft()
                address = endpoint.open(session, rewarded=rewarded)
                running.append(_start(agents, session, address, prompts[session.prompt], folder))
            for x in [x for x in running if x.process.poll() is not None or time.monotonic() > x.ends]:
                running.remove(x)
                endpoint.shut(x.address)
                found, last = _end(x, rewarded=rewarded)
                ended[id(x.session)] = found
                said = said or last
            calls = calls or endpoint.calls.take(strategy.config.engine_batch, wait=_TICK, more=_MORE)
            going = [(bool(calls), bool(waiting or running))]
            if strategy.world > 1:  # an engine's ranks agree whether it lives, so all ask it, or none
                going = dist.all_gather_object(going[0])
            if any(asked for asked, _ in going):
                calls = answer(engine, calls)
            elif not any(more for _, more in going):
                break
    finally:
        for x in running:
            endpoint.shut(x.address)
            sandbox.kill_group(x.process.pid)
            x.process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return [ended[id(session)] for session in sessions], said


# ---------- programs


def _start(agents: Agents, session: Session, address: Address, prompt: Any, folder: Path) -> _Running:
    """Start the program of an episode."""
    own = folder / f"{session.prompt}_{session.sample}"
    own.mkdir()
    task = own / "task.json"
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    task.write_text(json.dumps({"prompt": prompt.text, "messages": list(messages)}))
    env = {name: x for name, x in os.environ.items() if not name.startswith("RFT_")}
    env |= {
        "OPENAI_BASE_URL": f"{address.url}/v1",
        "OPENAI_API_KEY": "none",  # the address is the secret
        "OPENAI_MODEL": "policy",
        "RFT_TASK": str(task),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    if address.secret:
        env |= {"RFT_REWARD_URL": f"{address.url}/reward", "RFT_REWARD_TOKEN": address.secret}
    limits = "ulimit -c 0; "
    if agents.memory:
        limits += f"ulimit -v {int(agents.memory * 2**20)}; "
    with (own / "log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'{limits}exec "$@"', "sh", *agents.command],
            cwd=own,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Running(session, address, process, own, time.monotonic() + agents.seconds)


def _end(x: _Running, *, rewarded: bool) -> tuple[_Ended, str]:
    """End the program of an episode, with all that it has started: (the episode, a line of a failure)."""
    code = x.process.poll()
    sandbox.kill_group(x.process.pid)
    x.process.wait()
    failure = _failure(code, unrewarded=rewarded and x.session.reward is None)
    line = ""
    if failure:
        log = (x.folder / "log").read_bytes()[-_SHOWN:].decode(errors="replace")
        line = f"{failure}: {' '.join(log.split()) or 'it wrote nothing'}"
    shutil.rmtree(x.folder, ignore_errors=True)
    rows = [row.said for row in x.session.rows]
    return _Ended(rows, x.session.reward, x.session.cut, failure), line


def _failure(code: int | None, *, unrewarded: bool) -> str:
    """Return how a program failed, by its exit code, which is None while it runs; "" where it did not."""
    if code is None:
        return "late"
    if code:
        return f"exit {code}"
    return "no reward" if unrewarded else ""
