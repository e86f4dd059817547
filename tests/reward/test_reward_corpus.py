"""Reward functions in the conventions of other systems, as their users have them, through the public door."""

import math
import sys

import pytest
import torch
from corpus import make_table
from corpus.cases import CASES
from corpus.harness import LATE, judged, parsed, part_of, sampled, tokenizer
from each_case import each

from rft_fn import collect, reward
from rft_fn.strategy import get_fake_strategy

ABLE = [case for case in CASES if not case.needs]
UNABLE = [case for case in CASES if case.needs]


@pytest.fixture(scope="module", autouse=True)
def path():
    """As it was: beside a package of the corpus lie others with the names of libraries."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def named(case):
    return case.spec.partition("(")[0]


def case_of(function):
    return next(case for case in CASES if case.spec.endswith(f":{function}"))


@pytest.mark.parametrize("case", ABLE, ids=named)
def test_a_public_function_runs_unchanged(case):
    """Each response of each row is worth what the definition says, under the name that the logs have."""
    found = judged(case)
    assert next(iter(found.parts)) == case.name
    want = [[math.nan if x is None else float(x) for x in row] for row in case.values]
    torch.testing.assert_close(found.parts[case.name], torch.tensor(want), rtol=0, atol=2e-7, equal_nan=True)
    assert {f"{case.name}/{name}" for name in case.metrics} <= found.metrics.keys()


@each("case", ABLE, ids=named)
def test_a_right_answer_is_worth_more(case):
    right, wrong, unreadable = part_of(case, judged(case))[0][:3]
    assert right > wrong and right >= unreadable


@pytest.mark.parametrize("case", UNABLE, ids=named)
def test_a_function_that_cannot_run_says_what_it_lacks(case):
    if "GPU" in case.needs and torch.cuda.is_available():
        assert part_of(case, judged(case)) == case.values
        return
    with pytest.raises((ImportError, AssertionError, RuntimeError), match=case.why):
        judged(case)


def test_nearly_all_run():
    """48 of 51 was the aim."""
    assert len(CASES) >= 51 and len(UNABLE) / len(CASES) <= 3 / 51
    assert len({case.spec for case in CASES}) == len(CASES)


def test_a_row_without_a_column_that_is_needed_is_found_before_training():
    """What `reward.columns` names is in the rows of the system's schema, and a row without it is refused."""
    refused = 0
    for case in ABLE:
        score = parsed(case)
        for path in reward.columns(score):
            rows = [without(row, path) for row in case.rows]
            with pytest.raises(ValueError, match=f"no column {path!r}"):
                sampled(case._replace(rows=rows), score)
            refused += 1
    assert refused > 40


def without(row, path):
    """The row without what it has at a path of names."""
    first, _, rest = path.partition(".")
    if not rest:
        return {name: x for name, x in row.items() if name != first}
    return row | {first: without(row[first], rest)}


def test_the_columns_are_those_of_the_system():
    read = {case.system: set() for case in ABLE}
    for case in ABLE:
        read[case.system] |= set(reward.columns(parsed(case._replace(beside=()))))
    assert read["open-r1"] == read["TRL"] == {"solution"} and read["unsloth"] == {"answer"}
    assert read["TinyZero"] == {"reward_model.ground_truth"} and read["OpenRLHF"] == {"label"}
    assert read["LightRFT"] == {"label", "reference"} and read["verifiers"] == {"answer"}
    assert read["verl"] == {"data_source", "reward_model.ground_truth", "extra_info"}


@pytest.mark.parametrize("system", ["open-r1", "verl", "verifiers", "OpenRLHF"])
def test_ranks_judge_their_shares_as_one_process_does(system):
    """Through the engine's door, which every script uses, with its limit of time and its thread."""
    for case in (case for case in ABLE if case.system == system):
        score = parsed(case)
        given = (*sampled(case, score), tokenizer())
        found = collect.gather_and_judge(get_fake_strategy(), score, *given, state=LATE)
        assert part_of(case, found) == part_of(case, judged(case)), case.spec


@pytest.mark.parametrize(("function", "wrong"), [("reward_score/gsm8k.py", 0.25), ("multiply.py", 0.25)])
def test_arguments_in_a_spec_are_those_of_a_compute_score(function, wrong):
    """verl's reward_kwargs: a wrong answer in the form is worth format_score."""
    case = next(case for case in ABLE if function in case.spec)
    found = judged(case._replace(spec=f"{case.spec}(format_score={wrong})"))
    assert found.reward.tolist() == [[1.0, wrong, 0.0]]


def test_a_curriculum_reads_where_the_run_stands():
    """In the first half of the steps a right answer is worth 1, then 2."""
    case = case_of("curriculum_reward")
    early = judged(case, state=reward.TrainerState(global_step=4, max_steps=10))
    late = judged(case, state=reward.TrainerState(global_step=5, max_steps=10))
    assert early.reward.tolist() == [[1, 0, 0]] and late.reward.tolist() == [[2, 0, 0]]


def test_globals_of_a_file_outlive_a_call(capsys):
    """The notebook's counter: it prints at every fifth call."""
    case = case_of("check_numbers")
    score = parsed(case)
    for _ in range(10):
        reward.judge(score, *sampled(case, score), tokenizer())
    assert capsys.readouterr().out.count("*" * 20) == 2


def test_a_function_with_a_loop_of_its_own_leaves_async_ones_theirs():
    """It closes the event loop that it finds, at every call."""
    case = case_of("async_judge_reward")._replace(beside=("trl/custom.py:sync_judge_reward",))
    score = parsed(case)
    for _ in range(3):
        found = reward.judge(score, *sampled(case, score), tokenizer())
        assert found.reward.tolist() == [[2, 0, 0]]


def test_what_a_function_logs_is_a_metric_and_a_column():
    found = judged(case_of("logging_reward_func"))
    assert found.metrics["logging_reward_func/accuracy"].tolist()[0] == pytest.approx([1 / 3] * 3)
    assert found.extra["logging_reward_func/golden_answer"] == ["72"] * 3


def test_a_dict_is_a_score_numbers_and_texts():
    found = judged(next(case for case in ABLE if "math_dapo.py" in case.spec))
    assert found.metrics["compute_score/acc"].tolist() == [[1, 0, 0]]
    assert found.extra["compute_score/pred"] == ["72", "71", "[INVALID]"]


def test_the_table_in_the_docs_is_what_the_corpus_gives():
    text = make_table.DOCS.read_text()
    assert make_table.section(text, make_table.table()) == text
