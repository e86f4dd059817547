"""`--ahead`: a run is a function of its seed and of the versions, whatever ends it or its engine."""

import functools
import os
import signal
import threading

import pytest
import torch
from fake_server import FakeServer, serving
from script_runs import rows, run, start
from test_house import load_script

import rft_fn as rft
from rft_fn.engine import process
from rft_fn.run import options
from rft_fn.run.off_policy import Correction

# engines start in a moment
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children", "plain_runs")]

STEPS = 6
SMALL = ["--prompts", "4", "--group", "4", "--steps", STEPS, "--save-every", "2", "--eval-every", "4"]
SMALL += ["--eval-prompts", "8", "--ema", "0.9", "--rounds", "2"]


def main(folder, ahead, **more):
    """A run in this process, whose engine has its own."""
    script = load_script("grpo")
    few = {"prompts": 4, "group": 4, "steps": STEPS, "save_every": 2, "eval_every": 4, "eval_prompts": 8}
    few |= {"ema": 0.9, "rounds": 2}
    threads = torch.get_num_threads()
    script.main(script.Config(out=str(folder), ahead=ahead, **few | more))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folders of runs that nothing interrupts, by how far ahead they sample."""

    @functools.cache
    def folder(ahead):
        path = tmp_path_factory.mktemp("runs") / "straight"
        main(path, ahead)
        return path

    return folder


def same_files(a, b, model="model"):
    for name in ("metrics.jsonl", "trajectories.jsonl", f"{model}/model.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.parametrize("ahead", [1, 2])
def test_staleness_and_correction_are_those_of_the_schedule(straight, ahead):
    """A second round is drawn with the newest weights, so the mean can be smaller."""
    folder = straight(ahead)
    metrics = rows(folder)
    assert [r["rollout/staleness_max"] for r in metrics] == [min(k, ahead) for k in range(STEPS)]
    assert all("mismatch/weight" in r for r in metrics)  # tis, which nobody asked for
    assert all("beside/engine" in r for r in rows(folder, "timing.jsonl"))
    assert metrics[0]["policy/logp_gap"] < 1e-5 < 1e-3 < metrics[2]["policy/logp_gap"]


def test_in_flight_no_token_is_older_than_the_schedule_says(tmp_path):
    """By how much is a matter of time; the log-probs of all are of the weights that sampled them."""
    main(tmp_path / "run", 1, in_flight=True)
    metrics = rows(tmp_path / "run")
    assert all(0 <= r["rollout/staleness"] <= r["rollout/staleness_max"] <= 1 for r in metrics)
    assert all("mismatch/weight" in r for r in metrics)
    assert metrics[0]["policy/logp_gap"] < 1e-5


ENDS = [(signal.SIGKILL, 3, 1, -9), (signal.SIGTERM, 2, 1, 143), (signal.SIGINT, 2, 2, 130)]


@pytest.mark.parametrize(("number", "after", "ahead", "code"), ENDS)
def test_a_resumed_run_equals_the_uninterrupted_one(straight, tmp_path, number, after, ahead, code):
    """Killed between checkpoints, or asked to stop with a rollout in flight, which the checkpoint keeps."""
    args = [*SMALL, "--out", tmp_path / "straight", "--ahead", ahead]
    process = start("grpo", *args, interrupted=(number, after, 0.02))
    _, err = process.communicate(timeout=600)
    assert process.returncode == code and "Traceback" not in err, err
    done = len(rows(tmp_path / "straight"))
    assert after < done < STEPS
    if number != signal.SIGKILL:
        assert os.listdir(tmp_path / "straight" / "checkpoints")
    main(tmp_path / "straight", ahead)
    same_files(straight(ahead), tmp_path / "straight")


@pytest.mark.usefixtures("whole_run")
def test_a_killed_engine_is_built_again_and_the_run_is_the_same(straight, tmp_path, monkeypatch, capsys):
    """Its process is killed twice in mid-rollout: keys name the draw, so the tokens are the same."""
    ahead = 1
    undisturbed = straight(ahead)
    call, calls = process._Process.call, []

    def killed(self, name, *args, **options):
        calls.append(name)
        if name == "generate" and calls.count("generate") in (4, 7):
            os.kill(self.process.pid, signal.SIGSTOP)
            threading.Timer(0.1, os.kill, (self.process.pid, signal.SIGKILL)).start()
        return call(self, name, *args, **options)

    monkeypatch.setattr(process._Process, "call", killed)
    main(tmp_path / "straight", ahead)
    same_files(undisturbed, tmp_path / "straight")
    assert calls.count("build") == 3
    err = capsys.readouterr().err
    assert err.count("was killed by SIGKILL in generate") == 2 and "building it again (2 left)" in err
    assert "canary: engine and trainer differ" in err  # of an engine that was built again


@pytest.mark.usefixtures("whole_run")
def test_without_an_engine_left_the_step_is_saved_and_the_same_command_continues(
    straight, tmp_path, monkeypatch
):
    """And equals the uninterrupted run: the rollout that was lost is drawn with the weights that it had."""
    call, calls = process._Process.call, []

    def killed(self, name, *args, **options):
        calls.append(name)
        if calls.count("generate") >= 7:
            os.kill(self.process.pid, signal.SIGKILL)
        return call(self, name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(process._Process, "call", killed)
        with pytest.raises(rft.engine.EngineDead, match=r"killed by SIGKILL.* steps are saved"):
            main(tmp_path / "straight", 1, rebuilds=1, save_every=100)
    assert calls.count("build") == 2
    done = len(rows(tmp_path / "straight"))
    assert os.listdir(tmp_path / "straight" / "checkpoints") == [f"step_{done:08d}"]
    main(tmp_path / "straight", 1)
    same_files(straight(1), tmp_path / "straight")


def test_the_correction_that_is_on_by_default():
    found = {(): "none", ("ahead",): "tis", ("partial",): "tis"}
    for names, expected in found.items():
        assert Correction.of(options.Rollouts(**dict.fromkeys(names, 1))).name == expected
    assert Correction.of(options.Rollouts(ahead=1, mismatch="none")).name == "none"
    assert Correction.of(options.Rollouts(mismatch="icepop")).name == "icepop"


class Interrupted(Exception):
    """Ends a run between two checkpoints."""


def test_partial_rollouts_wait_in_checkpoints_too(tmp_path, monkeypatch):
    """Responses of six tokens grow by two in a step, over several versions; a resumed run has the same."""
    options = {"partial": 2, "rounds": 1, "max_new": 6}
    main(tmp_path / "whole", 0, **options)
    metrics = rows(tmp_path / "whole")
    assert max(r["rollout/staleness_max"] for r in metrics) == 2
    assert all("mismatch/weight" in r for r in metrics)

    write = rft.run.Run.write

    def interrupted(self, step, *args, **more):
        if step == 3:
            raise Interrupted
        write(self, step, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(rft.run.Run, "write", interrupted)
        with pytest.raises(Interrupted):
            main(tmp_path / "cut", 0, **options)
    main(tmp_path / "cut", 0, **options)
    same_files(tmp_path / "whole", tmp_path / "cut")


REFUSED = [
    ({"partial": 2, "ahead": 1}, "partial: expected 0 with ahead 1, which samples whole responses, got 2"),
    ({"partial": 2}, "partial: expected 0 with rounds 2, which judge whole responses, got 2"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_options_that_do_not_go_together(tmp_path, options, line):
    with pytest.raises(ValueError, match=line):
        main(tmp_path / "r", **{"ahead": 0} | options)


def test_ppo_samples_ahead(tmp_path):
    """The same script lines: stale from the second step on, and equal files when it is run in two parts."""
    script = load_script("ppo")
    few = {"prompts": 4, "group": 2, "steps": 4, "save_every": 2, "eval_every": 9, "eval_prompts": 4}
    script.main(script.Config(out=str(tmp_path / "r"), ahead=1, **few))
    assert [r["rollout/staleness"] for r in rows(tmp_path / "r")] == [0, 1, 1, 1]
    with pytest.raises(ValueError, match="partial: expected 0, as this script does not read it"):
        script.main(script.Config(out=str(tmp_path / "p"), partial=1, **few))


# ---------- on two processes

FEW = ["--prompts", "4", "--group", "2", "--steps", "4", "--save-every", "100", "--eval-every", "9"]
FEW += ["--eval-prompts", "4", "--ahead", "1", "--out"]
SERVERS = ["--engine-type", "openai", "--strategy.engine-servers"]
WAYS = {"fsdp2": [], "plain": ["--strategy.shard-size", "1"], "a server of both": SERVERS}


@pytest.fixture(scope="module")
def server():
    fake = FakeServer(rft.model.load("tiny"), rft.model.load_tokenizer("tiny"))
    with serving(fake):
        yield fake


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run("grpo", *FEW, folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_sample_the_tokens_of_one_and_resume_equal(alone, server, tmp_path, way):
    """Asked to stop after the second step, with the rollout of the third under way on both ranks."""
    options = [*WAYS[way], server.url] if WAYS[way] == SERVERS else WAYS[way]
    run("grpo", *FEW, tmp_path / "whole" / "run", *options, world=2)
    both, one = rows(tmp_path / "whole" / "run"), rows(alone)
    assert [r["rollout/staleness"] for r in both] == [0, 1, 1, 1]
    assert [r["reward/mean"] for r in both] == [r["reward/mean"] for r in one]
    for a, b in zip(both, one, strict=True):
        assert a["grad/norm"] == pytest.approx(b["grad/norm"], rel=1e-3)
    found = rows(tmp_path / "whole" / "run", "trajectories.jsonl")
    assert [r["response"] for r in found] == [r["response"] for r in rows(alone, "trajectories.jsonl")]

    folder = tmp_path / "cut" / "run"
    run("grpo", *FEW, folder, *options, world=2, interrupted=(signal.SIGTERM, 1, 0.0), code=1)
    done = len(rows(folder))
    assert 2 <= done < 4 and os.listdir(folder / "checkpoints") == [f"step_{done:08d}"]
    run("grpo", *FEW, folder, *options, world=2)
    same_files(tmp_path / "whole" / "run", folder)


def test_two_processes_have_a_server_in_flight(server, tmp_path):
    """The first loads it while the second samples."""
    run("grpo", *FEW, tmp_path / "run", *SERVERS, server.url, "--in-flight", world=2)
    metrics = rows(tmp_path / "run")
    assert all(0 <= x["rollout/staleness"] <= x["rollout/staleness_max"] <= 1 for x in metrics)
    assert metrics[0]["policy/logp_gap"] < 1e-5 and len(metrics) == 4


def test_a_resumed_ppo_that_samples_ahead_equals_the_uninterrupted_one(tmp_path):
    run("ppo", *FEW, tmp_path / "whole" / "run")
    folder = tmp_path / "cut" / "run"
    run("ppo", *FEW, folder, interrupted=(signal.SIGTERM, 1, 0.0), code=143)
    assert 2 <= len(rows(folder)) < 4
    run("ppo", *FEW, folder)
    assert [r["rollout/staleness"] for r in rows(folder)] == [0, 1, 1, 1]
    model = os.path.relpath(next((tmp_path / "whole" / "run").rglob("model.safetensors")).parent, tmp_path)
    same_files(tmp_path / "whole" / "run", folder, model=model.removeprefix("whole/run/"))
