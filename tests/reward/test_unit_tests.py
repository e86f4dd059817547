"""The reward `code`: what passes, what share, and candidates that want the verdict without the work."""

import threading

import pytest

from rft_fn import reward
from rft_fn.reward import early, unit_tests
from rft_fn.reward.unit_tests import cases_of, extract_code
from rft_fn.sandbox import program

IO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[1, 2]]}
ASSERTS = ["assert f(1) == 2", "import math\nassert math.isclose(f(2), 3)"]


def score(code, tests, **options):
    return reward.code(**options)(
        prompts=[""], completions=[f"So:\n```python\n{code}\n```\nDone."], tests=[tests]
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "tests", "options", "expected"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", IO, {}, 1.0),
        ("print(3)", IO, {}, 0.5),
        ("print(3)", IO, {"all_or_nothing": True}, 0.0),
        ("def f(a, b): return (a, *b)", CALLS, {}, 1.0),
        ("class Solution:\n    def f(self, a, b): return [a, *b]", CALLS, {}, 1.0),
        ("def f(x): return x + 1", ASSERTS, {}, 1.0),
        ("def f(x): return 2", ASSERTS, {}, 0.5),
        ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]\nassert x[0] == 2", {}, 0.5),
        ("class S:\n    def add(s, k): s.n = k", "s = S()\ns.add(3)\nassert s.n == 3", {}, 1.0),
    ],
)
def test_the_share_of_tests_that_pass(code, tests, options, expected):
    assert score(code, tests, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import os\nos.write(1, b'passed')\nos._exit(0)",
        "import os\nfor i in range(99):\n    try: os.write(i, b'passed')\n"
        "    except OSError: pass\nos._exit(0)",
        "import builtins, math\nmath.isclose = lambda *a: True\nbuiltins.AssertionError = KeyError\n"
        "def f(x): return None",
        "class Any:\n    __eq__ = lambda s, o: True\n    __float__ = lambda s: 3.0\ndef f(x): return Any()",
        "class Any(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
        "def f(x): return Any(77)",
        "def f(x): raise AssertionError",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import sys, gc\nassert ''.join(['isclose', '(f']) in str(gc.get_objects())\ndef f(x): return x + 1",
    ],
)
def test_no_verdict_without_the_work(code):
    assert score(code, ASSERTS, seconds=3.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("file", ["fd/0", "mem"])
def test_the_checker_is_closed_to_the_code(file):
    code = f"import os\nopen(f'/proc/{{os.getppid()}}/{file}', 'rb')\ndef f(x): return x + 1"
    found = score(code, ASSERTS, seconds=3.0)
    if program._refused:
        pytest.skip("this machine allows no namespaces: root reads what it likes")
    assert found == 0.0


def test_a_response_without_a_block_scores_0_and_the_last_block_counts():
    found = reward.code()(prompts=[""], completions=["print(3)"], tests=[IO])
    assert found == [0.0]
    assert extract_code("```\na\n```\n```py\nb\n```\n") == "b\n"
    assert extract_code("```py\nb") is None


def test_an_assert_is_a_test_after_what_is_before_it():
    cases = cases_of("x = 1\nassert f(x)\nassert g(x)", "tests")
    assert [x.stdin for x in cases] == ["x = 1\nassert f(x)", "x = 1\nassert g(x)"]
    assert cases_of('{"inputs": ["1"], "outputs": ["2"]}', "t") == cases_of(
        [{"input": "1", "output": "2"}], "t"
    )


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        (3, "got int"),
        ([], "got none"),
        ("assert (", "no Python"),
        ({"a": 1}, "got a dict of a"),
        ({"inputs": ["1"], "outputs": []}, "got 0 and 1"),
        ({"inputs": [1], "outputs": [2]}, "fn_name for calls"),
    ],
)
def test_tests_of_another_form_are_refused(cell, line):
    with pytest.raises(ValueError, match=f"^column 'tests': .*{line}"):
        score("", cell)


@pytest.mark.slow
def test_a_deadline_fails_what_is_left_with_a_warning():
    with pytest.warns(UserWarning, match="tests were not run within 0.3 s"):
        assert (
            score(
                "while True: pass",
                {"inputs": [f"{i}" for i in range(40)], "outputs": ["1"] * 40},
                deadline=0.3,
            )
            == 0.0
        )


def answer(code):
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("options", [{}, {"all_or_nothing": True}])
def test_tests_that_were_begun_are_run_once_and_score_as_in_a_call(options, monkeypatch):
    """Those of some responses, one of them told twice; the others run when they are asked for."""
    fn = reward.code(**options)
    codes = ["a, b = map(int, input().split())\nprint(a + b)", "print(3)", "print(7)", "print(9)"]
    completions, tests = [*map(answer, codes), "none"], [IO] * 5
    real, run = unit_tests._passes, []
    monkeypatch.setattr(unit_tests, "_passes", lambda *x: run.append(x[:2]) or real(*x))
    for i in (0, 1, 1, 4):
        fn.begin(completions=[completions[i]], tests=[IO])
    while any(not x.done() for x in unit_tests._begun._runs.values()):
        threading.Event().wait(0.01)
    assert {program for program, _ in run} == {code + "\n" for code in codes[:2]}
    found = fn(prompts=completions, completions=completions, tests=tests)
    assert found == ([1.0, 0.0, 0.0, 0.0, 0.0] if options else [1.0, 0.5, 0.5, 0.0, 0.0])
    assert len(run) == len(set(run)) and not unit_tests._begun._runs
    assert early.starts_early(reward.weighted(code=(fn, 1.0)))


def test_tests_that_were_begun_have_the_deadline_of_the_call(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(unit_tests, "_passes", lambda *_: gate.wait(60))
    fn, completions = reward.code(deadline=0.2), [answer("print(3)")]
    fn.begin(completions=completions, tests=[IO])
    with pytest.warns(UserWarning, match="2 tests were not run within 0.2 s"):
        assert fn(prompts=[""], completions=completions, tests=[IO]) == [0.0]
    gate.set()
