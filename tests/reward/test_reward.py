"""Rewards: what counts as an answer, that only the response is scored, and that a bad value never passes."""

import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_fn import metric, reward
from rft_fn.data.tasks import TASKS

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)


def one(fn, completion, **columns):
    """The score of one completion, whose prompt holds everything that a response would be rewarded for."""
    prompt = r"Think in <think>...</think>, then <answer>72</answer> and \boxed{72}."
    (value,) = fn(prompts=[prompt], completions=[completion], **{name: [v] for name, v in columns.items()})
    return value


# ------------------------------------------------------------------------------------------------- extractors


@each(
    ("text", "content"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),  # the second was cut off
        (r"\boxed{{3}", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"} } { \boxed{5}", "5"),
        ("\\boxed{a\nb}", "a\nb"),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_extract_boxed(text, content):
    assert reward.extract_boxed(text) == content


balanced = st.recursive(
    st.text(alphabet="ab1+ ", max_size=4),
    lambda inner: st.lists(inner.map(lambda s: "{" + s + "}"), max_size=3).map("".join),
    max_leaves=8,
)
prose = st.text(alphabet=st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=30)


@SETTINGS
@given(prose, balanced, prose, balanced, prose)
def test_extract_boxed_returns_the_last_of_any_balanced_contents(a, first, b, last, c):
    assert reward.extract_boxed(rf"{a}\boxed{{{first}}}{b}\boxed{{{last}}}{c}") == last


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 40_000, "}" * 200_000, "<answer>" * 20_000, "-1,234.5/" * 20_000]
)
def test_extractors_take_linear_time(text):
    start = time.perf_counter()
    reward.extract_boxed(text), reward.extract_number(text), reward.extract_tag(text, "answer")
    assert time.perf_counter() - start < 2


@each(
    ("text", "number"),
    [
        ("The answer is 72.", "72"),
        ("#### 72", "72"),
        ("#### 1,234", "1234"),
        ("1{,}234", "1234"),
        ("it is -3.5", "-3.5"),
        ("it is \N{MINUS SIGN}3.5", "-3.5"),
        ("$72", "72"),
        (r"\$72.50 in all.", "72.50"),
        ("-$72", "-72"),
        ("1/2", "1/2"),
        ("-1/2.", "-1/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"-\dfrac{3}{4}", "-3/4"),
        ("8-5", "5"),  # a subtraction, not a sign
        ("x=-5", "-5"),
        ("(3)-5", "5"),
        ("12,34", "34"),
        ("1,2,3", "3"),
        ("1,234,567.89", "1234567.89"),
        ("1e5", "1e5"),
        ("0.", "0"),
        (".5", ".5"),
        ("72 km/h", "72"),
        ("**72**", "72"),
        ("seventy-two", None),
        ("", None),
    ],
)
def test_extract_number(text, number):
    assert reward.extract_number(text) == number


words = st.text(alphabet="abc xyz:=", max_size=20)


@SETTINGS
@given(words, st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "{}.", "{}.0"]), words)
def test_extract_number_reads_back_any_integer_in_any_notation(before, value, notation, after):
    text = f"{before} {notation.format(value)} {after.replace('e', '')}"
    assert float(reward.extract_number(text)) == value
    assert one(reward.numeric(), text, answer=f"7 and #### {value:,}") == 1.0
    assert one(reward.numeric(), text, answer=f"#### {value + 1}") == 0.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>a <answer>b</answer>", "b"),
        ("<answer>1</answer> <answer>2", "1"),
        ("</answer><answer>", None),
        ("5", None),
    ],
)
def test_extract_tag(text, content):
    assert reward.extract_tag(text, "answer") == content


# ---------------------------------------------------------------------------------------------------- answers


@each(
    ("completion", "reference", "score"),
    [
        ("It is 72.", "48 + 24 = <<48+24=72>>72\n#### 72", 1.0),
        ("It is 72.0 dollars", "#### 72", 1.0),
        ("0.50", "1/2", 1.0),
        (r"\frac12", "1/2", 1.0),
        (r"\frac12", "12", 0.0),
        ("1,000", "#### 1000", 1.0),
        ("72, or rather 73", "#### 72", 0.0),
        ("It is -72", "#### 72", 0.0),
        ("", "#### 72", 0.0),
        ("72/0", "#### 72", 0.0),
        ("1e999999999", "#### 72", 0.0),
        ("9" * 10_000, "#### 72", 0.0),
        ("0.1" + "0" * 20 + "1", "0.1", 0.0),  # equal as floats
    ],
)
def test_numeric(completion, reference, score):
    assert one(reward.numeric(), completion, answer=reference) == score
    assert one(reward.numeric(boxed=True), rf"7 \boxed{{{completion}}} 9", answer=reference) == score
    assert one(reward.numeric(boxed=True), completion, answer=reference) == 0.0, "no box, no score"


def test_exact_compares_text():
    assert one(reward.exact(), " B\n", answer="B") == 1.0
    assert one(reward.exact(), "b", answer="B") == 0.0
    assert one(reward.exact(), r"\boxed{B}", answer="B") == 0.0
    assert one(reward.exact(boxed=True), r"It is \boxed{ B }", answer="B") == 1.0
    assert one(reward.exact(boxed=True), "B", answer="B") == 0.0
    assert one(reward.exact("label"), "3", label=3) == 1.0


MATHS = [
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{1+x}", "x+1", 1.0),
    (r"first \boxed{71}, then \boxed{72}", "72", 1.0),
    (r"first \boxed{72}, then \boxed{71}", "72", 0.0),
    ("The answer is $72$.", "... #### 72", 1.0),
    ("<think>71</think><answer>72</answer>", "72", 1.0),
    ("<think>72</think><answer>71</answer>", "72", 0.0),
    (r"<answer>So \frac{1}{2}</answer>", "<answer>0.5</answer>", 1.0),
    (r"\boxed{72}", r"So \boxed{72}", 1.0),
    (r"\boxed{(1,2)}", "(1,2)", 1.0),
    (r"\boxed{(2,1)}", "(1,2)", 0.0),
    (r"\boxed{}", "72", 0.0),
    ("", "72", 0.0),
    (r"\boxed{\frac{1}{}", "72", 0.0),
    (r"\boxed{\sqrt{\}}}", "72", 0.0),
    ("72 " + "words " * 300, "72", 0.0),  # only the end of an unboxed completion is read
]


@each(("completion", "reference", "score"), MATHS)
def test_math(completion, reference, score):
    assert one(reward.math(), completion, answer=reference) == score


def test_math_works_in_a_thread_where_signals_do_not():
    fn, got = reward.math(), []
    worker = threading.Thread(target=lambda: got.extend(one(fn, c, answer=r) for c, r, _ in MATHS))
    worker.start(), worker.join()
    assert got == [score for _, _, score in MATHS]


def test_math_gives_up_on_an_answer_that_would_take_for_ever():
    start = time.perf_counter()
    assert one(reward.math(timeout=1), r"\boxed{10^{10^{10}}}", answer="72") == 0.0
    assert time.perf_counter() - start < 5


def test_math_counts_any_failure_as_a_wrong_answer(monkeypatch):
    import math_verify

    monkeypatch.setattr(math_verify, "parse", lambda *args, **kwargs: 1 / 0)
    assert one(reward.math(), r"\boxed{71+y}", answer="y+71") == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_task_takes_the_box_or_the_whole_completion(name):
    rows = [TASKS[name].generate(0, index, 2) for index in range(20)]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    answers = columns.pop("answer")
    fn, prompts = reward.task(name), columns["question"]

    def score(completions):
        return fn(prompts=prompts, completions=completions, answer=answers, **columns)

    assert score(answers) == [1.0] * 20
    assert score([rf"Let me see: \boxed{{0}}, no: \boxed{{ {a} }}." for a in answers]) == [1.0] * 20
    assert max(score([rf"{a} \boxed{{?}}" for a in answers])) == 0.0


# ----------------------------------------------------------------------------------------------------- format

FORMATS = {
    "boxed": (reward.boxed_format(), r"the answer is \boxed{72}"),
    "tags": (reward.tag_format(), "<think>hm\nhm</think>\n<answer>72</answer>"),
    "pattern": (
        reward.pattern_format(r"<think>.*</think>.*\\boxed\{.*\}"),
        "<think>a\nb</think>\n\\boxed{72}",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_1_for_its_format_and_0_for_garbage_whatever_the_prompt_says(name):
    fn, good = FORMATS[name]
    assert one(fn, good) == 1.0
    for garbage in ("", "72", "\\boxed", "lorem ipsum", "<think></think>", "{}", good[:-1], good[1:]):
        assert one(fn, garbage) == (1.0 if garbage == good[1:] and name == "boxed" else 0.0), garbage


@pytest.mark.parametrize("name", ["math", "numeric", "exact", "format", "tags", "task:addition"])
def test_no_reward_reads_the_prompt(name):
    fn = reward.load(name)
    completions, answers = ["", "72", r"\boxed{72}", "<think>a</think><answer>72</answer>"], ["72"] * 4
    seen = {
        tuple(fn(prompts=[p] * 4, completions=completions, answer=answers)) for p in ("", r"\boxed{72}", "72")
    }
    assert len(seen) == 1
    assert 0.0 in next(iter(seen)) and 1.0 in next(iter(seen)), "a constant reward carries no signal"


@each(
    ("completion", "score"),
    [
        (" <think>a</think>  <answer>b</answer>\n", 1.0),
        ("<think>a < b</think><answer>b</answer>", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> bye", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>c</answer></think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>" * 5000, 0.0),
    ],
)
def test_tag_format(completion, score):
    assert one(reward.tag_format(), completion) == score


def test_tag_format_takes_other_tags():
    assert one(reward.tag_format("plan", "code"), "<plan>x</plan><code>y</code>") == 1.0
    assert one(reward.tag_format("plan"), "<plan>x</plan><code>y</code>") == 0.0


# ---------------------------------------------------------------------------------------------------- combine


def constant(*values):
    return lambda prompts, completions, **columns: list(values)


def test_weighted_adds_its_parts_and_keeps_them():
    score = reward.weighted(accuracy=(reward.numeric(), 0.9), format=(reward.boxed_format(), 0.1))
    total, parts, *_ = score(["p"] * 3, ["72", r"\boxed{72}", r"\boxed{7}"], {"answer": ["72"] * 3})
    assert parts["accuracy"].tolist() == [1.0, 1.0, 0.0] and parts["format"].tolist() == [0.0, 1.0, 1.0]
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor([0.9, 1.0, 0.1]))


@pytest.mark.parametrize(
    "values",
    [
        [1, 0],
        (True, False),
        np.array([1.0, 0.0], dtype=np.float32),
        torch.tensor([1.0, 0.0]),
        [torch.tensor(1.0), 0],
    ],
)
def test_values_may_be_any_kind_of_real_number(values):
    score = reward.weighted(a=(lambda **_: values, -2.0))
    assert score(["", ""], ["", ""], {}).total.tolist() == [-2.0, 0.0]


def test_a_reward_gets_the_columns_that_it_names():
    def bare(completions, answer, missing=0.25):
        return [float(c == a) + missing for c, a in zip(completions, answer, strict=True)]

    score = reward.weighted(bare=(bare, 1.0))
    assert score(["p"], ["x"], {"answer": ["x"], "unused": [1]}).total.tolist() == [1.25]
    assert score(["p"], ["x"], {"answer": ["y"]}).total.tolist() == [0.25]


ADVICE = (
    "not a finite number; return a float for every completion, 0.0 for one that cannot be scored, None where "
    "the reward does not apply"
)


@each(
    ("fn", "message"),
    [
        (constant(1, 2, 3), "reward 'format': expected 4 values, got 3"),
        (constant(1, 2, 3, 4, 5), "reward 'format': expected 4 values, got 5"),
        (constant(1, 2, float("nan"), 4), f"reward 'format': value 2 is nan, {ADVICE}"),
        (constant(float("inf"), 2, 3, 4), f"reward 'format': value 0 is inf, {ADVICE}"),
        (constant(1, 2, 3, 1e300), f"reward 'format': value 3 is 1e+300, {ADVICE}"),
        (constant(1, "0.5", 3, 4), f"reward 'format': value 1 is '0.5', {ADVICE}"),
        (constant(1, 2j, 3, 4), f"reward 'format': value 1 is 2j, {ADVICE}"),
        (constant(1, [1], 3, 4), f"reward 'format': value 1 is [1], {ADVICE}"),
        (lambda **_: None, "reward 'format': expected a list of 4 numbers, got NoneType"),
        (lambda **_: 1.0, "reward 'format': expected a list of 4 numbers, got float"),
        (lambda **_: torch.tensor(1.0), "reward 'format': expected a list of 4 numbers, got Tensor"),
        (
            lambda completions, solution: [0.0] * 4,
            "reward 'format': column 'solution' is not in the dataset; its columns are: answer, id",
        ),
        (reward.exact("solution"), "column 'solution': not in the dataset; its columns are: answer, id"),
        (reward.exact("id"), "column 'id': value 2 is None; drop that row from the dataset"),
        (reward.numeric(), "column 'answer': no number in the reference 'four'; use exact() or math()"),
    ],
)
def test_a_bad_reward_is_an_error_that_says_what_to_do(fn, message):
    columns = {"answer": ["1", "2", "3", "four"], "id": [1, 2, None, 4]}
    score = reward.weighted(good=(constant(0, 0, 0, 0), 1.0), format=(fn, 0.1))
    with pytest.raises(ValueError) as error:
        score([""] * 4, ["1"] * 4, columns)
    assert str(error.value) == message


def test_what_a_reward_raises_names_the_reward():
    score = reward.weighted(mine=(lambda **_: {}["key"], 1.0))
    with pytest.raises(KeyError) as error:
        score([""], [""], {})
    assert error.value.__notes__ == ["raised by the reward 'mine'"]


class Quit(BaseException):
    """No Exception, as asyncio.CancelledError is none."""


def raises(error):
    def fn(completions):
        raise error

    return fn


def raises_late(completions):
    """A generator: it runs when its values are read."""
    yield 1.0
    raise TypeError("unsupported operand")


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (lambda completions: [int("x")], ValueError, "invalid literal for int() with base 10: 'x'"),
        (raises(Quit("gone")), RuntimeError, "Quit: gone"),
        (raises(TimeoutError("no answer")), TimeoutError, "no answer"),
        (raises_late, TypeError, "unsupported operand"),
        (
            lambda completions: sys.exit(3),
            ValueError,
            "reward 'mine': expected a list of numbers, got sys.exit(3); raise an error to stop the run, "
            "return 0.0 for a completion that cannot be scored",
        ),
    ],
)
def test_every_exception_out_of_a_reward_has_the_note(fn, kind, message):
    with pytest.raises(kind) as error:
        reward.weighted(mine=(fn, 1.0))(["", ""], ["", ""], {})
    assert str(error.value) == message and error.value.__notes__ == ["raised by the reward 'mine'"]


def test_no_part_has_the_name_of_a_metric_of_the_whole_reward(tmp_path):
    """The names that are refused are all that a step logs as reward/NAME beside its parts."""
    rollout = tiny.said(["1"] * 4, [0, 0, 1, 1])
    part = reward.Judged(torch.ones(2, 2), {}, [""] * 4)
    logged = metric.rollout(rollout, part.reward) | reward.means(part, "reward")
    own = {name.removeprefix("reward/") for name in logged if name.startswith("reward/")}
    assert own == set(metric.OF_REWARD)
    file = tmp_path / "mine.py"
    for name in own:
        file.write_text(f"def {name}(completions):\n    return [0.0 for _ in completions]\n")
        with pytest.raises(ValueError, match=f"^reward {name!r}: expected another name than mean, std"):
            reward.parse(["exact", f"{file}:{name}"])


def test_ctrl_c_in_a_reward_is_not_the_rewards():
    with pytest.raises(KeyboardInterrupt) as error:
        reward.weighted(mine=(raises(KeyboardInterrupt()), 1.0))([""], [""], {})
    assert not hasattr(error.value, "__notes__")


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "weighted: expected at least one component, as name=(reward function, weight)"),
        ({"a": (len, float("nan"))}, "reward 'a': expected a finite weight, got nan"),
        ({"a": (len, "1")}, "reward 'a': expected a finite weight, got '1'"),
        ({"a": ("math", 1.0)}, "reward 'a': expected (reward function, weight), got ('math', 1.0)"),
        ({"a": 3}, "reward 'a': expected (reward function, weight), got 3"),
        (
            {"std": (len, 1.0)},
            "reward 'std': expected another name than mean, std, flat_groups, which metrics of the whole "
            "reward have, got 'std'",
        ),
    ],
)
def test_bad_components(components, message):
    with pytest.raises(ValueError) as error:
        reward.weighted(**components)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((["p"], ["a", "b"], {}), "prompts: expected 2 values, one per completion, got 1"),
        ((["p"], ["a"], {"answer": []}), "column 'answer': expected 1 values, one per completion, got 0"),
        (
            (["p"], ["a"], {"prompts": ["p"]}),
            "column 'prompts': the reward's own argument has this name; rename the column",
        ),
    ],
)
def test_bad_batches(batch, message):
    with pytest.raises(ValueError) as error:
        reward.weighted(a=(reward.boxed_format(), 1.0))(*batch)
    assert str(error.value) == message


# --------------------------------------------------------------------------------------------- check and load

ROWS = [TASKS["addition"].generate(0, index, 1) for index in range(4)]


def test_check_scores_nothing_garbage_and_the_reference():
    scored = reward.check(
        reward.weighted(a=(reward.numeric(boxed=True), 0.9), f=(reward.boxed_format(), 0.1)), ROWS
    )
    assert {name: s.total.tolist() for name, s in scored.items()} == {
        "empty": [0.0] * 4,
        "garbage": [0.0] * 4,
        "answer": [0.0] * 4,
        "boxed": [1.0] * 4,
        "tags": [0.0] * 4,
    }


def test_check_shows_a_reward_the_question_as_the_prompt_and_every_column():
    seen = []

    def spy(prompts, completions, **columns):
        seen.append((list(prompts), {k: v for k, v in columns.items() if k in ROWS[0]}))
        return [float(len(c)) for c in completions]

    with pytest.warns(UserWarning, match="score no more than garbage"):
        reward.check(reward.weighted(length=(spy, 1.0)), ROWS)
    assert seen[0] == ([r["question"] for r in ROWS], {k: [r[k] for r in ROWS] for k in ROWS[0]})


@pytest.mark.parametrize(
    ("fn", "rows", "message"),
    [
        (
            reward.exact("solution"),
            ROWS,
            "column 'solution': not in the dataset; its columns are: question, short, answer, level",
        ),
        (lambda completions, **_: [len(c) / len(c) for c in completions], ROWS, "division by zero"),
        (
            lambda completions, **_: [1.0 if c else "0" for c in completions],
            ROWS,
            f"reward 'r': value 0 is '0', {ADVICE}",
        ),
        (reward.exact(), [], "rows: expected at least one row of the dataset, got none"),
        (
            reward.exact(),
            [ROWS[0], {"question": "?"}],
            "column 'answer': not in the dataset; its columns are: question",
        ),
    ],
)
def test_check_raises_before_training_does(fn, rows, message):
    with pytest.raises((ValueError, ZeroDivisionError)) as error:
        reward.check(reward.weighted(r=(fn, 1.0)), rows)
    assert str(error.value) == message


def test_check_warns_about_a_constant_reward():
    line = "^reward 'a': it scores 1 for nothing, for garbage and for every reference$"
    with pytest.warns(UserWarning, match=line):
        reward.check(reward.weighted(a=(lambda completions: [1.0] * len(completions), 1.0)), ROWS)


FILE = """
from dataclasses import dataclass

SCALE = 3

@dataclass
class Config:
    scale: int = SCALE

def length(completions, **columns):
    return [float(len(c)) * Config().scale for c in completions]
"""


def test_load_runs_a_users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    assert reward.load(f"{path}:length")(completions=["ab"]) == [6.0]


@pytest.mark.parametrize(
    ("spec", "completion", "score"),
    [
        ("math", r"\boxed{\frac{144}{2}}", 1.0),
        ("numeric", "72.0", 1.0),
        ("exact", "72.0", 0.0),
        ("format", r"\boxed{x}", 1.0),
        ("tags", r"\boxed{72}", 0.0),
        ("task:addition", r"\boxed{72}", 1.0),
    ],
)
def test_load_knows_names(spec, completion, score):
    assert one(reward.load(spec), completion, answer="72") == score


KNOWN = (
    "expected one of math, numeric, boxed, exact, format, tags, reasoning_gym, code, task:NAME, "
    "path/file.py:function, package.module:function, model:FOLDER, judge:FOLDER or https://HOST/PATH"
)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", f"reward 'nope': {KNOWN}"),
        ("{dir}/mine.py", f"reward '{{dir}}/mine.py': {KNOWN}"),
        ("{dir}/no.py:f", "reward '{dir}/no.py:f': no such file: {dir}/no.py"),
        (
            "{dir}/mine.py:width",
            "reward '{dir}/mine.py:width': no 'width' in the file; its functions: dataclass, length",
        ),
        ("{dir}/mine.py:SCALE", "reward '{dir}/mine.py:SCALE': 'SCALE' is int, not a function"),
        (
            "task:chess",
            "task: expected one of addition, reverse, sort_digits, letter_count, countdown, count_squares, "
            "tone, got 'chess'",
        ),
    ],
)
def test_load_says_what_is_wrong(tmp_path, spec, message):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ValueError) as error:
        reward.load(spec.format(dir=tmp_path))
    assert str(error.value) == message.format(dir=tmp_path)


def test_load_passes_on_what_the_file_raises_and_leaves_no_module_behind(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('in the file')")
    before = set(sys.modules)
    with pytest.raises(RuntimeError, match="in the file"):
        reward.load(f"{tmp_path / 'broken.py'}:f")
    assert set(sys.modules) == before


def test_importing_the_rewards_loads_neither_transformers_nor_sympy():
    program = (
        "import sys; sys.path[:] = sys.argv[1:]; import rft_fn.reward;"
        "print({'transformers', 'math_verify'} & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, *sys.path], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"


def test_parse_reads_weights_from_the_command_line():
    score = reward.parse(["boxed", "format=0.1", "task:addition=-2"])
    total, parts, *_ = score(["p"] * 2, [r"\boxed{72}", r"\boxed{7}"], {"answer": ["72", "72"]})
    assert {name: part.tolist() for name, part in parts.items()} == {
        "boxed": [1.0, 0.0],
        "format": [1.0, 1.0],
        "task:addition": [1.0, 0.0],
    }
    torch.testing.assert_close(total, torch.tensor([-0.9, 0.1]))
    with pytest.raises(ValueError, match="expected NAME=WEIGHT with a number, got 'lots'"):
        reward.parse(["format=lots"])


def test_a_reward_is_named_once_on_the_command_line():
    with pytest.raises(ValueError, match=r"^reward 'exact': expected it once, got it twice"):
        reward.parse(["exact=1", "exact=0.5"])
    with pytest.raises(ValueError, match=r"^reward 'exact': expected it once, got it twice"):
        reward.parse(["exact", "numeric", "exact"])


@pytest.mark.parametrize("weight", ["", "=0.5", "=-1e-1"])
def test_only_a_number_behind_the_last_equals_sign_is_a_weight(tmp_path, weight):
    """Folders of a sweep are called lr=0.1."""
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    (folder / "mine.py").write_text(FILE)
    name = f"{folder / 'mine.py'}:length"
    total, parts, *_ = reward.parse([name + weight])([""], ["ab"], {})
    assert list(parts) == ["length"] and parts["length"].tolist() == [6.0]
    assert total.item() == pytest.approx(6.0 * float(weight[1:] or 1))


@pytest.mark.parametrize(
    ("spec", "name"), [("http://h/s?m=a", "http://h/s?m=a"), ("http://h/s?m=a=2", "http://h/s?m=a")]
)
def test_the_query_of_a_url_is_no_weight(monkeypatch, spec, name):
    monkeypatch.setattr(reward.from_spec, "_NAMED", {name.partition(":")[0]: lambda column: constant(1.0)})
    assert list(reward.parse([spec]).specs.values()) == [name]


def needs_two(prompts, completions, tests, language, verbose=False, **columns):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("components", "names"),
    [
        ({"a": (reward.exact(), 1.0)}, ("answer",)),
        ({"a": (reward.numeric("gold"), 1.0), "b": (reward.exact(), 1.0)}, ("gold", "answer")),
        ({"a": (reward.task("countdown"), 1.0)}, ("answer", "numbers", "target")),
        ({"a": (reward.boxed_format(), 1.0), "b": (reward.tag_format(), 1.0)}, ()),
        ({"a": (needs_two, 1.0)}, ("tests", "language")),
        ({"a": (partial(needs_two, language="C"), 1.0), "b": (reward.exact("tests"), 1.0)}, ("tests",)),
        ({"a": (constant(1.0), 1.0)}, ()),
    ],
)
def test_the_columns_that_a_score_reads(components, names):
    assert reward.columns(reward.weighted(**components)) == names


def test_a_score_of_ones_own_reads_no_columns():
    assert reward.columns(lambda prompts, completions, columns: None) == ()


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("def score(:", ValueError, r"^reward '.*mine.py:score': .*mine.py, line 1: invalid syntax$"),
        ("raise SystemExit(3)", ValueError, r"expected a file that defines functions, got sys.exit\(3\)$"),
        ("import no_such_module", ModuleNotFoundError, "No module named 'no_such_module'"),
    ],
)
def test_a_file_that_does_not_run_is_named(body, kind, message, tmp_path):
    (tmp_path / "mine.py").write_text(body + "\n")
    spec = f"{tmp_path}/mine.py:score"
    with pytest.raises(kind, match=message) as error:
        reward.load(spec)
    notes = " ".join(getattr(error.value, "__notes__", []))
    assert spec in str(error.value) + notes
