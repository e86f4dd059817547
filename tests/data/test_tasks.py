"""Built-in tasks: rows are functions of (seed, index, level), verifiers are exact, chance is as stated."""

import base64
import io
import json
import math
import os
import random
import subprocess
import sys
import wave
from fractions import Fraction

import numpy as np
import pytest
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rft_fn.data.tasks import ALPHABET, TASKS, get_task

NAMES = tuple(TASKS)
LEVELS = (1, 2, 4)
SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)


def rows(name, level, count=200, seed=7):
    return [TASKS[name].generate(seed, index, level) for index in range(count)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_verifier_accepts_the_answer_of_every_row_with_any_whitespace_around_it(name, level):
    for row in rows(name, level):
        assert TASKS[name].verify(row["answer"], row) == 1.0
        assert TASKS[name].verify(f"\n  {row['answer']}\t", row) == 1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_verifier_rejects_what_is_not_the_answer(name, level):
    for row in rows(name, level):
        answer = row["answer"]
        for wrong in (
            "",
            "?",
            f"{answer}0",
            f"0{answer}",
            f"{answer}.",
            f"= {answer}",
            f"{answer} {answer}",
            answer[:-1],
        ):
            assert TASKS[name].verify(wrong, row) < 1.0, (wrong, row)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_text_and_the_short_form_keeps_to_the_alphabet(name):
    for level in LEVELS:
        for row in rows(name, level):
            assert all(isinstance(value, str) for value in row.values())
            assert row["short"].endswith("=") and set(row["short"] + row["answer"]) <= set(ALPHABET)
            assert row["level"] == str(level) and row["question"][-1] in "?."
    assert len(set(ALPHABET)) == len(ALPHABET)


@pytest.mark.parametrize("name", NAMES)
def test_rows_depend_on_seed_index_and_level_and_on_nothing_else(name):
    generate = TASKS[name].generate
    state = random.getstate()
    forwards = [generate(3, index, 2) for index in range(50)]
    random.seed(0)
    assert [generate(3, index, 2) for index in reversed(range(50))] == forwards[::-1]
    random.setstate(state)
    generate(3, 0, 2)
    assert random.getstate() == state, "a generator touched the global random state"
    for other in (
        [generate(4, index, 2) for index in range(50)],
        [generate(3, index + 50, 2) for index in range(50)],
    ):
        assert sum(a == b for a, b in zip(forwards, other, strict=True)) < 5


def test_another_process_draws_the_same_rows():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "123"}
    program = (
        "import json; from rft_fn.data.tasks import TASKS;"
        "print(json.dumps({n: [t.generate(5, i, 3) for i in (9, 0, 4)] for n, t in TASKS.items()}))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert json.loads(out.stdout) == {n: [t.generate(5, i, 3) for i in (9, 0, 4)] for n, t in TASKS.items()}


def test_the_rows_of_a_seed_never_change():
    """A new version of the library or of Python must not silently change a benchmark."""
    assert [TASKS[name].generate(0, 0, 1)["short"] for name in NAMES] == GOLDEN


GOLDEN = ["2+3=", "reverse:wyh=", "sort:744=", "count:k,kifykk=", "make:2,15,1,13=", "red=", "pitch="]


@pytest.mark.parametrize("level", (1, 2, 3))
@pytest.mark.parametrize("name", NAMES)
def test_chance_is_what_the_guesser_scores(name, level):
    task, draw, count = TASKS[name], random.Random(level), 2000
    problems = [task.generate(11, index, level) for index in range(count)]
    scores = [task.verify(task.guess(draw, row), row) for row in problems]
    mean, chance = sum(scores) / count, task.chance(level)
    # A score in [0, 1] varies by at most what a coin of the same mean does: four standard errors, and half as
    # much again for countdown, whose chance is an estimate too.
    error = math.sqrt(chance * (1 - chance) / count)
    assert abs(mean - chance) < 4 * error * (1.5 if name == "countdown" else 1)
    assert 0 < chance <= 0.5


def test_addition_operands_are_below_the_bound_and_reach_it():
    operands = [int(n) for row in rows("addition", 2, 400) for n in row["short"][:-1].split("+")]
    assert min(operands) == 0 and max(operands) == 99
    assert all(
        sum(map(int, row["short"][:-1].split("+"))) == int(row["answer"]) for row in rows("addition", 3)
    )


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right_by_another_computation(level):
    for row in rows("reverse", level):
        word = row["short"].removeprefix("reverse:").removesuffix("=")
        assert len(word) == level + 2 and row["answer"] == "".join(reversed(word))
    for row in rows("sort_digits", level):
        digits = row["short"].removeprefix("sort:").removesuffix("=")
        assert len(digits) == level + 2
        assert row["answer"] == "".join(d * digits.count(d) for d in "0123456789")
    for row in rows("letter_count", level):
        letter, word = row["short"].removeprefix("count:").removesuffix("=").split(",")
        assert len(word) == 2 * level + 4 and row["answer"] == str(word.count(letter))


def pixels(uri):
    content = base64.b64decode(uri.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)))


def squares(uri, colour):
    """The cells of 4 x 4 pixels whose first pixel is mostly of that colour."""
    cells = pixels(uri)[::4, ::4]
    return int(((cells.argmax(-1) == ["red", "green", "blue"].index(colour)) & (cells.max(-1) > 150)).sum())


def test_squares_are_as_many_as_the_answer_says():
    for row in rows("count_squares", 1, 60):
        assert squares(row["image"], row["short"][:-1]) == int(row["answer"])
    for row in rows("count_squares", 3, 60):
        counts = [squares(uri, row["short"][5:-1]) for uri in json.loads(row["images"])]
        assert counts.count(max(counts)) == 1 and counts.index(max(counts)) == int(row["answer"]) - 1


def samples(uri):
    with wave.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768


def test_tones_have_the_pitch_and_beeps_the_number_of_the_answer():
    for row in rows("tone", 1, 60):
        x = samples(row["audio"])
        hertz = np.abs(np.fft.rfft(x)).argmax() * 16000 / len(x)
        assert round(np.log(hertz / 300) / np.log(1.5)) == int(row["answer"]) - 1
    for row in rows("tone", 3, 60):
        loud = np.abs(samples(row["audio"])).reshape(-1, 160).max(1) > 0.15
        assert (np.diff(loud.astype(int), prepend=0) == 1).sum() == int(row["answer"])


def test_letter_count_has_no_answer_that_is_better_than_chance():
    answers = [row["answer"] for row in rows("letter_count", 2, 4000)]
    assert set(answers) == set("01234")
    for answer in "01234":
        assert abs(answers.count(answer) / 4000 - 1 / 5) < 4 * math.sqrt(0.16 / 4000)


REVERSE = {"question": "", "short": "reverse:abcd=", "answer": "dcba", "level": "2"}


@each(
    ("text", "score"),
    [
        ("dcba", 1.0),
        ("dcbx", 0.375),
        ("abcd", 0.0),
        ("dc", 0.25),
        ("dcbaa", 0.4),  # padding costs: 4 of 5
        ("dcba" * 10, 0.05),
        ("xdcba", 0.0),  # shifted by one
        ("", 0.0),
    ],
)
def test_partial_credit_is_half_the_share_of_right_positions(text, score):
    assert TASKS["reverse"].verify(text, REVERSE) == pytest.approx(score)


@SETTINGS
@given(st.text(alphabet="abcdx ", max_size=12))
def test_partial_credit_never_reaches_the_exact_score(text):
    score = TASKS["reverse"].verify(text, REVERSE)
    assert score == 1.0 if text.strip() == "dcba" else 0.0 <= score < 0.5


COUNTDOWN = {"numbers": "2,3,8,8", "target": "24", "level": "2"}


@each(
    ("text", "score"),
    [
        ("(8-2)*(8/2)", 0.0),  # a number twice, another not at all
        ("8/(3-8/2)", 0.1),  # legal, and -8
        ("8*3*(8-2)/6", 0.0),
        ("8 * 3 * 2 - 8 * 3", 0.0),
        ("(8+8)*3/2", 1.0),
        (" ( 8 + 8 ) * 3 / 2\n", 1.0),
        ("8/2*3+8", 0.1),  # legal, and 20
        ("8/(2+3-8)+8", 0.0),
        ("3/(8-8)+2", 0.0),  # divides by zero
        ("(8+8)*3/2 = 24", 0.0),
        ("-8-8+3*2", 0.0),  # a sign is no operation on two numbers
        ("8**2+3+8", 0.0),
        ("8//3+2+8", 0.0),
        ("(8+8)*3.0/2", 0.0),
        ("(8+8)*03/2", 0.0),
        ("8(8+3)2", 0.0),
        ("24", 0.0),
        ("", 0.0),
        ("8+", 0.0),
        ("__import__('os').getcwd()", 0.0),
        ("(8+8)*3/2#", 0.0),
        ("８+8*3/2", 0.0),  # a full-width digit
        ("(" * 200 + "8" + ")" * 200, 0.0),
        ("1" + "+1" * 5000, 0.0),
        ("9" * 6000, 0.0),
        ("\0", 0.0),
    ],
)
def test_countdown_parses_safely_and_wants_each_number_once(text, score):
    assert TASKS["countdown"].verify(text, COUNTDOWN) == score


def test_countdown_is_exact_where_floats_are_not():
    row = {"numbers": "1,3,3,2", "target": "1", "level": "2"}
    assert TASKS["countdown"].verify("1/3*3/2*2", {**row, "numbers": "1,3,3,2,2"}) == 1.0
    assert TASKS["countdown"].verify("8/(3-8/3)", {"numbers": "8,3,8,3", "target": "24"}) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_countdown_problems_are_in_the_stated_range(level):
    for row in rows("countdown", level):
        numbers = [int(n) for n in row["numbers"].split(",")]
        assert len(numbers) == level + 2 and all(1 <= n <= 25 for n in numbers)
        assert 1 <= int(row["target"]) <= 100
        assert Fraction(eval(row["answer"].replace("/", "*Fraction(1)/"), {"Fraction": Fraction})) == int(
            row["target"]
        )
        assert row["short"] == f"make:{row['target']},{row['numbers']}="


@SETTINGS
@given(st.text(max_size=60), st.sampled_from(NAMES))
def test_verifiers_score_any_text_within_bounds_and_raise_nothing(text, name):
    assert 0.0 <= TASKS[name].verify(text, TASKS[name].generate(0, 1, 2)) <= 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: get_task("chess"),
            "task: expected one of addition, reverse, sort_digits, letter_count, countdown, count_squares, "
            "tone, got 'chess'",
        ),
        (lambda: TASKS["addition"].generate(0, 0, 0), "level: expected an integer in [1, 1000], got 0"),
        (lambda: TASKS["addition"].generate(0, 0, 1001), "level: expected an integer in [1, 1000], got 1001"),
        (lambda: TASKS["countdown"].generate(0, 0, -1), "level: expected an integer in [1, 1000], got -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_the_table_is_keyed_by_the_names_of_its_tasks():
    assert all(get_task(name).name == name for name in NAMES)
