"""Every script in docs/examples runs, with the same numbers on one process and on two."""

import contextlib
import importlib.util
import inspect
import io
import json
import re
import sys
from pathlib import Path

import pytest
import ranks

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "examples"
SCRIPTS = sorted(p for p in FOLDER.glob("*.py") if "def main(" in p.read_text())
SMALL = {"steps": 3, "n_prompts": 4, "group": 4, "roots": 2, "branches": 2, "tries": 2, "every": 2}


def run(path, out):
    """The metrics of a short run of an example."""
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    taken = inspect.signature(module.main).parameters
    with contextlib.redirect_stdout(io.StringIO()):
        module.main(out=str(out), **{name: x for name, x in SMALL.items() if name in taken})
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def all_on_two(rank, folder):
    for path in SCRIPTS:
        run(path, Path(folder) / path.stem)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """The folder of the runs of all examples on two processes."""
    folder = tmp_path_factory.mktemp("two")
    ranks.run(2, "test_examples:all_on_two", str(folder))
    return folder


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_an_example_gives_the_same_numbers_on_one_process_and_on_two(path, tmp_path, on_two):
    one = run(path, tmp_path / "one")
    two = [json.loads(x) for x in (on_two / path.stem / "metrics.jsonl").read_text().splitlines()]
    assert len(one) == len(two) == SMALL["steps"]
    for a, b in zip(one, two):
        compared = [k for k in a if not k.startswith(("time", "tokens"))]
        assert compared and "reward/mean" in compared
        for name in compared:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), (name, a["step"])
    assert any(row["reward/mean"] != one[0]["reward/mean"] for row in one)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_an_example_is_short_and_names_its_paper(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60 and re.search(r"arXiv \d{4}\.\d{5}", text.split('"""')[1])


def test_the_table_is_made_of_the_scripts():
    spec = importlib.util.spec_from_file_location(
        "bench_examples", FOLDER.parents[1] / "tests/bench/examples.py"
    )
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    text = bench.PAGE.read_text()
    assert bench.page(text) == text, "python tests/bench/examples.py"
    assert set(bench.scripts()) == set(SCRIPTS)
