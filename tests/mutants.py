"""Change the library at random places, one at a time, and see which changes no test notices: `make mutants`.

    python tests/mutants.py --seed 7 --count 100 --paths rft_fn/loss rft_fn/packing

Each mutant is one operator at one place of the syntax tree: a comparison flipped, min for max, a term
dropped, a bound shifted, a sign, a constant, `and` for `or`, a `not`, a branch dropped. It is applied in a
copy of the tree. The test files that could see it run once without one, and note which functions each test
calls; then the tests that call the changed function run, the quickest first, until one fails. The same seed
draws the same mutants of the same tree. A survivor is an equivalent change, or a property that no test
states.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATHS = [
    "segment", "scan", "logprob", "metric", "weight", "rollout", "reward_shaping", "advantage", "algorithm",
    "optim", "loss", "packing", "strategy", "engine/hf", "collect", "run", "reward", "data", "sync", "ckpt",
]  # fmt: skip
NONE = (
    "tests/vllm",
    "tests/scripts",
    "tests/test_house",
    "tests/test_public",
)  # that see none, or all of them
IDLE = 10  # seconds that a process may wait for one that it may compute
MOST = 8  # test files a mutant: those nearest to it
FEW = 12  # seconds of a core that the tests of a mutant take together without it

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
            if isinstance(node, ast.Module):
                text = ast.unparse(child)
                alias = isinstance(child, ast.Assign) and isinstance(child.value, ast.BinOp) and "|" in text
                if alias or "__all__" in text or "TYPE_CHECKING" in text:
                    continue
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
            found[start, end, new] = Mutant(path, gone.lineno, start, end, text(gone), new)
    return sorted(found.values(), key=lambda m: (m.start, m.end, m.new))


def applied(source: bytes, mutant: Mutant) -> bytes:
    return source[: mutant.start] + mutant.new.encode() + source[mutant.end :]


def compiles(mutant: Mutant) -> bool:
    try:
        compile(applied((ROOT / mutant.path).read_bytes(), mutant), mutant.path, "exec")
    except SyntaxError:
        return False
    return True


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


class Call(NamedTuple):
    seconds: float  # of a core that a test takes
    seen: set[tuple[str, int]]  # (file, first line) of each function of the library that it calls


def _functions(mutant: Mutant) -> set[tuple[str, int]]:
    """(file, first line) of the functions around a mutant, the innermost only."""
    around = []
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_text())):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.lineno <= mutant.line <= node.end_lineno
        ):
            around.append(min([node.lineno, *(x.lineno for x in node.decorator_list)]))
    return {(mutant.path, max(around))} if around else set()


class Recorder:
    """A plugin of pytest that notes the functions of the library that each test calls."""

    def __init__(self, folder: Path, file: Path):
        self.root, self.file = f"{folder}/", file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        seen, library, known = set(), f"{self.root}rft_fn/", {}

        def note(frame, event, arg):
            if event == "call":
                code = frame.f_code
                ours = known.get(code.co_filename)
                if ours is None:
                    ours = known[code.co_filename] = code.co_filename.startswith(library)
                if ours:
                    seen.add((code.co_filename.removeprefix(self.root), code.co_firstlineno))

        self.failed = False
        begun = time.process_time()
        threading.setprofile(note)
        sys.setprofile(note)
        found = yield
        sys.setprofile(None)
        threading.setprofile(None)
        if not self.failed:
            with self.file.open("a") as file:
                file.write(json.dumps([item.nodeid, time.process_time() - begun, sorted(seen)]) + "\n")
        return found

    def pytest_runtest_logreport(self, report):
        self.failed |= not report.passed


class Tree:
    """A copy of the tree in which mutants are applied, and what its tests call without one."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit, self.known = folder, limit, {}
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

    def run(self, tests: list[str], limit: int, *plugins: object) -> str:
        """What failed first in these tests, or ''; `limit` is in seconds of a core."""
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
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "--tb=no",
                "-m",
                "not slow and not docs",
            ]
            os._exit(pytest.main([*options, *([] if plugins else ["-x"]), *tests], plugins=list(plugins)))
        end, done = time.monotonic() + IDLE * limit, 0
        while not done and time.monotonic() < end:
            time.sleep(0.02)
            done, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            _, status = os.waitpid(child, 0)
        text, code = log.read_text(errors="replace"), os.waitstatus_to_exitcode(status)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+|tests/\S+)", text, re.MULTILINE)
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED) and not failed:
            return f"{tests[0]}: no import" if "loading conftest" in text else ""
        what = failed.group(1) if failed else f"{tests[0]}: status {code}"
        return what if status else ""

    def calls(self, test: str) -> dict[str, Call]:
        """What each test of a file that passes calls, by its name; of a slow file those within the limit."""
        if test not in self.known:
            file = self.folder / "calls.jsonl"
            file.unlink(missing_ok=True)
            file.touch()
            self.run([test], self.limit, Recorder(self.folder, file))
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found: dict[str, Call] = {}
            for name, seconds, seen in rows:  # a function's cases together: they are one name to pytest
                function = name.partition("[")[0]
                before = found.get(function, Call(0.0, set()))
                found[function] = Call(before.seconds + seconds, before.seen | {tuple(x) for x in seen})
            seconds = sum(call.seconds for call in found.values())
            print(f"    {seconds:.1f} s, {len(found)} tests  {test}", flush=True)
            self.known[test] = found
        return self.known[test]

    def killer(self, mutant: Mutant, tests: list[str]) -> str:
        """The test that notices a mutant, or '': also where no test calls what it changes."""
        inside = _functions(mutant)  # none: what is computed at the import, which every test could see
        file = self.folder / mutant.path
        source = file.read_bytes()
        for test in tests:
            near = {name: c for name, c in self.calls(test).items() if not inside or inside & c.seen}
            chosen, seconds = [], 0.0
            for name in sorted(near, key=lambda name: near[name].seconds):
                if seconds + near[name].seconds < FEW or not chosen:
                    chosen.append(name)
                    seconds += near[name].seconds
            if chosen:
                file.write_bytes(applied(source, mutant))
                killed = self.run(chosen, int(30 + 3 * seconds))
                file.write_bytes(source)
                if killed:
                    return killed
        return ""


def place(name: str) -> Path:
    """The folder or the file of a room of the library."""
    folder = ROOT / "rft_fn" / name
    return folder if folder.is_dir() else folder.with_suffix(".py")


def main() -> None:
    """Draw, apply, test and count."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--seed", type=int, required=True, help="draws the mutants")
    parser.add_argument("--count", type=int, default=100, help="how many are drawn")
    whole = [str(path.relative_to(ROOT)) for path in map(place, PATHS)]
    parser.add_argument("--paths", nargs="+", default=whole, help="files and folders")
    parser.add_argument("--limit", type=int, default=120, help="seconds of a core that a test file may take")
    parser.add_argument("--list", action="store_true", help="only print the mutants and their test files")
    args = parser.parse_args()
    files = []
    for path in (ROOT / name for name in args.paths):
        if not path.exists():
            parser.error(f"--paths: expected a file or a folder, got {path.relative_to(ROOT)}")
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    every = [m for file in files for m in mutants(str(file.relative_to(ROOT)))]
    random.Random(args.seed).shuffle(every)
    drawn = list(itertools.islice(filter(compiles, every), args.count))
    tests = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    texts = {t: (ROOT / t).read_text() for t in tests if not t.startswith(NONE)}
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
