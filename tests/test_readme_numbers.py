"""Each measured number of the README, and of pages that say the same, computed again from its file."""

import json
import re
import sys

import conformance
import pytest
from pages import as_module
from test_readme import BLOCKS, README, ROOT

import rft_fn as rft
from bench import record
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig

pytestmark = pytest.mark.docs

RESULTS = ROOT / "docs" / "results"
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


def sums():
    """Percent of sampled answers before GRPO and after it."""
    pair = as_module(ROOT / "tests" / "bench" / "rise.py").sums().stages["sampled"]
    return [100 * x.right / x.total for x in pair]


def calculations():
    """The same of GSM8K's calculations."""
    pair = (
        as_module(ROOT / "tests" / "bench" / "gsm8k_rise.py").rise(read("gsm8k_rise.json")).stages["sampled"]
    )
    return [100 * x.right / x.total for x in pair]


def warm_up():
    recipe = (ROOT / "Makefile").read_text().partition("\ntrain-smollm2:")[2].partition("define evaluate")[0]
    return [int(re.search(r"train_scripts/sft\.py.*?--steps (\d+)", recipe, re.S)[1])]


def loss_lines():
    return [len(re.search(r"def cispo.*?return [^\n]*\n", BLOCKS[1], re.S)[0].splitlines())]


# what a page says, with # for each number, and the numbers
SAID = {
    "reward of samples rises from # to # (# for greedy answers; guessing scores #)": ("README.md", tiny),
    "Its # steps take # seconds": ("README.md", tiny_time),
    "a test checks # cases": ("README.md", lambda: [len(conformance.CASES)]),
    "**An algorithm is three plain functions**: # rows": ("README.md", lambda: [len(rft.algorithm.TABLE)]),
    "held-out sums its samples get # % right before and # % after": ("README.md", sums),
    "On GSM8K's calculations samples go from # to # %": ("README.md", calculations),
    "[# examples](docs/examples": ("README.md", lambda: [len(read("../examples/results.json"))]),
    "CISPO in # lines": ("README.md", loss_lines),
    "TRL takes # times as long": ("docs/performance.md", lambda: [times("equal")]),
    "and # times as long with long-tailed lengths": ("docs/performance.md", lambda: [times("tailed")]),
    "Equal, of # families": ("docs/models.md", lambda: [len(read("families.json")["families"])]),
    "(`--strategy.max-skips`, #)": ("docs/troubleshooting.md", lambda: [StrategyConfig().max_skips]),
    "(`--reward-timeout`, # s": ("docs/trust.md", lambda: [options.Reward.reward_timeout]),
    "| # steps of SFT on": ("docs/results/README.md", warm_up),
}


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("said", SAID)
def test_a_number_is_that_of_its_file(said):
    """As far as the page writes it out."""
    page, numbers = SAID[said]
    form = re.escape(said).replace(r"\#", NUMBER)
    (found,) = re.findall(form, text_of(page))
    texts = [found] if isinstance(found, str) else found
    for text, value in zip(texts, numbers(), strict=True):
        if text in WORDS:
            text = WORDS[text]
        digits = len(text.partition(".")[2])
        assert f"{value:.{digits}f}" == text, f"{said}: {page} has {text}, the file {value}"


def test_every_measured_number_is_looked_at():
    """A number with a decimal point, or with a unit of time, is in one of the sentences above."""
    prose = " ".join(re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|!\[[^]]*\]", " ", README, flags=re.S).split())
    wanted = re.findall(r"(?<![\w.-])(\d+\.\d+|\d+(?= (?:seconds|minutes|ms|GB|%)))(?![\d.]*\d)", prose)
    forms = [said for said, (page, _) in SAID.items() if page == "README.md"]
    covered = {n for said in forms for n in numbers(re.escape(said).replace(r"\#", NUMBER))}
    assert wanted and set(wanted) - covered == set()


def numbers(form):
    """The numbers of the README's sentence of this form."""
    return re.search(form, text_of("README.md")).groups()
