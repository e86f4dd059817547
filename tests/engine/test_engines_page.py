"""docs/engines.md shows the numbers of docs/results/engines.json."""

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]


DATA = ROOT / "docs" / "results" / "engines.json"


def bench():
    """tests/bench/engines_table.py as a module."""
    file = ROOT / "tests" / "bench" / "engines_table.py"
    spec = importlib.util.spec_from_file_location("engines_table", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_data():
    found = bench()
    data = json.loads(DATA.read_text())
    page = found.PAGE.read_text()
    shown = page.partition(found.BEGIN)[2].partition(found.END)[0].strip()
    assert shown == found.tables(data)


def test_the_tables_follow_the_data():
    found = bench()
    data = json.loads(DATA.read_text())
    before = found.tables(data)
    data["rollout"]["hf"] = [2 * x for x in data["rollout"]["hf"]]
    assert found.tables(data) != before
    tokens = data["prompts"] * data["group"] * data["max_new"]
    slow = sorted(data["rollout"]["hf"])[len(data["rollout"]["hf"]) // 2]
    assert f"| hf | {tokens / slow:.0f} (" in found.tables(data)
