"""Each measured number of the README, computed again from the file that a run or a script wrote."""

import json
import re
import sys

import conformance
import pytest
from each_case import each
from test_readme import BLOCKS, README, ROOT

import rft_fn as rft
from bench import record
from rft_fn.run import options

pytestmark = pytest.mark.docs

RESULTS = ROOT / "docs" / "results"
TEXT = " ".join(README.split())
WORDS = dict(zip(("four", "eight", "ten", "twelve", "fourteen"), ("4", "8", "10", "12", "14"), strict=True))
NUMBER = r"(\d[\d.]*\d|\d|" + "|".join(WORDS) + ")"


def read(name):
    return json.loads((RESULTS / name).read_text())


def column(name, key):
    """The values of a metric over the steps of a run that has it."""
    return [row[key] for row in record.rows_of(RESULTS / name) if row.get(key) is not None]


def first_and_last(values):
    """The first step, and the mean of the last ten."""
    return [values[0], sum(values[-10:]) / 10]


def times(lengths):
    """How many times as long as rft_fn TRL takes, on the wall."""
    sys.path.insert(0, str(ROOT / "tests" / "bench" / "step"))
    import report

    sys.path.pop(0)
    lines = [report.parse(line) for line in report.ratios(read("step/step.json"), lengths)]
    (found,) = [x["middle"] for x in lines if x["over"] == "trl" and x["kind"] == "on the wall"]
    return found


def tiny():
    reward = first_and_last(column("tiny/run.json", "reward/mean"))
    chance = rft.data.TASKS["sort_digits"].chance(1)
    return [*reward, column("tiny/run.json", "eval/mean")[-1], chance]


def tiny_time():
    found = read("tiny/run.json")
    return [found["steps"], found["seconds"]]


def served():
    true = "task:sort_digits"
    greedy = column("rm/policy/run.json", f"eval/{true}")
    sampled = first_and_last(column("rm/policy/run.json", f"reward/{true}"))
    return [*sampled, greedy[0], greedy[-1]]


def warm_up():
    recipe = (ROOT / "Makefile").read_text().partition("\ntrain-smollm2:")[2].partition("define evaluate")[0]
    return [int(re.search(r"train_scripts/sft\.py.*?--steps (\d+)", recipe, re.S)[1])]


def loss_lines():
    return [len(re.search(r"def cispo.*?return [^\n]*\n", BLOCKS[1], re.S)[0].splitlines())]


# what the README says, with # for each number, and the numbers
SAID = {
    "reward of samples rises from # to # (# for greedy answers; guessing scores #)": tiny,
    "Its # steps take # seconds": tiny_time,
    "takes # times as long on two CPU cores (# times": lambda: [times("equal"), times("tailed")],
    "rises from # to # for sampled answers and from # to # for greedy ones": served,
    "measurements of # text families": lambda: [len(read("families.json")["families"])],
    "checks this in # cases": lambda: [len(conformance.CASES)],
    "After # updates in a row": lambda: [rft.strategy.StrategyConfig().max_skips],
    "`--reward-timeout` (# s)": lambda: [options.Reward.reward_timeout],
    "has # ideas from papers": lambda: [len(read("../examples/results.json"))],
    "CISPO in # lines": loss_lines,
    "the form of an answer in # supervised steps": warm_up,
}


@each("said", SAID)
def test_a_number_is_that_of_its_file(said):
    """As far as the README writes it out."""
    form = re.escape(said).replace(r"\#", NUMBER)
    (found,) = re.findall(form, TEXT)
    texts = [found] if isinstance(found, str) else found
    for text, value in zip(texts, SAID[said](), strict=True):
        if text in WORDS:
            text = WORDS[text]
        digits = len(text.partition(".")[2])
        assert f"{value:.{digits}f}" == text, f"{said}: the README has {text}, the file {value}"


def test_every_measured_number_is_looked_at():
    """A number with a decimal point, or with a unit of time, is in one of the sentences above."""
    prose = " ".join(re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|!\[[^]]*\]", " ", README, flags=re.S).split())
    wanted = re.findall(r"(?<![\w.-])(\d+\.\d+|\d+(?= (?:seconds|minutes|ms|GB|%)))(?![\d.]*\d)", prose)
    covered = {n for said in SAID for f in [re.escape(said).replace(r"\#", NUMBER)] for n in numbers(f)}
    limits = {"3.11", "2.11", "5.16", "2.13.0", "2.13"}  # of Python, torch and transformers
    assert set(wanted) - covered - limits == set()


def numbers(form):
    """The numbers of the README's sentence of this form."""
    return re.search(form, TEXT).groups()
