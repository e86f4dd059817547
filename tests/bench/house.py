"""Prints the measures of the house: files and lines, seconds of imports and of commands.

python tests/bench/house.py [ROOT]     another checkout, to compare with
python tests/bench/house.py --cases    also collects the tests, which takes a minute
python tests/bench/house.py --draw docs/pictures/house.svg     draws the floors and their rooms, and ends
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import time
import tokenize
from pathlib import Path


def modules(root: Path) -> dict[str, Path]:
    """Return {module of a checkout, without the package's name: its file}."""
    found = {}
    for path in sorted((root / "rft_fn").rglob("*.py")):
        name = ".".join(path.relative_to(root / "rft_fn").with_suffix("").parts)
        found[name.removesuffix(".__init__").removesuffix("__init__")] = path
    return found


def code_lines(text: str) -> int:
    """Return the number of lines that hold a token and are no docstring or comment."""
    lines: set[int] = set()
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*quiet, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        text_first = isinstance(body, list) and body and isinstance(body[0], ast.Expr)
        if text_first and isinstance(getattr(body[0].value, "value", None), str):
            lines -= set(range(body[0].lineno, body[0].end_lineno + 1))
    return len(lines)


TITLES = {"L0": "L0  values", "L1": "L1  mathematics", "L2": "L2  models and data", "L3": "L3  effects"}
PEOPLE = ("tools", "migrate")  # the rooms of L3 that people use beside a run


def floors(root: Path) -> list[tuple[str, list[str]]]:
    """Return the rooms of each floor, from the top, as the root of the package lists them."""
    listed = (root / "rft_fn" / "__init__.py").read_text().partition("if TYPE_CHECKING:")[2]
    parts = re.split(r"# (L\d): ", listed.partition("from rft_fn.types")[0])[1:]
    found = {}
    for floor, text in zip(parts[::2], parts[1::2]):
        found[floor] = [x for line in re.findall("from rft_fn import (.*)", text) for x in line.split(", ")]
    people = [name for name in found["L3"] if name in PEOPLE]
    found["L3"] = [name for name in found["L3"] if name not in PEOPLE]
    return [("for people", people), *((TITLES[floor], found[floor]) for floor in sorted(found, reverse=True))]


def drawing(root: Path) -> str:
    """Draw the floors as SVG: a box a room, as wide as it has lines, in rows that fill the picture."""
    width, high, left, least = 1000, 54, 150, 76
    out, y = [], 8
    for title, names in floors(root):
        rooms = []
        for name in names:
            paths = [p for m, p in modules(root).items() if m.split(".")[0] == name]
            rooms.append((name, len(paths), sum(p.read_text().count("\n") for p in paths)))
        half = -(-len(rooms) // 2) if len(rooms) > 10 else len(rooms)
        for row in (rooms[:half], rooms[half:]) if len(rooms) > half else (rooms,):
            room = width - left - 8 - least * len(row)  # beyond the least width of each
            total = sum(lines for _, _, lines in row)
            x = left
            for name, files, lines in row:
                w = least + room * lines / total
                middle = x + (w - 6) / 2
                about = f"{files} files, {lines:,}" if files > 1 else f"{lines:,}"
                out.append(
                    f'<rect x="{x:.0f}" y="{y}" width="{w - 6:.0f}" height="{high - 10}" rx="5"/>'
                    f'<text x="{middle:.0f}" y="{y + 19}">{name}</text>'
                    f'<text class="s" x="{middle:.0f}" y="{y + 35}">{about}</text>'
                )
                x += w
            out.append(f'<text class="t" x="8" y="{y + 26}">{title if row[0] is rooms[0] else ""}</text>')
            y += high
        y += 8
    style = (
        "text{font:12px sans-serif;text-anchor:middle;fill:#1c2733}.s{font-size:10px;fill:#51606f}"
        ".t{text-anchor:start;font-weight:bold}rect{fill:#e3edf7;stroke:#7b9cbf}"
    )
    note = "Imports point down, and on L3 to the left. The numbers are lines."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 18}"><style>{style}</style>'
        f'<rect x="0" y="0" width="{width}" height="{y + 18}" style="fill:#fff;stroke:none"/>'
        f'{"".join(out)}<text class="s" x="{width / 2}" y="{y + 8}">{note}</text></svg>\n'
    )


def seconds(root: Path, code: str) -> float:
    """Return the least wall time [s] of three processes that run `code`."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print every measure of a checkout."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("root", nargs="?", default=Path(__file__).resolve().parents[2], type=Path)
    options.add_argument("--cases", action="store_true", help="collect the tests too")
    options.add_argument("--draw", type=Path, help="write the floors as SVG, and end")
    given = options.parse_args()
    if given.draw:
        given.draw.write_text(drawing(given.root))
        return

    texts = [path.read_text() for path in modules(given.root).values()]
    sizes = [text.count("\n") for text in texts]
    small = sum(size < 80 for size in sizes)
    print(
        f"files of rft_fn / median lines / under 80    {len(sizes)} / {statistics.median(sizes):g} / {small}"
    )
    print(f"lines of rft_fn (code)                       {sum(sizes)} ({sum(map(code_lines, texts))})")
    tests = [p for p in (given.root / "tests").rglob("*.py") if "bench" not in p.parts]
    print(f"lines of tests without tests/bench           {sum(p.read_text().count(chr(10)) for p in tests)}")
    if given.cases:
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
        printed = subprocess.run(collect, cwd=given.root, capture_output=True, text=True).stdout
        print(f"cases of tests                               {sum('::' in x for x in printed.splitlines())}")

    print("\nseconds, the least of three")
    bare = seconds(given.root, "import torch")
    rooms = "import torch, rft_fn; [getattr(rft_fn, name) for name in rft_fn.__all__]"
    print(
        f"  import torch {bare:.2f}; every room of rft_fn beyond it {seconds(given.root, rooms) - bare:.2f}"
    )
    for words in (["--help"], ["--version"], ["where", "grpo"]):
        code = (
            f"import runpy, sys; sys.argv = ['rft', *{words}]; runpy.run_module('rft_fn', None, '__main__')"
        )
        print(f"  rft {' '.join(words):<11} {seconds(given.root, code):.2f}")


if __name__ == "__main__":
    main()
