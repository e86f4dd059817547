"""Engines in a process of their own: as good as in this one, and gone when either process ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import faulty
import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import engine
from rft_fn.engine import EngineConfig

# the engines of fixtures are fresh interpreters
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, KEYS, SAMPLING = [[3, 4, 5], [6, 7]], [1, 2], rft.Sampling(max_new=5)


def process_of(eng):
    """What knows the process, which is supervised."""
    return eng.generate.__self__.core


def made(model="", **options):
    return engine.own_process(faulty.build, EngineConfig(**options), model, None)


def gone(pid, seconds=10.0):
    """Whether a process ends within that time; one that nobody has waited for counts."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def pair():
    """(an engine in its own process, one in this process), of the same weights."""
    own = engine.get_engine(EngineConfig(process=True, batch=3), tiny.llama(3), tiny.tokenizer())
    yield own, engine.get_engine(EngineConfig(batch=3), tiny.llama(3), tiny.tokenizer())
    own.close()


def equal(a, b):
    leaves = zip(rft.tree.leaves(a), rft.tree.leaves(b), strict=True)
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in leaves)


def test_it_samples_loads_and_scores_as_in_this_process(pair):
    own, here = pair
    for eng in pair:
        delivered = eng.load(tiny.llama(5).named_parameters(), version=4)
        assert delivered[:2] == (sum(1 for _ in tiny.llama().parameters()), delivered.bytes)
        assert delivered.version == eng.status()["version"] == 4 and delivered.seconds > 0
    assert own.status() == here.status()

    rollouts = [eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING) for eng in pair]
    assert equal(*rollouts) and rollouts[0].version.tolist() == [4] * 4
    scores = [eng.score(rollouts[0], sampling=rft.Sampling(temperature=0.5)) for eng in pair]
    assert torch.equal(*scores)
    limits = {"max_new": [1, 2, 3, 4], "start": [0, 1, 0, 2]}
    assert equal(*(eng.generate(PROMPTS, KEYS, n=2, sampling=SAMPLING, **limits) for eng in pair))

    own.sleep()
    assert own.status()["asleep"]
    own.wake()
    assert not own.status()["asleep"]


def test_a_refused_request_is_named_and_leaves_it_alive(pair):
    with pytest.raises(engine.BadRequest, match="at least one token, got none in prompt 1"):
        pair[0].generate([[3], []], [1, 2], sampling=SAMPLING)
    assert pair[0].status()["alive"]
    assert pair[0].generate(PROMPTS, KEYS, sampling=SAMPLING).tokens.shape[0] == 2


@pytest.fixture(scope="module")
def unharmed():
    """An engine in its own process that no test makes fail."""
    eng = made()
    yield eng
    eng.close()


def test_weights_of_every_kind_arrive_whole_and_stay(unharmed):
    """What an engine keeps of one load is not what the next one brings, and nobody shares it."""
    eng = unharmed
    sent = {
        "float": torch.randn(3, 5).T,
        "half": torch.randn(7).to(torch.bfloat16),
        "bytes": torch.arange(5, dtype=torch.int8),
        "one": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    descriptors = len(os.listdir("/proc/self/fd"))
    first = {name: x.clone() for name, x in sent.items()}
    for version in (1, 2, 3):
        eng.load(sent.items(), version=version)
        for x in sent.values():
            x += 1
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (found, frozen), kept = eng.score(0), first
    assert frozen == frozenset() and len(found) == 3
    for loaded in found:
        assert all(torch.equal(loaded[n], x * 2) and loaded[n].dtype == x.dtype for n, x in kept.items())
        kept = {n: x + 1 for n, x in kept.items()}
    eng.load(rft.sync.CheckedWeights(Frozen(sent.items())), version=4)
    assert eng.score(0)[1] == {"base"}


class Frozen(list):
    """Weights of which one is not sent."""

    frozen = frozenset({"base"})


ENDS = [
    (1, engine.EngineDead, r"^engine faulty: its process \d+ gave no answer to generate within 1 s; build"),
    (7, engine.EngineDead, r"its process \d+ gave no answer to generate within 1 s; build another"),
    (8, engine.EngineDead, r"its process \d+ gave no answer to generate within 1 s; build another"),
    (2, RuntimeError, "Unsendable: one and two"),
    (3, FloatingPointError, "not finite"),
    (4, engine.EngineDead, r"its process \d+ ended with code 7 in generate; build another"),
]


IDS = ["hangs", "hangs_in_c", "hangs_with_the_lock", "unsendable", "raises", "exits"]


@pytest.mark.parametrize(("deed", "error", "line"), ENDS, ids=IDS)
def test_a_failure_ends_it_in_one_line(deed, error, line):
    eng = made()
    inner = process_of(eng)
    inner.timeout = 1.0
    with pytest.raises(error, match=line) as caught:
        eng.generate([[deed]], [0], sampling=SAMPLING)
    assert "\n" not in str(caught.value)
    if error is not engine.EngineDead:
        assert "faulty.py" in str(caught.value.__cause__)
    assert not eng.status()["alive"] and gone(inner.process.pid)
    with pytest.raises(engine.EngineDead, match="expected one that is alive, got one that failed in"):
        eng.generate([[0]], [0], sampling=SAMPLING)
    eng.close()
    eng.close()


def test_a_kill_in_mid_rollout_is_named_and_another_can_be_built():
    eng = made()
    inner = process_of(eng)
    threading.Timer(0.3, os.kill, (inner.process.pid, signal.SIGKILL)).start()
    with pytest.raises(engine.EngineDead, match=r"process \d+ was killed by SIGKILL in generate"):
        eng.generate([[1]], [0], sampling=SAMPLING)
    assert not eng.status()["alive"]
    eng.close()
    again = made()
    assert again.generate([[0]], [0], sampling=SAMPLING).mask.any()

    os.kill(process_of(again).process.pid, signal.SIGKILL)  # while nobody waits for it
    assert gone(process_of(again).process.pid)
    end = time.monotonic() + 10
    while again.status()["alive"] and time.monotonic() < end:
        time.sleep(0.05)  # its threads end one after another
    assert not again.status()["alive"]
    again.close()


def test_what_is_not_fatal_is_not(unharmed):
    """A refused prompt with its number, a score that fails, and the Ctrl-C of a terminal."""
    eng = unharmed
    with pytest.raises(engine.BadRequest, match="in prompt 3") as caught:
        eng.generate([[5]], [0], sampling=SAMPLING)
    assert caught.value.number == 3
    with pytest.raises(ValueError, match="rollout: expected one"):
        eng.score(None)
    eng.generate([[6]], [0], sampling=SAMPLING)
    assert eng.status()["alive"]


def test_its_threads_and_environment(monkeypatch):
    """As many threads as asked for, and no word of torchrun: it is no rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for threads, expected in ((3, 3), (0, torch.get_num_threads())):
        eng = made(threads=threads)
        rollout = eng.generate([[0]], [0], sampling=SAMPLING)
        assert rollout.tokens[rollout.mask][:2].tolist() == [expected, 0]
        pid = process_of(eng).process.pid
        eng.close()
        assert gone(pid) and not eng.status()["alive"]


def test_one_that_cannot_be_built_leaves_no_process():
    before = children()
    with pytest.raises(ValueError, match="model: expected another, got broken"):
        made("broken")
    assert children() == before


def test_an_engine_that_ranks_share_is_refused():
    with pytest.raises(ValueError, match=r"engine_process, engine_tp_size: expected one process .* got 2"):
        engine.check_config(EngineConfig(process=True, tp_size=2))


def children():
    """The numbers of the processes that this one has started."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [p for p in text.split() if not gone(p, 0.2)]


def test_close_does_not_wait_for_a_call():
    eng = made()
    pid = process_of(eng).process.pid
    errors = []

    def call():
        try:
            eng.generate([[1]], [0], sampling=SAMPLING)
        except engine.EngineDead as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    eng.close()
    thread.join(10)
    assert time.monotonic() - began < 5 and gone(pid) and "was closed" in errors[0]


@pytest.mark.parametrize("how", ["close", "exception", "kill", "interrupt"])
def test_no_process_is_left_however_the_script_ends(how):
    """It ends by itself, with an error in mid-rollout, by kill -9 and by Ctrl-C."""
    mode = "wait" if how in ("kill", "interrupt") else how
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "engine")]
    script = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "engine" / "process_parent.py"), mode],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = int(script.stdout.readline())
    number = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}.get(how)
    if number:
        time.sleep(0.5)
        script.send_signal(number)
    _, err = script.communicate(timeout=180)
    assert gone(pid), err
    codes = {"close": 0, "exception": 1, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}
    assert script.returncode == codes[how], err
