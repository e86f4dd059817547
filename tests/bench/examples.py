"""The table and the pictures of docs/examples: `python tests/bench/examples.py --runs runs/examples`.

Every script runs with its own defaults. `--page` writes the page anew from the results, without a run.
"""

import argparse
import ast
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "examples"
PAGE, RESULTS = FOLDER / "README.md", ROOT / "docs" / "results" / "examples.json"
START, END = "<!-- table -->", "<!-- end of table -->"


def scripts() -> list[Path]:
    """The examples that can be run, by name."""
    return [p for p in sorted(FOLDER.glob("*.py")) if "def main(" in p.read_text()]


def summary(path: Path) -> str:
    """The first sentence of an example's docstring."""
    return ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0].rstrip(".")


def paper(path: Path) -> str:
    """The arXiv id that an example names."""
    return re.search(r"arXiv (\d{4}\.\d{5})", path.read_text())[1]


def measure(path: Path, runs: Path) -> dict:
    """Run an example with its defaults: its rewards and its time. Its picture goes into the docs."""
    out = runs / path.stem
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, str(path), "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    reward = [json.loads(x)["reward/mean"] for x in (out / "metrics.jsonl").read_text().splitlines()]
    pictures = FOLDER / "pictures"
    pictures.mkdir(exist_ok=True)
    shutil.copy2(out / "curve.png", pictures / f"{path.stem}.png")
    return {"reward": [round(x, 4) for x in reward], "seconds": round(seconds)}


def table(found: dict) -> str:
    """A line for each example."""
    lines = [
        "| script | idea | paper | lines | reward, first and last ten steps | steps | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in scripts():
        x = found["scripts"][path.stem]
        first, last = (sum(part) / len(part) for part in (x["reward"][:10], x["reward"][-10:]))
        count = len(path.read_text().splitlines())
        link = f"[{path.name}]({path.name}), [picture](pictures/{path.stem}.png)"
        lines.append(
            f"| {link} | {summary(path)} | {paper(path)} | {count} | {first:.2f} -> {last:.2f} "
            f"| {len(x['reward'])} | {x['seconds']} |"
        )
    lines += ["", f"Measured on {found['hardware']}, torch {found['torch']}, {found['date']}."]
    return "\n".join(lines)


def page(text: str, found: dict) -> str:
    """The page with the table as the results have it."""
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{table(found)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Run what is asked for, keep the results, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/examples"), help="folder of the runs")
    parser.add_argument("--only", nargs="*", default=None, help="names of examples")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    found = {"scripts": {}}
    if RESULTS.is_file():
        found = json.loads(RESULTS.read_text())
    for path in [] if args.page else scripts():
        if args.only is None or path.stem in args.only:
            found["scripts"][path.stem] = measure(path, args.runs)
            print(path.stem, found["scripts"][path.stem]["seconds"], "s", flush=True)
    if not args.page:
        found |= {"date": str(date.today()), "torch": torch.__version__}
        found["hardware"] = f"{torch.get_num_threads()} cores of a shared {platform.machine()} machine"
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
