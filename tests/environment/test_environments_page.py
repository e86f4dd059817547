"""docs/environments.md shows docs/results/kuhn_poker.json, whose numbers follow from its strategies."""

import importlib.util
import json
from pathlib import Path

import pytest

from rft_fn.environment.kuhn_poker import best_payoff, exploitability

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
DATA = json.loads((ROOT / "docs" / "results" / "kuhn_poker.json").read_text())


def bench():
    """tests/bench/self_play.py as a module."""
    spec = importlib.util.spec_from_file_location("self_play", ROOT / "tests" / "bench" / "self_play.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_data():
    found = bench()
    shown = found.PAGE.read_text().partition(found.BEGIN)[2].partition(found.END)[0].strip()
    assert shown == found.table(DATA)


@pytest.mark.parametrize("case", DATA["runs"])
def test_the_numbers_are_those_of_the_strategies(case):
    for row in DATA["runs"][case]["rows"]:

        def play(card, actions, bets=row["bets"]):
            return bets[f"{card} {actions}".strip()]

        assert row["exploitability"] == pytest.approx(exploitability(play), abs=1e-3)
        assert row["best_second"] == pytest.approx(best_payoff(play, 1), abs=1e-3)


def test_the_mean_of_strategies_counts_how_often_their_own_actions_lead_somewhere():
    """A player who always bets first never gets to answer a bet: its answers there do not count."""
    one = dict.fromkeys([("j", ""), ("j", "01"), ("j", "0")], 1.0)
    two = {("j", ""): 0.0, ("j", "01"): 0.25, ("j", "0"): 0.5}
    assert bench().average([one, two]) == {("j", ""): 0.5, ("j", "01"): 0.25, ("j", "0"): 0.75}
