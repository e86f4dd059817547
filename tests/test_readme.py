"""The README's code, run as it stands there."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("number", range(2), ids=["the train step", "the custom loss"])
def test_code(number, capsys):
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), {"__name__": "readme"})
    if number == 0:
        steps = re.findall(r"step (\d)  reward (\d\.\d+)  gap", capsys.readouterr().out)
        assert [s for s, _ in steps] == ["0", "1", "2"] and all(0 < float(r) < 1 for _, r in steps)


def test_promises_of_size():
    """The train step is at most 60 lines, the loss at most 10."""
    assert len(BLOCKS) == 2
    assert len(BLOCKS[0].splitlines()) <= 60
    loss = re.search(r"def cispo.*?return [^\n]*\n", BLOCKS[1], re.S).group()
    assert len(loss.splitlines()) <= 10


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).resolve().parent.parent / target).exists(), target
