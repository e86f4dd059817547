"""The bench of sampling: it runs, and the ratio of each way of caching is that of its data."""

import json
import os
import re
import sys
from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench" / "sampling.py"
SIDES = ["transformers' cache", "buffers", "prompts held once"]


def test_each_side_has_a_ratio_to_its_products(tmp_path):
    file = tmp_path / "sampling.json"
    file.write_text('{"runs": {"of another command": {}}}')
    sizes = "--layers=1 --vocab=128 --batch=8 --prompt=40 --tokens=4 --runs=1"
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH), *sizes.split(), "--long-tail", "--wall", "--write", str(file)]
    done = forks.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr

    # what is printed is what is written, beside the runs that the file had
    found = json.loads(file.read_text())
    before, (name, sides) = found["runs"].items()
    assert before == ("of another command", {})
    assert "tokens=4" in name and "long_tail=True" in name and "wall=True" in name
    lines = dict(re.findall(r"^(.+?) +sampling .* ratio ([\d.]+) ", done.stdout, re.MULTILINE))
    assert list(lines) == list(sides) == SIDES
    for side, ratio in lines.items():
        middle = {what: figure[0] for what, figure in sides[side].items()}
        assert float(ratio) == round(middle["ratio"], 2)
        # of one turn, whose seconds have three digits behind the point
        assert middle["ratio"] == pytest.approx(middle["sampling"] / middle["products"], rel=0.2)
