"""docs/experiments: every experiment runs to its end, and the pages have the numbers of their json."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.docs, pytest.mark.usefixtures("plain_runs")]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "experiments"
sys.path.insert(0, str(FOLDER))

import claims  # noqa: E402
import loops  # noqa: E402
import models  # noqa: E402
import run  # noqa: E402

PAGES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of runs, with models that are taught for two steps."""
    threads = torch.get_num_threads()
    base = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "FOLDER", base / "models")
        patch.setattr(models, "TAUGHT", dict.fromkeys(models.TAUGHT, 2))
        patch.setattr(loops, "MAX_EVAL", 16)
        models.folder_of.cache_clear()
        yield base
    models.folder_of.cache_clear()
    torch.set_num_threads(threads)


def ran(name, folder, *, steps=2, seeds=1):
    """(the json of a small run, what it printed)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run.main(name, steps=steps, seeds=seeds, out=folder / "out", runs=folder / "runs")
    return json.loads((folder / "out" / f"{name}.json").read_text()), out.getvalue()


@pytest.mark.parametrize("name", claims.EXPERIMENTS)
def test_an_experiment_runs_to_its_end(name, folder):
    found, printed = ran(name, folder)
    e = claims.EXPERIMENTS[name]
    assert found["steps"] == 2 and found["seeds"] == 1 and list(found["arms"]) == list(e.arms)
    for arm in found["arms"].values():
        assert list(arm["numbers"]) == list(e.columns)
        assert all(len(x) == 1 and x[0] == x[0] for x in arm["numbers"].values())
    assert (folder / "out" / f"{name}.png").stat().st_size > 5000
    assert run.table(found) in printed

    # the arms differ: no option of an arm goes unread
    curves = [json.dumps(arm["curves"]) for arm in found["arms"].values()]
    assert len(set(curves)) > 1


def test_a_run_that_is_there_is_not_made_again(folder, monkeypatch):
    first, _ = ran("batch_size", folder)
    loop = claims.EXPERIMENTS["batch_size"].loop

    def never(*args):
        raise AssertionError("made again")

    never.__module__, never.__qualname__ = loop.__module__, loop.__qualname__
    again = {"batch_size": claims.replace(claims.BATCH_SIZE, loop=never)}
    monkeypatch.setattr(run, "EXPERIMENTS", again)
    second, _ = ran("batch_size", folder)
    assert second == first
    with pytest.raises(AssertionError, match="made again"):
        ran("batch_size", folder, seeds=2)


def test_numbers_of_a_run():
    logs = [{"x": float(i)} for i in range(20)]
    logs[4]["y"] = 7.0
    logs[14]["y"] = 8.0
    logs[19]["y"] = 9.0
    assert run.number(logs, "x", "end") == 14.5
    assert run.number(logs, "x", "mean") == 9.5
    assert run.number(logs, "x", "sum") == 190
    assert run.number(logs, "y", "last") == 9
    assert run.number(logs, "y", "middle") == 8
    assert run.shown([1.0, 2.0, 3.0]) == "2.000 ± 1.000" and run.shown([1280.0]) == "1,280"


def test_levels_of_a_rounded_matrix():
    x = torch.tensor([[3.0, -1.4, 0.4], [0.0, 0.0, 0.0]])
    found = dict(loops.rounded([("w", x), ("b", x[0])], 6))
    torch.testing.assert_close(found["w"], torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert found["b"] is x[0] or torch.equal(found["b"], x[0])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_numbers_of_its_json(name):
    found = json.loads((FOLDER / f"{name}.json").read_text())
    page = (FOLDER / f"{name}.md").read_text()
    begin, end = run.MARKS
    assert page.split(begin)[1].split(end)[0].strip() == run.table(found)
    assert found["command"] in page and f"({name}.png)" in page and (FOLDER / f"{name}.png").exists()
    assert f"]({name}.md)" in (FOLDER / "README.md").read_text()

    # the numbers are of the arms as they stand in claims.py
    e = claims.EXPERIMENTS[name]
    assert found["steps"] == e.steps and found["seeds"] == 3
    assert {a: x["options"] for a, x in found["arms"].items()} == json.loads(
        json.dumps({a: run.options(arm) for a, arm in e.arms.items()})
    )


def test_bad_names_and_counts_are_refused():
    with pytest.raises(SystemExit, match=r"name: expected all or one of clip_higher, .* got clip"):
        run.main("clip")
    with pytest.raises(SystemExit, match=r"steps, seeds: expected at least 1, got 0, 3"):
        run.main("clip_higher", steps=0)
