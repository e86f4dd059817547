"""Runs whose groups often have equal rewards: what their updates compute, and that they learn the same."""

import pytest
import torch
from script_runs import rows
from test_house import load_script

import rft_fn as rft
from rft_fn.run import options

# the last digit of the question decides whether the answers of a prompt differ in reward
REWARD = """
def odd(completions, question, **columns):
    return [len(c) % 3 if q.strip()[-1] in "13579" else 1.0 for c, q in zip(completions, question)]
"""
SMALL = {
    "prompts": 8, "group": 4, "max_new": 6, "budget": 64, "warmup": 0, "schedule": "constant",
    "eval_every": 9, "save_every": 9, "template": "{question}", "eval_share": 0.0, "noise_every": 1,
}  # fmt: skip


def trained(folder, varied="13579", **more):
    """(metrics of two steps, weights after them)."""
    (folder / "odd.py").write_text(REWARD.replace("13579", varied))
    lines = [f'{{"question": "sort {n}"}}' for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    out = folder / "_".join(["run", *(f"{name}_{value}" for name, value in more.items())])
    module = load_script("grpo")
    data, reward = (str(folder / "rows.jsonl"),), (f"{folder / 'odd.py'}:odd",)
    module.main(module.Config(**SMALL, **more, steps=2, data=data, reward=reward, out=str(out)))
    weights = rft.model.load(str(out / "model")).state_dict()
    return rows(out), torch.cat([x.flatten() for x in weights.values()])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_learns_the_same_without_the_rows_that_teach_nothing(tmp_path, minibatches):
    (few, a), (every, b) = (
        trained(tmp_path, minibatches=minibatches, keep_flat=keep) for keep in (False, True)
    )
    start = torch.cat([x.flatten() for x in rft.model.load("tiny").state_dict().values()])
    # Adam makes a whole step of the rounding of a gradient that is 0, in a few weights
    assert float((a - b).abs().mean()) < 1e-5 * float((a - start).abs().mean())
    for x, y in zip(few, every):
        assert x["grad/norm"] == pytest.approx(y["grad/norm"], rel=1e-4)
        assert x["reward/mean"] == y["reward/mean"] and x["adv/std"] == y["adv/std"]
        assert y["train/rows"] == 32 / minibatches > x["train/rows"]
        varied = 8 * (1 - x["reward/flat_groups"])
        assert x["train/rows"] >= 4 * varied / minibatches  # and in the first update a pack of the others
        assert x["policy/entropy"] != y["policy/entropy"]  # a mean over other rows
        assert x["policy/logp_gap"] < 1e-5


@pytest.mark.parametrize("more", [{"kl": 0.1}, {"entropy": 0.01}])
def test_a_loss_that_pulls_at_every_row_computes_every_row(tmp_path, more):
    (found, _) = trained(tmp_path, **more)
    assert [row["train/rows"] for row in found] == [32, 32]


def test_a_step_without_a_gradient_is_a_step(tmp_path):
    """Its rows are all flat: one pack of them is computed, and the update is of a gradient of 0."""
    found, _ = trained(tmp_path, varied="")
    assert all(row["grad/norm"] == 0 and 0 < row["train/rows"] < 32 for row in found)


def test_the_first_update_of_a_step_watches_a_pack_of_the_others():
    exp = rft.testing.case(0, weight=rft.weight.token_mean).exp
    exp = rft.tree.replace(exp, adv=torch.zeros_like(exp.adv))
    clipped = rft.algorithm.TABLE["grpo"].loss

    def rows_of(update, **more):
        return len(rft.run.learning_rows(options.FlatRows(**more), exp, clipped, update).tokens)

    assert rows_of(0, keep_flat=True) == rows_of(1, keep_flat=True) == len(exp.tokens)
    assert rows_of(0) == len(exp.tokens) > rows_of(0, budget=20) >= rows_of(1, budget=20) == 1

    # a budget of many packs' tokens keeps no more of them
    many = rft.packing.take(exp, torch.arange(len(exp.tokens)).repeat(100))
    kept = rft.run.learning_rows(options.FlatRows(budget=10**6), many, clipped)
    assert 1024 - int(exp.length.max()) < int(kept.length.sum()) <= 1024 < int(many.length.sum())
