"""dpo.py as a user runs it: it learns, resumes to the bit, runs on two processes, refuses in one line."""

import json
import math
import os
import signal
from importlib.util import find_spec

import chats
import pytest
import torch
from script_runs import comparable, rows, run, start
from test_house import load_script

import rft_fn as rft
from rft_fn import packing
from rft_fn.run import preferences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

SMALL = {"steps": 4, "batch": 8, "eval_pairs": 8, "eval_every": 2, "save_every": 2, "warmup": 0}
FLAGS = ["--steps", 6, "--batch", 8, "--eval-pairs", 8, "--eval-every", 3, "--save-every", 2,
         "--nll", 0.2]  # fmt: skip
dpo = load_script("dpo")


def train(folder, **options):
    """The rows of a run in this process."""
    dpo.main(dpo.Config(**{**SMALL, **options}, out=str(folder)))
    return rows(folder)


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("whole_run")
def test_it_learns_from_the_built_in_pairs(tmp_path):
    """From the odds of the first model to pairs that were not seen: 0.95 of them at these options."""
    options = {"steps": 40, "batch": 32, "lr": 1e-3, "nll": 0.5, "eval_pairs": 128, "eval_every": 40}
    found = train(tmp_path / "r", **options, warmup=5)
    first, last = found[0], found[-1]
    assert first["eval/accuracy"] == first["eval/margin"] == 0
    assert last["eval/accuracy"] > 0.95 and last["eval/margin"] > 0.3
    assert last["eval/ranking"] > 0.95 > first["eval/ranking"]
    assert last["eval/logp_chosen"] > first["eval/logp_chosen"] + 2
    evaluate = load_script("evaluate")
    for model in ("tiny", str(tmp_path / "r")):
        evaluate.main(evaluate.Config(model=model, count=64, out=str(tmp_path / f"{len(model)}.json")))
    before, after = (
        json.loads((tmp_path / f"{len(model)}.json").read_text())["result"]["reward/task:sort_digits"]
        for model in ("tiny", str(tmp_path / "r"))
    )
    assert before < 0.45 and after > 0.8
    assert {"curve.png", "phases.png", "config.json", "model"} <= set(os.listdir(tmp_path / "r"))
    timing = rows(tmp_path / "r", "timing.jsonl")[1]
    assert all(timing[f"phase/{name}"] > 0 for name in ("score", "train"))


INT8 = pytest.param(
    {"lora_rank": 4, "lora_merge": False, "quantize": "int8"},
    marks=pytest.mark.skipif(find_spec("torchao") is None, reason="no library for int8"),
)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"gradient_checkpointing": True}, INT8])
def test_the_policy_is_the_reference_before_the_first_update(tmp_path, options):
    first = train(tmp_path / "r", **options)[0]
    for name in ("margin", "accuracy", "reward_chosen", "reward_rejected"):
        assert first[f"pairs/{name}"] == first[f"eval/{name}"] == 0
    assert first["policy/ref_gap"] == 0
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6) == first["eval/loss"]


def held_out(tokenizer, count):
    """The pairs of an evaluation, as rows 2i and 2i + 1."""
    found = rft.data.load("sort_digits:1", tokenizer, kind=rft.data.PAIRS, seed=1)
    pairs, _ = rft.data.take(found, count, found.seed)
    return packing.conversations([side for p in pairs for side in (p.chosen, p.rejected)])


def test_the_reference_of_adapters_is_the_model_without_them(tmp_path):
    """The margin that a run with LoRA logs last is that of the model it saved against the one it started
    from."""
    last = train(tmp_path / "r", lora_rank=4, lr=1e-2)[-1]
    tokenizer = rft.model.load_tokenizer("tiny")
    exp = held_out(tokenizer, SMALL["eval_pairs"])
    sums = []
    for name in (str(tmp_path / "r/model"), "tiny"):
        apply, params = rft.model.bind(rft.model.load(name))
        pack = packing.pack(exp, range(len(exp.mask)), unit=2)
        sums.append(torch.stack(packing.sides(apply(params, pack).logp.detach(), pack)))
    better, worse = 0.1 * (sums[0] - sums[1])
    assert last["eval/margin"] == pytest.approx(float((better - worse).mean()), rel=1e-3)
    assert abs(last["eval/margin"]) > 0.01
    assert last["policy/ref_gap"] > 0.01 and abs(last["pairs/margin"]) > 0.01  # of the pairs in training too
    checkpoint = rft.ckpt.weights(tmp_path / "r/checkpoints/step_00000004")
    assert checkpoint and all("lora_" in name for name in checkpoint)


def test_a_run_in_two_parts_is_a_run_in_one(tmp_path):
    """Metrics, evaluations and weights, to the bit; with adapters too."""
    kinds = {"whole": {}, "lora": {"lora_rank": 2}, "kto": {"loss": "kto", "nll": None}}
    kinds |= {"bco": {"loss": "bco", "unpaired": True, "nll": None}}
    for name, options in kinds.items():
        options = {"lr_end": 1.0, "nll": 0.1} | options
        whole = train(tmp_path / name, **options, steps=6)
        train(tmp_path / f"{name} parts", **options, steps=3)
        parts = train(tmp_path / f"{name} parts", **options, steps=6)
        # the last step of a run is always evaluated
        assert parts[:2] + parts[3:] == whole[:2] + whole[3:]
        assert whole[2] == {k: x for k, x in parts[2].items() if not k.startswith("eval/")}
        assert weights(tmp_path / name) == weights(tmp_path / f"{name} parts")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, without a stop."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run("dpo", *FLAGS, "--out", folder)
    return folder


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, alone):
    args = [*FLAGS, "--out", tmp_path / "run"]
    process = start("dpo", *args, interrupted=(signal.SIGINT, 1, 0.02))
    _, err = process.communicate(timeout=300)
    done = len(rows(tmp_path / "run"))
    assert process.returncode == 130 and done < 6
    assert err.strip().endswith(f"stopped by SIGINT after step {done}; the same command continues from there")
    run("dpo", *args)
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (alone / name).read_bytes()


TWO = {"fsdp2": [], "zero1": ["--zero-stage", 1]}  # more backends: the case `pairs` of conformance.py


@pytest.mark.parametrize("kind", TWO)
def test_two_processes_log_what_one_logs(tmp_path, alone, kind):
    """Every number, to rounding, whatever the packs."""
    run("dpo", *FLAGS, "--budget", 60, *TWO[kind], "--out", tmp_path / "run", world=2, whole=True)
    both = comparable(tmp_path / "run")
    one = comparable(alone)
    assert len(both) == len(one)
    for a, b in zip(both, one):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


def test_two_processes_learn_from_single_responses_as_one_does(tmp_path):
    flags = [x for x in FLAGS if x not in ("--nll", 0.2)] + ["--loss", "kto", "--unpaired"]
    run("dpo", *flags, "--out", tmp_path / "one")
    for name, options in {"fsdp2": [], "zero3": ["--zero-stage", 3]}.items():
        run("dpo", *flags, "--budget", 60, *options, "--out", tmp_path / name, world=2, whole=True)
        for a, b in zip(comparable(tmp_path / name), comparable(tmp_path / "one"), strict=True):
            assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


OPTIONS = {
    "beta": {"beta": 0.5},
    "cdpo": {"loss": "cdpo", "label_smoothing": 0.1},
    "smoother": {"loss": "cdpo", "label_smoothing": 0.3},
    "ipo": {"loss": "ipo"},
    "average": {"loss": "ipo", "average": True},
    "nll": {"nll": 1.0},
    "ld_alpha": {"ld_alpha": 0.5},
    "simpo": {"loss": "simpo"},
    "margin": {"loss": "simpo", "margin": 0.5},
    "kto": {"loss": "kto"},
    "desirable_weight": {"loss": "kto", "desirable_weight": 2.0},
    "undesirable_weight": {"loss": "kto", "undesirable_weight": 2.0},
    "unpaired": {"loss": "kto", "unpaired": True},
    "completion": {"loss": "kto", "unpaired": True, "completion": "{completion}+"},
    "chosen": {"chosen": "{chosen}+"},
    "rejected": {"rejected": "{rejected}+"},
    "template": {"template": "{prompt}("},
    "seed": {"seed": 1},
    "batch": {"batch": 4},
    "lr_end": {"lr_end": 0.5},
    "constant": {"schedule": "constant"},
    "lora_rank": {"lora_rank": 2},
    "lora_targets": {"lora_rank": 2, "lora_targets": "q_proj"},
}


def test_every_option_of_learning_changes_the_weights_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.setattr("rft_fn.run.plot.curve", lambda *_, **__: None)  # most of the time of so short a run
    monkeypatch.setattr("rft_fn.run.plot.phases", lambda *_, **__: None)
    found = {}
    for name, change in {"none": {}, "again": {}, **OPTIONS}.items():
        train(tmp_path / name, **{"steps": 2, "eval_every": 9, **change})
        found[name] = weights(tmp_path / name)
    assert found["none"] == found.pop("again")
    assert len(set(found.values())) == len(found)


def test_every_loss_orders_unseen_responses_better(tmp_path, monkeypatch):
    """The held-out margin of each row of the table grows, of pairs and of single responses."""
    monkeypatch.setattr("rft_fn.run.plot.curve", lambda *_, **__: None)
    monkeypatch.setattr("rft_fn.run.plot.phases", lambda *_, **__: None)
    more = {"cdpo": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}
    runs = {name: {"loss": name, **more.get(name, {})} for name in rft.loss.PREFERENCES}
    runs |= {f"{name} unpaired": {"loss": name, "unpaired": True} for name in ("kto", "bco")}
    for name, options in runs.items():
        found = train(tmp_path / name, steps=6, batch=16, eval_pairs=64, eval_every=6, lr=1e-3, **options)
        # apo_down makes both sides less probable
        of = "reward_rejected" if name == "apo_down" else "margin"
        gain = found[-1][f"eval/{of}"] - found[0][f"eval/{of}"]
        assert gain < -1e-3 if name == "apo_down" else gain > 1e-3, name
        assert 0 <= found[-1]["eval/accuracy"] <= 1 and math.isfinite(found[-1]["eval/loss"]), name


def test_the_baselines_of_single_responses(tmp_path):
    """KTO's is of other prompts and 0 before the first update; BCO's is the running mean of both rewards."""
    kto = train(tmp_path / "kto", loss="kto", unpaired=True)
    assert kto[0]["eval/loss"] == 0.5 and kto[0]["loss"] == 0.5
    cfg, values = dpo.Config(loss="bco"), {"pairs/reward_chosen": 0.5, "pairs/reward_rejected": -0.1}
    assert preferences.rewards_mean(cfg, 0.0, values, 0) == pytest.approx(0.2)
    assert preferences.rewards_mean(cfg, 0.5, values, 2) == pytest.approx(0.4)
    assert preferences.rewards_mean(dpo.Config(), 0.5, values, 2) == 0.5
    one = {"pairs/reward_chosen": 0.5}  # a batch of one kind has no middle, and no margin
    assert preferences.rewards_mean(cfg, 0.3, one, 2) == 0.3 and preferences.with_margin(dict(one)) == one


def test_the_baseline_of_a_run_is_of_the_batches_with_both_kinds(tmp_path):
    """Batches of two responses are of one kind half of the time; the mean goes on in another process."""
    options = {"loss": "bco", "unpaired": True, "batch": 2, "lr": 1e-2, "lr_end": 1.0}
    train(tmp_path / "run", **options, steps=5)
    found = train(tmp_path / "run", **options, steps=12)
    names = ("responses/reward_chosen", "responses/reward_rejected")
    middles = [sum(row[name] for name in names) / 2 for row in found if all(name in row for name in names)]
    assert 0 < len(middles) < len(found) == 12
    meta = json.loads((rft.ckpt.latest(tmp_path / "run" / "checkpoints") / "meta.json").read_text())
    assert meta["plain"]["extra/middles"] == len(middles)
    assert meta["plain"]["extra/shift"] == pytest.approx(sum(middles) / len(middles), rel=1e-4)


def test_a_mismatched_response_has_another_prompt():
    cfg = dpo.Config(loss="kto")
    tokenizer = rft.model.load_tokenizer("tiny")
    pairs, _ = rft.data.take(rft.data.load("sort_digits:1", tokenizer, kind=rft.data.PAIRS), 3, 0)
    exp, others = preferences.experience(cfg, pairs), preferences.mismatched(cfg, pairs)
    for b in range(6):
        own, other = exp.tokens[b][~exp.mask[b]], exp.tokens[(b + 2) % 6][exp.mask[(b + 2) % 6]]
        start = int(exp.mask[b].int().argmax())
        assert others.tokens[b, :start].tolist() == own[:start].tolist()
        assert others.tokens[b][others.mask[b]].tolist() == other.tolist()


def test_single_responses_of_a_file(tmp_path):
    """TRL's form, a label that is true or false; messages too."""
    turn = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    lines = [
        {"prompt": turn("user", f"{i}?"), "completion": turn("assistant", "yes" if i % 2 else "no"),
         "good": bool(i % 2)}
        for i in range(12)
    ]  # fmt: skip
    (tmp_path / "rated.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = chats.folder(tmp_path / "model", chats.CHATML)
    found = train(
        tmp_path / "r",
        model=model,
        data=(str(tmp_path / "rated.jsonl"),),
        messages=("prompt", "completion"),
        loss="kto",
        unpaired=True,
        label="good",
        lr=3e-3,
        eval_share=0.0,
    )
    assert found[-1]["eval/accuracy"] == 1 and found[-1]["eval/margin"] > 0.1


def test_what_changes_no_result_changes_none(tmp_path):
    """Packs of one pair, and of all; how often one looks."""
    whole = train(tmp_path / "a", budget=4096)
    small = train(tmp_path / "b", budget=32, eval_every=1)
    assert small[-1] == pytest.approx(whole[-1], rel=1e-4, abs=1e-5)
    alone = train(tmp_path / "c", strategy=rft.strategy.StrategyConfig(packing_samples=False))
    assert alone[-1] == pytest.approx(whole[-1], rel=1e-4, abs=1e-5)


def test_pairs_of_messages_in_a_file_and_others_held_out(tmp_path):
    """Conversations as TRL has them; the chosen side becomes more probable on what was not seen."""
    turn = lambda role, content: {"role": role, "content": content}  # noqa: E731
    lines = [
        {
            "prompt": [turn("user", f"{i}?")],
            "chosen": [turn("assistant", "yes")],
            "rejected": [turn("assistant", "no")],
        }
        for i in range(12)
    ]
    for name, part in {"train": lines[:8], "test": lines[8:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    model = chats.folder(tmp_path / "model", chats.CHATML)
    options = {"model": model, "data": (str(tmp_path / "train.jsonl"),), "lr": 3e-3}
    found = train(
        tmp_path / "r",
        **options,
        eval_data=(str(tmp_path / "test.jsonl"),),
        messages=("prompt", "chosen", "rejected"),
    )
    assert found[-1]["eval/accuracy"] == 1 and found[-1]["eval/margin"] > 0.1
