"""docs/environments.md shows docs/results/kuhn_poker.json, whose numbers follow from its strategies."""

import json
from pathlib import Path

import pytest
from kuhn import best_payoff, exploitability

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
DATA = json.loads((ROOT / "docs" / "results" / "kuhn_poker.json").read_text())


@pytest.mark.parametrize("case", DATA["runs"])
def test_the_numbers_are_those_of_the_strategies(case):
    for row in DATA["runs"][case]["rows"]:

        def play(card, actions, bets=row["bets"]):
            return bets[f"{card} {actions}".strip()]

        assert row["exploitability"] == pytest.approx(exploitability(play), abs=1e-3)
        assert row["best_second"] == pytest.approx(best_payoff(play, 1), abs=1e-3)
