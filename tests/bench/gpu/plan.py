"""Holds the stages of run.py with their seconds, the command lines of its two calls, and what they carry."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
WHEELS = Path(".wheels")


class Stage(NamedTuple):
    """A part of the measurement: where its cases are, and the seconds that are kept for it.

    A stage is killed once it would take from the seconds that are kept for later ones: what an earlier one
    did not use is there for the next.
    """

    function: str  # module.name
    seconds: float
    beside: bool = False  # it needs no device and runs beside the others, from the start
    together: bool = False  # it asks whether it is right: its neighbours of this kind run at once


STAGES = {
    "ceilings": Stage("speed.ceilings", 30),
    "smoke": Stage("checks.smoke", 75, together=True),
    "head": Stage("checks.head", 60, together=True),
    "attention": Stage("checks.attention", 40, together=True),
    "gap": Stage("checks.gap", 60, together=True),
    "vision": Stage("state.vision", 60, together=True),
    "tests": Stage("checks.tests", 75, together=True),
    "bars": Stage("speed.bars", 35),
    "sampling": Stage("speed.sampling", 75),
    "attention_rate": Stage("speed.attention_rate", 5),
    "decode": Stage("speed.decode", 25),
    "gradient": Stage("speed.gradient", 50),
    "state": Stage("state.state", 55),
    "fsdp2": Stage("state.fsdp2", 20),
    "lora": Stage("speed.lora", 80),
    "gradient_7b": Stage("speed.gradient_7b", 45),
    "step": Stage("speed.step", 75),
    "forecast": Stage("state.forecast", 120, beside=True),
}
# what everything rests on comes first: the second call reads the auto.json of the first
CALLS = (tuple(STAGES)[:9], tuple(STAGES)[9:])
AUTO = "/tmp/rft_auto.json"  # which a machine that stays warm still has


def groups(names: Sequence[str]) -> list[list[str]]:
    """Return the stages that run at once, in their order: neighbours that are `together`, others alone."""
    found: list[list[str]] = []
    for name in names:
        if STAGES[name].beside:
            continue
        if found and STAGES[name].together and STAGES[found[-1][-1]].together:
            found[-1].append(name)
        else:
            found.append([name])
    return found


def seconds_of(parts: Sequence[Sequence[str]]) -> float:
    """Return the seconds that are kept for groups of stages, one after another."""
    return sum(max(STAGES[name].seconds for name in part) for part in parts)


# ---------- what is printed and carried


def commands() -> str:
    """Return the two command lines for a machine with a GPU that has no network, and what to do between."""
    install = (
        "set -o pipefail; python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir "
        f"--upgrade --target /tmp/site {WHEELS}/*.whl && export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1"
    )
    lines = [
        "On the machine with the GPU, in the root of a copy of this tree with the folder .wheels; OUT is a",
        "folder for the results, and nothing is fetched there:",
    ]
    for number, stages in enumerate(CALLS, 1):
        budget = seconds_of(groups(stages)) + 15  # imports, and ends of processes
        names = " ".join(stages)
        options = f'--out "$OUT" --auto {AUTO} --budget {budget:.0f} --only {names}'
        command = f"python3 tests/bench/gpu/run.py {options}"
        log = '2>&1 | tee "$OUT/log"'
        lines += ["", f"{number}. at most {budget + 10:.0f} s", "", f"{install} && {command} {log}"]
    lines += [
        "",
        "Where the machine stays warm between them, the second reads the auto.json of the first; else copy",
        "it to kernels/rft_kernels/ before. After both, here:",
        "",
        "python tests/bench/gpu/page.py FIRST/results.json SECOND/results.json",
    ]
    return "\n".join(lines)


def wheels() -> list[str]:
    """Return the wheels that a call carries, as name==version."""
    lines = Path(__file__).with_name("wheels.txt").read_text().splitlines()
    return [x for line in lines if (x := line.partition("#")[0].strip())]


def fetch(folder: Path = ROOT / WHEELS) -> None:
    """Download the wheels that the folder lacks, for Python 3.12 on Linux; delete those of other versions."""
    folder.mkdir(exist_ok=True)
    names = {x.replace("-", "_").replace("==", "-"): x for x in wheels()}
    for path in folder.glob("*.whl"):
        if names.pop("-".join(path.name.split("-")[:2]), None) is None:
            path.unlink()  # two versions of one package stop an installation
    if not names:
        return
    platforms = [f"manylinux_2_{n}_x86_64" for n in (34, 28, 27, 17)] + ["manylinux2014_x86_64"]
    options = [x for name in platforms for x in ("--platform", name)]
    options += ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, "-d", str(folder), *names.values()], check=True)
