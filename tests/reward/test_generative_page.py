"""The judges of docs/reward_models.md: the code runs in order, tables are those of what is there."""

import inspect
import json
import re
from pathlib import Path

import pytest

from rft_fn import reward
from rft_fn.reward import forms, verdicts

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reward_models.md").read_text().partition("\n## Judges")[2]


def test_the_tables_have_every_option_form_and_vote():
    options = inspect.signature(reward.generative_by_name).parameters.values()
    named = {p.name for p in options if p.kind != p.VAR_KEYWORD} - {
        "engine",
        "tokenizer",
        "processing",
        "served",
    }
    lines = [line for line in TEXT.splitlines() if line.startswith("| `")]
    found = {name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named | set(forms.FORMS) <= found
    for vote in verdicts.VOTES:
        assert f"`{vote}`" in TEXT


def test_the_seconds_are_those_of_the_data():
    found = json.loads((ROOT / "docs" / "results" / "judge.json").read_text())
    train, ask = ([round(judge[x]) for judge in found["judges"].values()] for x in ("train_s", "ask_s"))
    assert f"{train[0]} and {train[1]} s of training, {ask[0]} and {ask[1]} s of asking." in TEXT
    rewards = (ROOT / "docs" / "rewards.md").read_text()
    assert f"two small judges took {ask[0]} and {ask[1]} s of asking, " in rewards
