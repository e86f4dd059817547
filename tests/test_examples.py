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
import torch
from pages import as_module
from torch.func import grad

import rft_fn as rft

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "examples"
SCRIPTS = sorted(p for p in FOLDER.glob("*.py") if "def main(" in p.read_text())
SMALL = {"steps": 3, "n_prompts": 4, "group": 4, "roots": 2, "branches": 2, "tries": 2, "every": 2}


def loaded(path):
    """An example as a module."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path, out):
    """The metrics of a short run of an example."""
    module = loaded(path)
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
    assert len(text.splitlines()) < 60 and re.search(r"arXiv \d{4}\.\d{5}", text.split('"""')[1])


@pytest.fixture(scope="module")
def bench():
    """tests/bench/examples.py, which makes table and pictures."""
    return as_module(ROOT / "tests/bench/examples.py")


def test_the_table_is_made_of_the_scripts_and_of_their_results(bench):
    text = bench.PAGE.read_text()
    assert bench.page(text) == text, "python tests/bench/examples.py"
    assert bench.scripts() == SCRIPTS
    assert set(json.loads(bench.RESULTS.read_text())) <= {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_the_run_of_an_example_learned_within_minutes_and_has_a_picture(path, bench):
    found = json.loads(bench.RESULTS.read_text()).get(path.stem)
    if found is None:
        pytest.skip(f"not run yet: python tests/bench/examples.py --run {path.stem}")
    first, last = found["moved"]["reward/mean"]
    assert last > 2 * first and last > first + 0.15 and found["seconds"] <= 180
    assert found["steps"] == inspect.signature(loaded(path).main).parameters["steps"].default
    picture = bench.PICTURES / f"{path.stem}.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 60_000


def test_ends_are_means_of_the_first_and_of_the_last_steps(bench):
    rows = [{"reward/mean": float(i)} for i in range(30)] + [{"other": 1.0}]
    assert bench.ends(rows, "reward/mean") == (0.5, 24.5)


def test_the_limit_of_cispo_has_a_meta_gradient_and_that_of_ppo_has_none():
    """Through one step of gradient descent on a tabular policy, against finite differences."""
    torch.manual_seed(0)
    target, adv = torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, -1.0, 0.5, 2.0]).double()
    old = torch.tensor([-2.0, -1.0, -1.5, -1.8]).double()
    z = torch.randn(4, 3, dtype=torch.float64)

    def after(limit, loss):
        slope = grad(lambda z: loss(logp_of(z), old, adv, high=limit).sum())(z)
        return -((logp_of(z - 0.1 * slope) - old).exp() * adv).sum()

    def logp_of(z):
        return z.log_softmax(-1)[torch.arange(4), target]

    for loss, moves in ((rft.loss.cispo, True), (rft.loss.ppo_clip, False)):
        at, h = torch.tensor(0.3, dtype=torch.float64), 1e-6
        found = float(grad(lambda x, loss=loss: after(x, loss))(at))
        expected = float(after(at + h, loss) - after(at - h, loss)) / (2 * h)
        assert abs(found - expected) < 1e-6 and (abs(found) > 1e-3) == moves, (loss.__name__, found, expected)
