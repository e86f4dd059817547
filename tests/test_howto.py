"""docs/howto and the drawings of docs/ideas.md: nothing is left out, nothing is stale."""

import importlib.util
import re

import pytest
from test_house import ROOT

HOWTO = ROOT / "docs" / "howto"


def drawings():
    """The script of the drawings, as a module."""
    spec = importlib.util.spec_from_file_location("ideas", ROOT / "tests" / "bench" / "ideas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_has_every_page():
    index = (HOWTO / "README.md").read_text()
    pages = {page.name for page in HOWTO.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == pages


def test_the_drawings_are_those_of_their_script(tmp_path, monkeypatch):
    ideas = drawings()
    monkeypatch.setattr(ideas, "FOLDER", tmp_path)
    ideas.main()
    committed = ROOT / "docs" / "pictures"
    written = sorted(tmp_path.glob("*.svg"))
    assert [x.name for x in written] == [f"idea{i}.svg" for i in range(1, 6)]
    for file in written:
        assert file.read_text() == (committed / file.name).read_text(), file.name


@pytest.mark.parametrize("page", sorted(HOWTO.glob("[!R]*.md")), ids=lambda page: page.stem)
def test_a_page_says_when_it_is_needed_what_goes_wrong_and_where_to_read_on(page):
    text = page.read_text()
    assert "**When**:" in text and "More: " in text
    assert "Pitfalls" in text or page.stem == "does_not_learn"
    assert 40 <= len(text.splitlines()) <= 125
