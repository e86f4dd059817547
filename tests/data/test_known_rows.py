"""Rows of data sets that many have: read, or answered with the options that read them."""

import chats
import pytest

from rft_fn import reward
from rft_fn.data import prompts
from rft_fn.data.pairs import pairs_from_rows
from rft_fn.data.points import points_from_rows
from rft_fn.data.ranked import lists_from_rows


@pytest.fixture(scope="module")
def tokenizer():
    return chats.tokenizer(chats.CHATML)


STEER = {"prompt": "Hi?", "response": "Ho.", "helpfulness": 3, "correctness": 2, "coherence": 4}
ASKED = [{"role": "user", "content": "What?"}]
STEER3 = {"context": ASKED, "response1": "a", "response2": "b", "overall_preference": -2}
TRIED = [
    {"model": "x", "response": "good", "overall_score": 7.5},
    {"model": "y", "response": "bad", "overall_score": 5.0},
    {"model": "z", "response": "same as bad", "overall_score": 5.0},
]
ULTRA = {"instruction": "Say it", "models": ["x", "y", "z"], "completions": TRIED}
SOLVED = "So it is \\boxed{7}."
NUMINA = {
    "problem": "Find 3 + 4.", "solution": SOLVED,
    "messages": [*ASKED, {"role": "assistant", "content": SOLVED}],
}  # fmt: skip
DAPO = {"data_source": "math_dapo", "prompt": ASKED, "reward_model": {"ground_truth": "34", "style": "rule"}}
ANSWERED = [
    (
        pairs_from_rows, STEER, {},
        "train_rm.py --kind points --completion '{response}' --heads helpfulness correctness coherence "
        "--loss mse",
    ),
    (pairs_from_rows, STEER3, {}, "--messages context chosen rejected"),
    (pairs_from_rows, ULTRA, {}, "train_rm.py --kind lists --template '{instruction}'; pairs are"),
    (
        prompts.from_rows, NUMINA, {"messages": ("messages",)},
        "got assistant; the messages end with the answer: --template '{problem}' --reward math:solution",
    ),
    (
        prompts.from_rows, DAPO, {"messages": ("prompt",), "columns": ("answer",)},
        "--messages prompt --reward math:reward_model.ground_truth",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("read", "row", "options", "said"), ANSWERED)
def test_rows_of_others_are_answered_with_options(read, row, options, said, tokenizer):
    with pytest.raises(ValueError) as error:
        read([row], tokenizer, **options)
    assert said in str(error.value)


def test_with_these_options_the_rows_are_read(tokenizer):
    labels = ("helpfulness", "correctness", "coherence")
    points = points_from_rows([STEER], tokenizer, template="{prompt}", completion="{response}", labels=labels)
    assert points.prompt(0).labels == (3.0, 2.0, 4.0)
    ranked = lists_from_rows([ULTRA], tokenizer, template="{instruction}")
    assert ranked.prompt(0).ranks == (0, 1, 1)
    assert prompts.from_rows([NUMINA], tokenizer, template="{problem}").prompt(0).text
    assert prompts.from_rows([DAPO], tokenizer, messages=("prompt",)).prompt(0).columns == DAPO
    for spec, row, right in (("math:solution", NUMINA, "7"), ("math:reward_model.ground_truth", DAPO, "34")):
        columns = {name: [cell] * 2 for name, cell in row.items()}
        score = reward.parse([spec])
        total = score(["q"] * 2, [f"\\boxed{{{right}}}", "\\boxed{1}"], columns).total
        assert total.tolist() == [1.0, 0.0]
