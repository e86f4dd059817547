"""Rows and scores of reasoning-gym: of a module of its shape, and of the package where that is installed."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import pytest
from each_case import each

import rft_fn as rft
from rft_fn import reward
from rft_fn.data import PAIRS, load, load_for_training, reasoning_gym, take
from rft_fn.run.reward_task import rewards_of

TOKENIZER = rft.model.load_tokenizer("tiny")


@dataclass
class Sums:
    """The options of the module's task, beside the two that every task has."""

    seed: int = 0
    size: int = 500
    most: int = 10

    def validate(self):
        assert self.most > 0, "most must be positive"


class Dataset:
    """Row i of seed s is row i - 1 of seed s + 1, as of many tasks of the package."""

    def __init__(self, config):
        self.config = config

    def __getitem__(self, i):
        assert i < self.config.size
        n = self.config.seed + i
        return {"question": f"{n}+1=\n", "answer": str(n + 1), "metadata": {"numbers": (n, 1)}}

    def score_answer(self, answer, entry):
        if answer == "loop":
            while True:
                pass
        assert isinstance(entry["metadata"]["numbers"], tuple)
        return 1.0 if int(answer) == int(entry["answer"]) else 0.25


@pytest.fixture
def package(monkeypatch):
    """A module with the shape of reasoning-gym in its place."""
    module, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")

    def create_dataset(name, **options):
        config = factory.DATASETS[name][1](**options)
        config.validate()
        return Dataset(config)

    factory.DATASETS = {"sums": (Dataset, Sums), "ransom_note": (Dataset, Sums)}
    factory.create_dataset = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    yield
    for kept in (reasoning_gym._read, reasoning_gym._block, reasoning_gym._entry):
        kept.cache_clear()


def test_rows_are_those_of_the_seed_and_no_row_is_both_learned_and_held_out(package):
    drawn, unseen = load_for_training("reasoning_gym:sums", TOKENIZER, seed=3)
    again, _ = load_for_training("reasoning_gym:sums", TOKENIZER, seed=3)
    texts = {drawn.prompt(i).text for i in range(2500)}
    assert len(texts) == 2500, "blocks repeat rows"
    assert not texts & {unseen.prompt(i).text for i in range(2500)}
    assert drawn.prompt(2345).columns == again.prompt(2345).columns
    assert drawn.size is None and "seed 4" in unseen.note


def test_the_score_is_that_of_the_package_whatever_the_answer_does(package):
    columns = take(load("reasoning_gym:sums(most=3)", TOKENIZER), 1, seed=0)[0][0].columns
    right = columns["answer"]
    answers = [right, rf"so \boxed{{{right}}}", f"<answer> {right} </answer>", "7", "no number"]
    score = reward.load("reasoning_gym")
    entries = [columns["entry"]] * len(answers)
    assert score(prompts=[""] * 5, completions=answers, entry=entries) == [1, 1, 1, 0.25, 0]


@pytest.mark.slow
def test_an_answer_that_its_scorer_never_ends_with_costs_the_others_nothing(package, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "_SECONDS", 1)
    columns = load("reasoning_gym:sums", TOKENIZER).prompt(0).columns
    scores = reasoning_gym.score_all([columns["answer"], "loop"], [columns["entry"]] * 2)
    assert scores == [1.0, 0.0]


def test_it_is_the_reward_of_its_rows_where_none_is_named():
    cfg = type("Cfg", (), {"reward": ()})()
    assert rewards_of(cfg, ["reasoning_gym:sums=0.3", "reasoning_gym:ransom_note"]) == ("reasoning_gym",)
    assert rewards_of(cfg, ["addition:2", "addition:3=0.5"]) == ("task:addition",)
    with pytest.raises(ValueError, match="reward: expected one for the tasks addition, reverse, got none"):
        rewards_of(cfg, ["reverse:1", "addition:2"])


@each(
    "text, message",
    [
        (
            "reasoning_gym",
            "data: expected reasoning_gym:TASK, as reasoning_gym:leg_counting, got 'reasoning_gym'",
        ),
        ("reasoning_gym:sum", "got 'sum'; did you mean sums?"),
        ("reasoning_gym:sums(most=0)", "data: reasoning_gym:sums(most=0): most must be positive"),
        ("reasoning_gym:sums(least=1)", "expected one of most, got 'least'"),
        ("reasoning_gym:sums(size=9)", "expected no size, as rows have no end and --seed draws them, got 9"),
        ("reasoning_gym:sums(most=x)", "expected reasoning_gym:TASK(OPTION=VALUE, ...)"),
        ("reasoning_gym:ransom_note", "expected PYTHONHASHSEED to be set, as to 0"),
    ],
)
def test_what_is_refused(package, monkeypatch, text, message):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError) as error:
        load(text, TOKENIZER)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rows_have_no_wrong_answers(package):
    with pytest.raises(ValueError, match="the row has no column 'chosen'"):
        load("reasoning_gym:sums", TOKENIZER, kind=PAIRS)


def test_the_extra_is_named_where_the_package_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    reasoning_gym._read.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rft-fn\[reasoning-gym\]'"):
        load("reasoning_gym:leg_counting", TOKENIZER)


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
@pytest.mark.filterwarnings("ignore:data. 0")
def test_tasks_of_the_package_score_their_own_answers():
    for name in (
        "leg_counting(max_animals=3)",
        "chain_sum",
        "basic_arithmetic",
        "word_sorting",
        "pool_matrix",
    ):
        rows = reasoning_gym.endless(name, 1)
        made = [rows.row(i) for i in (0, 5, 1005)]
        assert len({row["question"] for row in made}) == 3
        assert reasoning_gym.score_all([row["answer"] for row in made], [x["entry"] for x in made]) == [
            1,
            1,
            1,
        ]
        assert max(reasoning_gym.score_all(["#"] * 3, [x["entry"] for x in made])) < 0.5, name
