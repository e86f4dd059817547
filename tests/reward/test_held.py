"""A held reward is in metrics, columns and the report, and in no sum, advantage or gradient."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_house import load_script

import rft_fn as rft
from rft_fn import reward
from rft_fn.run import plot, samples
from rft_fn.tools.page import build

TEXTS = ["12", "1", "", "21", "112", "2"]
COLUMNS = {"answer": ["12", "1", "12", "21", "12", "1"], "kind": ["a", "b", "a", "a", "b", "b"]}
HACKED = """
def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def some(completions, **columns):
    return [None if text == "2" else 1.0 for text in completions]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hacked.py").write_text(HACKED)


def scored(*specs, vetoes=()):
    score = reward.parse(specs).with_vetoes(*vetoes)
    return score, score(["p"] * len(TEXTS), TEXTS, COLUMNS)


@pytest.mark.parametrize(
    "learned",
    [
        ["hacked.py:ones"],
        ["hacked.py:ones=0.3", "numeric=-2"],
        ["[kind=a]hacked.py:ones=0.3", "[kind=b]hacked.py:ones=1", "exact=0.1"],
    ],
)
@pytest.mark.parametrize("over", ["", "batch", "group"])
def test_rewards_and_advantages_are_those_without_it_to_the_byte(learned, over):
    prompts = [SimpleNamespace(columns={"kind": kind}) for kind in "ab"]

    def of(*specs):
        score, found = scored(*specs, vetoes=[reward.Veto("ones", 1.0, -0.7)])
        parts = {name: x.view(2, 3) for name, x in found.parts.items()}
        judged = reward.Judged(reward=found.total.view(2, 3), parts=parts, texts=TEXTS, metrics={}, extra={})
        total = reward.normalized(score, judged, prompts, over=over) if over else judged.reward
        return total.numpy().tobytes(), rft.advantage.grpo(total).numpy().tobytes()

    assert of(*learned) == of(*learned, "exact@held", "hacked.py:some@held") == of("math@held", *learned)


def test_it_is_a_part_by_its_own_name():
    score, found = scored("hacked.py:ones", "hacked.py:ones@held", "exact:answer@held")
    assert list(score.components) == ["ones", "ones@held", "exact@held"]
    assert found.total.tolist() == found.parts["ones"].tolist() == found.parts["ones@held"].tolist()
    assert found.parts["exact@held"].tolist() == [1, 1, 0, 1, 0, 0]
    assert score.specs["exact@held"] == "exact:answer@held" and reward.columns(score) == ("answer",)


@pytest.mark.parametrize(
    ("specs", "line"),
    [
        (["exact@held"], "reward: expected at least one that is learned, got exact@held, all of them held"),
        (
            ["numeric", "exact@held=0.5"],
            "reward 'exact@held=0.5': expected no weight for a reward that is held",
        ),
        (["numeric", "exact@held", "exact@held"], "reward 'exact@held': expected it once, got it twice"),
    ],
)
def test_what_cannot_be_held_is_refused(specs, line):
    with pytest.raises(ValueError, match=line):
        reward.parse(specs)


def test_it_decides_no_veto_and_is_no_reward_of_a_row():
    with pytest.raises(ValueError, match="veto: expected a reward that is learned, got 'exact@held'"):
        scored("numeric", "exact@held", vetoes=[reward.Veto("exact@held", 1.0)])
    with pytest.raises(ValueError, match="reward: expected a number from one of some for every completion"):
        scored("hacked.py:some", "exact@held")


def test_the_row_at_the_99th_percentile_of_the_reward_is_kept():
    values = torch.arange(200.0).view(20, 10).flip(0)
    prompts = [SimpleNamespace(text=f"p{i}") for i in range(20)]
    parts = {"ones": values, "true@held": -values}
    judged = reward.Judged(values, parts, [f"r{i}" for i in range(200)], {}, {})
    (row,) = samples.top_rows(3, prompts, judged)
    assert row == {
        "step": 3, "prompt": "p0", "response": "r7", "reward": 197.0, "split": samples.TOP,
        "ones": 197.0, "true@held": -197.0,
    }  # fmt: skip
    assert not samples.top_rows(3, prompts, judged._replace(parts={"ones": values}))


def test_a_planted_over_optimised_run_shows_both_curves():
    """The learned reward rises and the held one falls: in the picture, on the page, and as a symptom."""
    rows = [
        {"step": i, "reward/mean": i / 60, "reward/ones": i / 60, "reward/true@held": 1 - i / 60}
        for i in range(60)
    ]
    panel = next(x for x in plot._panels(rows) if x.title == "learned and held reward")
    assert list(panel.keys) == ["reward/mean", "reward/true@held"]
    assert build.top_metrics([rows])[:2] == ["reward/mean", "reward/true@held"]
    (found,) = [x for x in rft.run.symptoms.symptoms(rows) if x.name == "held"]
    assert "reward/true@held fell from 0.967 to 0.05" in found.sentence
    falling = [row | {"reward/mean": -row["reward/mean"]} for row in rows]
    assert not [x for x in rft.run.symptoms.symptoms(falling) if x.name == "held"]


@pytest.mark.slow
def test_a_run_learns_the_same_weights_and_writes_what_is_held(tmp_path):
    grpo = load_script("grpo")
    how = {"steps": 2, "prompts": 4, "group": 4, "eval_prompts": 4, "warmup": 0}
    grpo.main(grpo.Config(**how, reward=("hacked.py:ones",), out="plain"))
    grpo.main(grpo.Config(**how, reward=("hacked.py:ones", "task:sort_digits@held"), out="held"))
    plain, held = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "held"))
    assert all(x.numpy().tobytes() == held[name].numpy().tobytes() for name, x in plain.items())
    metrics = [json.loads(line) for line in (tmp_path / "held" / "metrics.jsonl").read_text().splitlines()]
    assert all("reward/task:sort_digits@held" in row for row in metrics)
    assert "eval/task:sort_digits@held" in metrics[-1]
    rows = [json.loads(line) for line in (tmp_path / "held" / "trajectories.jsonl").read_text().splitlines()]
    top = [row for row in rows if row.get("split") == samples.TOP]
    assert [row["step"] for row in top] == [0, 1] and all("task:sort_digits@held" in row for row in rows)
