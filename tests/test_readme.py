"""The README's code, run as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
from test_house import load_script

from rft_fn import parsing

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


def test_links_and_pictures_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r" (?:src|srcset)=\"([^\"]+)\"", README)
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_table_has_every_script():
    rows = re.findall(r"^\| \[\w+\.py\]\(train_scripts/.*?\|", README, re.M)
    listed = re.findall(r"\[(\w+\.py)\]", " ".join(rows))
    assert sorted(listed) == sorted(p.name for p in (ROOT / "train_scripts").glob("*.py"))


def commands(text):
    """(script, arguments) of each command line in a document, its bash arrays filled in."""
    arrays = dict(re.findall(r"^(\w+)=\(([^)]*)\)$", text, re.M))
    for line in text.replace("\\\n", " ").splitlines():
        found = re.match(r" *(?:python|torchrun)\b.*? train_scripts/(\w+)\.py(.*)", line)
        if found:
            rest = found[2]
            for name, words in arrays.items():
                rest = rest.replace(f'"${{{name}[@]}}"', words)
            yield found[1], shlex.split(rest, comments=True)


@pytest.mark.parametrize(
    ("path", "least"),
    [("README.md", 5), ("docs/results/README.md", 3), ("docs/data.md", 9), ("docs/preferences.md", 8)],
)
def test_commands_are_understood_as_they_stand(path, least):
    """Every option is one of the script's, with a value that it takes."""
    found = list(commands((ROOT / path).read_text()))
    assert len(found) >= least
    for name, args in found:
        config = load_script(name).Config
        parsing.parse(config, parsing.qualify(args, config))
