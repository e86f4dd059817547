"""Small wrong changes of the library, each with the test that has to fail for it: `make mutants`.

The lists lie beside this file, one for each part of the library. A mutant is (what, file, old, new, test):
`old` occurs exactly once in `file`, and `test` is a pytest id that passes as the code stands and fails with
`new` in its place. Every mutant runs in a copy of the repository.

    python tests/mutants/run.py                 all of them
    python tests/mutants/run.py loss engine     those that mention one of the words anywhere
    python tests/mutants/run.py --new           those that were not run yet, or were changed since

Every result is kept in docs/results/mutants.json, with the commit that it was run on; docs/mutants.md is made
of those, so that it says of each mutant when its test last saw it.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
PAGE, RECORD = ROOT / "docs" / "mutants.md", ROOT / "docs" / "results" / "mutants.json"
LIMIT = 600  # s that one test may take
LOW = (
    Path(sys.prefix) / "low"
)  # libraries for the tests of low precision alone: others would see their prints


class Mutant(NamedTuple):
    """A wrong change, and the test that sees it."""

    part: str  # name of its list
    what: str
    file: str  # relative to the root
    old: str  # occurs exactly once
    new: str
    test: str  # a pytest id


class Result(NamedTuple):
    """How a mutant fared."""

    mutant: Mutant
    killed: bool
    seconds: float
    note: str  # why it does not count, where it does not


def mutants() -> list[Mutant]:
    """All mutants, in the order of the lists' names."""
    found = []
    for path in sorted(HERE.glob("*.py")):
        if path != Path(__file__).resolve():
            spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found += [Mutant(path.stem, *entry) for entry in module.MUTANTS]
    return found


def wanted(everything: Sequence[Mutant], words: Sequence[str]) -> list[Mutant]:
    """The mutants that one of the words is about; all without words."""
    return [m for m in everything if not words or any(w in " ".join(m) for w in words)]


def copy_to(folder: Path) -> None:
    """The files that git knows, with what is not committed yet."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def is_low(test: str) -> bool:
    """Whether a test is one of those that need what lies in `LOW`."""
    return test.startswith("tests/model/test_quantize.py")


def passes(folder: Path, *tests: str) -> tuple[bool, str]:
    """(whether the tests pass in that copy, the end of their output)."""
    path = [str(folder), str(folder / "kernels")]
    if all(is_low(test) for test in tests):
        path.append(str(LOW))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "CI": "true"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    limit = LIMIT * len(tests)
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return False, f"longer than {limit} s"
    said = done.stdout[-600:] + done.stderr[-400:]
    if done.returncode not in (0, 1):  # 2 interrupted, 3 internal, 4 usage, 5 no such test
        raise ValueError(f"{' '.join(tests)}: pytest ended with {done.returncode}: {said}")
    if done.returncode == 0 and " passed" not in said:
        raise ValueError(f"{' '.join(tests)}: all skipped; make mutants installs what they need: {said}")
    return done.returncode == 0, said


def tried(folder: Path, mutant: Mutant) -> Result:
    """The mutant in that copy, which is as it was before when this returns."""
    path = folder / mutant.file
    source = path.read_text()
    began = time.perf_counter()
    count = source.count(mutant.old)
    if count != 1:
        return Result(mutant, False, 0.0, f"its old text occurs {count} times in {mutant.file}")
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        survived, _ = passes(folder, mutant.test)
        note = "the test passes all the same" if survived else ""
    except ValueError as error:
        survived, note = True, str(error)
    finally:
        path.write_text(source)
    return Result(mutant, not survived, time.perf_counter() - began, note)


def run(chosen: Sequence[Mutant], jobs: int) -> Iterator[Result]:
    """Each mutant's result, in order, `jobs` at a time. ValueError for a test that fails without a mutant."""
    with tempfile.TemporaryDirectory() as tmp:
        free = [Path(tmp) / str(i) for i in range(jobs)]
        for folder in free:
            copy_to(folder)
        for low in (True, False):
            tests = sorted({m.test for m in chosen if is_low(m.test) == low})
            ok, said = passes(free[0], *tests) if tests else (True, "")
            if not ok:
                raise ValueError(f"tests: expected to pass without a mutant: {said}")

        def in_a_copy(mutant: Mutant) -> Result:
            folder = free.pop()
            try:
                return tried(folder, mutant)
            finally:
                free.append(folder)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(in_a_copy, chosen)


def key(mutant: Mutant) -> str:
    """The name of a mutant in the record: another wrong change, or another test, has another one."""
    text = "\0".join([mutant.file, mutant.old, mutant.new, mutant.test])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def head() -> str:
    """The commit of the code; a + behind it where files differ from it."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    commit = git(["git", "rev-parse", "--short=8", "HEAD"]).stdout.strip()
    return commit + "+" * bool(git(["git", "status", "--porcelain"]).stdout.strip())


def recorded() -> dict[str, dict]:
    """What was found so far, by `key`."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def keep(result: Result, commit: str) -> None:
    """Put a result into the record, and make the page anew."""
    found = recorded()
    found[key(result.mutant)] = {
        "what": result.mutant.what,
        "killed": result.killed,
        "note": result.note,
        "seconds": round(result.seconds),
        "commit": commit,
    }
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(table(mutants(), found))


def table(everything: Sequence[Mutant], found: dict[str, dict]) -> str:
    """A page for docs: the mutants by part, each with the test that kills it and the commit it was run on."""
    results = [found.get(key(m)) for m in everything]
    killed = sum(r is not None and r["killed"] for r in results)
    unseen = sum(r is None for r in results)
    lines = [
        "# Mutants",
        "",
        "Small wrong changes of the library, and the test that fails for each. `make mutants` applies every",
        "one to a copy of the repository and runs its test. A wrong change that no test sees belongs here,",
        "with a new test. The last column is the commit on which a mutant was run last.",
        "",
        f"Of {len(everything)} mutants {killed} are killed, {len(everything) - killed - unseen} survive and "
        f"{unseen} were not run as they stand.",
    ]
    for part in dict.fromkeys(m.part for m in everything):
        lines += ["", f"## {part}", "", "| what | where | killed by | on |", "|---|---|---|---|"]
        lines += [_row(m, found.get(key(m))) for m in everything if m.part == part]
    return "\n".join(lines) + "\n"


def _row(mutant: Mutant, result: dict | None) -> str:
    name = f"`{mutant.test.removeprefix('tests/')}`".replace("|", chr(92) + "|")
    if result is None:
        name, on = f"{name}, not run yet", ""
    else:
        on = result["commit"]
    if result is not None and not result["killed"]:
        name = f"**survives** {name}: {result['note']}"
    return f"| {mutant.what} | `{mutant.file}` | {name} | {on} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only mutants that one of these is about")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at a time")
    parser.add_argument("--new", action="store_true", help="only mutants without a result as they stand")
    args = parser.parse_args()
    chosen, results = wanted(mutants(), args.words), []
    if args.new:
        done = recorded()
        chosen = [m for m in chosen if key(m) not in done]
    commit = head()
    for i, result in enumerate(run(chosen, args.jobs)):
        results.append(result)
        verdict = "killed" if result.killed else f"SURVIVES: {result.note}"
        keep(result, commit)
        print(f"{i + 1}/{len(chosen)}  {result.mutant.part}: {result.mutant.what}: {verdict}  "
              f"({result.seconds:.0f} s)", flush=True)  # fmt: skip
    alive = [r for r in results if not r.killed]
    print(f"{len(results) - len(alive)} killed, {len(alive)} alive")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
