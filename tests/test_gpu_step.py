"""tests/bench/gpu_step.py, whose call on a GPU has to work at once: every part by a dry run on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from rft_fn.model import layers

pytestmark = pytest.mark.slow

BENCH = Path(__file__).resolve().parent / "bench"


@pytest.fixture
def step(monkeypatch):
    """The script, and whatever it changes put back."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(layers, "compile_blocks", layers.compile_blocks)
    import gpu_step

    yield gpu_step
    for name in ("gpu_step", "gpu_step_model", "gpu_step_ops", "gpu", "tune", "cases", "others"):
        sys.modules.pop(name, None)


def test_every_part_runs_and_is_written(step, tmp_path, capsys):
    given = ["--dry", "--rounds", "1", "--seconds", "1e9", "--sizes", "7B", "--out", str(tmp_path)]
    found = step.main(step.arguments(given))
    written = json.loads((tmp_path / "gpu_step.json").read_text())
    assert written["parts"].keys() == found["parts"].keys()
    assert (tmp_path / "gpu_step.png").stat().st_size > 1000

    # No case failed, and each has its line.
    rows = [row for part in written["parts"].values() for row in part]
    assert [row["error"] for row in rows if isinstance(row.get("error"), str)] == []
    assert len(capsys.readouterr().out.splitlines()) >= len(rows) + len(written["parts"])
    left_out = [row["left_out"] for row in rows if "left_out" in row]
    assert set(left_out) <= {"vllm is not installed", "trl is not installed"} | {
        "make bench-step measures it, with --device cpu"
    }

    # In float32 all ways agree with float64, and so do the kernels of attention.
    parts = written["parts"]
    assert max(row["logp_max"] for row in parts["numerics"]) < 1e-5
    assert max(row["gradient"] for row in parts["numerics"]) < 1e-5
    assert max(row["gradient_error"] for row in parts["attention"]) < 1e-5
    for row in parts["gradients"]:
        assert row["mfu"] == pytest.approx(row["tflops"] / 989)
        assert row["tokens_s"] > 0
    # A step of the largest model went through the meta device at its full shapes.
    eager, checkpointing = parts["shapes"]
    assert eager["gradient_gib"] > 2 * checkpointing["gradient_gib"] > 60
    rules = json.loads((tmp_path / "auto.json").read_text())["engine"]["dry"]["rules"]
    assert rules == parts["auto"][0]["rules"]
    assert {row["operation"] for row in parts["head"][0]["rows"]} >= {"forward", "forward+backward"}
