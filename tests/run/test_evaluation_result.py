"""What an evaluation measured: by hand, with the protocol, and beside another model on the same draws."""

import json

import pytest
import torch
from test_house import load_script

import rft_fn as rft
from rft_fn.run.evaluation_result import Measured, answer_numbers, answers_of, compared, described, summary


def of(value, answer=None, **protocol):
    answers = None if answer is None else answer_numbers(answer)
    return Measured("task", torch.tensor(value, dtype=torch.float64), answers, {}, protocol)


ONE = of([[1, 1, 0], [0, 0, 1], [0, 0, 0]], [["4", " 4", "5"], ["1", "2", "3"], ["", "7", "[invalid]"]])
OTHER = of([[1, 0, 0], [0, 0, 0], [0, 0, 0]])


def test_the_numbers_of_an_evaluation_by_hand():
    assert ONE.answer.tolist() == [[0, 0, 1], [0, 1, 2], [-1, 0, -1]]
    found = summary(ONE, (1, 2, 3), 0, model="tiny")
    assert found["result"] == pytest.approx(
        {
            "avg@3": 3 / 9,
            "pass@1": 3 / 9,
            "pass@2": (1 + 2 / 3) / 3,
            "pass@3": 2 / 3,
            "maj@2": 1 / 3,
            "maj@3": (1 + 1 / 3) / 3,
            "questions": 3,
        }
    )
    for name, (low, high) in found["interval"].items():
        assert 0 <= low < found["result"][name] < high <= 1, name
    assert found["protocol"].keys() >= {"model", "digest", "seed", "samples per problem", "rft_fn"}
    assert len(found["protocol"]["digest"]) == 16


def test_values_between_0_and_1_have_no_pass_at_k():
    assert list(of([[0.5, 1.0], [0.0, 1.0]], [["a", "b"], ["a", "a"]]).each((1, 2))) == ["avg@2"]


def test_two_models_are_compared_problem_by_problem():
    """The interval of the differences is that of pairs: equal models have no noise between them."""
    found = compared(ONE, OTHER, (1, 2), 0)
    assert found.keys() == {"avg@3", "pass@1", "pass@2"}
    gain, low, high = found["avg@3"]
    assert gain == pytest.approx(2 / 9) and 0 <= low < gain < high
    many = of([[1.0], [0.0]] * 200)
    gain, low, high = compared(many, many, (1,), 0)["pass@1"]
    assert gain == 0 and -0.01 < low < 0 < high < 0.01
    with pytest.raises(ValueError, match="beside: expected the same 400 problems for both models, got 3"):
        compared(many, OTHER, (1,), 0)


def test_a_protocol_is_a_line_for_each_thing():
    lines = described({"system": None, "first prompt": "a\n" * 100, "stop": ["\n"]})
    assert lines[0] == "  system: null" and len(lines) == 3
    assert all("\n" not in line and len(line) < 140 for line in lines)


@pytest.mark.parametrize(
    ("spec", "texts", "numbers"),
    [
        ("numeric", ["so 7", "7.0", "none", "8 or 7"], [[0, 0, -1, 0]]),
        ("boxed", [r"\boxed{7}", "7", r"\boxed{8}", r"\boxed{07}"], [[0, -1, 1, 0]]),
        ("exact", ["a", "a ", "b", ""], [[0, 0, 1, -1]]),
        ("math", [r"\boxed{x}", "is 3", "3.", ""], [[0, 1, 1, -1]]),
        ("task:addition", ["7", r"\boxed{7}", "8", "9"], [[0, 0, 1, 2]]),
    ],
)
def test_rewards_that_compare_answers_say_what_they_read(spec, texts, numbers):
    assert answers_of(rft.reward.load(spec), texts, 4).tolist() == numbers


def test_a_reward_of_a_form_has_no_answer():
    assert answers_of(rft.reward.load("format"), ["a", "b"], 2) is None


def test_evaluate_shows_both_models_and_the_protocol(tmp_path, capsys):
    evaluate = load_script("evaluate")
    out = tmp_path / "out.json"
    how = {"data": ("sort_digits:1",), "count": 12, "group": 3, "k": (1, 3), "temperature": 1.0}
    evaluate.main(evaluate.Config(**how, beside="tiny", out=str(out)))
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    for name in ("model", "digest", "template", "system", "extraction", "temperature", "max_new", "seed"):
        assert name in found["protocol"] and f"  {name}: " in shown
    assert found["protocol"]["max_new"] == 6 and "reward task:sort_digits >= 1" in shown
    assert found["result"] == found["beside"]["result"] and found["difference"]["pass@3"][0] == 0
    assert found["result"].keys() >= {"avg@3", "pass@1", "pass@3", "maj@3", "truncated", "standard_error"}
    rows = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert len(rows) == 72 and [row["response"] for row in rows[:36]] == [
        row["response"] for row in rows[36:]
    ]
