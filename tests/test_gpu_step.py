"""tests/bench/gpu_step.py, whose call on a GPU has to work at once: every part by a dry run on the CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from rft_fn.model import blocks

pytestmark = pytest.mark.slow

BENCH = Path(__file__).resolve().parent / "bench"


@pytest.fixture
def step(monkeypatch):
    """The script, and whatever it changes put back."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(blocks, "compile_blocks", blocks.compile_blocks)
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


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(step, tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("no such kernel\nand much more")

    def full():
        raise torch.cuda.OutOfMemoryError("full")

    def cases():
        yield {"case": 1}, fails
        yield {"case": 2}, full
        yield {"case": 3}, lambda: {"value": 4.0}

    monkeypatch.setattr(step, "parts_of", lambda setting, out, names: {"some": cases, "others": cases})
    args = ["--dry", "--out", str(tmp_path)]
    rows = step.main(step.arguments([*args, "--only", "some"]))["parts"]
    assert list(rows) == ["some"]
    errors = [row.get("error") for row in rows["some"]]
    assert errors == ["RuntimeError: no such kernel", "does not fit into the memory of the device", None]
    late = step.main(step.arguments([*args, "--seconds", "0"]))["parts"]
    assert [row["left_out"] for part in late.values() for row in part] == ["0.0 seconds are over"] * 6


def test_the_work_of_a_pack_is_that_of_its_products(step):
    """Every product of a forward, counted by torch where attention is written out: a third of the total."""
    from torch.utils.flop_counter import FlopCounterMode

    model = step.model
    setting = step.setting_of(step.arguments(["--dry"]))
    lm = model.module_of(setting, model.TINY)
    b = model.pack_of(setting, model.TINY["vocab_size"])
    sizes = torch.bincount(b.seq).tolist()
    assert sum(sizes) == setting.tokens == len(b.tokens)
    lm.set_attn_implementation("eager")
    counted = 0.0
    for size in sizes:
        with FlopCounterMode(display=False) as counter:
            lm.model(input_ids=torch.zeros(1, size, dtype=torch.long))
        counted += counter.get_total_flops()

    # Eager attention has whole squares of scores, of which causality needs half.
    config = lm.config
    squares = config.num_hidden_layers * config.hidden_size * sum(n * n for n in sizes)
    head = 2 * config.hidden_size * config.vocab_size * int(b.mask.sum())
    assert model.flops(lm, b) == pytest.approx(3 * (counted - 2 * squares + head))


def test_without_a_gpu_it_is_refused_in_one_line(step, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected a CUDA device, got none; --dry runs on a CPU"):
        step.main(step.arguments(["--out", str(tmp_path)]))
