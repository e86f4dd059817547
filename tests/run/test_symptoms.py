"""Symptoms: each rule is provoked by a history, stays silent just short of it, and on healthy runs."""

import json
import re
from pathlib import Path

import pytest

from rft_fn import run as runs
from rft_fn.run import plot
from rft_fn.run.symptoms import RULES, symptoms

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = {
    "reward/flat_groups": 0.2,
    "rollout/truncated": 0.1,
    "policy/entropy": 0.6,
    "policy/clip_frac": 0.05,
    "policy/logp_gap": 1e-6,
    "rollout/length_mean": 100.0,
    "reward/mean": 0.5,
    "lr": 1e-3,
    "grad/norm": 0.7,
}


def history(steps, **changes):
    """Rows of a healthy run, in which some metrics (a_b for a/b) are functions of the step."""
    changes = {name.replace("__", "/"): f for name, f in changes.items()}
    return [HEALTHY | {name: f(i) for name, f in changes.items()} for i in range(steps)]


def names(rows):
    return [x.name for x in symptoms(rows)]


def late(value, usual, since=40):
    """A metric that has a value from a step on."""

    def at(step):
        return value if step >= since else usual

    return at


def falling(step):
    return 0.9 - 0.002 * step if step % 10 == 9 else None


def rising(step):
    return 0.1 + 0.005 * step


# name: (a history that shows it, the same short of the limit)
CASES = {
    "flat_groups": (
        history(60, reward__flat_groups=late(0.9, 0.2)),
        history(60, reward__flat_groups=late(0.89, 0.2)),
    ),
    "truncated": (
        history(60, rollout__truncated=late(0.9, 0.1)),
        history(60, rollout__truncated=late(0.89, 0.1)),
    ),
    "entropy": (
        history(60, policy__entropy=late(0.019, 0.6)),
        history(60, policy__entropy=late(0.021, 0.6)),
    ),
    "clipped": (
        history(60, policy__clip_frac=late(0.51, 0.1)),
        history(60, policy__clip_frac=late(0.5, 0.1)),
    ),
    "mismatch": (
        history(60, policy__logp_gap=late(0.0051, 5e-4)),
        history(60, policy__logp_gap=late(0.0049, 5e-4)),
    ),
    "length": (
        history(60, rollout__length_mean=late(151, 100)),
        history(60, rollout__length_mean=late(151, 100), reward__mean=late(0.52, 0.5)),
    ),
    "overfitted": (
        history(60, eval__mean=falling, reward__mean=rising),
        history(60, eval__mean=falling),
    ),
    "learning_rate": (
        history(60, lr=late(0.0, 1e-3, since=55)),
        history(60, lr=late(0.0, 1e-3, since=56)),
    ),
    "gradient": (
        history(60, grad__norm=late(6.9e-4, 0.7)),
        history(60, grad__norm=late(7.1e-4, 0.7)),
    ),
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_rule_is_provoked_alone_and_not_just_below_its_limit(name):
    found, short = CASES[name]
    assert names(found) == [name]
    assert names(short) == []


def test_a_window_has_to_be_whole():
    every = {"reward__flat_groups": late(1.0, 1.0, 0), "policy__entropy": late(0.0, 0.0, 0)}
    assert names(history(19, **every)) == []
    assert names(history(20, **every)) == ["flat_groups", "entropy"]


def test_mismatch_of_rounding_is_none():
    assert names(history(60, policy__logp_gap=late(9e-4, 1e-8))) == []


def test_metrics_that_are_absent_or_not_finite_show_nothing():
    assert symptoms([]) == []
    assert symptoms([{"loss": 1.0}] * 60) == []
    assert symptoms([dict.fromkeys(HEALTHY)] * 60) == []


@pytest.mark.parametrize(
    "name", ["tiny", "audio", "vl", "guess_number", "calculator", "smollm2", "rm/policy"]
)
def test_recorded_runs_that_learned_have_no_symptom_at_any_step(name):
    rows = plot.read_metrics(ROOT / "docs" / "results" / name / "metrics.jsonl")
    assert all(names(rows[:n]) == [] for n in range(1, len(rows) + 1))


def test_a_run_shows_each_symptom_once_and_notes_it_in_every_row(tmp_path, capsys):
    run = runs.Run(tmp_path / "r", {"lr": 1}, total=60)
    run.resume(0)
    found = history(60, lr=lambda i: 0.0 if 10 <= i < 30 else 1e-3)
    for step, row in enumerate(found[:20]):
        run.write(step, row)
    out = capsys.readouterr().out
    assert out.count("warning: learning_rate: the learning rate of the last 5 steps is 0; raise --lr") == 1

    # a run that continues knows of it, and says nothing twice
    run.finish()
    run = runs.Run(tmp_path / "r", {"lr": 1}, total=60)
    run.resume(20)
    for step, row in enumerate(found[20:], 20):
        run.write(step, row)
    assert "warning:" not in capsys.readouterr().out
    notes = [row.get("warning/learning_rate") for row in plot.read_metrics(run.folder / "metrics.jsonl")]
    assert notes == [None] * 14 + [1.0] * 16 + [0.0] * 30
    run.finish()


def test_every_rule_is_in_the_documentation():
    text = " ".join((ROOT / "docs" / "reports.md").read_text().split())
    for rule in RULES:
        assert f"`{rule.name}` | {rule.condition} | {rule.remedy} |" in text, rule.name


def test_options_that_remedies_name_exist():
    from test_house import load_script

    fields = load_script("grpo").Config.__dataclass_fields__
    for rule in RULES:
        for option in re.findall(r"--([\w-]+)", rule.remedy):
            assert option.replace("-", "_") in fields, option


def test_symptoms_are_json():
    found, _ = CASES["entropy"]
    assert json.loads(json.dumps([x._asdict() for x in symptoms(found)]))[0]["name"] == "entropy"
