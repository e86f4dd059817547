"""The benches that need a GPU, with a clock that is told its answers: their conclusions and files."""

import json
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import forks
import pytest
import torch

from rft_kernels import engines

pytestmark = pytest.mark.slow

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench"
PATHS = os.pathsep.join([str(BENCH.parent.parent), str(BENCH.parent)])
ENV = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def bench(monkeypatch):
    """The modules of kernels/bench, which are scripts beside each other and no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu
    import tune

    yield Namespace(gpu=gpu, tune=tune)
    for name in ("gpu", "tune", "cases", "others"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("found", "want"),
    [
        ({64: {"gemm": 1, "triton": 2}}, [[None, "gemm"]]),
        ({64: {"gemm": 2, "triton": 1}, 256: {"gemm": 1, "triton": 2}}, [[160, "triton"], [None, "gemm"]]),
        ({256: {"gemm": 1, "triton": 2}, 64: {"gemm": 2, "triton": 1}}, [[160, "triton"], [None, "gemm"]]),
        (
            {d: {"gemm": g, "triton": 2} for d, g in ((1, 3), (3, 3), (5, 1), (9, 1), (21, 3))},
            [[4, "triton"], [15, "gemm"], [None, "triton"]],
        ),
    ],
)
def test_the_rules_name_the_fastest_at_every_measured_width(bench, found, want):
    got = bench.tune.rules(found)
    assert got == want
    for width, seconds in found.items():
        assert engines.choose({"sm_90": got, "default": []}, "sm_90", width) == min(seconds, key=seconds.get)


def told(*seconds):
    """A clock that runs a call and answers with the next of these seconds, and 7 MB."""
    script = iter(seconds)
    return lambda call: (call(), next(script))[1], lambda call: (call(), 7.0)[1]


def test_what_tune_writes_is_what_auto_reads(bench, monkeypatch, tmp_path):
    """A dry run on a CPU, by a clock for which "reference" is the fastest below D = 48."""
    file = tmp_path / "auto.json"
    shutil.copy(bench.tune.FILE, file)
    before = json.loads(file.read_text())["engine"]
    widths, names = [16, 32, 64, 128], ("streamed", "reference")
    # For each width and round: forward, then forward and backward, by one engine after the other.
    script = [s for d in widths for _ in range(3) for s in (8.0, 24.0, d / 4, d * 3 / 4)]
    clock = bench.gpu.Clock(*told(*script))
    found = bench.tune.measure(
        Namespace(widths=widths, T=5, V=70, rounds=3), clock, device="cpu", names=names
    )
    assert found == {d: {"streamed": 32.0, "reference": float(d)} for d in widths}
    bench.tune.rewrite(file, found, {"capability": "sm_90", "device": "none"})

    monkeypatch.setattr(engines, "__file__", str(tmp_path / "engines.py"))
    engines.table.cache_clear()
    picks = [engines.choose(engines.table(), "sm_90", d) for d in (8, 16, 24, 25, 64, 4096)]
    others = [engines.choose(engines.table(), d, 64) for d in ("default", "sm_80")]
    engines.table.cache_clear()
    assert picks == ["reference"] * 3 + ["streamed"] * 3 and others == ["gemm", "gemm"]
    after = json.loads(file.read_text())["engine"]
    assert after["default"] == before["default"]
    source = after["sm_90"]["source"]
    assert source["device"] == "none" and source["seconds"]["128"] == {"streamed": 32.0, "reference": 128.0}


def test_without_a_gpu_tune_is_refused_in_one_line(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^tune.py: expected a CUDA device, got none$"):
        bench.tune.main()


def test_the_rows_of_a_gpu(bench, monkeypatch):
    """Three products of 1 s, then 2 s for everything else; one variant has no room."""
    clock = bench.gpu.Clock(*told(*[1.0] * 3, *[2.0] * 7))
    import cases

    def full(*args):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(cases, "naive_entropy", full)
    shape = bench.gpu.Shape(6, 8, 300)
    found = bench.gpu.measure(
        shape, clock, rounds=1, device="cpu", engines={"streamed": "streamed"}, only=["naive", "streamed"]
    )
    assert (found["T"], found["D"], found["V"]) == shape
    assert found["gemm_tflops"] == dict.fromkeys(("logits", "dh", "dw"), 2 * 6 * 8 * 300 / 1e12)
    rows = {(r["operation"], r["variant"]): r for r in found["rows"]}
    assert len(rows) == 8
    limits = {"forward": 0.5, "forward+backward": 2.0, "frozen head, f+b": 1.0}
    for operation, limit in limits.items():
        row = rows[operation, "streamed"]
        assert (row["seconds"], row["over_naive"], row["of_gemm_limit"]) == (2.0, 1.0, limit)
    assert rows["forward+backward", "naive"]["of_gemm_limit"] == 1.5  # three products, none of them twice
    lost = rows["forward, entropy", "naive"]
    assert [lost[k] for k in ("seconds", "over_naive", "of_gemm_limit", "peak_mb")] == [None] * 4
    assert rows["forward, entropy", "streamed"]["over_naive"] is None
    text = cases.table(found["rows"])
    assert len(text.splitlines()) == 9 and " -" in text


def test_a_result_is_named_after_its_device(bench):
    assert bench.gpu.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert bench.gpu.file_name("AMD Instinct MI300X (OAM)") == "amd_instinct_mi300x_oam.json"


def test_the_table_of_errors_holds_the_bars():
    """|error| of float32 and bfloat16: log p 1e-5, entropy 2e-4, gradients 1e-5 and 4e-3."""
    command = [
        sys.executable,
        str(BENCH / "errors.py"),
        "-T",
        "32",
        "-D",
        "64",
        "-V",
        "500",
        "--device",
        "cpu",
    ]
    out = forks.run(command, check=True, capture_output=True, text=True, env=ENV).stdout
    head, *lines = out.splitlines()
    assert head.split()[:2] == ["inputs", "std"] and len(lines) in (6, 12)
    for line in lines:
        logp, entropy, _, dh, dw = (float(x) for x in line.split()[-5:])
        assert 0 < logp <= 1e-5 and 0 < entropy <= 2e-4, line
        assert 0 < max(dh, dw) <= (1e-5 if line.startswith("float32") else 4e-3), line


def test_a_variant_that_is_not_there_is_said_before_anything_is_measured():
    command = [sys.executable, str(BENCH / "linear_logprob.py"), "--cpu", "--only", "ours", "theirs"]
    done = forks.run(command, capture_output=True, text=True, env=ENV)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--only: expected some of" in done.stderr and done.stderr.rstrip().endswith("got theirs")


def test_a_gradient_with_the_head_fused_and_not_has_one_loss():
    root = BENCH.parent.parent
    options = ["--rows", "4", "--length", "8", "--budget", "32", "--rounds", "1"]
    command = [sys.executable, str(root / "tests" / "bench" / "head.py"), *options]
    env = ENV | forks.CHILDREN
    out = forks.run(command, check=True, capture_output=True, text=True, env=env).stdout
    rows = [line.split() for line in out.splitlines() if line.startswith(("logits", "fused  "))]
    assert [row[0] for row in rows] == ["logits", "fused"]
    for row in rows:
        assert float(row[2]) > 0 and float(row[3]) == pytest.approx(float(rows[0][3]), abs=1e-6)
        assert float(row[4]) == pytest.approx(float(rows[0][4]), abs=1e-5)
