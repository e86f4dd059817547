"""docs/estimators.md: its commands run as they are written, and show what its paragraphs say."""

import json
import re
import shlex

import pages
import pytest
from test_house import load_script as script

from rft_fn.run import config_file

pytestmark = pytest.mark.docs

TEXT = pages.read("docs/estimators.md")
FOLDER = pages.ROOT / "docs" / "estimators"


def words(name):
    """The options of the page's command whose results are in a folder."""
    (line,) = re.findall(
        rf"^    python train_scripts/compare.py (.* --out docs/estimators/{name})$", TEXT, re.M
    )
    return shlex.split(line)


def paragraph(name):
    return " ".join(re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", TEXT, re.S)[1].split())


def check_batch(rows):
    assert 0.1 < rows["grpo"]["noise_prompts"] < 0.9 and 0.1 < rows["rloo"]["noise_prompts"] < 1
    assert 10 < rows["grpo"]["noise_scale"] < 300


def check_baseline(rows):
    for name in ("rloo", "opo", "dr_grpo", "reinforce_pp"):
        assert abs(rows[name]["direction"] - 1) < 0.015
    assert 0.95 < rows["grpo"]["direction"] < 1.02
    assert rows["remax"]["noise_prompts"] > 3 * rows["rloo"]["noise_prompts"]


def check_length(rows):
    assert rows["rloo"]["length"] == pytest.approx(1) and rows["dapo"]["length"] == pytest.approx(1)
    assert abs(rows["grpo"]["length"]) < 1e-3
    assert min(rows["rloo"]["longest"], rows["dapo"]["longest"]) > 0.3 > rows["grpo"]["longest"]


CHECKS = {"batch": check_batch, "baseline": check_baseline, "length": check_length}


@pytest.mark.parametrize("name", list(CHECKS))
def test_a_question_is_answered_by_its_command(name, tmp_path):
    compare = script("compare")
    *options, _ = words(name)
    compare.main(config_file.parse(compare.Config, [*options, str(tmp_path)]))
    CHECKS[name](json.loads((tmp_path / "estimators.json").read_text())["rows"])
    assert (tmp_path / "estimators.png").stat().st_size > 20_000


@pytest.mark.parametrize("name", list(CHECKS))
def test_a_paragraph_has_the_numbers_of_its_file(name):
    found = json.loads((FOLDER / name / "estimators.json").read_text())
    rows, text = found["rows"], paragraph(name)
    CHECKS[name](rows)
    given = dict(zip(words(name)[::2], words(name)[1::2])) if name == "batch" else {}
    assert not given or found["config"]["out"] == f"docs/estimators/{name}"
    if name == "batch":
        shown = [f"{rows[row]['noise_prompts']:.2f} ± {rows[row]['noise_prompts_se']:.2f}" for row in rows]
        shown += [
            f"{rows['rloo']['noise_scale']:.0f} prompts",
            f"{rows['grpo']['noise_scale']:.0f} under GRPO",
        ]
    elif name == "baseline":
        shown = [f"{rows['grpo']['direction']:.3f} ± {rows['grpo']['direction_se']:.3f}"]
    else:
        shares = [rows[row]["longest"] for row in ("rloo", "dapo", "grpo")]
        shown = [f"{shares[0]:.0%} and {shares[1]:.0%}", f"{shares[2]:.0%}"]
        shown = [x.replace("% and", " and").replace("%", " %") for x in shown]
    for number in shown:
        assert number in text, f"{number} is not in: {text}"
