"""docs/troubleshooting has a row for every error line of the library, and no others, each with a remedy."""

import ast
import dataclasses
import difflib
import re
import sys
from pathlib import Path

import pytest
import torch
from test_house import load_script

import rft_fn as rft
from rft_fn import check, rng
from rft_fn.engine.vllm.package import part as vllm_part
from rft_fn.run import commands, parsing
from rft_fn.run.cli import guard
from tests import error_lines
from tests.error_lines import Line, Module, normal

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "troubleshooting"
INDEX = FOLDER / "README.md"
PAGES = sorted(set(FOLDER.glob("*.md")) - {INDEX})
REMEDY = "**Remedy:** "
_TEXTS = {page.name: page.read_text() for page in [INDEX, *PAGES]}

# options of programs that are not ours
OTHERS = {"--rdzv-endpoint", "--standalone", "--shm-size", "--ipc", "--logprobs-mode", "--help"}


def entries(text: str) -> list[tuple[list[str], str]]:
    """(the lines, what is said about them) of each entry of a page: lines are indented by four spaces."""
    found = []
    for block in re.finditer(r"(?m)^((?:    \S.*\n)+)\n((?:(?![ #|]).+\n?)*)", text):
        found.append(([line.strip() for line in block[1].splitlines()], " ".join(block[2].split())))
    return found


ENTRIES = [(page, lines, said) for page in PAGES for lines, said in entries(_TEXTS[page.name])]
ROWS = {normal(line): (page, line, said) for page, lines, said in ENTRIES for line in lines}


def nearest(line: str, known: list[str]) -> str:
    """What a line may have been before it was changed."""
    return next(iter(difflib.get_close_matches(line, known, n=1, cutoff=0.5)), "")


def missing(lines: tuple[Line, ...], rows: set[str]) -> list[str]:
    """A report about each line that no row has."""
    free = sorted(rows - {normal(line.text) for line in lines})
    found = {}
    for line in lines:
        if normal(line.text) in rows:
            continue
        report = f"{line.place}: no row of docs/troubleshooting has its line. Write\n    {line.text}"
        before = nearest(normal(line.text), free)
        if before:
            report += f"\nin place of\n    {ROWS[before][1]}\nin {ROWS[before][0].name}"
        found[normal(line.text)] = report
    return list(found.values())


def test_every_line_has_a_row():
    found = missing(error_lines.lines(), set(ROWS))
    assert not found, "\n\n".join(found)


def test_every_row_has_a_line():
    known = {normal(line.text) for line in error_lines.lines()}
    odd = [
        f"{page.name}: no code prints\n    {line}" for x, (page, line, _) in ROWS.items() if x not in known
    ]
    assert not odd, "\n\n".join(odd)


def test_every_row_has_a_cause_and_a_remedy_and_is_there_once():
    for page, lines, said in ENTRIES:
        cause, remedy, rest = said.partition(REMEDY)
        assert remedy and len(cause) > 15 and len(rest) > 5, f"{page.name}: no cause or remedy: {lines[0]}"
    every = [normal(line) for _, lines, _ in ENTRIES for line in lines]
    assert not (twice := {row for row in every if every.count(row) > 1}), twice


def has_text(node: ast.AST) -> bool:
    """Whether an argument is written out, at least in part; texts of calls within it do not count."""
    if isinstance(node, ast.Call | ast.Subscript):
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and error_lines.has_words(node.value)
    return any(map(has_text, ast.iter_child_nodes(node)))


def test_no_raise_is_passed_over():
    """Each raise makes a known exception, calls a helper that makes one, or raises a variable again."""
    places = {line.place for line in error_lines.lines()}
    for module in error_lines.modules():
        makers = {name for name, f in module.functions.items() if any(map(error_lines.is_error, ast.walk(f)))}
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            place = f"{module.path.relative_to(ROOT)}:{node.exc.lineno}"
            name = error_lines.last(node.exc.func)
            helper = name in makers or name in error_lines.imported_makers(module)
            assert error_lines.is_error(node.exc) or helper, f"{place}: {name} is no known exception"
            spoken = any(map(has_text, node.exc.args))
            silent = name in error_lines.SILENT or helper
            assert place in places or silent or not spoken, f"{place}: its text is not collected"


SOURCE = """
class Odd(ValueError):
    def __init__(self, place, reason):
        super().__init__(f"data: {place}: {reason}")

def helper(name):
    text = f"name: expected one of these, got {name!r}"
    if name:
        text += "; see the page"
    return ValueError(text)

def act(x):
    if x == 0:
        raise Odd("here", f"nothing in row {x}")
    if x == 1:
        raise helper(x)
    try:
        act(0)
    except Odd as error:
        error.add_note(f"raised in row {x}")
        raise ValueError(str(error)) from error
    print(f"error: row {x} was not saved")
    print(f"row {x} is done")
    raise
"""


def test_the_collector_reads_texts_as_they_are_made(tmp_path, monkeypatch):
    path = tmp_path / "odd.py"
    path.write_text(SOURCE)
    module = Module(path)
    monkeypatch.setattr(error_lines, "modules", lambda: (module,))
    monkeypatch.setattr(error_lines, "ROOT", tmp_path)
    error_lines.forms.cache_clear()
    try:
        found = {normal(line.text) for line in error_lines.lines.__wrapped__()}
    finally:
        error_lines.forms.cache_clear()
    assert found == {
        "data: here: nothing in row {}",
        "name: expected one of these, got {}",
        "name: expected one of these, got {}; see the page",
        "raised in row {}",
        "row {} was not saved",
    }


def test_a_change_of_a_message_is_told_with_the_row_to_write():
    (line,) = [x for x in error_lines.lines() if x.text.startswith("mask: expected an even number of rows")]
    changed = line._replace(text=line.text.replace("even number", "even count"))
    (report,) = missing((changed,), set(ROWS))
    assert (
        line.place in report
        and changed.text in report
        and f"in place of\n    {line.text}\nin maths.md" in report
    )


def explained(printed: str) -> str:
    """The row of a line as it is printed: of those that match, the one with the most fixed text."""
    printed = " ".join(printed.split())
    found = []
    for row in ROWS:
        form = ".*?".join(map(re.escape, row.split("{}")))
        if re.fullmatch(form, printed, re.S):
            found.append((len(row), row))
    return max(found)[1]


@pytest.mark.parametrize(
    ("act", "page", "words"),
    [
        (lambda: check.shapes(logp=(torch.zeros(7), "T"), adv=(torch.zeros(6), "T")), "maths", "dimension"),
        (lambda: rft.strategy.StrategyConfig(timeout=0.0), "options", "limits"),
        (lambda: rft.strategy.StrategyConfig(fsdp=True, zero_stage=1), "training", "FSDP2"),
        (lambda: rft.algorithm.get_algorithm("grop"), "maths", "algorithms"),
        (lambda: rft.algorithm.get_algorithm("grpo", group=1), "maths", "--group"),
        (lambda: rft.reward.parse([]), "rewards", "--reward"),
        (lambda: rft.reward.parse(["nothing:of:it"]), "rewards", "name"),
        (lambda: rft.data.load("no_such.jsonl", None), "data", "reason"),
        (lambda: rft.optim.clip_by_global_norm(0.0), "maths", "norm"),
        (lambda: rft.model.load("./no/such/folder"), "models", "path"),
        (lambda: rng.generator(1.5), "maths", "key"),
        (lambda: rft.packing.supervised([]), "maths", "examples"),
        (lambda: rft.Sampling(stop=("",)), "maths", "stop"),
    ],
)  # fmt: skip
def test_a_printed_line_leads_to_its_row(act, page, words):
    with pytest.raises((ValueError, TypeError, AttributeError)) as error:
        act()
    found, _, said = ROWS[explained(str(error.value))]
    assert found.stem == page and words in said


@pytest.mark.parametrize(
    ("package", "act"), [("math_verify", lambda: rft.reward.math()), ("vllm", lambda: vllm_part())]
)
def test_a_missing_package_ends_a_script_with_one_line(package, act, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        guard(lambda _: act(), None)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert "install" in printed and ROWS[explained(printed.removeprefix("error: "))]


@pytest.mark.parametrize("page", sorted(_TEXTS))
def test_options_names_and_links_of_a_page_are_there(page):
    text = _TEXTS[page]
    options = {"trainer", "table"}  # of python -m rft_fn.migrate
    for script in (ROOT / "train_scripts").glob("*.py"):
        options |= parsing.names(load_script(script.stem).Config)
    for command in commands.COMMANDS.values():
        if command.options is not None:
            options |= {field.name for field in dataclasses.fields(command.options)}
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text)) - OTHERS
    turned_on = {f: f[2:].replace("-", "_").removeprefix("no_").replace(".no_", ".") for f in flags}
    odd = {f for f, name in turned_on.items() if name not in options}
    assert not odd, odd
    for name in set(re.findall(r"`rft\.([\w.]+)", text)):
        x = rft
        for part in name.split("."):
            x = getattr(x, part)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (FOLDER / link).exists(), link


def test_the_index_names_every_page():
    assert {page.name for page in PAGES} <= set(re.findall(r"\]\((\w+\.md)\)", _TEXTS[INDEX.name]))
    for lines, said in entries(_TEXTS[INDEX.name])[1:]:  # the first is an example
        assert REMEDY in f"{said} ", lines[0]
