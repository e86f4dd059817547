"""Symptoms: each rule is provoked by a history, stays silent just short of it, and on healthy runs."""

import json
import random
import re
from pathlib import Path
from typing import ClassVar

import pytest
from each_case import each
from test_house import load_script
from test_run_page import blocks

from bench import record
from rft_fn import parsing
from rft_fn import run as runs
from rft_fn.reward.from_spec import HELD
from rft_fn.run import plot
from rft_fn.run.symptoms import RULES, symptoms
from rft_fn.tools.page.build import found_symptoms, write_page

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
    "grad/snr": 2.0,
    "grad/noise_scale": 16.0,
}


def history(steps, **changes):
    """Rows of a healthy run; some metrics (a__b for a/b) are functions of the step, absent where None."""
    changes = {name.replace("__", "/"): f for name, f in changes.items()}
    rows = [HEALTHY | {name: f(i) for name, f in changes.items()} for i in range(steps)]
    return [{name: x for name, x in row.items() if x is not None} for row in rows]


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
    "entropy": (history(60, policy__entropy=late(0.019, 0.6)), history(60, policy__entropy=late(0.021, 0.6))),
    "clipped": (
        history(60, policy__clip_frac=late(0.51, 0.1)),
        history(60, policy__clip_frac=late(0.5, 0.1)),
    ),
    "mismatch": (
        history(60, policy__logp_gap=late(0.0051, 5e-4)),
        history(60, policy__logp_gap=late(0.0049, 5e-4)),
    ),
    "depth": (
        history(60, **{"mismatch/gap@1k": late(5e-4, 5e-4), "mismatch/gap@16k": late(0.0021, 5e-4)}),
        history(60, **{"mismatch/gap@1k": late(5e-4, 5e-4), "mismatch/gap@16k": late(0.0019, 5e-4)}),
    ),
    "length": (
        history(60, rollout__length_mean=late(151, 100)),
        history(60, rollout__length_mean=late(151, 100), reward__mean=late(0.52, 0.5)),
    ),
    "overfitted": (history(60, eval__mean=falling, reward__mean=rising), history(60, eval__mean=falling)),
    "held": (
        history(60, reward__mean=rising, **{"reward/true@held": late(0.44, 0.5)}),
        history(60, reward__mean=rising, **{"reward/true@held": late(0.46, 0.5)}),
    ),
    "learning_rate": (history(60, lr=late(0.0, 1e-3, since=55)), history(60, lr=late(0.0, 1e-3, since=56))),
    "gradient": (history(60, grad__norm=late(6.9e-4, 0.7)), history(60, grad__norm=late(7.1e-4, 0.7))),
    "small_batch": (history(60, grad__snr=late(0.09, 2.0)), history(60, grad__snr=late(0.11, 2.0))),
    "large_batch": (history(60, grad__snr=late(10.1, 2.0)), history(60, grad__snr=late(10.0, 2.0))),
}
SAME = """
def same(completions, **columns):
    return [0.5] * len(completions)
"""


class Asked(dict):
    """A row that notes which metrics are asked for."""

    asked: ClassVar[set[str]] = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def read_by_rules():
    """The metrics that the rules read: a script that does not write one of them switches a rule off."""
    for name in CASES:
        symptoms([Asked(row) for row in CASES[name][0]])
    return sorted(Asked.asked)


def check_written(rows):
    """Each metric that a rule reads is in each of a script's rows; that of evaluations in one of them."""
    names = read_by_rules()
    assert len(names) == 12 + 10 + 1  # and depths, of which short runs have one, and a held reward
    for name in names:
        if name.endswith(HELD):
            continue
        here = [row.get(name) is not None for row in rows]
        if not name.startswith(("grad/snr", "grad/noise", "mismatch/gap@")):  # in some batches alone
            assert any(here) if name == "eval/mean" else all(here), (name, here)


@each("name", [rule.name for rule in RULES])
def test_each_rule_is_provoked_alone_and_not_just_below_its_limit(name):
    found, short = CASES[name]
    assert names(found) == [name]
    assert names(short) == []


@each("name", [rule.name for rule in RULES])
def test_a_line_says_what_is_seen_what_it_means_and_what_to_do(name):
    (found,) = symptoms(CASES[name][0])
    seen, meaning = found.sentence.rsplit(", so ", 1)
    assert re.search(r"\d", seen) and len(meaning.split()) > 2
    assert found.line == f"warning: {name}: {found.sentence}; {found.remedy}"
    assert not re.search(r"[.;\n]\s", found.sentence)  # one sentence
    assert found.sentence[0] not in ".;" and not found.sentence.endswith(".")


def test_a_window_has_to_be_whole():
    every = {"reward__flat_groups": late(1.0, 1.0, 0), "policy__entropy": late(0.0, 0.0, 0)}
    assert names(history(19, **every)) == []
    assert names(history(20, **every)) == ["flat_groups", "entropy"]


def test_a_run_that_learns_nothing_at_all_is_told_after_three_steps():
    still = {"reward__flat_groups": late(1.0, 0.2, 2), "grad__norm": late(0.0, 0.7, 2)}
    assert names(history(4, **still)) == []
    (found,) = symptoms(history(5, **still))
    assert found.name == "flat_groups"
    assert found.sentence == "every group of the last 3 steps has equal rewards, so the gradient is 0"

    # a KL to the initial model, or one group that differs, has a gradient
    assert names(history(5, **(still | {"grad__norm": late(1e-6, 0.7, 2)}))) == []
    assert names(history(5, **(still | {"reward__flat_groups": late(0.99, 0.2, 2)}))) == []
    assert names(history(3, reward__flat_groups=late(1.0, 1.0), grad__norm=late(None, None))) == []


def test_the_first_gradients_may_come_after_steps_with_a_frozen_policy():
    collapsing = lambda step: None if step < 7 else late(0.0009, 1.0)(step)  # noqa: E731
    assert names(history(60, grad__norm=collapsing)) == ["gradient"]


def test_the_noise_of_a_batch_is_a_mean_of_the_last_measured_steps_with_advice_in_prompts():
    measured = lambda x: lambda step: x(step) if step % 10 == 0 else None  # noqa: E731
    rare = {"grad__snr": measured(late(0.05, 2.0, 30)), "grad__noise_scale": measured(late(640.0, 16.0, 30))}
    assert names(history(70, **rare)) == []
    (found,) = symptoms(history(71, **rare))
    assert found.sentence == (
        "a step has 32 prompts and the noise scale is about 640, so a step is mostly noise"
    )
    large = {"grad__snr": late(20.0, 2.0), "grad__noise_scale": late(1.6, 16.0)}
    (found,) = symptoms(history(60, **large))
    assert found.sentence.startswith("a step has 32 prompts and the noise scale is about 2, so half of them")
    none = {"grad__snr": late(-0.2, 2.0), "grad__noise_scale": late(None, 16.0)}
    (found,) = symptoms(history(60, **none))
    assert found.sentence.startswith("the last 5 measured gradients have no signal above their noise, so ")


def test_a_held_reward_that_falls_is_told_after_two_short_windows_and_noise_is_no_fall():
    held = "reward/true@held"
    turned = history(30, reward__mean=rising, **{held: late(0.4, 0.5, 5)})
    assert [names(turned[:n]) for n in (9, 10)] == [[], ["held"]]

    drawn = random.Random(0)
    noisy = history(300, reward__mean=rising, **{held: lambda step: 0.5 + drawn.gauss(0, 0.1)})
    assert all(names(noisy[:n]) == [] for n in range(1, 301))
    drifting = history(
        300, reward__mean=rising, **{held: lambda step: 0.5 - step / 1200 + drawn.gauss(0, 0.1)}
    )
    assert names(drifting) == ["held"]


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
    rows = record.rows_of(ROOT / "docs" / "results" / name / "run.json")
    assert all(names(rows[:n]) == [] for n in range(1, len(rows) + 1))


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_run_shows_each_symptom_once_notes_it_in_every_row_and_reports_it(name, tmp_path, capsys):
    """The terminal, metrics.jsonl and the page, against the rules themselves at every step."""
    found = CASES[name][0] + history(25)
    found_at = [names(found[: n + 1]) for n in range(len(found))]
    hits = [step for step, those in enumerate(found_at) if name in those]
    cut = hits[0] + 2
    run = runs.Run(tmp_path / "r", {"lr": 1}, total=85)
    run.resume(0)
    for step, row in enumerate(found[:cut]):
        run.write(step, row)
    (rule,) = (rule for rule in RULES if rule.name == name)
    said = re.findall(r"^warning: (.*)$", capsys.readouterr().out, re.M)
    assert said == [f"{name}: {rule.find(found[: hits[0] + 1])}; {rule.remedy}"]

    # a run that continues knows of it, and says nothing twice
    run = runs.Run(tmp_path / "r", {"lr": 1}, total=85)
    run.resume(cut)
    for step, row in enumerate(found[cut:], cut):
        run.write(step, row)
    assert "warning:" not in capsys.readouterr().out
    notes = [row.get(f"warning/{name}") for row in plot.read_metrics(run.folder / "metrics.jsonl")]
    here = [float(name in those) for those in found_at]
    assert notes == [None] * hits[0] + here[hits[0] :] and notes[-1] == 0

    # the report has where it was, the last sentence and the remedy
    page = write_page([run.folder], tmp_path / "page.html")
    (entry,) = blocks(page)["data"]["runs"][0]["symptoms"]
    assert (entry["name"], entry["first"], entry["last"]) == (name, hits[0] + 1, hits[-1] + 1)
    assert entry["sentence"] == rule.find(found[: hits[-1] + 1]) and entry["remedy"] == rule.remedy


@pytest.mark.usefixtures("plain_runs")
def test_a_script_whose_run_cannot_learn_says_why(tmp_path, capsys):
    """Rewards that are all equal, one token a response, and a rate that is 0 until half of its warm-up."""
    (tmp_path / "same.py").write_text(SAME)
    grpo = load_script("grpo")
    cfg = {"prompts": 2, "group": 2, "steps": 20, "eval_prompts": 1, "tokens_every": 0}
    cfg |= {"reward": (f"{tmp_path / 'same.py'}:same",), "max_new": 1, "lr": 5e-324, "warmup": 15}
    with pytest.warns(UserWarning, match="reward 'same': it scores 0.5 for nothing"):
        grpo.main(grpo.Config(**cfg, out=str(tmp_path / "r")))
    said = re.findall(r"^warning: (\w+): ", capsys.readouterr().out, re.M)
    assert said == ["flat_groups", "learning_rate", "truncated"]
    entries = found_symptoms(plot.read_metrics(tmp_path / "r" / "metrics.jsonl"))
    assert [(x["name"], x["first"], x["last"]) for x in entries] == [
        ("flat_groups", 3, 20),
        ("learning_rate", 5, 7),
        ("truncated", 20, 20),
    ]


def test_every_rule_is_in_the_documentation():
    text = " ".join((ROOT / "docs" / "commands.md").read_text().split())
    for rule in RULES:
        assert f"`{rule.name}` | {rule.condition} | {rule.remedy} |" in text, rule.name


def test_options_that_remedies_name_exist():
    known = parsing.names(load_script("grpo").Config)
    for rule in RULES:
        for option in re.findall(r"--([\w-]+)", rule.remedy):
            assert option.replace("-", "_") in known, option


def test_symptoms_are_json():
    found, _ = CASES["entropy"]
    assert json.loads(json.dumps([x._asdict() for x in symptoms(found)]))[0]["name"] == "entropy"
