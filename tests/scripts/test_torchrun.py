"""The scripts under torchrun: the same run on two processes as on one, and one that outlives a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import tiny
import torch
from script_runs import ROOT, rows, run, start

from rft_fn import model

pytestmark = pytest.mark.slow

SMALL = ["--prompts", "8", "--group", "4", "--eval-every", "100", "--eval-prompts", "8"]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run("grpo", *SMALL, "--steps", 10, "--out", folder)
    return rows(folder)


@pytest.mark.parametrize("options", [[], ["--strategy.sp-size", "2"]], ids=["fsdp2", "sp"])
def test_two_processes_log_what_one_logs(tmp_path, alone, options):
    """Rewards are equal at every step, the rest to rounding, and the engines pass their canary."""
    done = run("grpo", *SMALL, "--steps", 10, "--out", tmp_path / "run", *options, world=2, whole=True)
    assert "canary: engine and trainer differ" in done
    both = rows(tmp_path / "run")
    assert [r["reward/mean"] for r in both] == [r["reward/mean"] for r in alone] and len(both) == 10
    assert [r["eval/mean"] for r in both if "eval/mean" in r] == [
        r["eval/mean"] for r in alone if "eval/mean" in r
    ]
    for a, b in zip(both, alone):
        assert a.keys() == b.keys()
        assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-4)


def test_pairs_of_a_group_are_learned_from_as_on_one(tmp_path):
    """The rows of a group share a pack on one rank, under FSDP2 and ZeRO."""
    few = ["--algorithm", "online_dpo", *SMALL, "--steps", 3]
    run("grpo", *few, "--out", tmp_path / "one")
    one = rows(tmp_path / "one")
    assert any(row["grad/norm"] for row in one)
    for name, options in {"fsdp2": [], "zero3": ["--strategy.zero-stage", 3]}.items():
        run("grpo", *few, *options, "--out", tmp_path / name, world=2, whole=True)
        for a, b in zip(rows(tmp_path / name), one, strict=True):
            assert a.keys() == b.keys() and a["reward/mean"] == b["reward/mean"]
            assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-4, abs=1e-9)


EVEN = """
import os, pathlib

pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text(str(os.getpid()))

def even(completions, **columns):
    return [float(sum(c in "02468" for c in text)) for text in completions]
"""


@pytest.fixture
def chat_data(tmp_path):
    """Rows as TRL has them: a conversation as prompt, and a column that the reward reads."""
    path = tmp_path / "train.jsonl"
    system = {"role": "system", "content": "Sort the digits."}
    digits = [f"{n * 7919 % 1000:03d}" for n in range(64)]
    talks = [[system, {"role": "user", "content": f"sort:{d}="}] for d in digits]
    lines = [{"prompt": t, "solution": "".join(sorted(d))} for t, d in zip(talks, digits)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_reward_file_and_chat_data_of_trl_as_they_are(tmp_path, chat_data):
    """Through grpo.py, untouched, on one process and on two: the rewards are those of the definition."""
    file = ROOT / "tests" / "reward" / "corpus" / "rewards" / "trl" / "custom.py"
    rewards = [f"{file}:sorted_digits_reward", f"{file}:token_length_reward=0.125"]
    args = ["--data", chat_data, "--messages", "prompt", "--reward", *rewards, "--steps", 3]
    for world in (1, 2):
        run("grpo", *SMALL, *args, "--out", tmp_path / str(world), world=world)
    one, two = rows(tmp_path / "1"), rows(tmp_path / "2")
    names = ("reward/mean", "reward/sorted_digits_reward", "reward/token_length_reward")
    for name in names:
        assert [r[name] for r in one] == [r[name] for r in two] and one[0][name] > 0, name
    for a, b in zip(one, two):
        assert a["grad/norm"] > 0 and a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-4)

    for line in (tmp_path / "2" / "trajectories.jsonl").read_text().splitlines():
        told = json.loads(line)
        solution = "".join(sorted(told["prompt"][5:-1]))
        right = sum(a == b for a, b in zip(told["response"], solution)) / 3
        assert told["sorted_digits_reward"] == pytest.approx(right)
        assert told["reward"] == pytest.approx(right + 0.125 * told["token_length_reward"])


def test_torchrun_goes_on_by_itself_after_a_kill(tmp_path):
    """Rank 1 is killed in the middle; the restarted run ends with the metrics and weights of a whole one."""
    (tmp_path / "even.py").write_text(EVEN)
    args = ("--steps", 14, "--save-every", 3, "--reward", f"{tmp_path}/even.py:even")
    run("grpo", *SMALL, *args, "--out", tmp_path / "whole", world=2)
    log = {"stdout": (tmp_path / "log").open("w"), "stderr": subprocess.STDOUT}
    process = start("grpo", *SMALL, *args, "--out", tmp_path / "run", world=2, restarts=1, **log)
    try:
        end = time.monotonic() + 600
        while not (tmp_path / "run/metrics.jsonl").exists() or len(rows(tmp_path / "run")) < 5:
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
        assert process.wait(timeout=600) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
    text = (tmp_path / "log").read_text()
    assert "continuing after step" in text
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()
    a, b = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_first_start_leaves_a_whole_model_in_the_cache(tmp_path):
    """Both processes find the cache empty; one of them builds, and a later process can load what it left."""
    env = {"RFT_FN_CACHE": str(tmp_path / "cache")}
    run("grpo", *SMALL, "--steps", 1, "--out", tmp_path / "run", world=2, env=env)
    (built,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    model.load(str(built))
    model.load_tokenizer(str(built))


def test_a_mistake_is_one_line_from_rank_0(tmp_path):
    options = ["--out", tmp_path / "run", "--strategy.sp-size", 3]
    err = run("grpo", *SMALL, *options, world=2, code=1)
    lines = [line for line in err.splitlines() if line.startswith("error")]
    assert lines == ["error: sp_size: expected a divisor of the 2 processes, got 3"]
    assert not (tmp_path / "run").exists()


def test_a_signal_to_torchrun_stops_all_ranks_after_one_step(tmp_path):
    """The step at which they stop is the same, its checkpoint is whole, and the run ends as a whole one."""
    args = ("--steps", 12, "--save-every", 100)
    run("grpo", *SMALL, *args, "--out", tmp_path / "whole", world=2)
    log = {"stdout": subprocess.DEVNULL, "stderr": (tmp_path / "log").open("w")}
    process = start("grpo", *SMALL, *args, "--out", tmp_path / "run", world=2, **log)
    try:
        end = time.monotonic() + 600
        while not (tmp_path / "run/metrics.jsonl").exists() or len(rows(tmp_path / "run")) < 3:
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) != 0
    finally:
        process.kill()
    done = len(rows(tmp_path / "run"))
    text = (tmp_path / "log").read_text()
    assert f"stopped by SIGTERM after step {done}" in text and 3 <= done < 12, text
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == [f"step_{done:08d}"]
    run("grpo", *SMALL, *args, "--out", tmp_path / "run", world=2)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_a_folder_in_use_is_one_line_on_every_rank(tmp_path):
    from rft_fn.run import claim

    folder = tmp_path / "run"
    folder.mkdir()
    claim.acquire(folder)
    try:
        err = run("grpo", *SMALL, "--out", folder, world=2, code=1)
    finally:
        claim.release(folder)
    lines = [line for line in err.splitlines() if line.startswith("error")]
    assert f"in use by process {os.getpid()} on " in lines[0]
    assert all(line.partition(": ")[2] == lines[0].partition(": ")[2] for line in lines)


def other_rows(rank):
    """A data file of which one rank has another version, with as many rows."""
    from rft_fn import data, strategy

    st = strategy.get_strategy(strategy.StrategyConfig())
    rows = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    same = data.from_rows(rows, tiny.tokenizer(), name="same.jsonl")
    other = data.from_rows(
        [*rows[:1], rows[1] | {"answer": f"e{rank}"}], tiny.tokenizer(), name="other.jsonl"
    )
    strategy.check_data(st, same, data.load("sort_digits:1", tiny.tokenizer()))
    try:
        strategy.check_data(st, same, other)
    except ValueError as error:
        return str(error), other.digest
    return "", ""


def test_ranks_with_other_rows_are_refused_on_every_rank():
    found = ranks.run(2, "test_torchrun:other_rows")
    digests = [digest for _, digest in found]
    line = (
        f"data: expected the same rows on all ranks, got others for other.jsonl: rank 0 has 2 rows, "
        f"{digests[0]}, rank 1 has 2 rows, {digests[1]}; give all ranks the same file"
    )
    assert [text for text, _ in found] == [line, line] and digests[0] != digests[1]


def slow_gloo(rank):
    """The last words of a script, where gloo's threads get a processor only when this one sleeps."""
    from rft_fn import dist, strategy

    st = strategy.get_strategy(strategy.StrategyConfig())
    dist.all_gather_object(rank)
    cpu = {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]}
    os.sched_setaffinity(0, cpu)
    threads = [p for p in Path("/proc/self/task").iterdir() if "runloop" in (p / "comm").read_text()]
    for thread in threads:
        os.sched_setaffinity(int(thread.name), cpu)
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    sys.modules["__main__"].strategy = st  # as in a script, where it lives until the interpreter goes
    return len(threads), dist.all_gather_object(rank)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system about threads by /proc")
def test_an_exit_right_after_a_collective_waits_for_the_threads_of_gloo():
    for count, said in ranks.run(3, "test_torchrun:slow_gloo", popen=subprocess.Popen):
        assert count > 0 and said == [0, 1, 2]
