"""`--ahead 1` on two processes: the tokens of one process, and a resumed run equals the uninterrupted one."""

import json
import os
import signal
import sys
from pathlib import Path

import forks
import pytest
import ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--prompts", "4", "--group", "2", "--steps", "4", "--save-every", "100", "--eval-every", "9"]
FEW += ["--eval-prompts", "4", "--ahead", "1"]
WAYS = {"fsdp2": [], "plain": ["--strategy.shard-size", "1"]}


def run(world, folder, *args, script="grpo", interrupted=(), code=0):
    """A run of a script; `interrupted` is (signal, after step, seconds) of its first rank's row."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": forks.PATH, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= forks.PLAIN
    command = [sys.executable]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        command += ["--master-port", str(ranks.free_port())]
    if interrupted:
        command += [str(ROOT / "tests" / "scripts" / "interrupted.py"), *map(str, interrupted)]
    command += [str(ROOT / "train_scripts" / f"{script}.py"), *FEW, *args, "--out", str(folder)]
    done = forks.run(command, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert (done.returncode == 0) == (code == 0), done.stderr[-3000:]
    return done


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def same_files(a, b, model="model"):
    for name in ("metrics.jsonl", "trajectories.jsonl", f"{model}/model.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(1, folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_sample_the_tokens_of_one_and_resume_equal(alone, tmp_path, way):
    """Asked to stop after the second step, with the rollout of the third under way on both ranks."""
    run(2, tmp_path / "whole" / "run", *WAYS[way])
    both, one = rows(tmp_path / "whole" / "run"), rows(alone)
    assert [r["rollout/staleness"] for r in both] == [0, 1, 1, 1]
    assert [r["reward/mean"] for r in both] == [r["reward/mean"] for r in one]
    for a, b in zip(both, one, strict=True):
        assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-3)
    found = rows(tmp_path / "whole" / "run", "trajectories.jsonl")
    assert [r["response"] for r in found] == [r["response"] for r in rows(alone, "trajectories.jsonl")]

    folder = tmp_path / "cut" / "run"
    run(2, folder, *WAYS[way], interrupted=(int(signal.SIGTERM), 1, 0.0), code=143)
    done = len(rows(folder))
    assert 2 <= done < 4 and os.listdir(folder / "checkpoints") == [f"step_{done:08d}"]
    run(2, folder, *WAYS[way])
    same_files(tmp_path / "whole" / "run", folder)


def test_a_resumed_ppo_that_samples_ahead_equals_the_uninterrupted_one(tmp_path):
    run(1, tmp_path / "whole" / "run", script="ppo")
    folder = tmp_path / "cut" / "run"
    run(1, folder, script="ppo", interrupted=(int(signal.SIGTERM), 1, 0.0), code=143)
    assert 2 <= len(rows(folder)) < 4
    run(1, folder, script="ppo")
    assert [r["rollout/staleness"] for r in rows(folder)] == [0, 1, 1, 1]
    model = os.path.relpath(next((tmp_path / "whole" / "run").rglob("model.safetensors")).parent, tmp_path)
    same_files(tmp_path / "whole" / "run", folder, model=model.removeprefix("whole/run/"))
