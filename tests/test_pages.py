"""The documentation's code runs and its command lines are understood, on every page.

All Python blocks of a page run in one process, one after the other, as a reader would type them. A block that
cannot run here says so in the line above it, `<!-- not run: REASON -->`, with a reason of `REASONS`: it is
compiled, and the names of the library in it have to exist.
"""

import importlib.util
import os
import re
import sys
import textwrap

import forks
import page_setups
import pages
import pytest
import test_recipes
from test_house import load_script
from test_public import named_in

import rft_fn as rft
from rft_fn import parsing
from rft_fn.migrate import translation
from rft_fn.model import model_names
from rft_fn.tools import commands

pytestmark = pytest.mark.docs

REASONS = ("a GPU", "several processes", "vLLM", "a server", "weights of the hub")
# pages whose code another test runs, and checks more of
ELSEWHERE = {
    "README.md": "test_readme.py",
    "CONTRIBUTING.md": "test_contributing.py",
    "docs/engines.md": "collect/test_generate.py",
} | {f"docs/recipes/{page}": "test_recipes.py" for page in test_recipes.STAND_INS}
TEXTS = {page: pages.read(page) for page in pages.PAGES}
CODE = {page: [b for b in pages.blocks(text) if b.language == "python"] for page, text in TEXTS.items()}
RUN = [page for page in CODE if page not in ELSEWHERE and any(not b.reason for b in CODE[page])]
NOT_RUN = [(page, b) for page in CODE for b in CODE[page] if b.reason]
LINES = [(page, words) for page, text in TEXTS.items() for words in pages.commands(text)]
SCRIPT = re.compile(r"(?:.*/)?train_scripts/(\w+)\.py")


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, tmp_path):
    code = page_setups.whole(page, [b.text for b in CODE[page] if not b.reason])
    env = forks.early(os.environ) | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    env |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "RFT_FN_CACHE": str(model_names.cache_dir())}
    (tmp_path / "page.py").write_text(code)
    done = forks.run([sys.executable, "page.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("page", "block"), NOT_RUN)
def test_a_block_that_is_not_run_says_why_and_names_what_exists(page, block):
    assert block.reason.startswith(REASONS), f"{page}: expected one of {REASONS}, got {block.reason!r}"
    compile(textwrap.dedent(block.text), page, "exec")
    names = named_in(textwrap.dedent(block.text))
    names |= set(re.findall(r"\brft\.((?:\w+\.)?\w+)", block.text))
    for name in names:
        assert resolves(name), f"{page}: {name}"


def resolves(name):
    """Whether a dotted name of the library leads to something."""
    here = rft
    for part in name.split("."):
        if not hasattr(here, part):
            return isinstance(here, type)  # an instance's field
        here = getattr(here, part)
    return True


@pytest.mark.parametrize(("page", "file"), ELSEWHERE.items())
def test_a_page_that_another_test_runs_is_run_there(page, file):
    text = (pages.ROOT / "tests" / file).read_text()
    assert f'"{page.rpartition("/")[2]}"' in text and "exec(" in text + text.replace("forks.run(", "exec(")


def test_every_setup_is_for_a_page_and_its_block():
    for page, number in page_setups.BEFORE:
        assert number < len(CODE[page]), (page, number)
    assert set(page_setups.AFTER) <= set(RUN)


@pytest.mark.parametrize(("page", "count"), [("CONTRIBUTING.md", 13), ("docs/scripts.md", None)])
def test_every_row_of_a_table_leads_to_a_section_with_code(page, count):
    sections = [section.partition("\n") for section in TEXTS[page].split("\n## ")[1:]]
    coded = {pages.slug(title) for title, _, text in sections if "```python" in text}
    rows = [line for line in TEXTS[page].splitlines() if line.startswith("| [")]
    assert {re.search(r"\(#(.+?)\)", line)[1] for line in rows} == coded and len(rows) == (count or len(rows))


def test_what_the_page_on_scripts_names_is_there():
    named = set(re.findall(r"`(?:rft\.)?(?!rft)(\w+)\.(\w+)`", TEXTS["docs/scripts.md"]))
    lost = []
    for room, attribute in sorted(x for x in named if x[0] not in ("out", "b", "torch")):
        known = attribute in rft.Strategy._fields if room == "st" else hasattr(getattr(rft, room), attribute)
        if not known:
            lost.append(f"{room}.{attribute}")
    assert not lost, lost


@pytest.mark.parametrize("page", sorted({page for page, _ in LINES}))
def test_every_command_line_is_understood(page):
    """Options by the scripts' own parsers, targets by the Makefile, files and modules by being there."""
    for there, words in LINES:
        if there == page:
            check(words)


def check(words):
    """AssertionError, or the parser's own error, for a command line that would not start."""
    script = next((i for i, word in enumerate(words) if SCRIPT.fullmatch(word)), None)
    if words[0] == "make":
        for target in (word for word in words[1:] if re.fullmatch(r"[\w./-]+", word)):
            assert target in targets(), f"make {target}: the Makefile has no such target"
    elif "rft" in words:  # also behind torchrun --no-python
        check_rft(words[words.index("rft") + 1 :])
    elif script is not None:
        parsed(SCRIPT.fullmatch(words[script])[1], words[script + 1 :])
    elif "-m" in words:
        check_module(*words[words.index("-m") + 1 :])
    else:
        file = next((x for x in words[1:] if "/" in x and not x.startswith("-")), None)
        assert file is None or (pages.ROOT / file).exists(), words


def check_module(module, *args):
    """`python -m MODULE ARGS`; modules of others are theirs."""
    if module == "rft_fn":
        check_rft(args)
    elif module == "rft_fn.migrate" and args and "|" not in args[0] and not args[0].isupper():
        translation.parser().parse_args(args)
    elif module.startswith("rft_fn"):
        assert importlib.util.find_spec(module), module


def targets():
    """What `make` can be asked for; files of the environments too."""
    text = (pages.ROOT / "Makefile").read_text()
    found = set(re.findall(r"^([\w-]+):", text, re.M))
    return found | {x.replace("$(VLLM_VENV)", ".venv-vllm") for x in re.findall(r"^(\$\S+):", text, re.M)}


def parsed(name, args):
    """The config of a script from a command line; one with `...` is not whole, and none of it is parsed.

    The file of --config is not there.
    """
    config = load_script(name).Config
    if "--config" in args:
        place = args.index("--config")
        args = [*args[:place], *args[place + 2 :]]
    if "..." not in args and "--help" not in args:
        parsing.parse(config, parsing.qualify(args, config))


def check_rft(words):
    """A command of `rft`; placeholders in capitals stand for values."""
    if not words or words[0].startswith("-") or words[0].isupper():
        return
    name, *args = words
    assert name in commands.COMMANDS, f"rft {name}: expected one of {list(commands.COMMANDS)}"
    options = commands.COMMANDS[name].options
    if name == "run":
        check_run(*args)
    elif options is None and args:  # those of the script of this name
        parsed(name.replace("-", "_"), args)
    elif options is not None and args and "[" not in "".join(args):
        parsing.parse(options, parsing.qualify(args, options))


def check_run(script="", *args):
    """`rft run SCRIPT ARGS`; a file my_SCRIPT.py is a copy of it, and has its options."""
    name = script.removeprefix("my_").removesuffix(".py")
    known = (pages.ROOT / f"train_scripts/{name}.py").exists()
    assert known or not script or script.isupper() or script.endswith(".py"), f"rft run {script}"
    if known and args:
        parsed(name, args)


def test_a_line_that_is_refused_on_purpose_is_marked():
    text = "So:\n\n<!-- refused: why -->\n\n    rft wibble\n\nThus:\n\n    rft doctor\n"
    assert list(pages.commands(text)) == [["rft", "doctor"]]
    marked = sum(text.count("<!-- refused: ") for text in TEXTS.values())
    assert marked == 1  # an option of another library, in docs/data.md


def test_pages_have_code_and_commands():
    assert len(RUN) >= 12 and len(LINES) >= 300 and sum(map(len, CODE.values())) >= 57
