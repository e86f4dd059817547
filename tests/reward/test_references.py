"""References: read once, as alternatives, numbers, words or mathematics, and told before a run."""

import threading
import time

import pytest

from rft_fn import data, model, reward
from rft_fn.reward import mathematics
from rft_fn.reward.references import Survey


def one(fn, completion, answer):
    return fn(prompts=["p"], completions=[completion], answer=[answer])[0]


SEVENS = [
    "7",
    "7.",
    "7.0",
    "+7",
    "$7$",
    "$7.$",
    r"\(7\)",
    r"\[7\]",
    r"\text{7}",
    "**7**",
    r"\boxed{7}",
    "€7",
    r"\$7",
    "7€",
    "7 apples.",
    "7 apples",
    "7 dollars",
    "$7 dollars",
    "7 km",
    r"7\text{ cm}",
    r"7 \text{ apples}",
    "x=7",
    "x = 7.",
    "2+5=7",
    "3 + 4 = 7",
    "(A) 7",
    "A) 7",
    r"\frac{14}{2}",
    "#### 7",
    "07",
    r"7^\circ",
    "7 cm^2",
    r"7\%",
]  # fmt: skip


@pytest.mark.parametrize("answer", SEVENS)
def test_math_reads_the_usual_ways_to_write_a_reference(answer):
    fn = reward.math()
    assert one(fn, r"So \boxed{7}.", answer) == 1.0
    assert one(fn, r"So \boxed{8}.", answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "box", "score"),
    [
        ("7", "7.", 1),
        ("Evelyn", "Evelyn.", 1),
        ("red", "Red", 1),
        ("cat", "act", 0),
        ("listen", "silent", 0),
        ("John Smith", "Smith John", 0),
        (r"\text{cat}", "cat", 1),
        ("xyz", "zyx", 1),
        ("ab", "ba", 1),  # products
        (r"6.63 \times 10^{-34}", r"1.6 \times 10^{-19}", 0),
        ("1.6e-19", r"1.6\times10^{-19}", 1),
        (r"6.022\times 10^{23}", "6.022e23", 1),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", 0),
        (r"\frac{1}{2^{99}}", "2^{-99}", 1),
        ("0", "10^{-20}", 0),
        ("10^{-20}", "0", 0),
        ("1/3", "0.333333", 1),
        ("1/3", "0.3333", 0),
        ("1234567.5", "1234567.4", 0),
        (r"\pi", "3.14159265", 1),
        (r"5\text{ cm}", r"5\text{ m}", 0),
        ("5 cm", "5 centimeters", 1),
        ("5 cm", "5", 1),
        ("5x", "5", 0),
        ("12 minutes", "12 hours", 0),
        ("5 m/s", "5 m/s", 1),
        ("5 m/s", "5 km/h", 0),
        ("3:30 PM", "3:30 AM", 0),
        ("3:30 PM", "3:30 p.m.", 1),
        ("3:30 PM", "3:30", 1),
        ("3:30 PM", "4:30 PM", 0),
        ("(A) 7", "A", 1),
        ("(A) 7", "B", 0),
        ("A", "(A) 7", 1),
        ("7", "2+5=7", 1),
        ("The answer is 7.", "7", 1),
        ("So the final answer is: **7**.", "7", 1),
        ("Answer: (B) 7", "B", 1),
        ("the solution is x = 3", "3", 1),
        ("Answer", "7", 0),
        ("2 1/2", "2.5", 1),
        ("1 1/2 hours", "1.5", 1),
        ("3 1/4", "31/4", 0),
        ("90\N{DEGREE SIGN}", "90", 1),
        ("7", "2+6=8", 0),
        ("x^2+y^2=7", "7", 0),
        ("y=2x+3", "2x+3", 1),
        ("50%", "0.5", 1),
        ("50", r"50\%", 1),
        ("50%", "5", 0),
        ("1,2", "12", 0),
        ("10,20", "20,10", 1),
        ("2,3,5", "5,3,2", 1),
        ("1,234", "1234", 1),
        (r"\textbf{(C)}\ 12", "12", 1),
        ("C", r"\textbf{(C)}\ 12", 1),
        ("C", r"\text{(C) } \frac{1}{2}", 1),
        ("C", r"\mathrm{(D)}\ 12", 0),
        ("C", "Option C", 1),
        ("option (C)", "C", 1),
        ("1011_2", "1011_{2}", 1),
        ("1011_2", "1011_{3}", 0),
        ("2 hours 30 minutes", "2 hours 45 minutes", 0),
        ("5 feet 3 inches", "5 feet 4 inches", 0),
        (r"7 \text{ cm}^3", r"7 \text{ cm}^2", 0),
        (r"7 \text{ cm}^{2}", "7 cm^2", 1),
        ("3 million", "3", 0),
        ("$3.5 million", "3500000", 1),
        (r"10\text{ million}", r"1 \times 10^7", 1),
        ("50 percent", "0.5", 1),
        ("2024-01-05", "2023-01-04", 0),
        ("2024-01-05", "2024-1-5", 1),
        (r"0.\overline{3}", r"\frac13", 1),
        (r"1.2\overline{3}", "37/30", 1),
        ("1e-07", "10^{-7}", 1),
        ("4 000", "4000", 1),
        (r"12\ 345\,678", "12345678", 1),
        ("4 00", "400", 0),
        ("1 234/567", "1234/567", 0),
        (r"6 \text { or } 7", "7, 6", 1),
        (r"7 \, \text{and} \, 8", "7, 8", 1),
        (r"\operatorname{arctan} 2", r"\arctan 2", 1),
        (r"0.\dot{3}", "1/3", 1),
        (r"\{x \mid x>1\}", r"\{x|x>1\}", 1),
        ("1e-07", "10^{-8}", 0),
        (r"0.\overline{3}", "0.3", 0),
        ("\u00bd", "0.5", 1),
        ("2\u00bd", "2.5", 1),
        ("\u221a12", r"2\sqrt{3}", 1),
        ("x\u00b2", "x^2", 1),
        ("x\u00b2", "x2", 0),
        ("2.5 \u00d7 10\u207b\u00b3", "0.0025", 1),
        ("x \u2264 5", r"x \le 5", 1),
        ("2*pi", r"2\pi", 1),
        ("x**2", "x^2", 1),
        ("US$7", "7", 1),
        ("Rs. 7", "7", 1),
        (r"\boldsymbol{7}", "7", 1),
        (r"\langle 1,2\rangle", r"\langle 1, 2\rangle", 1),
        (r"\langle 1,2\rangle", r"\langle 2, 1\rangle", 0),
        (r"\varnothing", r"\emptyset", 1),
    ],
)  # fmt: skip
def test_math_is_not_taken_in_by_words_units_times_and_small_numbers(answer, box, score):
    assert one(reward.math(), rf"So \boxed{{{box}}}.", answer) == score


def test_a_list_has_alternatives():
    for fn in (reward.exact(), reward.math()):
        assert [one(fn, x, ["Paris", "paris"]) for x in ("Paris", "paris", "London")] == [1, 1, 0]
    assert [one(reward.numeric(), x, ["1", "#### 2"]) for x in ("it is 1", "2", "3")] == [1, 1, 0]
    for cell in ('["7", "8"]', ['["7"]', "8"]):  # as JSON text too, which a text that is compared is not
        assert [one(reward.math(), rf"\boxed{{{x}}}", cell) for x in "789"] == [1, 1, 0]
        assert [one(reward.numeric(), x, cell) for x in "789"] == [1, 1, 0]
    assert [one(reward.exact(), x, '["7"]') for x in ("7", '["7"]')] == [0, 1]
    assert one(reward.math(), r"\boxed{[1,2]}", "[1,2]") == 1
    for cell, got in (([], "an empty list"), ({"a": 1}, "dict"), ([["a"]], "list"), ([None], "NoneType")):
        with pytest.raises(ValueError, match=f"^column 'answer': expected .* got {got}$"):
            one(reward.exact(), "a", cell)


@pytest.mark.parametrize(
    ("cell", "right", "wrong"),
    [
        (4.0, "4", "4.1"),
        (4.0, "4.0", "40"),
        (1e-05, "0.00001", "0.0001"),
        (1e-05, "1e-5", "1"),
        (0.1 + 0.2, "0.3", "0.31"),
        (1e22, "10000000000000000000000", "1"),
        (7, "7", "8"),
        (True, "True", "1"),
    ],
)  # fmt: skip
def test_a_number_of_the_data_has_no_notation(cell, right, wrong):
    assert one(reward.exact(), right, cell) == 1.0 and one(reward.exact(), wrong, cell) == 0.0
    if not isinstance(cell, bool):
        assert one(reward.numeric(), f"it is {right}", cell) == 1.0
        assert one(reward.numeric(), f"it is {wrong}", cell) == 0.0
        assert one(reward.math(), rf"\boxed{{{right}}}", cell) == 1.0


def test_a_text_is_compared_exactly_where_exact_is_asked_for():
    assert one(reward.exact(), "4", "4.0") == 0.0
    assert one(reward.numeric(), "0.1" + "0" * 20 + "1", "0.1") == 0.0


def test_math_has_its_limit_in_every_thread():
    found = []

    def ask():
        start = time.perf_counter()
        found.append(mathematics.equal("72", "10^{10^{10}}", boxed=True, seconds=1))
        found.append(mathematics.equal("x+1", "1+x", boxed=True, seconds=60))
        found.append(time.perf_counter() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(300)
    assert found[:2] == [False, True]


def formulas(count):
    """Questions that need mathematics, half of them with the right answer."""
    made = [(f"x^{i % 9}+{i}", f"{i + i % 2}+x^{i % 9}", True) for i in range(2, count + 2)]
    return [mathematics.Question(*x) for x in made]


def test_many_different_answers_are_compared_by_children_and_alike(monkeypatch):
    questions = formulas(30)
    alone = mathematics.equal_all(questions, seconds=60)
    assert 0 < sum(alone) < 30
    asked = []
    monkeypatch.setattr(mathematics, "_FEW", 20)
    ask = mathematics._children.ask
    monkeypatch.setattr(mathematics._children, "ask", lambda x, *rest: asked.append(list(x)) or ask(x, *rest))
    assert mathematics.equal_all([*questions, *questions], seconds=60) == [*alone, *alone]
    assert asked == [questions]  # equal ones once
    assert mathematics.equal_all(questions[:20], seconds=60) == alone[:20] and len(asked) == 1
    fn = reward.math()
    completions = [rf"so \boxed{{{x.answer}}}" for x in questions]
    scores = fn(prompts=completions, completions=completions, answer=[["0", x.reference] for x in questions])
    assert scores == [float(x) for x in alone] and len(asked) == 2


def test_the_limits_of_hard_answers_do_not_add_up(monkeypatch):
    """A call has a limit of its own: what is not compared by then scores 0, and the next call goes on."""
    mathematics.equal_all(formulas(1), seconds=60)
    hard = [mathematics.Question(f"{i}", rf"10^{{10^{{{i}}}}}", True) for i in range(11, 61)]
    for few in (100, 0):
        monkeypatch.setattr(mathematics, "_FEW", few)
        monkeypatch.setattr(mathematics, "_MINUTE", 2.0)
        monkeypatch.setattr(mathematics, "_A_QUESTION", 0.0)
        start = time.perf_counter()
        with pytest.warns(UserWarning, match=r"reward 'math': \d+ of 50 different answers were not compared"):
            assert not any(mathematics.equal_all(hard, seconds=1))
        assert time.perf_counter() - start < 50
        monkeypatch.setattr(mathematics, "_MINUTE", 60.0)
        assert mathematics.equal_all(formulas(4), seconds=60)


ROWS = [
    {"question": "a", "answer": "7 apples."},
    {"question": "b", "answer": "8"},
    {"question": "c", "answer": r"\frac{1}{"},
    {"question": "d", "answer": ["9", "nine"]},
]


def survey_of(rows, *specs):
    found = Survey(reward.parse(specs))
    tokenizer = model.load_tokenizer("tiny")
    data.from_rows(rows, tokenizer, template="{question}", survey=found.see)
    return found


def test_unreadable_references_are_told_with_their_rows():
    found = survey_of(ROWS, "math")
    (line,) = found.unreadable()
    assert line.startswith("reward 'math': 1 of 4 references read as nothing that can be read")
    assert "row 3" in line and r"\\frac{1}{" in line and not found.refused()
    assert found.shares() == [
        "reward 'math': 4 references of 'answer': 25 % a number in words or marks, 25 % a number, "
        "25 % nothing that can be read, 25 % alternatives"
    ]


def test_references_that_would_stop_a_run_stop_it_before():
    rows = [*ROWS, {"question": "e", "answer": {"a": 1}}]
    line = survey_of(rows, "numeric").refused()
    assert line.startswith("reward 'numeric': 2 of 5 references cannot be used: ")
    assert "'nine'" in line and "row 5" in line and "got dict" in line


def test_a_reward_by_a_column_reads_the_references_of_its_rows():
    rows = [{"question": "a", "answer": "1", "label": "x"}, {"question": "b", "answer": "two", "label": "y"}]
    found = survey_of(rows, "[label=x]numeric", "[label=y]exact")
    assert not found.refused()
    assert [line.split(": ", 1)[1] for line in found.shares()] == [
        "1 references of 'answer': 100 % a number",
        "1 references of 'answer': 100 % text",
    ]
