"""tests/bench/over_optimization.py: cells are run once, kept, and drawn with those of earlier calls."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    """The program, with runs that write their metrics at once."""
    path = ROOT / "tests" / "bench" / "over_optimization.py"
    spec = importlib.util.spec_from_file_location("bench_over_optimization", path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, made)
    spec.loader.exec_module(made)
    made.calls = []

    def call(script, folder, **options):
        made.calls.append((script, options))
        folder.mkdir(parents=True)
        row = {"eval/loss": 0.5, "policy/kl_ref": 0.25, "rollout/length_mean": 4.0}
        row |= {"reward/mean": 2.0, "reward/task:sort_digits": 0.125}
        (folder / "metrics.jsonl").write_text(2 * (json.dumps(row) + "\n"))
        return 7.0

    monkeypatch.setattr(made, "call", call)
    monkeypatch.setattr(made, "write_pairs", lambda path, seed, count: path.write_text(f"{seed} {count}"))
    return made


def run(bench, monkeypatch, folder, *words):
    given = ["over_optimization.py", "--runs", str(folder), "--results", str(folder), *words]
    monkeypatch.setattr(sys, "argv", given)
    bench.main()
    return json.loads((folder / "over_optimization.json").read_text())


def test_cells_are_run_once_and_put_together(bench, monkeypatch, tmp_path):
    found = run(bench, monkeypatch, tmp_path, "--only", "pairs100-kl0-")
    scripts = [script for script, _ in bench.calls]
    assert scripts == ["train_rm", "grpo"] * 3 and len(found["cells"]) == len(found["reward_models"]) == 3
    assert found["cells"][0]["rows"] == [{"gold": 0.125, "proxy": 2.0, "kl": 1.0}] * 2  # a response's KL

    # the proxy alone is learned from; without a KL in the loss one is measured all the same
    model, policy = (options for _, options in bench.calls[:2])
    assert policy["reward"] == [f"model:{tmp_path / 'rm-pairs100-seed0'}=1", "task:sort_digits=0"]
    assert 0 < policy["kl"][0] < 1e-6 and policy["seed"] == [0]
    assert model["data"][0].read_text() == "1000 100" and model["eval-data"][0].read_text() == "2000 512"

    # a second call has what the first one made, and trains no reward model again
    found = run(bench, monkeypatch, tmp_path, "--only", "pairs100-kl0")
    assert [script for script, _ in bench.calls] == [*scripts, "grpo", "grpo", "grpo"]
    assert bench.calls[-1][1]["kl"] == [0.1] and len(found["cells"]) == 6
    assert len({(x["pairs"], x["kl"], x["seed"]) for x in found["cells"]}) == 6
    before = (tmp_path / "over_optimization.svg").read_bytes()
    run(bench, monkeypatch, tmp_path, "--draw")
    assert len(bench.calls) == 9 and (tmp_path / "over_optimization.svg").read_bytes() == before
