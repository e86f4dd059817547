"""docs/scripts.md: its code runs in order, as one script, and what it names is there."""

import re
from pathlib import Path

import pytest

import rft_fn as rft

pytestmark = pytest.mark.docs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scripts.md"
TEXT = PAGE.read_text()
SECTIONS = [section.partition("\n") for section in TEXT.split("\n## ")[1:]]
BLOCKS = [(t, b) for t, _, x in SECTIONS for b in re.findall(r"```python\n(.*?)```", x, re.S)]
TABLE = [line for line in TEXT.splitlines() if line.startswith("| [")]


def test_the_page_runs_from_its_first_line_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for title, code in BLOCKS:
        exec(compile(code, f"scripts.md, {title}", "exec"), names)
    assert names["state"].step == 1 and (tmp_path / "runs/mine/metrics.jsonl").exists()


def test_every_line_of_the_table_has_its_section():
    titles = {title.lower().replace(" ", "-") for title, *_ in SECTIONS}
    assert titles == {re.search(r"\(#(.+?)\)", line)[1] for line in TABLE}
    assert {title for title, _ in BLOCKS} == {title for title, *_ in SECTIONS}


def test_what_the_page_names_is_there():
    lost = []
    for room, attribute in sorted(set(re.findall(r"`(?:rft\.)?(?!rft)(\w+)\.(\w+)`", TEXT))):
        if room in ("out", "b", "torch"):
            continue
        known = attribute in rft.Strategy._fields if room == "st" else hasattr(getattr(rft, room), attribute)
        if not known:
            lost.append(f"{room}.{attribute}")
    assert not lost, lost
