"""The bench of gradients: its sides run, on the same packs, and its shares are taken within a round."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench" / "gradients.py"


def test_each_side_is_measured_on_the_same_packs():
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    sizes = ["--rounds", "1", "--layers", "1", "--vocab", "128", "--rows", "2"]
    env = os.environ | forks.CHILDREN | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = forks.run([sys.executable, str(BENCH), *sizes], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    sides = [line.split(" | ")[0].strip("| ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert sides == ["side", "plain", "fast", "products"]
    assert done.stdout.count("'packs': [366]") == 3  # 60 + 64 and 180 + 64 tokens, less the first of each


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_gradients", BENCH)
    made = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(made)
    yield made
    sys.path[:] = before


def test_shares_are_of_the_products_of_the_same_round(bench):
    def turn(round_, side, seconds):
        own = {"round": round_, "side": side, "settings": "usual", "seconds": seconds}
        return own | {"update": 0.5, "peak": 2**30}

    turns = [turn(0, "products", 3.0), turn(0, "fast", 4.0), turn(1, "fast", 12.0), turn(1, "products", 6.0)]
    row = bench.table(turns).splitlines()[-1]
    assert row == "| fast | usual | 8.00 | 0.50 | 0.62 (0.50 to 0.75) | 1.00 |"


def test_the_table_of_the_page_is_that_of_the_data(bench):
    found = json.loads(bench.RESULTS.read_text())
    assert bench.table(found["turns"]) in (ROOT / "docs" / "performance.md").read_text()
