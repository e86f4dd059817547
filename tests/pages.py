"""The pages of the documentation, in parts: prose, blocks of code, headings, command lines."""

import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")
PAGES = [*TOP, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^ *<!-- not run: ([^\n]*?) -->\n\s*)?^( *)```([\w-]*)[^\n]*\n(.*?)^\2``` *$", re.S | re.M
)
# a block that is indented by four spaces, and the mark of one that is wrong on purpose
INDENTED = re.compile(r"(?:^<!-- (refused): [^\n]* -->\n)?^\n((?: {4}[^\n]*\n)(?:(?: {4}[^\n]*)?\n)*)", re.M)
COMMAND = re.compile(r"(?:\$ )?((?:\w+=\S+ )*)(?:\S*/bin/)?(python3?|torchrun|make|rft) ")


@dataclass(frozen=True)
class Block:
    """A block of code, and why it is not run, "" where it is."""

    language: str
    text: str
    reason: str


def read(page):
    return (ROOT / page).read_text()


def blocks(text):
    """The blocks of code of a page, without the indentation that a list gives them."""
    found = []
    for reason, indent, language, code in FENCE.findall(text):
        lines = [line.removeprefix(indent) for line in code.split("\n")]
        found.append(Block(language, "\n".join(lines), reason))
    return found


def prose(text):
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def indented(text):
    """The blocks of a page that four spaces make code, but for those that are marked as refused."""
    return [code for refused, code in INDENTED.findall(prose(text) + "\n") if not refused]


def slug(heading):
    """The anchor of a heading, by the rule of GitHub, which the site's configuration follows."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text):
    """The anchors of a page, those of its headings first."""
    headings = re.findall(r"^#+ +(.*?) *#* *$", prose(text), re.M)
    return [slug(x) for x in headings] + re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)


def links(text):
    """The targets of a page's links and pictures that are in the repository."""
    plain = re.sub(r"(`+).*?\1", "``", prose(text).replace("\\`", ""))
    found = re.findall(r"\]\(([^()\s]+)\)", plain) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", plain)
    return [x for x in found if not re.match(r"[a-z]+:", x)]


def commands(text):
    """The words of each command line of a page, also of those in sentences; bash arrays are filled in."""
    arrays = dict(re.findall(r"^(\w+)=\(([^)]*)\)$", text, re.M))
    shells = [b.text for b in blocks(text) if b.language in ("", "bash", "sh", "shell", "console")]
    shells += indented(text)
    spans = [" ".join(x.split()) for x in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))]
    lines = "\n".join([*shells, *spans]).replace("\\\n", " ").split("\n")
    for line in lines:
        start = COMMAND.match(line.strip() + " ")
        if not start:
            continue
        rest = line.strip()[start.end(1) :].removeprefix("$ ")
        for name, words in arrays.items():
            rest = rest.replace(f'"${{{name}[@]}}"', words)
        for one in re.split(r"(?<=\s)(?:&&|\||>+|&)(?=\s)", rest + " "):
            if COMMAND.match(one.strip() + " "):
                yield shlex.split(one, comments=True)


def titled(text):
    """{name: content} of the blocks of a page that are files."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.S | re.M))


def as_module(path):
    """A script as a module, which finds what lies beside it."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(made)
    sys.path[:] = before
    return made
