"""train_rm.py as a user runs it: each kind of rows is learned, resumed to the bit, refused in one line."""

import itertools
import json
import math
import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import ranks
import script_runs
import torch
from PIL import Image
from script_runs import comparable, rows
from test_house import load_script

import rft_fn as rft

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

SMALL = {"steps": 4, "batch": 8, "eval_items": 8, "eval_every": 2, "save_every": 2, "warmup": 0}
train_rm = load_script("train_rm")


def train(folder, **options):
    """The rows of a run in this process."""
    train_rm.main(train_rm.Config(**{**SMALL, **options}, out=str(folder)))
    return rows(folder)


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def data_file(folder, name, lines):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return (str(path),)


@pytest.mark.usefixtures("whole_run")
def test_it_learns_from_the_built_in_pairs(tmp_path):
    """Unseen pairs are ordered; the saved model has the accuracy that was logged, and a calibration."""
    options = {"steps": 50, "batch": 32, "eval_items": 64, "eval_every": 50, "warmup": 5, "save_every": 99}
    options |= {"lr": 1e-3, "beta2": 0.999}
    found = train(tmp_path / "r", **options)
    first, last = found[0], found[-1]
    assert first["eval/accuracy"] == first["eval/margin"] == first["pairs/ece"] == 0
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6) == first["eval/loss"]
    assert last["eval/accuracy"] > 0.7 and last["eval/loss"] < 0.6 and last["eval/margin"] > 0.3
    assert {"curve.png", "phases.png", "reliability.png", "config.json"} <= set(os.listdir(tmp_path / "r"))

    # the pairs of the evaluation, by the folder alone
    module = rft.model.load_reward(str(tmp_path / "r/model"))
    (head,) = module.heads
    assert head.name == "score" and head.scale != 1 and head.shift != 0
    st = rft.strategy.get_strategy()
    apply, params = st.bind(module)
    tokenizer = rft.model.load_tokenizer(str(tmp_path / "r/model"))
    negatives = train_rm.Config().negatives
    source = rft.data.pairs_from_task("sort_digits", tokenizer, seed=1, negatives=negatives)
    pairs = [source.prompt(i) for i in range(64)]
    exp, _ = train_rm.pairs_batch(pairs)
    score = st.score(apply, params, exp, 2048, fields=("score",)).score
    raw = rft.model.final_scores(score, exp.mask)[:, 0].view(-1, 2)
    assert (raw[:, 0] > raw[:, 1]).double().mean() == pytest.approx(last["eval/accuracy"])
    assert (raw[:, 0] - raw[:, 1]).mean() == pytest.approx(last["eval/margin"], rel=1e-4)

    # the accuracy for each kind of wrong answer
    drawn = [pair.columns["negative"] for pair in pairs]
    assert {"guess", "mistake", "ordered"} <= set(drawn)
    for kind in set(drawn):
        of = torch.tensor([name == kind for name in drawn])
        right = (raw[of, 0] > raw[of, 1]).double().mean()
        assert right == pytest.approx(last[f"eval/accuracy/{kind}"])

    # calibrated differences are the logits that fit these pairs best, so no other scale has a lower loss
    def loss(scale):
        h = (raw[:, 0] - raw[:, 1]).double() / scale
        right = 65 / 66  # Platt's label of 64 pairs
        return float(-(right * torch.nn.functional.logsigmoid(h) +
                       (1 - right) * torch.nn.functional.logsigmoid(-h)).mean())  # fmt: skip

    assert loss(head.scale) < min(loss(head.scale * 1.2), loss(head.scale / 1.2))
    assert head.shift == pytest.approx(float(raw.mean()), rel=1e-3)


def entropy(p):
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_the_kinds_of_wrong_answers_are_for_tasks():
    config = train_rm.Config(negatives=("noise",), data=("sort_digits",))
    rft.run.check_labelled(config)
    rft.run.check_labelled(replace(config, data=("a.jsonl",), eval_data=("sort_digits",)))
    with pytest.raises(ValueError, match=r"negatives: .*only built-in tasks make wrong answers"):
        rft.run.check_labelled(replace(config, data=("a.jsonl",)))


def constant_loss(kind, negatives):
    """The loss on the held-out rows of the best answer that is the same for all of them."""
    tokenizer = rft.model.load_tokenizer("tiny")
    how = {"seed": 1, "negatives": negatives}
    if kind == "points":
        points = rft.data.points.points_from_task("sort_digits", tokenizer, **how)
        return float(np.var([points.prompt(i).labels[0] for i in range(64)]))
    if kind == "steps":
        steps = rft.data.reasoning_steps.steps_from_task("sort_digits", tokenizer, **how)
        return entropy(np.mean([x for i in range(64) for x in steps.prompt(i).labels]))
    lists = rft.data.ranked.lists_from_task("sort_digits", tokenizer, **how)
    orders = [lists.prompt(i).ranks for i in range(64)]
    return float(np.mean([sum(np.log(sum(b >= a for b in order)) for a in order) for order in orders]))


@pytest.mark.parametrize(("kind", "options"), [("lists", {}), ("points", {"loss": "mse"}), ("steps", {})])
def test_it_learns_from_lists_points_and_steps(tmp_path, kind, options):
    """More than the best constant knows, on unseen rows."""
    options = {**options, "negatives": ("noise=2", "guess")}
    constant = constant_loss(kind, options["negatives"])
    more = {"steps": 80, "batch": 32, "eval_items": 64, "eval_every": 80, "save_every": 99, "lr": 2e-3}
    more["beta2"] = 0.999
    found = train(tmp_path / "r", kind=kind, warmup=10, **more, **options)
    first, last = found[0], found[-1]
    assert last["eval/loss"] < 0.9 * constant
    if kind == "lists":
        assert first["eval/loss"] == pytest.approx(constant, rel=1e-5)
        assert last["eval/accuracy"] > 0.7 and last["eval/top"] > 0.6
    (head,) = rft.model.load_reward(str(tmp_path / "r/model")).heads
    assert head.scale != 1


PAIRS = [
    {"prompt": "sort:312=", "chosen": "123", "rejected": "312", "margin": 0.5, "a": 1, "b": -1},
    {"prompt": "sort:21=", "chosen": "12", "rejected": "x", "a": 2, "b": 0},
    {"prompt": "sort:9=", "chosen": "9", "rejected": "99", "margin": -0.25, "a": 0, "b": 1},
]
LISTS = [
    {"prompt": "sort:312=", "completions": ["132", "123", "aaa"], "ranks": [2, 1, 3]},
    {"prompt": "sort:21=", "completions": ["2", "12", "1", "21"], "scores": [0.5, 1, 0.5, 0]},
]
POINTS = [
    {"prompt": "sort:312=", "completion": text, "score": i / 3, "format": i % 2}
    for i, text in enumerate(["a", "132", "213", "123"])
]
STEPS = [
    {"prompt": "3+4+5=", "completions": ["3+4=7", "7+5", "12"], "labels": [True, True, False]},
    {"prompt": "1=", "completions": ["1"], "labels": [0.25]},
]


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory):
    """A folder with a reward model of two heads that score something."""
    folder = tmp_path_factory.mktemp("two") / "model"
    module = rft.model.load_reward("tiny", new=True, heads=("a", "b"))
    with torch.no_grad():
        module.score.weight.copy_(torch.randn(module.score.weight.shape, generator=rft.rng.generator(3)))
    rft.model.save_reward(folder, module)
    rft.model.load_tokenizer("tiny").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def score_of(two_heads):
    """text -> the scores [H] of both heads at its end, by transformers' own class, one text at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(two_heads).double()
    tokenizer = rft.model.load_tokenizer("tiny")

    def score(prompt, response, *, end=True):
        ids = [*tokenizer.encode(prompt), *tokenizer.encode(response)] + [tokenizer.eos_token_id] * end
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids])).logits[0].numpy()

    return score


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def one_step(folder, model, kind, lines, **options):
    """(the loss that the first step logs, the whole row)."""
    found = train(folder, model=model, kind=kind, data=data_file(folder.parent, kind, lines), steps=2,
                  batch=len(lines), eval_share=0.0, eval_every=9, keep_heads=True, **options)  # fmt: skip
    return found[0]["loss"], found[0]


def test_the_loss_of_pairs_is_its_definition(tmp_path, two_heads, score_of):
    """Each head has its own better side, none where it has no opinion; the mean over heads, then pairs."""
    options = {"heads": ("a", "b"), "margin": "margin", "label_smoothing": 0.1, "centering": 0.05}
    loss, row = one_step(tmp_path / "r", two_heads, "pairs", PAIRS, **options)
    total, right, told = 0.0, 0, 0
    for pair in PAIRS:
        chosen, rejected = (score_of(pair["prompt"], pair[side]) for side in ("chosen", "rejected"))
        each = []
        for h, name in enumerate("ab"):
            if pair[name] == 0:
                continue
            better, worse = (chosen[h], rejected[h]) if pair[name] > 0 else (rejected[h], chosen[h])
            x = better - worse - pair.get("margin", 0)
            each.append(-0.9 * log_sigmoid(x) - 0.1 * log_sigmoid(-x) + 0.05 * (better + worse) ** 2)
            right, told = right + (better > worse), told + 1
        total += np.mean(each) / len(PAIRS)
    assert loss == pytest.approx(total, rel=1e-5)
    assert row["pairs/accuracy"] == pytest.approx(right / told)
    assert row["eval/loss"] == pytest.approx(total, rel=1e-5)  # before the update, on the same rows
    assert {"eval/a/accuracy", "eval/b/margin"} <= set(row)


@pytest.fixture(scope="module")
def one_head(two_heads, tmp_path_factory):
    """The first head of `two_heads` alone."""
    folder = tmp_path_factory.mktemp("one") / "model"
    both = rft.model.load_reward(two_heads)
    module = rft.model.load_reward("tiny", new=True)
    with torch.no_grad():
        module.score.weight.copy_(both.score.weight[:1])
    rft.model.save_reward(folder, module)
    rft.model.load_tokenizer("tiny").save_pretrained(folder)
    return str(folder)


def test_the_loss_of_lists_is_its_definition(tmp_path, one_head, score_of):
    """Each response against those that are not better; a sum over a list, a mean over lists of any length."""
    loss, row = one_step(tmp_path / "r", one_head, "lists", LISTS)
    total, right, pairs = 0.0, 0, 0
    for one in LISTS:
        score = [score_of(one["prompt"], text)[0] for text in one["completions"]]
        rank = one.get("ranks") or [-x for x in one["scores"]]
        for i in range(len(score)):
            left = [score[j] for j in range(len(score)) if rank[j] >= rank[i]]
            total += (np.log(np.sum(np.exp(left))) - score[i]) / len(LISTS)
        for i, j in itertools.permutations(range(len(score)), 2):
            if rank[i] < rank[j]:
                right, pairs = right + (score[i] > score[j]), pairs + 1
    assert loss == pytest.approx(total, rel=1e-5) == row["eval/loss"]
    assert row["lists/accuracy"] == pytest.approx(right / pairs)


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_the_loss_of_points_is_its_definition(tmp_path, two_heads, score_of, loss):
    """A mean over responses and heads, each with the column of its name."""
    named = [{**row, "a": row["score"], "b": row["format"]} for row in POINTS]
    found, row = one_step(tmp_path / "r", two_heads, "points", named, heads=("a", "b"), loss=loss)
    score = np.array([score_of(row["prompt"], row["completion"]) for row in POINTS])
    label = np.array([[row["score"], row["format"]] for row in POINTS])
    each = (score - label) ** 2
    if loss == "bce":
        each = -label * log_sigmoid(score) - (1 - label) * log_sigmoid(-score)
        assert row["points/correct"] == pytest.approx(np.mean((score > 0) == (label > 0.5)))
    else:
        assert row["points/mse"] == pytest.approx(each.mean(), rel=1e-5)
    assert found == pytest.approx(each.mean(), rel=1e-5) == row["eval/loss"]


def test_the_loss_of_steps_is_its_definition(tmp_path, one_head, score_of):
    """The score after each step, which sees nothing behind it; a mean over all steps."""
    found, row = one_step(tmp_path / "r", one_head, "steps", STEPS, separator=",")
    each, correct = [], []
    for one in STEPS:
        texts, said = one["completions"], ""
        for k, (text, label) in enumerate(zip(texts, one["labels"])):
            last = k == len(texts) - 1
            said += text if last else text + ","
            score = score_of(one["prompt"], said, end=last)[0]
            each.append(-label * log_sigmoid(score) - (1 - label) * log_sigmoid(-score))
            correct.append((score > 0) == (label > 0.5))
    assert found == pytest.approx(np.mean(each), rel=1e-5) == row["eval/loss"]
    assert row["steps/correct"] == pytest.approx(np.mean(correct))


def check_same(whole, parts):
    """Two runs are equal to the bit; their cards have different titles."""
    assert rows(parts) == rows(whole)
    for name in set(os.listdir(whole / "model")) - {"README.md"}:
        assert (whole / "model" / name).read_bytes() == (parts / "model" / name).read_bytes(), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "lists", "pool": "attention"},
        {"kind": "points", "loss": "mse"},
        {"kind": "steps", "pool": "mean", "lora_rank": 2},
    ],
    ids=["pairs", "lists", "points", "steps"],
)
def test_a_run_in_two_parts_is_a_run_in_one(tmp_path, options):
    """Metrics, evaluations, weights and calibration, to the bit."""
    options = {**options, "lr_end": 1.0}
    train(tmp_path / "whole", **options, steps=4)
    train(tmp_path / "parts", **options, steps=2)
    train(tmp_path / "parts", **options, steps=4)
    check_same(tmp_path / "whole", tmp_path / "parts")


def test_what_changes_no_result_changes_none(tmp_path):
    """Packs of one pair, and of all; how often one looks."""
    whole = train(tmp_path / "a", budget=4096)
    small = train(tmp_path / "b", budget=40, eval_every=1)
    assert small[-1] == pytest.approx(whole[-1], rel=1e-4, abs=1e-5)


TWO = {
    "pairs": ({"centering": 0.01}, {"zero_stage": 1}),
    "lists": ({}, {"sp_size": 2}),
    "points": ({}, {"zero_stage": 3}),
    "steps": ({}, {"shard_size": 1}),
}
LEAST = {"pairs": 60, "lists": 100, "points": 60, "steps": 60}  # budget of packs, which hold a list


def on_two_ranks(rank, folder, ports):
    """A run of each kind of rows by another strategy; points also in two parts. Each has its own group."""

    def go(name, steps=4):
        os.environ["MASTER_PORT"] = str(ports.pop())
        kind = name.split()[0]
        options = {"kind": kind, "steps": steps, "budget": LEAST[kind], "lr_end": 1.0, **TWO[kind][0]}
        how = rft.strategy.StrategyConfig(**TWO[kind][1])
        train_rm.main(train_rm.Config(**{**SMALL, **options}, strategy=how, out=str(folder / name)))

    script_runs.leave_out()
    for kind in TWO:
        go(kind)
    for steps in (2, 4):
        go("points in parts", steps)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of those runs."""
    folder = tmp_path_factory.mktemp("two_ranks")
    ranks.run(2, "test_train_rm:on_two_ranks", folder, [ranks.free_port() for _ in range(len(TWO) + 2)])
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """kind -> the folder of the run of one process, without a stop."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def found(kind):
        train(folder / kind, kind=kind, lr_end=1.0, **TWO[kind][0])
        return folder / kind

    return found


def check_close(one, both):
    """Every number is equal to rounding, whatever the packs; and the same model comes out."""
    assert len(rows(both)) == len(rows(one)) == 4
    for a, b in zip(comparable(both), comparable(one)):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    heads = [rft.model.load_reward(str(folder / "model")).heads[0] for folder in (both, one)]
    assert heads[0].scale == pytest.approx(heads[1].scale, rel=1e-2) != 1


@pytest.mark.parametrize("kind", TWO)
def test_two_processes_log_what_one_logs(two, alone, kind):
    """ZeRO that shards the optimizer or all, ranks that share a pack, and replicas."""
    check_close(alone(kind), two / kind)


def test_two_processes_in_two_parts_are_in_one(two):
    check_same(two / "points", two / "points in parts")


def test_torchrun_logs_what_one_process_logs(tmp_path, alone):
    flags = [x for name, value in SMALL.items() for x in (f"--{name}", value)]
    flags += ["--budget", 60, "--lr-end", 1, "--centering", 0.01, "--out", tmp_path / "run"]
    script_runs.run("train_rm", *flags, world=2)
    check_close(alone("pairs"), tmp_path / "run")


# ---------- options


OPTIONS = {
    "pool": {"pool": "mean"},
    "attention": {"pool": "attention"},
    "label_smoothing": {"label_smoothing": 0.1},
    "centering": {"centering": 0.5},
    "negatives": {"negatives": ("noise",)},
    "shares": {"negatives": ("guess=3", "mistake")},
    "chosen": {"chosen": "{chosen}+"},
    "template": {"template": "{prompt}("},
    "seed": {"seed": 1},
    "batch": {"batch": 4},
    "lora_rank": {"lora_rank": 2},
    "freeze": {"freeze": ("layers.0",)},
    "lists": {"kind": "lists"},
    "points": {"kind": "points"},
    "mse": {"kind": "points", "loss": "mse"},
    "steps": {"kind": "steps"},
    "separator": {"kind": "steps", "separator": ","},
    "mse of steps": {"kind": "steps", "loss": "mse"},
}


def test_every_option_of_learning_changes_the_weights_in_its_own_way(tmp_path):
    found = {}
    for name, change in {"none": {}, "again": {}, **OPTIONS}.items():
        train(tmp_path / name, **{"steps": 2, "eval_every": 9, **change})
        path = tmp_path / name / "model"
        heads = path / "reward_head.safetensors"
        found[name] = weights(tmp_path / name) + (heads.read_bytes() if heads.exists() else b"")
    assert found["none"] == found.pop("again")
    assert len(set(found.values())) == len(found)


def test_margins_of_the_data_are_read(tmp_path):
    """A column of them changes what is learned, unless another column is named."""
    plain = [{k: v for k, v in pair.items() if k in ("prompt", "chosen", "rejected")} for pair in PAIRS]
    lines = {"with": [{**x, "margin": 2} for x in plain], "without": plain}
    options = {"steps": 2, "batch": 3, "eval_share": 0.0}
    found = []
    for name, column in (("with", "margin"), ("without", "margin"), ("with", "other")):
        files = data_file(tmp_path, name, lines[name])
        train(tmp_path / f"{name} {column}", data=files, margin=column, **options)
        found.append(weights(tmp_path / f"{name} {column}"))
    assert found[0] != found[1] == found[2]


def test_heads_have_the_names_of_their_columns_and_are_kept(tmp_path):
    """Two heads of one model; a second run goes on with them, or begins with new ones."""
    files = data_file(tmp_path, "points", POINTS * 4)
    options = {"data": files, "kind": "points", "eval_share": 0.5, "heads": ("format", "score")}
    train(tmp_path / "a", **options)
    saved = rft.model.load_reward(str(tmp_path / "a/model"))
    assert [head.name for head in saved.heads] == ["format", "score"]
    kept = train(tmp_path / "b", model=str(tmp_path / "a/model"), keep_heads=True, **options)
    assert kept[0]["eval/loss"] == pytest.approx(rows(tmp_path / "a")[-1]["eval/loss"], rel=1e-4)
    new = train(tmp_path / "c", model=str(tmp_path / "a/model"), **options)
    assert new[0]["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)
    with pytest.raises(ValueError, match=r"heads: expected .*, --heads format score, got none"):
        train(tmp_path / "d", model=str(tmp_path / "a/model"), keep_heads=True, kind="pairs")


def test_images_are_read_and_the_model_is_saved(tmp_path):
    """The right count against a wrong one, of a model that sees."""
    options = {"model": "tiny-vl", "data": ("count_squares:1",), "steps": 3, "batch": 4, "eval_items": 4}
    found = train(tmp_path / "r", **options)
    assert found[-1]["loss"] != found[0]["loss"] and found[-1]["grad/norm"] > 0
    module = rft.model.load_reward(str(tmp_path / "r/model"))
    assert module.heads[0].name == "score"


def said(text):
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


@pytest.mark.parametrize("form", ["conversations", "texts beside a task"])
def test_pairs_about_images_of_a_file(tmp_path, form):
    """TRL's conversations with a place for the image, and texts mixed with a task: images are seen."""
    lines = []
    for i, colour in enumerate(("red", "blue", "green", "black")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{i}.png")
        row = {"image": f"{i}.png", "prompt": "count=", "chosen": str(i), "rejected": str(i + 3)}
        if form == "conversations":
            asked = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
            row = {"images": [f"{i}.png"], "prompt": [{"role": "user", "content": asked}]}
            row |= {"chosen": said(str(i)), "rejected": said(str(i + 3))}
        lines.append(row)
    (file,) = data_file(tmp_path, "pairs", lines)
    options = {
        "model": "tiny-vl",
        "data": (file, "count_squares:1=2"),
        "eval_share": 0.5,
        "steps": 2,
        "batch": 6,
    }
    if form == "conversations":
        options |= {"data": (file,), "messages": ("prompt", "chosen", "rejected")}
    found = train(tmp_path / "r", **options)
    assert found[-1]["grad/norm"] > 0 and found[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)

    # both sides of a pair have the pixels of their own image
    processing = rft.data.Processing(rft.model.load_processor("tiny-vl"), rft.data.MediaLimits())
    how = {"messages": options.get("messages", ()), "processing": processing}
    pairs = rft.data.load(file, processing.tokenizer, kind=rft.data.PAIRS, **how)
    one, other = (pairs.prompt(i) for i in range(2))
    assert one.chosen.media["pixel_values"].equal(one.rejected.media["pixel_values"])
    assert not one.chosen.media["pixel_values"].equal(other.chosen.media["pixel_values"])


def test_pairs_that_cannot_be_used_are_counted_and_named(tmp_path, monkeypatch):
    """Equal sides, an empty one, one longer than the model's window, a column missing: all in one line."""
    monkeypatch.setattr(rft.model, "load", None)
    good = PAIRS[1]
    bad = {
        "same": [good, {**good, "rejected": "12"}, {**good, "rejected": " "}],
        "long": [good, {**good, "rejected": "1" * 140}],
        "missing": [good, {"prompt": "a", "chosen": "b"}],
    }
    messages = {
        "same": r"line 2: .* are the same; .*line 3: the rejected response is empty. 2 of 3 rows cannot be",
        "long": r"line 2: the row has 149 tokens.* above the model's window of 128; .*1 of 2 rows cannot",
        "missing": r"line 2: the row has no column 'rejected'; it has 'prompt', 'chosen'.*1 of 2 rows cannot",
    }
    for name, lines in bad.items():
        with pytest.raises(ValueError, match=messages[name]):
            train(tmp_path / name, data=data_file(tmp_path, name, lines), eval_share=0.0)
