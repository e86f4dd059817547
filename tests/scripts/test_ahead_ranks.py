"""`--ahead 1` on two processes: the tokens of one process, and a resumed run equals the uninterrupted one."""

import os
import signal

import pytest
from script_runs import rows, run

pytestmark = pytest.mark.slow

FEW = ["--prompts", "4", "--group", "2", "--steps", "4", "--save-every", "100", "--eval-every", "9"]
FEW += ["--eval-prompts", "4", "--ahead", "1", "--out"]
WAYS = {"fsdp2": [], "plain": ["--strategy.shard-size", "1"]}


def same_files(a, b, model="model"):
    for name in ("metrics.jsonl", "trajectories.jsonl", f"{model}/model.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run("grpo", *FEW, folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_sample_the_tokens_of_one_and_resume_equal(alone, tmp_path, way):
    """Asked to stop after the second step, with the rollout of the third under way on both ranks."""
    run("grpo", *FEW, tmp_path / "whole" / "run", *WAYS[way], world=2)
    both, one = rows(tmp_path / "whole" / "run"), rows(alone)
    assert [r["rollout/staleness"] for r in both] == [0, 1, 1, 1]
    assert [r["reward/mean"] for r in both] == [r["reward/mean"] for r in one]
    for a, b in zip(both, one, strict=True):
        assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-3)
    found = rows(tmp_path / "whole" / "run", "trajectories.jsonl")
    assert [r["response"] for r in found] == [r["response"] for r in rows(alone, "trajectories.jsonl")]

    folder = tmp_path / "cut" / "run"
    run("grpo", *FEW, folder, *WAYS[way], world=2, interrupted=(signal.SIGTERM, 1, 0.0), code=1)
    done = len(rows(folder))
    assert 2 <= done < 4 and os.listdir(folder / "checkpoints") == [f"step_{done:08d}"]
    run("grpo", *FEW, folder, *WAYS[way], world=2)
    same_files(tmp_path / "whole" / "run", folder)


def test_a_resumed_ppo_that_samples_ahead_equals_the_uninterrupted_one(tmp_path):
    run("ppo", *FEW, tmp_path / "whole" / "run")
    folder = tmp_path / "cut" / "run"
    run("ppo", *FEW, folder, interrupted=(signal.SIGTERM, 1, 0.0), code=143)
    assert 2 <= len(rows(folder)) < 4
    run("ppo", *FEW, folder)
    assert [r["rollout/staleness"] for r in rows(folder)] == [0, 1, 1, 1]
    model = os.path.relpath(next((tmp_path / "whole" / "run").rglob("model.safetensors")).parent, tmp_path)
    same_files(tmp_path / "whole" / "run", folder, model=model.removeprefix("whole/run/"))
