"""The README's code, run as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("number", range(2), ids=["the train step", "the custom loss"])
def test_code(number, capsys):
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), {"__name__": "readme"})
    if number == 0:
        steps = re.findall(r"step (\d)  reward (\d\.\d+)  gap", capsys.readouterr().out)
        assert [s for s, _ in steps] == ["0", "1", "2"] and all(0 < float(r) < 1 for _, r in steps)


def test_promises_of_size():
    """The page is at most 140 lines, the train step at most 35, the loss at most 10."""
    assert len(README.splitlines()) <= 140
    assert len(BLOCKS) == 2
    assert len(BLOCKS[0].splitlines()) <= 35
    loss = re.search(r"def cispo.*?return [^\n]*\n", BLOCKS[1], re.S).group()
    assert len(loss.splitlines()) <= 10


def test_the_table_has_every_script():
    rows = re.findall(r"^\| \[\w+\.py\]\(train_scripts/.*?\|", README, re.M)
    listed = re.findall(r"\[(\w+\.py)\]", " ".join(rows))
    assert sorted(listed) == sorted(p.name for p in (ROOT / "train_scripts").glob("*.py"))
