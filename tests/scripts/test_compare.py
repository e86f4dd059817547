"""compare.py: its numbers on the embedded default, its errors, and the same on two processes."""

import json
import re

import pytest
from script_runs import run
from test_house import load_script as script

import rft_fn as rft

pytestmark = pytest.mark.slow

SMALL = {"prompts": 4, "group": 4, "parts": 2, "reference_prompts": 32, "drift": 2}
LOSS = """
import rft_fn as rft


def loss(out, b):
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv, low=1e-6, high=1e-6)
"""


def compared(folder, **changes):
    """(the numbers of a small comparison, by row; the whole file)."""
    compare = script("compare")
    compare.main(compare.Config(**SMALL | changes, out=str(folder)))
    assert (folder / "estimators.png").stat().st_size > 20_000
    found = json.loads((folder / "estimators.json").read_text())
    return found["rows"], found


def test_rows_of_the_table_and_a_loss_of_a_file(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(LOSS)
    names = ("grpo", "cispo", "rloo", "remax", f"{tmp_path}/mine.py:loss")
    rows, found = compared(tmp_path, rows=names)
    assert list(rows) == list(names)
    printed = capsys.readouterr().out
    assert "2 updates away from the samples" in printed and "rloo on 32 fresh prompts" in printed
    assert rows[names[-1]]["stopped"] > rows["grpo"]["stopped"] > 0 == rows["rloo"]["stopped"]
    assert all(-1 <= row["cosine"] <= 1 and row["cosine_se"] >= 0 for row in rows.values())
    assert rows["rloo"]["length"] == pytest.approx(1) and abs(rows["grpo"]["length"]) < 0.5
    assert found["buffer"]["log_ratio_std"] > 0 and 0 < found["reference"]["ceiling"] <= 1

    # without a drift the policy is the sampler: nothing is stopped, and many rows coincide
    rows, found = compared(tmp_path, rows=("grpo", "gspo", "sapo"), drift=0)
    assert found["buffer"]["log_ratio_std"] < 1e-4
    assert rows["gspo"]["cosine"] == pytest.approx(rows["grpo"]["cosine"], abs=1e-4)
    assert rows["grpo"]["stopped"] == 0


def test_the_buffer_of_a_run(tmp_path):
    grpo, few = script("grpo"), {"prompts": 4, "group": 6, "steps": 2, "eval_prompts": 2, "budget": 1024}
    grpo.main(grpo.Config(**few, rollouts_every=1, out=str(tmp_path / "run")))
    saved = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert [path.name for path in saved] == ["step_00000000.safetensors", "step_00000001.safetensors"]
    rollout, reward = rft.run.read_rollout(saved[0])
    assert reward.shape == (4, 6) and len(rollout.tokens) == 24 and rollout.sampling.max_new == 6
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["reward/mean"] == pytest.approx(float(reward.mean()), abs=1e-6)

    # the model that drew it, as it is: ratios of 1, and the rewards of the run
    use = {"rollouts": str(saved[0]), "parts": 2, "drift": 0, "max_new": 6}
    _, found = compared(tmp_path, rows=("grpo", "rloo"), **use)
    assert found["buffer"]["responses"] == 24 and found["buffer"]["log_ratio_max"] < 1e-4
    assert found["buffer"]["reward_mean"] == pytest.approx(metrics[0]["reward/mean"], abs=1e-6)
    assert found["buffer"]["sampler"] == str(saved[0])

    # the model that the run left, two updates away
    _, found = compared(tmp_path, rows=("grpo", "rloo"), model=str(tmp_path / "run"), **use)
    assert found["buffer"]["log_ratio_std"] > 1e-4

    compare = script("compare")
    for change, message in (
        ({"max_new": 5}, f"max_new: expected 6, as of {saved[0]}, got 5"),
        ({"sampler": "tiny"}, "rollouts: expected none with sampler tiny, which draws its own"),
        ({"rows": ("rloo", "remax")}, "rollouts: expected none with remax, which asks for greedy answers"),
        ({"rollouts": str(tmp_path / "run" / "config.json")}, "expected a file that --rollouts-every wrote"),
        ({"rollouts": "missing"}, "rollouts: expected a file that --rollouts-every wrote, got missing"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            compare.main(compare.Config(**SMALL | use | change, out=str(tmp_path)))


EXACT = {"reference": "exact", "least": 0.0, "max_new": 1, "drift": 0, "prompts": 32, "parts": 16}


def test_an_exact_reference_has_no_noise(tmp_path):
    rows, found = compared(tmp_path, rows=("rloo", "grpo"), **EXACT)
    assert "exact, 96 responses with 100.00% of the probability" in found["reference"]["what"]
    assert found["reference"]["ceiling"] == 1
    assert rows["rloo"]["direction"] == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": 3}, "parts: expected a divisor of the 4 prompts, got 3"),
        ({"rows": ("gpro",)}, "algorithm: expected one of grpo, dr_grpo, "),
        ({"rows": ("missing.py:loss",)}, "loss 'missing.py:loss': no such file: "),
    ],
)
def test_wrong_options_are_named(change, message, tmp_path):
    compare = script("compare")
    with pytest.raises(ValueError, match=re.escape(message)):
        compare.main(compare.Config(**SMALL | change, out=str(tmp_path)))


def test_two_processes_measure_what_one_measures(tmp_path):
    options = ("--prompts", 4, "--group", 4, "--parts", 2, "--reference-prompts", 8, "--drift", 1)
    run("compare", *options, "--rows", "grpo", "rloo", "--out", tmp_path / "one")
    run("compare", *options, "--rows", "grpo", "rloo", "--out", tmp_path / "two", world=2)
    one, two = (json.loads((tmp_path / n / "estimators.json").read_text())["rows"] for n in ("one", "two"))
    for name, row in one.items():
        for key, x in row.items():
            assert x is two[name][key] or two[name][key] == pytest.approx(x, rel=1e-2, abs=1e-3), (name, key)
