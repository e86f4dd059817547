"""Holds the stages of run.py with their seconds, the command lines of its two calls, and what they carry."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
WHEELS = Path(".wheels")


class Stage(NamedTuple):
    """A part of the measurement: where its cases are, and the seconds after which it is killed."""

    function: str  # module.name
    seconds: float
    beside: bool = False  # it needs no device and runs beside the others, from the start


STAGES = {
    "ceilings": Stage("speed.ceilings", 10),
    "smoke": Stage("checks.smoke", 45),
    "head": Stage("checks.head", 40),
    "attention": Stage("checks.attention", 15),
    "bars": Stage("speed.bars", 45),
    "gradient": Stage("speed.gradient", 75),
    "sampling": Stage("speed.sampling", 60),
    "gap": Stage("checks.gap", 20),
    "state": Stage("state.state", 40),
    "fsdp2": Stage("state.fsdp2", 30),
    "vision": Stage("state.vision", 25),
    "lora": Stage("speed.lora", 20),
    "gradient_7b": Stage("speed.gradient_7b", 40),
    "step": Stage("speed.step", 75),
    "tests": Stage("checks.tests", 30),
    "forecast": Stage("state.forecast", 120, beside=True),
}
# what everything rests on comes first: the second call reads the auto.json of the first
CALLS = (("ceilings", "smoke", "head", "attention", "bars"), tuple(STAGES)[5:])


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
        most = sum(STAGES[n].seconds for n in stages if not STAGES[n].beside)
        budget = most + 25  # imports, and ends of processes
        names = " ".join(stages)
        command = f'python3 tests/bench/gpu/run.py --out "$OUT" --budget {budget:.0f} --only {names}'
        log = '2>&1 | tee "$OUT/log"'
        lines += ["", f"{number}. at most {budget + 20:.0f} s", "", f"{install} && {command} {log}"]
    lines += [
        "",
        "After the first: copy its auto.json to kernels/rft_kernels/. After both, here:",
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
