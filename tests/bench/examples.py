"""The table of docs/examples, made of the scripts themselves: `python tests/bench/examples.py`."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
PAGE = FOLDER / "README.md"
START, END = "<!-- table -->", "<!-- end of table -->"


def scripts() -> list[Path]:
    """The examples that can be run, by name."""
    return [p for p in sorted(FOLDER.glob("*.py")) if "def main(" in p.read_text()]


def summary(path: Path) -> str:
    """The first sentence of an example's docstring."""
    first = ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0]
    return re.sub(r" \(arXiv .*\)", "", first).rstrip(".")


def paper(path: Path) -> str:
    """The arXiv id that an example names."""
    return re.search(r"arXiv (\d{4}\.\d{5})", path.read_text())[1]


def table() -> str:
    """A line for each example."""
    lines = ["| script | idea | paper | lines |", "|---|---|---|---|"]
    for path in scripts():
        count = len(path.read_text().splitlines())
        lines.append(f"| [{path.name}]({path.name}) | {summary(path)} | {paper(path)} | {count} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table as the scripts have it."""
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
