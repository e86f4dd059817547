"""Builds a release, checks it as a stranger would use it, and tags it: `make release`.

    python tests/release.py build                      dist/: the sdist, and the wheel that is built of it
    python tests/release.py try 3.11 3.12 3.13 3.14    the wheel in an empty environment of each Python
    python tests/release.py notes 0.2.0                the changelog's section of a version
    python tests/release.py tag 0.2.0                  the section's date, a commit and a tag

`make release VERSION=0.2.0` does all in this order and stops at what fails; nothing is published before the
tag is pushed. A Python that is not on this machine is named and left to the workflow.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CHANGELOG = ROOT / "CHANGELOG.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONED = {  # file -> how it says the version
    "pyproject.toml": 'version = "{}"',
    "rft_fn/__init__.py": '__version__ = "{}"',
    "CITATION.cff": "version: {}",
}

# what a stranger types after `pip install`, in an empty folder, as the pages say
COMMANDS = (
    "rft doctor",
    "rft run grpo --steps 2 --out runs/first",
    "rft report runs/first",
    "rft new grpo my_grpo.py",
    "rft run my_grpo.py --steps 2 --out runs/mine",
)


class Failed(SystemExit):
    """A release that is not one, in one line."""


def run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Return what a command prints."""
    done = subprocess.run(list(map(str, words)), cwd=cwd or ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise Failed(
            f"{' '.join(map(str, words))}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


# ---------- build


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel out of the sdist: what it lacks no wheel has."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", DIST, cwd=unpacked)
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def check(sdist: Path, wheel: Path) -> None:
    """Check the contents and metadata of both files. SystemExit for what is missing, or too much."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines())
    left_out = {
        x for x in tracked if x.startswith(("rft_fn/", "kernels/", "train_scripts/", "tests/"))
    } - inside
    if left_out:
        raise Failed(f"{sdist.name}: expected every tracked file, {sorted(left_out)[0]} is not in it")
    foreign = {x for x in inside - tracked if x != "PKG-INFO" and not (ROOT / x).is_dir()}
    if foreign:
        raise Failed(f"{sdist.name}: expected tracked files alone, got {sorted(foreign)[0]}")

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"rft_fn-{PROJECT['version']}.dist-info"
        about = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    wanted = {x for x in tracked if x.startswith("rft_fn/")}
    wanted |= {x.removeprefix("kernels/") for x in tracked if x.startswith("kernels/rft_kernels/")}
    wanted |= {
        x.replace("train_scripts", "rft_scripts", 1) for x in tracked if x.startswith("train_scripts/")
    }
    if wanted - names:
        raise Failed(
            f"{wheel.name}: expected every file of the packages, {sorted(wanted - names)[0]} is missing"
        )
    extra = {x for x in names - wanted if not x.startswith(f"{info}/")}
    if extra:
        raise Failed(f"{wheel.name}: expected the packages alone, got {sorted(extra)[0]}")
    said = {
        "Name": PROJECT["name"],
        "Version": PROJECT["version"],
        "Requires-Python": PROJECT["requires-python"],
        "License-Expression": PROJECT["license"],
        "Description-Content-Type": "text/markdown",
    }
    for key, want in said.items():
        if about[key] != want:
            raise Failed(f"{wheel.name}: expected {key} {want}, got {about[key]}")
    if not {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names:
        raise Failed(f"{wheel.name}: the licence or the command is missing")


# ---------- try


def try_wheel(wheel: Path, version: str, requirements: list[str]) -> bool:
    """Install the wheel in an empty environment and run the commands; False without such a Python."""
    found = shutil.which(f"python{version}")
    works = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    if not works:
        print(f"Python {version}: not on this machine, left to the workflow", flush=True)
        return False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(found, "-m", "venv", folder / "env")
        python = folder / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", wheel, *requirements, cwd=folder)
        run(python, "-m", "pip", "check", cwd=folder)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        clean["PATH"] = f"{folder / 'env' / 'bin'}{os.pathsep}{clean['PATH']}"
        for command in COMMANDS:
            print(f"Python {version}: {command}", flush=True)
            run(*command.split(), cwd=folder, env=clean)
    return True


# ---------- notes and tag


def section(text: str, version: str) -> str:
    """Return the changelog's section of a version, released or not."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = [x for x in parts if x.startswith((f"{version} ", f"Unreleased ({version})"))]
    if len(found) != 1:
        raise Failed(f"CHANGELOG.md: expected one section of {version}, got {len(found)}")
    return found[0].partition("\n")[2].strip() + "\n"


def released(text: str, version: str, date: str) -> str:
    """Return the changelog with its unreleased section dated."""
    head = f"## Unreleased ({version})\n"
    if text.count(head) != 1:
        raise Failed(f"CHANGELOG.md: expected one line {head.strip()!r}, got {text.count(head)}")
    return text.replace(head, f"## {version} ({date})\n")


def check_version(version: str) -> None:
    """Check that every file says the version."""
    for name, form in VERSIONED.items():
        if form.format(version) not in (ROOT / name).read_text().splitlines():
            raise Failed(f"{name}: expected the line {form.format(version)!r}")


def check_clean(version: str) -> None:
    """Check that a tag would name what is here."""
    if run("git", "status", "--porcelain"):
        raise Failed("git: expected a clean work tree, there are changes or files that no commit has")
    if run("git", "tag", "--list", f"v{version}"):
        raise Failed(f"git: expected no tag v{version}, there is one")


def tag(version: str) -> None:
    """Date the changelog's section, commit it, and tag the commit."""
    check_version(version)
    check_clean(version)
    text = CHANGELOG.read_text()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    CHANGELOG.write_text(released(text, version, date))
    run("git", "commit", "--quiet", "-m", f"Release {version}", "--", CHANGELOG)
    run("git", "tag", "--annotate", f"v{version}", "-m", f"rft_fn {version}\n\n{section(text, version)}")
    print(f"tagged v{version}; publish it with: git push origin main v{version}")


def main() -> None:
    """Run one part of a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    first = parts.add_parser("build")
    first.add_argument(
        "--version", help="refuse another one, a tag that exists, and changes without a commit"
    )
    tries = parts.add_parser("try")
    tries.add_argument("pythons", nargs="+", help="as 3.12")
    tries.add_argument("--with", dest="requirements", nargs="*", default=[], help="as torch==2.13.0")
    for name in ("notes", "tag"):
        parts.add_parser(name).add_argument("version")
    args = parser.parse_args()

    if args.part == "build":
        if args.version:
            check_version(args.version)
            check_clean(args.version)
            section(CHANGELOG.read_text(), args.version)
        sdist, wheel = build()
        check(sdist, wheel)
        print(f"{sdist.name} {wheel.name}: checked")
    elif args.part == "try":
        (wheel,) = DIST.glob("*.whl")
        if not any([try_wheel(wheel, version, args.requirements) for version in args.pythons]):
            raise Failed("expected one of these Pythons on this machine, there is none")
    elif args.part == "notes":
        print(section(CHANGELOG.read_text(), args.version), end="")
    else:
        tag(args.version)


if __name__ == "__main__":
    main()
