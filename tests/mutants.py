"""Change the library at random places, one at a time, and see which changes no test notices: `make mutants`.

    python tests/mutants.py --seed 7 --count 100 --paths rft_fn/loss rft_fn/packing

Each mutant is one operator at one place of the syntax tree: a comparison flipped, min for max, a term
dropped, a bound shifted, a sign, a constant, `and` for `or`, a `not`, a branch dropped. It is applied in a
copy of the tree, and the tests that could see it run there until one fails. The same seed draws the same
mutants of the same tree. A survivor is an equivalent change, or a property that no test states.
"""

import argparse
import ast
import contextlib
import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATHS = [
    "segment.py", "scan.py", "logprob.py", "metric", "weight.py", "rollout.py", "reward_shaping.py",
    "advantage", "algorithm", "optim", "loss", "packing", "strategy", "collect",
]  # fmt: skip
SLOW = tuple(
    f"tests/{x}" for x in ("scripts", "vllm", "run", "dist", "memory", "model", "engine", "test_house")
)
IDLE = 10  # seconds that a process may wait for one that it may compute
MOST = 5  # test files a mutant: those nearest to it

FLIPPED = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
OTHER = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.BitAnd: "|", ast.BitOr: "&"}
DROPPED = (*OTHER, ast.Mod, ast.FloorDiv, ast.Pow)  # the right side of these may go
BOTH = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)  # and the left side of these
PAIRS = [
    ("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("all", "any"), ("argmin", "argmax"),
    ("floor", "ceil"), ("sum", "mean"), ("zeros", "ones"), ("zeros_like", "ones_like"),
]  # fmt: skip
SWAPPED = dict(PAIRS) | {b: a for a, b in PAIRS}
SILENT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import)  # what these compute nobody gets
UNARY = {"abs", "detach", "exp", "log", "sqrt", "square", "float", "double", "clone"}


class Mutant(NamedTuple):
    path: str  # from the root of the tree
    line: int
    start: int  # bytes of the file that are replaced
    end: int
    old: str
    new: str


def _expressions(node: ast.AST, text) -> Iterator[tuple[ast.AST, str]]:
    """(the part of a node that goes, the source that comes), for each operator that fits the node."""
    match node:
        case ast.Compare(left=left, ops=[op, *others], comparators=rights):
            flipped = (ast.Compare(left, [new(), *others], rights) for new in FLIPPED[type(op)])
            yield from ((node, f"({ast.unparse(x)})") for x in flipped)
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, f"({word.join(f'({text(v)})' for v in values)})"
            yield from ((node, f"({text(v)})") for v in values if len(values) == 2)
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield node, f"({text(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, DROPPED):
            if type(op) in OTHER:
                yield node, f"(({text(left)}) {OTHER[type(op)]} ({text(right)}))"
            yield node, f"({text(left)})"
            if isinstance(op, BOTH):
                yield node, f"({text(right)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, repr(value * 2 or 1.0)
        case ast.Slice(lower=lower, upper=upper):
            shifted = ((x, by) for x, by in ((lower, "+ 1"), (upper, "- 1")) if x is not None)
            yield from ((x, f"({text(x)}) {by}") for x, by in shifted if not isinstance(x, ast.Constant))
        case ast.Call(func=func, args=args, keywords=keywords):
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if name in SWAPPED:
                yield func, text(func)[: -len(name)] + SWAPPED[name]
            if name == "where" and len(args) == 3:
                yield from ((node, f"({text(x)})") for x in args[1:])
            if name in UNARY and isinstance(func, ast.Attribute) and not args:
                yield node, text(func.value)
            for k in keywords if name.startswith("clamp") else ():
                others = [x for x in keywords if x is not k]
                yield node, ast.unparse(ast.Call(func, args, others)) if others else text(func.value)
        case ast.If(test=test):
            yield from ((test, x) for x in ("True", "False"))
        case ast.IfExp(body=body, orelse=orelse):
            yield from ((node, f"({text(x)})") for x in (body, orelse))
        case ast.comprehension(ifs=ifs):
            yield from ((x, "True") for x in ifs)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute: no types, messages of errors, texts or lists of names."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, SILENT):
                continue
            text = ast.unparse(child)
            alias = isinstance(child, ast.Assign) and isinstance(child.value, ast.BinOp) and "|" in text
            if not (isinstance(node, ast.Module) and (alias or "__all__" in text or "TYPE_CHECKING" in text)):
                yield from _nodes(child)


def mutants(path: str) -> list[Mutant]:
    """Every mutant of one file, in its order."""
    source = (ROOT / path).read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def span(node) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def text(node) -> str:
        start, end = span(node)
        return source[start:end].decode()

    found = {}
    for node in _nodes(ast.parse(source)):
        for gone, new in _expressions(node, text):
            start, end = span(gone)
            mutant = Mutant(path, gone.lineno, start, end, text(gone), new)
            with contextlib.suppress(SyntaxError):
                compile(applied(source, mutant), path, "exec")
                found[start, end, new] = mutant
    return sorted(found.values(), key=lambda m: (m.start, m.end, m.new))


def applied(source: bytes, mutant: Mutant) -> bytes:
    return source[: mutant.start] + mutant.new.encode() + source[mutant.end :]


def seen_by(path: str, texts: dict[str, str]) -> list[str]:
    """The test files that could see a change: named after its file, of its room, then those that name it."""
    room, stem = Path(path).with_suffix("").parts[1], Path(path).stem
    tree = ast.parse((ROOT / path).read_text())
    tables = [t for x in tree.body if isinstance(x, ast.Assign) for t in x.targets]
    names = [getattr(x, "name", "_") for x in tree.body] + [getattr(t, "id", "_") for t in tables]
    names = [name for name in names if name[0] != "_"]
    called = re.compile(rf"\b(?:{room}|{stem})\.(?:{'|'.join(names) or stem})\b|import .*\b{stem}\b")
    counts = {name: len(called.findall(text)) for name, text in texts.items()}
    near = {t for t in texts if stem in Path(t).stem}
    of_room = {t for t in texts if t.startswith((f"tests/{room}/", f"tests/test_{room}"))}
    found = {t for t in texts if counts[t]} | near | of_room
    order = {t: (stem in Path(t).stem, t in near or t in of_room, counts[t]) for t in found}
    return sorted(found, key=lambda t: order[t], reverse=True)[:MOST]


class Tree:
    """A copy of the tree in which mutants are applied, and what its tests take without one."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit, self.seconds = folder, limit, {}
        for name in ("rft_fn", "kernels", "tests", "docs", "train_scripts"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        for file in ROOT.glob("*.*"):
            if file.is_file():
                shutil.copy(file, folder)
        paths = (folder, folder / "kernels")
        os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CI": "1", "OMP_NUM_THREADS": "1"}
        # a mutant may have the size of the one before, and the second of its time
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def run(self, test: str, limit: int) -> tuple[str, float]:
        """(what failed first in a test file, or '', seconds of a core that it took, at most `limit`)."""
        log = self.folder / "log.txt"
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(self.folder)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
            sys.dont_write_bytecode = True
            os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", test]))
        end, done = time.monotonic() + IDLE * limit, 0
        while not done and time.monotonic() < end:
            time.sleep(0.02)
            done, status, used = os.wait4(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            _, status, used = os.wait4(child, 0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
        what = failed.group(1) if failed else f"{test}: status {os.waitstatus_to_exitcode(status)}"
        return what if status else "", used.ru_utime + used.ru_stime

    def usable(self, test: str) -> bool:
        """Whether a file passes here in time without a mutant; told once where it does not."""
        if test not in self.seconds:
            failed, seconds = self.run(test, self.limit)
            self.seconds[test] = 0 if failed else seconds
            print(f"    {seconds:.1f} s  {test}" if not failed else f"left out: {failed}", flush=True)
        return self.seconds[test] > 0

    def killer(self, mutant: Mutant, tests: list[str]) -> str:
        """The test that notices a mutant, or ''."""
        file = self.folder / mutant.path
        source = file.read_bytes()
        for test in tests:
            if self.usable(test):
                file.write_bytes(applied(source, mutant))
                found, _ = self.run(test, int(10 + 3 * self.seconds[test]))
                file.write_bytes(source)
                if found:
                    return found
        return ""


def main() -> None:
    """Draw, apply, test and count."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--seed", type=int, required=True, help="draws the mutants")
    parser.add_argument("--count", type=int, default=100, help="how many are drawn")
    whole = [f"rft_fn/{name}" for name in PATHS]
    parser.add_argument("--paths", nargs="+", default=whole, help="files and folders")
    parser.add_argument("--limit", type=int, default=20, help="seconds of a core that a test file may take")
    parser.add_argument("--list", action="store_true", help="only print the mutants and their test files")
    args = parser.parse_args()
    files = []
    for path in (ROOT / name for name in args.paths):
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    every = [m for file in files for m in mutants(str(file.relative_to(ROOT)))]
    drawn = random.Random(args.seed).sample(every, min(args.count, len(every)))
    tests = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    texts = {t: (ROOT / t).read_text() for t in tests if not t.startswith(SLOW)}
    texts = {t: text for t, text in texts.items() if "pytestmark = pytest.mark.slow" not in text}
    killed = 0
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = None if args.list else Tree(Path(folder), args.limit)
        importlib.import_module("transformers")  # once, for all the forks
        for number, m in enumerate(drawn, 1):
            shown = f"{m.path}:{m.line}  {' '.join(m.old.split())}  ->  {' '.join(m.new.split())}"
            if tree is None:
                print(shown, *seen_by(m.path, texts), sep="\n    ")
                continue
            by = tree.killer(m, seen_by(m.path, texts))
            killed += bool(by)
            print(f"{'killed' if by else 'SURVIVED'}  {shown}  {by}", flush=True)
            if number % 10 == 0 or number == len(drawn):
                print(f"    {killed} of {number} killed, drawn by {args.seed} from {len(every)}", flush=True)


if __name__ == "__main__":
    main()
