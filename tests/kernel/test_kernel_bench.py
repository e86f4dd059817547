"""What kernels/bench/tune.py measures, by a clock that is told its answers, is what `engine="auto"` reads."""

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from rft_kernels import engines

pytestmark = pytest.mark.slow

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench"


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
