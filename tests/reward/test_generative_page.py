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


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        exec(compile(code, "reward_models.md", "exec"), names)
    rows = [json.loads(line) for line in Path("judge.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["score=1", "score=0"]


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
