"""The bench of a whole step: it runs without TRL, and its lines can be read back."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench" / "step"
SIZES = {"prompts": 2, "group": 4, "micro": 4, "tokens": 6, "budget": 256}
SMALL = ["--model", "tiny", *(x for k, v in SIZES.items() for x in (f"--{k}", str(v)))]


@pytest.fixture(scope="module")
def bench():
    """The modules `case` and `report`, which the script finds in its own folder."""
    sys.path.insert(0, str(BENCH))
    import case
    import report

    yield case, report
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def script(bench):
    """The script itself, as a module."""
    spec = importlib.util.spec_from_file_location("bench_step", BENCH / "__main__.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["bench_step"] = script  # where its dataclass looks for its types
    spec.loader.exec_module(script)
    return script


def run(*options):
    command = [sys.executable, str(BENCH / "__main__.py"), *options]
    env = os.environ | forks.CHILDREN | {"PYTHONPATH": forks.PATH}
    return forks.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


def test_a_step_is_measured_without_trl_and_its_ratio_is_read_back(tmp_path, bench, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as the bench sets it: its processes can be forks
    _, report = bench
    sides = ["--sides", "rft_fn", "every_token", "products", "--lengths", "tailed", "--rounds", "1"]
    done = run(*SMALL, *sides, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr

    # what was sampled has the lengths that were asked for, the same ones on both sides
    found = json.loads((tmp_path / "step.json").read_text())
    turns = {x["side"]: x for x in found["turns"]}
    case = bench[0].Case("tiny", "cpu", "tailed", 2, 4, 6, 4, 256, False, 1)
    assert turns["rft_fn"]["steps"][0]["response"] == sum(bench[0].lengths(case))
    assert turns["rft_fn"]["steps"][0]["prompt"] == turns["products"]["steps"][0]["prompt"]
    assert all(
        turns["rft_fn"]["steps"][0]["wall"][x] > 0 for x in ("generate", "gradients", "update", "sync")
    )
    assert turns["rft_fn"]["peak"] > 2**26

    # the lines that were printed are those of the data
    lines = [x for x in map(report.parse, done.stdout.splitlines()) if x]
    assert [x["kind"] for x in lines] == ["on the wall", "of the processor"] * 2
    assert [x["over"] for x in lines] == ["every_token"] * 2 + ["products"] * 2
    ratio = report.seconds(turns["products"], "wall") / report.seconds(turns["rft_fn"], "wall")
    assert lines[2]["middle"] == pytest.approx(ratio, abs=0.006)
    assert (tmp_path / "step.png").stat().st_size > 1000


def turn(lengths, side, round_, *steps):
    rows = [
        {"wall": {"generate": s, "gradients": s}, "cpu": {"generate": 2 * s, "gradients": s}} for s in steps
    ]
    return {"lengths": lengths, "side": side, "round": round_, "steps": rows, "peak": 2**30}


def test_ratios_are_taken_round_by_round(bench):
    _, report = bench
    turns = [turn("equal", "rft_fn", 0, 1.0), turn("equal", "trl", 0, 2.0), turn("equal", "trl", 3, 9.0)]
    turns += [turn("equal", "trl", 1, 8.0), turn("equal", "rft_fn", 1, 2.0)]
    turns += [
        turn("equal", "rft_fn", 2, 1.0, 3.0),
        turn("equal", "trl", 2, 6.0),
        turn("tailed", "trl", 0, 1.0),
    ]
    lines = report.ratios({"turns": turns}, "equal")
    assert lines[0] == "equal: trl / rft_fn 3.00 (2.00 to 4.00 in 3 rounds), seconds on the wall"
    parts = report.parse(lines[0])
    assert (parts["over"], parts["under"], parts["rounds"]) == ("trl", "rft_fn", 3)
    assert (parts["least"], parts["middle"], parts["most"]) == (2.0, 3.0, 4.0)
    assert report.parse("weights: tiny") is None
    assert report.ratios({"turns": turns}, "tailed") == []


def test_rounds_are_appended_to_those_of_the_same_step(bench, script, tmp_path, monkeypatch):
    _, report = bench
    phases = dict.fromkeys(report.PHASES, 1.0)
    steps = [{"wall": phases, "cpu": phases, "prompt": 7, "response": 12, "gflops": 3.0}]
    order = []

    def measured(side, case):
        order.append(side)
        return {"steps": steps, "peak": 2**30, "others": 0.0}

    monkeypatch.setattr(script, "turn", measured)
    options = {"model": "tiny", "sides": ("rft_fn", "products"), "rounds": 1, "out": str(tmp_path)}
    for append in (True, True, False, True):
        script.main(script.Config(**options, append=append))
    found = json.loads((tmp_path / "step.json").read_text())
    rounds = [(x["round"], x["side"]) for x in found["turns"]]
    assert rounds == [(0, "rft_fn"), (0, "products"), (1, "products"), (1, "rft_fn")]
    assert len(order) == 8 and "2 rounds" in report.text(found)
    with pytest.raises(ValueError, match=r"^append: expected tokens 64 as in .*step.json, got 32$"):
        script.main(script.Config(**options, append=True, tokens=32))
    assert len(order) == 8


def test_the_command_names_no_folder(bench):
    _, report = bench
    for out in (["--out", "here"], ["--out=here"]):
        found = report.command("step", ["--rounds", "2", *out, "--liger"])
        assert found == "python tests/bench/step --rounds 2 --liger"


def test_the_table_of_the_page_is_that_of_the_data(bench):
    _, report = bench
    found = json.loads((ROOT / "docs" / "results" / "step" / "step.json").read_text())
    page = (ROOT / "docs" / "performance.md").read_text()
    assert f"<!-- step:begin -->\n\n{report.text(found)}\n\n<!-- step:end -->" in page


def test_long_tailed_lengths_are_quantiles(bench):
    case, _ = bench
    tailed = case.lengths(case.Case("", "cpu", "tailed", 8, 8, 64, 8, 1024, False, 1))
    assert len(tailed) == 64 and max(tailed) == 4 * 64  # the last quantile is beyond the cut
    assert sorted(tailed)[31] <= 0.7 * 64 <= sorted(tailed)[32]
    assert tailed != sorted(tailed)
    assert case.lengths(case.Case("", "cpu", "equal", 2, 3, 5, 6, 64, False, 1)) == [5] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ("short",)}, "lengths: expected equal, tailed, got short"),
        ({"sides": ("verl",)}, "sides: expected rft_fn, every_token, trl, products, got verl"),
        ({"sides": ()}, "sides: expected rft_fn, every_token, trl, products, got none"),
        ({"micro": 3}, "micro: expected a divisor of prompts x group = 32, got 3"),
        ({"device": "tpu"}, "device: expected cpu, cuda, got tpu"),
    ],
)
def test_wrong_options_are_named(script, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        script.check(script.Config(**options))


def test_sides_with_other_tokens_are_not_compared(script):
    rows = {side: {"steps": [{"prompt": 7, "response": n}]} for side, n in (("rft_fn", 12), ("trl", 11))}
    with pytest.raises(
        ValueError, match=r"^tokens: expected the same .* got {'rft_fn': \(7, 12\), 'trl': \(7, 11\)}"
    ):
        script.same_tokens(rows)
    rows["trl"]["steps"][0]["response"] = 12
    script.same_tokens(rows)
