"""Prints the measures of the house: files and lines, what one opens to read a function, imports, and tics.

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
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# floors that a reader knows after one file
UNCOUNTED = {"check", "limits", "tree", "types", "rng", "precision"}
TICS = [
    "alone",
    "those of",
    "whose",
    "behind",
    "beside",
    "of which",
    "as it is",
    "of its own",
    "has to",
    "found",
]
READ = {  # what a reader wants to understand: (where it begins now, and where it began before)
    "ppo_clip": ("loss.policy:ppo_clip",),
    "gae": ("advantage:gae", "advantage.tokens:gae"),
    "pack": ("packing.packs:pack",),
    "a row, dapo": ("algorithm:dapo", "algorithm:TABLE", "algorithm.table:TABLE"),
    "Strategy.grad of FSDP2": (
        "strategy.fsdp2:FSDP2Backend._grad",
        "strategy.fsdp2:_FSDP2.grad",
        "strategy.fsdp2:grad",
    ),
    "the sampler's step": ("engine.hf.sampler:Sampler._step",),
    "push to vLLM": ("engine.vllm.engine:InProcess.load",),
    "a judge": ("reward.judge:generative", "reward.generative_model:generative"),
    "restore": ("ckpt.reading:restore", "ckpt:restore"),
    "options": ("run.parsing:parse", "parsing:parse"),
}


class House:
    """The modules of a checkout, with their trees."""

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[str, Path] = {}
        for path in sorted((root / "rft_fn").rglob("*.py")):
            name = ".".join(path.relative_to(root / "rft_fn").with_suffix("").parts)
            self.files[name.removesuffix(".__init__").removesuffix("__init__")] = path

    @cache  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        """Parse a module."""
        return ast.parse(self.files[module].read_text())

    @cache  # noqa: B019
    def names(self, module: str) -> dict[str, tuple[str, str]]:
        """Return {name of a module: (module, name) that it stands for}, "" for a whole module."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rft_fn":
                base = node.module.removeprefix("rft_fn").lstrip(".")
                for a in node.names:
                    whole = f"{base}.{a.name}".lstrip(".")
                    found[a.asname or a.name] = (whole, "") if whole in self.files else (base, a.name)
        for node in self.tree(module).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            found |= {name: (module, name) for name in names}
        return found

    def resolve(self, module: str, name: str) -> tuple[str, str] | None:
        """Return where a name is defined, through re-exports."""
        for _ in range(6):
            at = self.names(module).get(name)
            if at is None or at == (module, name):
                return at
            if not at[1]:
                return at
            module, name = at
        return None

    def definition(self, module: str, name: str) -> ast.AST | None:
        """Return the statement that defines `name` or `Class.method`."""
        first, _, method = name.partition(".")
        for node in self.tree(module).body:
            if getattr(node, "name", None) == first:
                if method:
                    return next((n for n in node.body if getattr(n, "name", None) == method), None)
                return node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == first for t in targets):
                return node
        return None

    def used(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield the definitions of this package that the body of `name` names; a class's are its methods'."""
        node = self.definition(module, name)
        owner = name.partition(".")[0]
        for x in ast.walk(node) if node is not None else ():
            at = None
            if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name):
                if x.value.id in ("self", "cls") and self.definition(module, f"{owner}.{x.attr}") is not None:
                    at = module, f"{owner}.{x.attr}"
                else:
                    base = self.resolve(module, x.value.id)
                    at = self.resolve(base[0], x.attr) if base is not None and not base[1] else None
            elif isinstance(x, ast.Name):
                at = self.resolve(module, x.id)
            if at is not None and at[1] and at[0].split(".")[0] not in UNCOUNTED:
                yield at

    def opened(self, module: str, name: str, depth: int) -> set[str]:
        """Return the modules that one opens to read `name` and what it calls, `depth` calls down."""
        seen, level = {(module, name)}, {(module, name)}
        for _ in range(depth):
            level = {at for here in level for at in self.used(*here)} - seen
            seen |= level
        return {module for module, _ in seen}


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


FLOORS = (  # from the top; on the upper two rows a room also imports those to its left
    ("for people", "tools migrate"),
    ("L3  effects", "dist ckpt memory strategy engine sync collect run"),
    ("L2  models and data", "model modality reward data environment hub parsing"),
    (
        "L1  mathematics",
        "segment scan advantage weight loss reward_shaping logprob sampling "
        "metric rollout packing optim algorithm testing",
    ),
    ("L0  values", "tree rng check precision types"),
)


def drawing(house: House) -> str:
    """Draw the floors as SVG: a box a room, as wide as it has lines, in rows that fill the picture."""
    width, high, left, least = 1000, 54, 150, 76
    out, y = [], 8
    for title, names in FLOORS:
        rooms = []
        for name in names.split():
            paths = [p for m, p in house.files.items() if m.split(".")[0] == name]
            rooms.append((name, len(paths), sum(p.read_text().count("\n") for p in paths)))
        for row in (rooms[:7], rooms[7:]) if len(rooms) > 10 else (rooms,):
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
    house = House(given.root)
    if given.draw:
        given.draw.write_text(drawing(house))
        return

    texts = [path.read_text() for path in house.files.values()]
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

    print("\nfiles that the names in a body lead to, one call down and two")
    for title, places in READ.items():
        for place in places:
            module, _, name = place.partition(":")
            if module in house.files and house.definition(module, name) is not None:
                counts = [len(house.opened(module, name, depth)) for depth in (1, 2)]
                print(f"  {title:<24} {counts[0]:>3} {counts[1]:>3}   {place}")
                break
        else:
            print(f"  {title:<24} not found")

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

    scripts = [p.read_text() for p in (given.root / "train_scripts").glob("*.py")]
    whole = "\n".join(texts + scripts)
    counts = ", ".join(f"{tic} {len(re.findall(rf'{chr(92)}b{tic}{chr(92)}b', whole))}" for tic in TICS)
    print(f"\ntics in rft_fn and train_scripts: {counts}")


if __name__ == "__main__":
    main()
