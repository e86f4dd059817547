"""Rubrics: each criterion by itself, with weights, vetoes, partial credit and agreement."""

import asyncio
import json

import chats
import judges
import pytest
import torch

from rft_fn import reward
from rft_fn.reward import forms, verdicts

TOKENIZER = chats.tokenizer(chats.CHATML, end="<|im_end|>")
RUBRIC = [
    {"name": "right", "text": "The sum is right.", "weight": 3},
    {"name": "polite", "text": "It says please."},
    {"name": "short", "text": "At most four words.", "weight": 0, "veto": 1},
]
TEXTS = ["it is 7 please", "it is 7", "it is 8 please", "it is 7 please and 7 again"]
PARTS = ["right", "polite", "short"]


def honest(criterion, response):
    words = response.split()
    return {
        "The sum is right.": 2 * ("7" in words),
        "It says please.": 2 * ("please" in words),
        "At most four words.": 2 if len(words) <= 4 else 1,
    }[criterion]


def judge(said, *, asked=None, **options):
    """A reward by a judge that says said(criterion, response, sample) of a question."""

    def answer(question, key, j):
        criterion = question.split("<criterion>\n")[-1].split("\n</criterion>")[0]
        response = question.split("<response>\n")[-1].split("\n</response>")[0]
        if asked is not None:
            asked.append((criterion, response, key, j))
        x = said(criterion, response, j)
        return x if isinstance(x, str) else f"<score>{x}</score>"

    return reward.generative_by_name(judges.engine(answer, TOKENIZER), TOKENIZER, by="rubric", **options)


def scored(fn, rubric=RUBRIC, texts=TEXTS, **more):
    score = reward.weighted(judge=(fn, 1.0))
    return score(["3+4?"] * len(texts), texts, {"rubric": [rubric] * len(texts)}, **more)


@pytest.mark.parametrize("rubric", [RUBRIC, json.dumps(RUBRIC)])
def test_a_reward_is_the_weighted_mean_and_each_criterion_a_metric(rubric):
    """By hand: wrong and polite is 1 / 4; the last text is long, which its criterion forbids."""
    found = scored(judge(lambda c, r, j: honest(c, r)), rubric)
    assert found.total.tolist() == [1, 0.75, 0.25, 0]
    columns = {name: found.metrics[f"judge/{name}"].tolist() for name in [*PARTS, "vetoed"]}
    assert columns == {
        "right": [1, 1, 0, 1],
        "polite": [1, 0, 1, 1],
        "short": [1, 1, 1, 0.5],
        "vetoed": [0, 0, 0, 1],
    }
    assert found.extra["judge/said"][1].splitlines()[1] == "polite: <score>0</score>"


def test_criteria_are_those_of_each_row():
    rubrics = [[RUBRIC[0]], [RUBRIC[1], RUBRIC[2]]]
    score = reward.weighted(judge=(judge(lambda c, r, j: honest(c, r)), 1.0))
    found = score(["3+4?"] * 2, TEXTS[:2], {"rubric": rubrics})
    assert found.total.tolist() == [1, 0] and reward.columns(score) == ("rubric",)
    assert found.metrics["judge/right"][0] == 1 and found.metrics["judge/right"][1].isnan()


def test_votes_agree_or_not_on_each_criterion():
    """Two of three samples see the wrong sum as right: its verdict is theirs, and says so."""
    asked = []
    fn = judge(
        lambda c, r, j: 2 * (j > 0) if c == "The sum is right." else honest(c, r),
        votes=3,
        vote="majority",
        asked=asked,
    )
    found = scored(fn, texts=["it is 8"], keys=[5])
    assert found.total.tolist() == [0.75]
    assert found.metrics["judge/right/agreement"][0] == pytest.approx(2 / 3)
    assert found.metrics["judge/polite/agreement"].tolist() == [1]
    assert len({key for _, _, key, _ in asked}) == 3  # a stream for each criterion
    nan = float("nan")
    shares = verdicts.agreement(torch.tensor([[1, 1, 0.5, nan], [nan] * 4], dtype=torch.float64))
    assert shares[0] == pytest.approx(2 / 3) and shares[1].isnan()


@pytest.mark.parametrize(("unparsable", "worth"), [(0.0, [0.0]), (-1.0, [-1.0]), (None, [None])])
def test_a_criterion_without_a_verdict_is_no_verdict_of_0(unparsable, worth):
    mute = judge(lambda c, r, j: "who knows" if "please" in c else 2, unparsable=unparsable, patience=9)
    (found,) = mute(prompts=["p"], completions=["x"], rubric=[RUBRIC])
    assert [found["score"]] == worth and found["right"] == 1 and "polite" not in found
    with pytest.raises(
        ValueError, match="expected a verdict on each criterion of completion 0, got none on polite"
    ):
        judge(lambda c, r, j: "?" if "please" in c else 2, unparsable="error")(
            prompts=["p"], completions=["x"], rubric=[RUBRIC]
        )


def test_a_judge_on_servers_is_awaited():
    engine = judges.engine(lambda *_: "<score>2</score>", TOKENIZER)
    form = forms.rating(criteria=reward.rubric_judge.CRITERION, high=2)
    fn = reward.by_criterion(reward.generative(engine, TOKENIZER, form=form, unparsable=None, served=True))
    assert fn.asynchronous
    waiting = fn(prompts=["p"], completions=["x"], rubric=[RUBRIC])

    async def awaited():
        return await waiting

    assert asyncio.run(awaited())[0]["score"] == 1


def test_faults_that_one_number_hides():
    """A judge that likes confidence: its one number is moved, the criterion of what is wrong is not."""

    def fooled(criterion, response, j):
        if criterion in ("The sum is right.", "It says please.", "At most four words."):
            return honest(criterion, response)
        return 10 if "surely" in response else 5

    engine = judges.engine(lambda q, *_: f"<score>{fooled('', q, 0)}</score>", TOKENIZER)
    one = reward.generative_by_name(engine, TOKENIZER)
    texts = ["it is 7", "surely it is 8"]
    single = one(prompts=["3+4?"] * 2, completions=texts)
    by_criterion = scored(judge(fooled), texts=texts).total
    assert single[1] > single[0] and by_criterion[1] < by_criterion[0]


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ([], "column 'rubric', completion 0: expected a list of criteria"),
        ("be nice", "expected"),
        ([{"name": "a"}], "expected criteria with a text and a name that no other has"),
        ([{"name": "score", "text": "x"}], "expected criteria with a text and a name that no other has"),
        (
            [{"name": "a", "text": "x"}, {"name": "a", "text": "y"}],
            "expected criteria with a text and a name",
        ),
        ([{"name": "a", "text": "x", "weight": -1}], "a: expected a weight from 0 and a veto in"),
        ([{"name": "a", "text": "x", "weight": 0}], "expected a criterion with a weight above 0, got none"),
    ],
)
def test_rubrics_that_are_none_are_refused(cell, line):
    with pytest.raises(ValueError, match=line):
        judge(lambda c, r, j: 2)(prompts=["p"], completions=["x"], rubric=[cell])


def test_a_form_without_the_place_is_refused():
    with pytest.raises(ValueError, match=r"form: expected one with the place \{criterion\}"):
        judge(lambda c, r, j: 2, criteria="Is it good?")
