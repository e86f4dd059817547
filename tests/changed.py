"""Run the tests of the files that changed: `make check`, or `python tests/changed.py --base main`.

A test file runs if it changed; if it is named after a module that changed; or, where no test file has the
module's name, if it lies in the folder that mirrors the module's. The rules of the house always run.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = "tests/test_house.py"
MIRRORS = {"rft_fn": "tests", "kernels/rft_kernels": "tests/kernel", "train_scripts": "tests/scripts"}


def changed(base: str) -> list[str]:
    """Files that differ from the commit `base`, and those that git does not know yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    names = []
    for command in commands:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"base: expected a commit, got {base}: {done.stderr.strip().splitlines()[0]}")
        names += done.stdout.split()
    return sorted(set(names))


def tests_of(name: str, tests: list[str]) -> list[str]:
    """The test files, out of all `tests`, that a changed file calls for."""
    path = PurePosixPath(name)
    if name in tests:
        return [name]
    source = next((folder for folder in MIRRORS if path.is_relative_to(folder)), None)
    if path.suffix != ".py" or source is None:
        return []
    mirror = PurePosixPath(MIRRORS[source]) / path.parent.relative_to(source)
    word = path.stem
    if word == "__init__":
        word = path.parent.name
    near = [t for t in tests if PurePosixPath(t).parent == mirror]
    named = [t for t in near if word in PurePosixPath(t).stem]
    if named or mirror == PurePosixPath("tests"):
        return named
    return near


def wanted(names: list[str], tests: list[str]) -> list[str]:
    """The test files for all changed files."""
    found = {ALWAYS}
    for name in names:
        found |= set(tests_of(name, tests))
    return sorted(found)


def main() -> None:
    """Run pytest on them; its exit code is this one's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--list", action="store_true", help="only print the test files")
    args = parser.parse_args()
    tests = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    try:
        files = wanted(changed(args.base), tests)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("\n".join(files), flush=True)
    if args.list:
        return
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *files]
    sys.exit(subprocess.run(command, cwd=ROOT, env=env, check=False).returncode)


if __name__ == "__main__":
    main()
