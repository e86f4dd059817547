"""The scripts as a user runs them: they train, resume to the bit, and say in one line what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_house import load_script as script

import rft_fn as rft
from rft_fn import algorithm

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--prompts",
    "4",
    "--group",
    "4",
    "--steps",
    "8",
    "--save-every",
    "2",
    "--eval-every",
    "4",
    "--eval-prompts",
    "8",
]


def start(script, *args, **options):
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    command = [sys.executable, str(ROOT / "train_scripts" / f"{script}.py"), *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def run(script, *args, code=0):
    process = start(script, *args)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    return out if code == 0 else err


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One uninterrupted run with all that has a state: EMA, KL to the initial model, reward moments."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    run("grpo", *SMALL, "--out", folder, "--ema", "0.9", "--kl", "0.01", "--normalize-reward")
    return folder


def test_a_run_leaves_everything(straight):
    metrics = rows(straight)
    assert [r["step"] for r in metrics] == list(range(8))
    for name in (
        "reward/mean",
        "policy/logp_gap",
        "policy/entropy",
        "policy/kl_ref",
        "policy/clip_frac",
        "grad/norm",
    ):
        assert all(name in r for r in metrics), name
    assert all(r["policy/logp_gap"] < 1e-4 for r in metrics)
    assert [i for i, r in enumerate(metrics) if "eval/mean" in r] == [0, 3, 7]
    assert {"curve.png", "lengths.png", "timing.jsonl", "config.json", "model", "checkpoints"} <= set(
        os.listdir(straight)
    )
    assert rows(straight, "trajectories.jsonl")[0]["prompt"].startswith("sort:")
    assert len(os.listdir(straight / "checkpoints")) in (
        2,
        3,
    )  # the two newest, and the best where it is neither


@pytest.mark.parametrize("after", [1, 4])
def test_kill_9_and_the_same_command_again(straight, tmp_path, after):
    """Killed once `after` steps are written, at whatever it is doing then: equal files in the end."""
    args = [*SMALL, "--out", tmp_path / "straight", "--ema", "0.9", "--kl", "0.01", "--normalize-reward"]
    process, path = start("grpo", *args), tmp_path / "straight" / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) > after):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(path.read_text().splitlines()) < 8
    run("grpo", *args)
    assert path.read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert (tmp_path / "straight/trajectories.jsonl").read_bytes() == (
        straight / "trajectories.jsonl"
    ).read_bytes()
    weights = [p / "model" / "model.safetensors" for p in (straight, tmp_path / "straight")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


FREE = [name for name, row in algorithm.TABLE.items() if isinstance(row, algorithm.Algorithm)]


@pytest.mark.parametrize("name", FREE)
def test_every_row_without_a_critic_runs_and_moves_the_model(name, tmp_path):
    grpo = script("grpo")
    options = {"prompts": 4, "group": 4, "steps": 2, "eval_prompts": 4, "algorithm": name}
    grpo.main(grpo.Config(**options, out=str(tmp_path / "r")))
    found = rows(tmp_path / "r")
    assert len(found) == 2 and all(r["grad/norm"] > 0 and r["policy/logp_gap"] < 1e-4 for r in found)
    assert found[0]["loss"] != found[1]["loss"]


def test_a_row_with_a_critic_is_sent_to_its_script(tmp_path):
    assert "has a critic: see train_scripts/ppo.py" in run(
        "grpo", "--algorithm", "ppo", "--out", tmp_path / "r", code=2
    )


def test_dynamic_sampling_and_the_overlong_penalty_do_something(tmp_path):
    grpo = script("grpo")
    options = {"prompts": 4, "group": 2, "steps": 2, "eval_prompts": 4, "seed": 2}
    changes = {"plain": {}, "rounds": {"rounds": 6}, "again": {"rounds": 6}, "overlong": {"overlong": 6}}
    for name, change in changes.items():
        grpo.main(grpo.Config(**options, **change, out=str(tmp_path / name)))
    found = {name: rows(tmp_path / name) for name in changes}
    assert found["plain"][0]["reward/flat_groups"] > 0 and found["plain"][0]["sampling/rounds"] == 1
    assert found["rounds"][0]["reward/flat_groups"] == 0 and found["rounds"][0]["sampling/rounds"] > 1
    assert found["rounds"] == found["again"]  # what is drawn again is a function of the step too
    assert (
        found["overlong"][0]["reward/mean"] == found["plain"][0]["reward/mean"]
    )  # the reward that is reported
    assert found["overlong"][0]["loss"] != found["plain"][0]["loss"]


def test_updates_of_a_rollout_by_train_batch_size(tmp_path):
    """16 samples in updates of 6: three a rollout, of which only the first is on-policy."""
    run("grpo", *SMALL, "--steps", 2, "--lr", 0.03, "--strategy.train-batch-size", 6, "--out", tmp_path / "r")
    meta = json.loads((tmp_path / "r/checkpoints/step_00000002/meta.json").read_text())
    assert meta["plain"]["state/step"] == 6 and meta["plain"]["extra/step"] == 2
    run("grpo", *SMALL, "--steps", 2, "--lr", 0.03, "--out", tmp_path / "one")
    several, one = rows(tmp_path / "r"), rows(tmp_path / "one")
    assert max(r["policy/clip_frac"] for r in several) > 0 == max(r["policy/clip_frac"] for r in one)
    assert len(several) == 2 and several[0]["reward/mean"] == one[0]["reward/mean"]


def test_a_sweep_is_what_single_runs_of_the_loss_give(tmp_path):
    sweep = script("sweep")
    cfg = sweep.Config(prompts=4, group=4, away=2, points=5, at_once=2, budget=64, out=str(tmp_path))
    sweep.main(cfg)
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    apply, params, packs = sweep.buffer(cfg)
    for name in ("ppo_clip", "gspo", "dppo_tv", "kl"):
        for i in (0, 3):
            x = torch.tensor(found["x"][i])

            def total(p):
                return sum((b.w * sweep.at(name, apply(p, b).logp, b, x)).sum() for b in packs)  # noqa: B023

            grads = torch.func.grad(total)(params)
            norm = torch.stack([g.norm() for g in grads.values()]).norm()
            assert found[name]["grad_norm"][i] == pytest.approx(norm.item(), rel=1e-4)
    stopped = found["ppo_clip"]["stopped"]
    assert stopped == sorted(stopped, reverse=True) and stopped[0] > stopped[-1]


def test_grpo_learns(tmp_path):
    """A third of the default run: the sampled reward from 0.1, greedy answers to new questions from 0.3."""
    run("grpo", "--steps", "50", "--eval-every", "50", "--out", tmp_path / "r")
    metrics = rows(tmp_path / "r")
    assert metrics[0]["reward/mean"] < 0.2 and metrics[0]["eval/mean"] < 0.4
    assert metrics[-1]["reward/mean"] > 0.4 and metrics[-1]["eval/mean"] > 0.6


def test_sft_then_evaluate(tmp_path):
    run("sft", "--steps", "60", "--out", tmp_path / "sft", "--lr", "3e-3")
    losses = [r["loss"] for r in rows(tmp_path / "sft")]
    assert losses[-1] < losses[0] / 2
    out = tmp_path / "eval.json"
    text = run("evaluate", "--model", tmp_path / "sft/model", "--count", "64", "--out", out)
    result = json.loads(out.read_text())["result"]
    assert "pass@1" in text and 0.1 < result["pass@1"] == result["avg@1"] <= 1
    sampled = ["--temperature", "1", "--group", "4", "--k", "1", "2", "4", "--count", "32"]
    run("evaluate", "--model", tmp_path / "sft/model", *sampled, "--out", out)
    result = json.loads(out.read_text())["result"]
    assert (
        result["avg@4"] == pytest.approx(result["pass@1"])
        and result["pass@1"] <= result["pass@2"] <= result["pass@4"]
    )
    assert len(rows(tmp_path, "eval.jsonl")) == 128
    run("evaluate", "--model", tmp_path / "sft/model", *sampled, "--strategy.engine-batch", "7", "--out", out)
    assert json.loads(out.read_text())["result"] == result  # the number does not depend on the batches


def bad_reward(folder, body):
    path = folder / "mine.py"
    path.write_text(f"def score(prompts, completions, **columns):\n    return {body}\n")
    return ["--reward", f"{path}:score"]


BAD = {
    "an unknown flag": (lambda t: ["--learning-rate", "1"], "learning-rate"),
    "a missing column": (lambda t: ["--template", "{query}"], "has no column 'query'"),
    "a prompt longer than the window": (lambda t: ["--max-new", "200"], "window of 128 tokens"),
    "a group of one": (lambda t: ["--group", "1"], "group: expected >= 2 responses a prompt for grpo"),
    "too few rewards": (lambda t: bad_reward(t, "[0.0]"), "expected 2 values, got 1"),
    "a reward that is NaN": (
        lambda t: bad_reward(t, "[float('nan')] * len(completions)"),
        "not a finite number",
    ),
    "a bound of no rounds": (
        lambda t: ["--rounds", "0"],
        "rounds: expected an integer in [1, inf), got 0",
    ),
    "an overlong buffer beyond max_new": (
        lambda t: ["--overlong", "9"],
        "overlong: expected at most max_new = 6, got 9",
    ),
    "remax on normalised rewards": (
        lambda t: ["--algorithm", "remax", "--normalize-reward"],
        "normalize_reward: expected off with remax",
    ),
    "an unknown algorithm": (lambda t: ["--algorithm", "ppo2"], "algorithm: expected one of grpo"),
    "no such data": (lambda t: ["--data", "nowhere.jsonl"], "could not read 'nowhere.jsonl': no such file"),
    "no such model": (lambda t: ["--model", "./nowhere"], "expected a folder, a hub name"),
    "no such reward": (lambda t: ["--reward", "best"], "reward 'best': expected one of math"),
    "greedy sampling": (lambda t: ["--temperature", "0"], "temperature: expected > 0"),
    "a budget too small": (lambda t: ["--budget", "5"], "budget: expected at least"),
}


LIMITS = [
    *(("grpo", "--lr", value) for value in ("nan", "inf", "-0.001")),
    *(("grpo", "--lr-end", value) for value in ("nan", "2")),
    *(("grpo", "--kl", value) for value in ("nan", "-1")),
    *(("sft", "--save-every", value) for value in ("0", "-1")),
    ("ppo", "--critic-lr", "nan"),
    ("grpo", "--timeout", "nan"),
    ("grpo", "--steps", "-3"),
    ("ppo", "--eval-every", "0"),
    ("sft", "--batch", "0"),
    ("grpo", "--max-gap", "nan"),
    ("grpo", "--eval-prompts", "0"),
    ("evaluate", "--temperature", "inf"),
]


@pytest.mark.parametrize(("name", "option", "value"), LIMITS)
def test_a_senseless_setting_is_one_line(name, option, value, tmp_path, monkeypatch, capsys):
    """NaN is outside of all limits, and no model is built to find that out."""
    module = script(name)
    monkeypatch.setattr("sys.argv", [f"{name}.py", option, value, "--out", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as end:
        rft.log.cli(module.main, module.Config)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    assert re.match(
        rf"error: (strategy\.)?{option[2:].replace('-', '_')}: expected an? (number|integer) in ", line
    )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, tmp_path):
    args, message = BAD[case]
    err = run("grpo", *args(tmp_path), "--out", tmp_path / "r", code=2)
    assert message in " ".join(err.replace("│", " ").split())
    assert not (tmp_path / "r" / "metrics.jsonl").exists()  # no step was spent on it
    if case != "an unknown flag":
        assert err.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": 1}, "points: expected an integer in [2, inf), got 1"),
        ({"group": 1}, "group: expected an integer in [2, inf), got 1"),
        ({"low": 0.0}, "low: expected a number in (0, inf), got 0.0"),
        ({"low": 2.0}, "low, high: expected 0 < low < high, got 2.0 and 1.0"),
    ],
)
def test_a_sweep_of_nothing_is_named(change, message, tmp_path):
    sweep = script("sweep")
    with pytest.raises(ValueError) as error:
        sweep.main(sweep.Config(**change, out=str(tmp_path)))
    assert str(error.value) == message and not list(tmp_path.iterdir())


def test_an_empty_data_set_and_an_unwritable_folder(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "expected at least one row" in run(
        "grpo", "--data", tmp_path / "empty.jsonl", "--out", tmp_path / "r", code=2
    )
    assert "cannot be written" in run("grpo", "--out", tmp_path / "empty.jsonl" / "r", code=2)
    run(
        "grpo", *SMALL[:4], "--steps", "1", "--eval-prompts", "4", "--out", tmp_path / "r"
    )  # the mended command


def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(straight, tmp_path):
    import shutil

    folder = tmp_path / "straight"
    shutil.copytree(straight, folder)
    newest = folder / "checkpoints" / "step_00000008" / "rank_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    args = [*SMALL, "--out", folder, "--ema", "0.9", "--kl", "0.01", "--normalize-reward"]
    before = (folder / "metrics.jsonl").read_bytes()
    err = run("grpo", *args, code=2)
    assert "step_00000008 is damaged" in err and "delete it to go on from step_00000006" in err
    assert (folder / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(newest.parent)
    run("grpo", *args)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_reward_errors_in_the_middle_lose_nothing(tmp_path):
    """A reward that breaks after some steps stops the run; with it mended, the same command goes on."""
    body = "[None if __import__('os').path.exists({!r}) else float(len(c)) for c in completions]"
    flag = tmp_path / "break"
    args = [*SMALL, "--out", tmp_path / "r", *bad_reward(tmp_path, body.format(str(flag)))]
    process, path = start("grpo", *args), tmp_path / "r" / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) > 3):
        time.sleep(0.01)
    flag.write_text("")
    _, err = process.communicate()
    assert process.returncode == 2 and "value 0 is None, not a finite number" in err
    flag.unlink()
    run("grpo", *args)
    assert [r["step"] for r in rows(tmp_path / "r")] == list(range(8))


def test_help_is_the_docs_of_the_fields():
    text = " ".join(run("grpo", "--help").replace("│", " ").split())
    for line in (
        "prompts a step",
        "a row of rft_fn.algorithm.TABLE",
        "trade a second forward for memory",
        "--strategy.engine-batch",
    ):
        assert line in text
