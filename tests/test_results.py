"""docs/results: tables are what their scripts make of the files, and intervals are their definition."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "results"


def curriculum():
    path = FOLDER / "curriculum" / "table.py"
    spec = importlib.util.spec_from_file_location("curriculum_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("right", "count"), [(0, 256), (1, 200), (128, 256), (200, 200), (3, 7)])
def test_an_interval_ends_where_the_share_is_z_standard_errors_away(right, count):
    module = curriculum()
    for p in module.wilson(right, count):
        far = (right / count - p) ** 2 - module.Z**2 * p * (1 - p) / count
        assert abs(far) < 1e-12
    low, high = module.wilson(right, count)
    assert low - 1e-12 <= right / count <= high + 1e-12 and high - low > 0.01


def test_the_table_of_the_curriculum_is_what_its_files_say():
    assert curriculum().table() in (FOLDER / "README.md").read_text()


def rows(name):
    return [json.loads(line) for line in (FOLDER / "rm" / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("seed", "model", "policy"),
    [(0, "metrics.jsonl", "policy/metrics.jsonl")]
    + [(seed, f"seed_{seed}/model.jsonl", f"seed_{seed}/policy.jsonl") for seed in (1, 2)],
)
def test_the_table_of_a_policy_on_a_reward_model_is_what_its_files_say(seed, model, policy):
    """Of the page of reward models: the model's last evaluation, and the policy's first and last steps."""
    held_out = [row for row in rows(model) if "eval/accuracy" in row][-1]
    steps, true = rows(policy), "task:sort_digits"

    def learned(name):
        return steps[0][name], sum(row[name] for row in steps[-10:]) / 10

    greedy = [row[f"eval/{true}"] for row in steps if f"eval/{true}" in row]
    cells = [seed, len(steps), f"{held_out['eval/accuracy']:.3f}, {held_out['eval/top']:.3f}"]
    cells += ["{:.3f} -> {:.3f}".format(*learned(f"reward/{true}"))]
    cells += [f"{greedy[0]:.3f} -> {greedy[-1]:.3f}"]
    cells += ["{:.2f} -> {:.2f}".format(*learned("reward/model"))]
    line = f"| {' | '.join(map(str, cells))} |"
    assert line in (ROOT / "docs" / "reward_models.md").read_text().splitlines()
    assert greedy[-1] > greedy[0] + 0.1
