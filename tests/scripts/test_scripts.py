"""The scripts as a user runs them: they train, resume to the bit, and say in one line what is wrong."""

import contextlib
import dataclasses
import functools
import json
import os
import resource
import shutil
import signal
import warnings

import chats
import pytest
import torch
from safetensors.torch import load_file
from script_runs import ROOT, rows, run, start
from test_house import load_script as script
from test_symptoms import check_written

import rft_fn as rft
from rft_fn import algorithm, parsing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

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


STATES = ["--ema", "0.9", "--kl", "0.01", "--ref-every", "3", "--ref-mix", "0.5", "--normalize-reward"]
STATES += ["--entropy-target", "9", "--entropy-delta", "0.001"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One uninterrupted run with all that has a state: averages, moments, the entropy's coefficient."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    run("grpo", *SMALL, "--out", folder, *STATES, whole=True)
    return folder


def test_noise_and_the_kl_of_updates_are_measured_where_asked(straight, tmp_path):
    """In the steps that are due, and the numbers of the training stay the same but for rounding."""
    asked = ["--ema", "0.9", "--kl", "0.01", "--normalize-reward", "--noise-every", "2", "--update-kl"]
    run("grpo", *SMALL, "--steps", "8", "--out", tmp_path / "run", *asked)
    found, usual = rows(tmp_path / "run"), rows(straight)
    assert ["grad/snr" in r for r in found] == [True, False] * 4
    assert not any(name in r for r in usual for name in ("grad/snr", "policy/kl_update"))  # one pack a step
    for r in found:
        assert 0 <= r["policy/kl_update"] < 0.1 and 0 <= r["policy/kl_quadratic"] < 0.1
    assert max(r["policy/kl_update"] for r in found) > 1e-6
    for name in ("reward/mean", "grad/norm", "policy/entropy"):
        assert found[0][name] == pytest.approx(usual[0][name], rel=1e-4)

    # of two packs that hold whole prompts both are measured by default, without other bits
    two = [tmp_path / name for name in ("free", "off")]
    for folder, every in zip(two, ([], ["--noise-every", "0"])):
        run("grpo", *SMALL, "--budget", "100", "--steps", "2", "--out", folder, *every)
    free, off = (rows(folder) for folder in two)
    assert "grad/snr" in free[0] and not any("grad/snr" in r for r in off)
    assert [{n: x for n, x in r.items() if n in off[0]} for r in free] == off


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
    check_written(metrics)
    assert {"curve.png", "lengths.png", "timing.jsonl", "config.json", "model", "checkpoints"} <= set(
        os.listdir(straight)
    )
    assert rows(straight, "trajectories.jsonl")[0]["prompt"].startswith("sort:")
    assert len(os.listdir(straight / "checkpoints")) in (
        2,
        3,
    )  # the two newest, and the best where it is neither


LOUD = """
def even(completions, **columns):
    return [float(sum(c in "02468" for c in text)) for text in completions]

def loud(completions, **columns):
    return [1000 * x for x in even(completions)]
"""


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_normalised_parts_train_alike_whatever_their_scale(tmp_path, script):
    """The gradient of the first step is that of quieter parts; without the option it is another."""
    (tmp_path / "loud.py").write_text(LOUD)
    norms = {}
    for part, over in (("even", "batch"), ("loud", "batch"), ("loud", "")):
        folder = tmp_path / f"{part}_{over}"
        args = ["--prompts", "4", "--group", "4", "--steps", "1", "--eval-every", "100", "--warmup", "0"]
        args += ["--reward", f"{tmp_path}/loud.py:{part}", "task:sort_digits", "--reward-norm", over]
        run(script, *args, "--out", folder)
        norms[part, over] = rows(folder)[0]["grad/norm"]
    assert norms["loud", "batch"] == pytest.approx(norms["even", "batch"], rel=1e-4)
    assert norms["loud", "batch"] != pytest.approx(norms["loud", ""], rel=1e-2)


@pytest.mark.parametrize(("after", "seconds"), [(0, 0.0), (1, 0.02), (4, 0.07)])
def test_kill_9_and_the_same_command_again(straight, tmp_path, after, seconds):
    """Killed after step `after`, before the first checkpoint or later, wherever it is: equal files at the
    end."""
    args = [*SMALL, "--out", tmp_path / "straight", *STATES]
    process = start("grpo", *args, interrupted=(signal.SIGKILL, after, seconds))
    path = tmp_path / "straight" / "metrics.jsonl"
    process.communicate()
    assert process.returncode == -signal.SIGKILL and len(path.read_text().splitlines()) == after + 1
    run("grpo", *args)
    assert path.read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert (tmp_path / "straight/trajectories.jsonl").read_bytes() == (
        straight / "trajectories.jsonl"
    ).read_bytes()
    weights = [p / "model" / "model.safetensors" for p in (straight, tmp_path / "straight")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_saves_it(straight, tmp_path, number, code):
    """The files end with the step at which it stopped; the same command makes them those of a whole run."""
    args = [*SMALL, "--save-every", "100", "--out", tmp_path / "straight"]
    args += [*STATES]
    process, path = start("grpo", *args, interrupted=(number, 1, 0.02)), tmp_path / "straight/metrics.jsonl"
    _, err = process.communicate(timeout=600)
    assert process.returncode == code and "Traceback" not in err
    done = len(path.read_text().splitlines())
    line = f"stopped by {number.name} after step {done}; the same command continues from there"
    assert done < 8 and err.strip().splitlines()[-1] == line
    assert os.listdir(path.parent / "checkpoints") == [f"step_{done:08d}"]
    run("grpo", *args)
    assert path.read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_a_reader_that_leaves_does_not_end_a_run(tmp_path):
    process = start("sft", "--steps", "30", "--batch", "8", "--out", tmp_path / "r")
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=200) == 0 and "Broken pipe" not in process.stderr.read()
    assert len(rows(tmp_path / "r")) == 30


def test_a_checkpoint_without_a_newer_part_of_the_loop_resumes(tmp_path):
    """An option that has a state may be switched on, or off, and an older checkpoint has no place for it."""
    grpo = script("grpo")
    small = {
        "prompts": 4,
        "group": 4,
        "eval_prompts": 4,
        "lr_end": 1.0,
        "kl": 0.1,
        "out": str(tmp_path / "r"),
    }
    grpo.main(grpo.Config(**small, steps=2))
    more = {"ref_every": 1, "entropy_target": 9.0, "override": True}
    grpo.main(grpo.Config(**small, **more, steps=4))
    grpo.main(grpo.Config(**small, steps=5, override=True))
    found = rows(tmp_path / "r")
    assert [x.get("entropy/coef") for x in found] == [None, None, 0.0, 0.005, None]
    # the reference is the initial model in step 3, the newest policy in step 4, the initial one again
    assert found[3]["policy/kl_ref"] < 1e-6 < found[2]["policy/kl_ref"] < found[4]["policy/kl_ref"]


def test_a_remedy_that_an_error_names_can_be_taken(straight, tmp_path):
    """The budget is raised and fewer are sampled at a time in mid-run; other changes are noted."""
    folder = tmp_path / "straight"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000008")
    args = [*SMALL, "--out", folder, *STATES]
    run(
        "grpo", *args, "--budget", "512", "--engine-batch", "4", "--gradient-checkpointing", "--timeout", "99"
    )
    assert [r["step"] for r in rows(folder)] == list(range(8)) and not (folder / "overrides.jsonl").exists()
    shutil.rmtree(folder / "checkpoints" / "step_00000008")
    err = run("grpo", *args, "--max-new", "5", code=2)
    assert "other arguments: max_new was 6 and is 5; give --override" in err
    run("grpo", *args, "--max-new", "5", "--override")
    assert rows(folder, "overrides.jsonl") == [{"step": 6, "name": "max_new", "old": 6, "new": 5}]
    assert rows(folder)[-1]["rollout/length_max"] <= 5


def test_checkpoints_that_are_gone_are_named(straight, tmp_path):
    folder = tmp_path / "straight"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "metrics.jsonl").read_bytes()
    err = run("grpo", *SMALL, "--out", folder, *STATES, code=2)
    assert "no checkpoint is left" in err and "Traceback" not in err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_becomes_a_model(straight, tmp_path):
    """The newest is what the run itself left, the average included; another is other weights."""
    export, folder = script("export"), tmp_path / "straight"
    shutil.copytree(straight, folder)
    export.main(export.Config(run=str(folder)))
    own = (folder / "model/model.safetensors").read_bytes()
    assert (folder / "model_00000008/model.safetensors").read_bytes() == own
    export.main(export.Config(run=str(folder), step=6, out=str(tmp_path / "six")))
    assert (tmp_path / "six/model.safetensors").read_bytes() != own
    export.main(export.Config(run=str(folder), ema=False, out=str(tmp_path / "plain")))
    assert (tmp_path / "plain/model.safetensors").read_bytes() != own
    scores = {
        p: json.loads((p / "meta.json").read_text())["score"] for p in (folder / "checkpoints").iterdir()
    }
    best = script("export").chosen(export.Config(run=str(folder), best=True))
    assert scores[best] == max(scores.values())
    for options, message in (
        ({"step": 3}, "step: expected one of .*8, got 3"),
        ({"step": 8, "best": True}, "step, best: expected one of them"),
        ({"critic": True}, "critic: expected off, got on: .* has no critic"),
        (
            {"merge": False, "out": str(tmp_path / "x")},
            "merge: expected on, got off: the model of .* has no adapters",
        ),
        ({"out": str(folder / "config.json/x")}, "out: .*config.json cannot be made"),
        ({"out": str(tmp_path / "six")}, "out: .*six is there already"),
    ):
        with pytest.raises(ValueError, match=message):
            export.main(export.Config(run=str(folder), **options))
    (folder / "config.json").write_text(json.dumps(rft.run.settings(folder) | {"ema": 0.0}))
    with pytest.raises(ValueError, match=r"ema: expected off, got on: .* has no average"):
        export.main(export.Config(run=str(folder), ema=True, out=str(tmp_path / "x")))
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="run: expected the folder of a run"):
        export.main(export.Config(run=str(tmp_path)))


def test_evaluate_takes_the_model_of_a_run(straight, tmp_path):
    folder = tmp_path / "straight"
    shutil.copytree(straight, folder)
    assert rft.run.last_model("tiny") == "tiny"
    assert rft.run.last_model(str(folder)) == str(folder / "model")
    assert rft.run.last_model(str(folder / "model")) == str(folder / "model")
    shutil.rmtree(folder / "model")
    with pytest.raises(ValueError, match=r"has left no model yet; rft export .*straight"):
        rft.run.last_model(str(folder))
    evaluate = script("evaluate")
    with pytest.raises(ValueError, match=r"out: expected a file such as x.json"):
        evaluate.main(evaluate.Config(model=str(folder), out=str(tmp_path / "x.jsonl")))


def test_low_rank_adapters_learn_and_are_exported_both_ways(tmp_path):
    """Only adapters are in the checkpoint; merged they are the model that the run leaves."""
    grpo, folder = script("grpo"), tmp_path / "r"
    options = {
        "prompts": 8,
        "group": 8,
        "steps": 6,
        "eval_prompts": 4,
        "lora_rank": 4,
        "kl": 0.01,
        "lr": 5e-3,
    }
    grpo.main(grpo.Config(**options, warmup=0, out=str(folder)))
    found = rows(folder)
    assert all(r["policy/logp_gap"] < 1e-4 and r["grad/norm"] > 0 for r in found)
    assert found[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and found[-1]["policy/kl_ref"] > 1e-5
    weights = rft.ckpt.weights(folder / "checkpoints/step_00000006")
    assert weights and all("lora_" in name for name in weights)
    export = script("export")
    export.main(export.Config(run=str(folder), out=str(tmp_path / "merged")))
    own = (folder / "model/model.safetensors").read_bytes()
    assert (tmp_path / "merged/model.safetensors").read_bytes() == own
    export.main(export.Config(run=str(folder), merge=False, out=str(tmp_path / "adapters")))
    assert (tmp_path / "adapters/adapter_model.safetensors").exists()


FREE = [name for name, row in algorithm.TABLE.items() if isinstance(row, algorithm.Algorithm)]


@pytest.mark.parametrize("name", FREE)
def test_every_row_without_a_critic_runs_and_moves_the_model(name, tmp_path):
    grpo = script("grpo")
    options = {"prompts": 4, "group": 4, "steps": 2, "eval_prompts": 4, "algorithm": name}
    grpo.main(grpo.Config(**options, out=str(tmp_path / "r")))
    found = rows(tmp_path / "r")
    assert len(found) == 2 and all(r["grad/norm"] > 0 and r["policy/logp_gap"] < 1e-4 for r in found)
    start = dict(rft.model.load("tiny").named_parameters())
    end = load_file(tmp_path / "r" / "model" / "model.safetensors")
    assert any((end[name] - start[name]).abs().max() > 1e-4 for name in end)


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


OPTIONS = {
    "epochs": {"epochs": 2},
    "minibatches": {"minibatches": 3},
    "loss.low": {"epochs": 2, "loss": rft.run.options.Limits(low=0.9)},
    "loss.high": {"epochs": 2, "loss": rft.run.options.Limits(high=9.0)},
    "loss.dual": {"epochs": 3, "loss": rft.run.options.Limits(dual=1.0001)},
    "weight": {"weight": "token_mean"},
    "constant weight": {"weight": "constant:512", "lr": 3e-3},
    "advantage": {"advantage": "grpo"},
    "kl": {"epochs": 2, "kl": 0.5},
    "kl_in_reward": {"epochs": 2, "kl_in_reward": 0.5, "steps": 2},
    "steps": {"epochs": 2, "steps": 2},
    "reward_clip": {"reward_clip": 0.1},
    "linear": {"epochs": 3},
    "cosine": {"epochs": 3, "schedule": "cosine"},
    "constant": {"epochs": 3, "schedule": "constant"},
    "beta1": {"epochs": 2, "beta1": 0.5},
    "beta2": {"epochs": 2, "beta2": 0.5},
    "weight_decay": {"weight_decay": 10.0},
    "two steps": {"steps": 2, "kl": 0.5},
    "ref_every": {"steps": 2, "kl": 0.5, "ref_every": 1},
    "ref_mix": {"steps": 2, "kl": 0.5, "ref_every": 1, "ref_mix": 0.5},
    "entropy": {"entropy": 0.05},
    "entropy_target": {"entropy": 0.1, "entropy_target": 9.0},
    "entropy_share": {"entropy_share": 0.2},
    "mask_truncated": {"max_new": 4, "mask_truncated": True},
    "not mask_truncated": {"max_new": 4},
    "lora_rank": {"lora_rank": 2},
    "lora_alpha": {"lora_rank": 2, "lora_alpha": 8.0},
    "lora_targets": {"lora_rank": 2, "lora_targets": "q_proj"},
}


def test_every_option_of_learning_changes_the_weights_in_its_own_way(tmp_path):
    grpo, found = script("grpo"), {}
    small = {
        "prompts": 4,
        "group": 4,
        "eval_prompts": 4,
        "steps": 1,
        "warmup": 0,
        "lr": 2e-3,
        "algorithm": "dr_grpo",
    }
    for name, change in {"none": {}, "again": {}, **OPTIONS}.items():
        grpo.main(grpo.Config(**{**small, **change}, out=str(tmp_path / name)))
        found[name] = (tmp_path / name / "model/model.safetensors").read_bytes()
    assert found["none"] == found.pop("again")
    twins = [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
    assert not twins


def test_what_a_step_logs(straight):
    """Learning rate, spread of advantages, the policy's part of the loss, seconds of each phase."""
    last = rows(straight)[-1]
    assert last["lr"] == pytest.approx(1e-3 * 8 / 15)
    assert last["adv/min"] < 0 < last["adv/max"] and last["adv/std"] > 0
    bonus = last["entropy/coef"] * last["policy/entropy"]
    assert last["loss"] + bonus == pytest.approx(last["policy/loss"] + 0.01 * last["policy/kl_ref"], abs=5e-4)
    assert last["entropy/coef"] == pytest.approx(0.007) and last["loss"] != last["policy/loss"]
    timing = rows(straight, "timing.jsonl")
    phases = {"generate", "judge", "score", "train", "sync"}
    for row in timing:
        assert all(row[f"phase/{name}"] > 0 for name in phases)
        assert sum(x for name, x in row.items() if name.startswith("phase/")) <= row["seconds"] * 1.001
    assert [i for i, row in enumerate(timing) if "phase/save" in row] == [2, 4, 6]
    assert (straight / "phases.png").stat().st_size > 5_000


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


SWEEP = {"train": True, "steps": 2, "seeds": 2, "prompts": 2, "group": 4, "eval_every": 2, "eval_prompts": 4}


def trained(tmp_path, **changes):
    """The curves of a small sweep of training."""
    sweep = script("sweep")
    sweep.main(sweep.Config(**SWEEP | changes, out=str(tmp_path)))
    assert (tmp_path / "train.png").stat().st_size > 10_000
    return json.loads((tmp_path / "train.json").read_text())["curves"]


def test_a_sweep_of_training_has_a_curve_for_each_config_and_seed(tmp_path, capsys):
    names = ("grpo", "grpo,high=0.01,low=0.01", "grpo,lr=1e-5")
    shared = trained(tmp_path, configs=names, passes=3)
    assert list(shared) == list(names) and all(len(logs) == 2 for logs in shared.values())
    assert "greedy reward after 2 steps on the rollouts of grpo, 2 seeds" in capsys.readouterr().out
    first = {name: logs[0] for name, logs in shared.items()}
    assert [row["step"] for row in first["grpo"]] == [1, 2]
    assert ["eval/mean" in row for row in first["grpo"]] == [False, True]
    stopped = {name: log[0]["policy/clip_frac"] for name, log in first.items()}
    assert stopped["grpo,high=0.01,low=0.01"] > stopped["grpo"] > stopped["grpo,lr=1e-5"] == 0
    assert first["grpo"] != shared["grpo"][1]

    # the first config has its own rollouts in any case; on their own the others change
    own = trained(tmp_path, configs=names, passes=3, own=True)
    assert own["grpo"] == shared["grpo"] and own["grpo,lr=1e-5"] != shared["grpo,lr=1e-5"]
    assert trained(tmp_path, configs=names[:1], passes=1)["grpo"] != shared["grpo"]


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


def test_a_refused_command_that_is_mended_runs(tmp_path):
    """In a process of its own: one line, code 2, and the folder is still the next command's."""
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [0.0]\n")
    err = run("grpo", "--reward", f"{tmp_path}/mine.py:score", "--out", tmp_path / "r", code=2)
    assert err.startswith("error: ") and "expected 2 values, got 1" in err and err.count("\n") == 1
    run("grpo", *SMALL[:4], "--steps", "1", "--eval-prompts", "4", "--out", tmp_path / "r")


def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(straight, tmp_path):
    folder = tmp_path / "straight"
    shutil.copytree(straight, folder)
    newest = folder / "checkpoints" / "step_00000008" / "rank_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    args = [*SMALL, "--out", folder, *STATES]
    before = (folder / "metrics.jsonl").read_bytes()
    err = run("grpo", *args, code=2)
    assert "step_00000008 is damaged" in err and "delete it to resume from step_00000006" in err
    assert (folder / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(newest.parent)
    run("grpo", *args)
    assert (folder / "metrics.jsonl").read_bytes() == before


BROUGHT = """
from __future__ import annotations

def get_accuracy(slack: float = 0.0):
    def accuracy_reward(completions: list[list[dict]], answer: list[str], **kwargs) -> list[float | None]:
        kwargs["log_metric"]("step", kwargs["trainer_state"].global_step)
        contents = [completion[0]["content"] for completion in completions]
        return [float(content == gold) + slack for content, gold in zip(contents, answer)]
    return accuracy_reward

async def short_reward(completion_ids, trainer_state, prompts, **kwargs):
    assert 0 <= trainer_state.global_step <= trainer_state.max_steps <= 2
    return [None if len(ids) > 4 else {"score": 1.0, "length": len(ids)} for ids in completion_ids]
"""


@pytest.mark.parametrize("script", ["grpo", "ppo", "evaluate"])
def test_a_reward_file_written_for_trl_runs_unchanged(script, tmp_path):
    """Messages, a factory, async, None, dicts, the state of the run and its metrics."""
    path, out = tmp_path / "brought.py", tmp_path / "r"
    path.write_text(BROUGHT)
    rewards = [f"messages:{path}:get_accuracy(slack=0.5)", f"{path}:short_reward=0.1"]
    if script == "evaluate":
        run(script, "--count", 8, "--reward", *rewards, "--out", out.with_suffix(".json"))
        row = json.loads(out.with_suffix(".json").read_text())["result"]
        assert row["reward/accuracy_reward/step"] == 1
    else:
        run(script, *SMALL, "--steps", 2, "--reward", *rewards, "--out", out)
        row = rows(out)[1]
        assert [r["reward/accuracy_reward/step"] for r in rows(out)] == [0, 1]
        assert row["eval/accuracy_reward/step"] == 2  # after the last step
    assert 0.5 <= row["reward/accuracy_reward"] <= 1.5
    assert 0 < row.get("reward/short_reward/skipped", 0) <= 1 or row["reward/short_reward/length"] <= 4
    assert row.get("reward/short_reward", 1.0) == 1.0


def test_reward_errors_in_the_middle_lose_nothing(tmp_path):
    """A reward that breaks after some steps stops the run; with it mended, the same command continues."""
    path, mended, reward = tmp_path / "r" / "metrics.jsonl", tmp_path / "mended", tmp_path / "mine.py"
    reward.write_text(f"""
from pathlib import Path

def score(completions, **_):
    rows = Path({str(path)!r})
    late = rows.exists() and len(rows.read_text().splitlines()) > 3
    broken = late and not Path({str(mended)!r}).exists()
    return [float("nan") if broken else float(len(c)) for c in completions]
""")
    args = [*SMALL, "--out", tmp_path / "r", "--reward", f"{reward}:score"]
    assert "value 0 is nan, not a finite number" in run("grpo", *args, code=2)
    assert len(rows(tmp_path / "r")) == 4
    mended.write_text("")
    run("grpo", *args)
    assert [r["step"] for r in rows(tmp_path / "r")] == list(range(8))


def test_help_is_the_docs_of_the_fields():
    text = " ".join(run("grpo", "--help", "all").split())
    for line in (
        "prompts per step",
        "a row of rft_fn.algorithm.TABLE",
        "recompute activations to save memory",
        "--strategy.engine-batch",
    ):
        assert line in text


def test_the_learning_rate_on_record_is_the_one_that_was_used(tmp_path, monkeypatch):
    """An update that is skipped does not move the schedule on."""
    sft, nll, calls = script("sft"), rft.loss.nll, []

    def once_nan(logp):
        calls.append(0)
        return nll(logp) * (torch.nan if len(calls) == 2 else 1)

    monkeypatch.setattr(rft.loss, "nll", once_nan)
    options = {"steps": 4, "batch": 2, "warmup": 4, "lr": 0.004, "budget": 4096, "tokens_every": 0}
    cfg = sft.Config(out=str(tmp_path / "run"), **options)
    sft.main(cfg)
    found = rows(tmp_path / "run")
    assert [r["grad/skipped"] for r in found] == [0, 1, 0, 0]
    assert [r["lr"] for r in found] == pytest.approx([0.001, 0.002, 0.002, 0.003])


def test_adapters_are_saved_alone_and_trained_further_as_they_are(tmp_path):
    """lora_merge=False leaves a folder of adapters; a model that has some gets no second ones."""
    grpo, folder = script("grpo"), tmp_path / "r"
    options = {"prompts": 2, "group": 2, "steps": 1, "eval_prompts": 2}
    grpo.main(grpo.Config(**options, lora_rank=2, lora_merge=False, out=str(folder)))
    assert (folder / "model/adapter_model.safetensors").exists()
    assert not (folder / "model/model.safetensors").exists()
    again = {**options, "model": str(folder / "model")}
    with pytest.raises(ValueError, match=r"^rank: expected no new adapters for a model that has some, got 2"):
        grpo.main(grpo.Config(**again, lora_rank=2, out=str(tmp_path / "two")))
    grpo.main(grpo.Config(**again, out=str(tmp_path / "further")))
    weights = rft.ckpt.weights(tmp_path / "further/checkpoints/step_00000001")
    assert weights and all("lora_" in name for name in weights)


def test_the_checkpoints_that_are_kept(tmp_path):
    """The newest, the best beside them, and no more than fit into max_bytes."""
    grpo = script("grpo")
    options = {"prompts": 2, "group": 2, "steps": 5, "eval_prompts": 2, "save_every": 1}

    def left(name, **change):
        grpo.main(grpo.Config(**options, **change, out=str(tmp_path / name)))
        return sorted(int(p.name[5:]) for p in (tmp_path / name / "checkpoints").iterdir())

    assert left("newest", keep=2, best=0) == [4, 5]
    scores = [row["reward/mean"] for row in rows(tmp_path / "newest")]
    kept = left("best", keep=1, best=2)
    assert kept[-1] == 5 and len(kept) in (2, 3)
    assert {scores[i - 1] for i in kept} >= set(sorted(scores)[-2:])
    size = sum(f.stat().st_size for f in (tmp_path / "newest/checkpoints/step_00000005").iterdir())
    assert left("bytes", keep=4, best=0, max_bytes=int(2.5 * size)) == [4, 5]
    assert left("least", keep=4, best=2, max_bytes=1) == [5]


def test_the_critic_of_a_run_is_exported(tmp_path):
    ppo, export, folder = script("ppo"), script("export"), tmp_path / "r"
    options = {"prompts": 8, "steps": 1, "eval_prompts": 2, "minibatches": 1, "ema": 0.5}
    ppo.main(ppo.Config(**options, save_critic=True, out=str(folder)))
    export.main(export.Config(run=str(folder), critic=True, out=str(tmp_path / "critic")))
    for name in ("model.safetensors", "value_head.safetensors"):
        assert (tmp_path / "critic" / name).read_bytes() == (folder / "critic" / name).read_bytes()
    export.main(export.Config(run=str(folder), out=str(tmp_path / "actor")))
    own = (folder / "model/model.safetensors").read_bytes()
    assert (tmp_path / "actor/model.safetensors").read_bytes() == own
    with pytest.raises(ValueError, match=r"ema: expected off, got on: .* has no average of these weights"):
        export.main(export.Config(run=str(folder), critic=True, ema=True, out=str(tmp_path / "x")))


def test_a_full_disk_at_the_last_model_is_one_line_and_leaves_no_half_of_it(tmp_path):
    """A file may have 600 KiB, the model has 1.3 MiB; with room again the same command makes it."""
    run("sft", "--steps", 1, "--batch", 2, "--out", tmp_path / "r")
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (600 << 10, resource.RLIM_INFINITY))
    process = start("export", tmp_path / "r", "--out", tmp_path / "m", preexec_fn=limit)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2 and err.count("\n") == 1
    assert err.startswith(f"error: model: {tmp_path}/m could not be written: ") and "File too large" in err
    assert not (tmp_path / "m").exists()
    run("export", tmp_path / "r", "--out", tmp_path / "m")
    assert (tmp_path / "m/model.safetensors").exists()


def test_a_request_to_stop_that_a_library_catches_still_stops(monkeypatch, capsys):
    """Before the first step; its own error, made of the request, is not what is told."""

    def main(cfg):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            raise ValueError("could not import that") from None

    def deaf(cfg):
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        rft.run.signals.enter_steps()
        raise AssertionError("it runs")

    for body in (main, deaf):
        monkeypatch.setattr("sys.argv", ["x.py"])
        with pytest.raises(SystemExit) as end:
            rft.run.cli(body, Nothing)
        assert end.value.code == 143
        assert capsys.readouterr().err == "stopped by SIGTERM before the first step\n"
        assert not rft.run.signals.asked()  # the next main in this process starts afresh


def test_a_warning_to_the_user_is_one_line(monkeypatch):
    """One to a programmer still says where it comes from, and so do all after the script."""
    told = []

    def main(cfg):
        for category in (UserWarning, DeprecationWarning):
            told.append(warnings.formatwarning("judge: it said\n nothing", category, "x.py", 7, "x = 1"))

    monkeypatch.setattr("sys.argv", ["x.py"])
    usual = warnings.formatwarning
    rft.run.cli(main, Nothing)
    assert told[0] == "warning: judge: it said nothing\n"
    assert told[1].startswith("x.py:7: DeprecationWarning") and warnings.formatwarning is usual


@dataclasses.dataclass(frozen=True)
class Nothing:
    """A script without options."""


# ---------- conversations

MATHS = [
    {"prompt": [{"role": "user", "content": f"{i}+{i}?"}], "answer": str(2 * i), "id": i} for i in range(6)
]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A folder with a model that has a chat template, and files of conversations."""
    folder = tmp_path_factory.mktemp("chatty")
    chats.folder(folder / "model", chats.QWEN3)
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, MATHS)))
    said = [{"role": "assistant", "content": x["answer"]} for x in MATHS]
    talks = [{"messages": [*x["prompt"], y], "answer": x["answer"]} for x, y in zip(MATHS, said)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    reward = "def place(prompts, completions, id, **columns):\n    return [i % 2 for i in range(len(id))]\n"
    (folder / "mine.py").write_text(reward)
    return folder


def chat_options(folder, data="prompts.jsonl", messages=("prompt",)):
    return {"model": str(folder / "model"), "data": (str(folder / data),), "messages": messages}


@pytest.mark.parametrize("name", ["grpo", "ppo", "evaluate"])
def test_prompts_of_messages_go_through_the_chat_template(name, chatty, tmp_path, monkeypatch):
    """Every prompt that is sampled from is what the model's template makes of a row's messages."""
    seen, generate = [], rft.collect.gather_and_generate

    def recorded(eng, st, prompts, *args, **options):
        seen.extend(prompts)
        return generate(eng, st, prompts, *args, **options)

    monkeypatch.setattr(rft.collect, "gather_and_generate", recorded)
    options = chat_options(chatty) | {"reward": (f"{chatty / 'mine.py'}:place",), "max_new": 4}
    options["chat_template_kwargs"] = ("enable_thinking=False",)
    if name == "evaluate":
        script(name).main(script(name).Config(count=6, **options))
    else:
        more = {"prompts": 2, "group": 2, "steps": 1, "eval_prompts": 2, "out": str(tmp_path / "run")}
        if name == "ppo":
            more |= {"ptx": 0.5, "ptx_data": str(chatty / "talks.jsonl"), "ptx_messages": ("messages",)}
        script(name).main(script(name).Config(**more, **options))
    tokenizer = rft.model.load_tokenizer(str(chatty / "model"))
    assert seen
    for prompt in seen:
        question = MATHS[prompt.columns["id"]]["prompt"][0]["content"]
        assert tokenizer.decode(prompt.ids) == (
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


CHAT_MISTAKES = {
    "nothing said": ("grpo", "prompts.jsonl", [],
        "the row has no column 'short'; it has 'prompt', 'answer', 'id'; 'prompt' holds messages: --messages "
        "prompt, without --template"),
    "a template that prints a list": ("sft", "talks.jsonl", ["--template", "{messages}"],
        "column 'messages' holds a list, which no template prints; 'messages' holds messages: --messages "
        "messages, without --template"),
    "both": (
        "grpo",
        "prompts.jsonl",
        ["--messages", "prompt", "--template", "{answer}"],
        "template: expected '{short}', as this script does not read it, got '{answer}'; --messages takes its",
    ),
    "a response too": ("sft", "talks.jsonl", ["--messages", "messages", "--response", "{gold}"],
        "response: expected '{answer}', as this script does not read it, got '{gold}'; --messages takes its"),
    "which turns of a text": ("sft", "talks.jsonl", ["--loss-on", "last"], "loss_on: expected 'all', as "),
    "both in ppo": ("ppo", "prompts.jsonl", ["--messages", "prompt", "--template", "{a}"],
        "template: expected '{short}'"),
    "both in examples": ("ppo", "prompts.jsonl", ["--ptx-messages", "messages", "--ptx-response", "{a}"],
        "ptx_response: expected {answer} with ptx_messages messages, which take its place, got {a}"),
    "both in evaluate": ("evaluate", "prompts.jsonl", ["--messages", "prompt", "--template", "{a}"],
        "template: expected '{short}'"),
    "a keyword that is not read": ("evaluate", "prompts.jsonl",
        ["--messages", "prompt", "--chat-template-kwargs", "thinking=False"],
        "expected a name that the chat template reads (enable_thinking), got 'thinking'"),
    "a keyword that is no literal": ("sft", "talks.jsonl",
        ["--messages", "messages", "--chat-template-kwargs", "enable_thinking=off"],
        "chat_template_kwargs: expected NAME=LITERAL as enable_thinking=False"),
    "an answer at the end": ("grpo", "talks.jsonl", ["--messages", "messages"],
        "turn 2: expected the last turn of a prompt from user or tool, got assistant; and 2 more. 5 of 5"),
    "nothing to learn": ("sft", "prompts.jsonl", ["--messages", "prompt"],
        "lines 1, 2, 3: expected a turn of the assistant to learn, got none; and 3 more"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAT_MISTAKES)
def test_mistakes_with_messages_are_one_line_before_a_model_is_loaded(case, chatty, tmp_path, monkeypatch):
    name, file, more, message = CHAT_MISTAKES[case]
    monkeypatch.setattr(rft.model, "load", None)
    args = ["--model", chatty / "model", "--data", chatty / file, *more]
    if name != "evaluate":
        args += ["--out", tmp_path / "run"]
    if name != "sft":
        args += ["--reward", "exact"]
    config = script(name).Config
    with pytest.raises(ValueError) as error:
        script(name).main(parsing.parse(config, parsing.qualify([str(x) for x in args], config)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sft_learns_a_conversation(chatty, tmp_path):
    options = chat_options(chatty, "talks.jsonl", ("messages",))
    more = {"steps": 12, "batch": 6, "lr": 3e-3, "loss_on": "last", "out": str(tmp_path / "run")}
    sft = script("sft")
    sft.main(sft.Config(**options, **more, chat_template_kwargs=("enable_thinking=False",)))
    losses = [r["loss"] for r in rows(tmp_path / "run")]
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_of_version_0_1_0_resumes(tmp_path):
    """Its folder after two of four steps; the other rows are what that version wrote then."""
    stored = ROOT / "tests" / "ckpt" / "data" / "run_0_1_0"
    folder = tmp_path / "old4"
    shutil.copytree(stored, folder)
    lines = (stored / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    options = ["--steps", 4, "--prompts", 4, "--group", 4, "--lora-rank", 1, "--save-every", 2, "--warmup", 1]
    options += ["--ema", 0.9, "--kl", 0.01, "--normalize-reward", "--tokens-every", 0, "--no-canary"]
    run("grpo", *options, "--eval-every", 100, "--eval-prompts", 4, "--out", folder)
    found, wanted = rows(folder), rows(stored)
    assert [row["step"] for row in found] == [0, 1, 2, 3] and found[:2] == wanted[:2]
    for new, old in zip(found[2:], wanted[2:], strict=True):
        for name in ("lr", "reward/mean", "policy/kl_ref", "grad/norm"):
            # its base was trained on another processor
            assert new[name] == pytest.approx(old[name], rel=1e-2, abs=1e-6), name
