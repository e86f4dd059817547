"""How large and how fast the page of long runs is: `python tests/bench/report_page.py --steps 10000`.

Writes runs of made-up numbers and their page, opens it in Chromium, and prints bytes, elements and seconds.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "run")]

import headless  # noqa: E402

from rft_fn.tools.page.build import write_page  # noqa: E402

# the time until the first charts of the redrawn curves are there, and a frame is painted
REDRAW = """new Promise((done) => {
  const begin = performance.now();
  CHANGE;
  const look = () => {
    const there = document.querySelector('#curves .chart:not(.waiting)');
    if (!there && performance.now() < begin + 9999) return requestAnimationFrame(look);
    requestAnimationFrame(() => done((performance.now() - begin) / 1000));
  };
  requestAnimationFrame(look);
})"""
CHANGES = {
    "a group is hidden": "document.querySelector('#legend input').click()",
    "curves are smoothed": "document.getElementById('smooth').value = '0.9'; curves()",
    "metrics are filtered": "document.getElementById('filter').value = 'm/1'; curves()",
    "another step of responses": "(() => { const m = document.querySelectorAll('#responses select')[1];"
    " m.selectedIndex = 0; m.dispatchEvent(new Event('change')); })()",
}


def write_run(folder, seed, steps, metrics):
    """A run of `metrics` curves, with phases, quantiles, and 16 responses of 50 tokens every 10 steps."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"lr": seed, "steps": steps}))

    def write(name, rows):
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    spread = [float(k) for k in range(7)]
    names = [f"m/{k}" for k in range(metrics)]
    write(
        "metrics",
        (
            {"step": i} | {name: math.sin(i * (k + 1) + seed) for k, name in enumerate(names)}
            for i in range(steps)
        ),
    )
    phases = {f"phase/{name}": 0.5 for name in ("generate", "judge", "score", "train", "sync")}
    write("timing", ({"step": i, "seconds": 3.0, **phases} for i in range(steps)))
    write("distributions", ({"step": i, "length": spread, "reward": spread} for i in range(steps)))
    text = {"prompt": "What is it?", "response": "It is this. " * 20, "reward": 1.0}
    write("trajectories", ({"step": i, **text} for i in range(steps) for _ in range(4)))
    numbers = {name: [0.125] * 50 for name in ("logp", "adv", "w", "push", "entropy", "ratio")}
    row = {"prompt": "What is it?", "pieces": [" token"] * 50, "mask": [1] * 50, "reward": 1.0, **numbers}
    write(
        "tokens",
        (
            {"step": i, "group": s // 8, "sample": s % 8, **row}
            for i in range(0, steps, 10)
            for s in range(16)
        ),
    )
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--metrics", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        runs = [write_run(here / f"r{k}", k, args.steps, args.metrics) for k in range(args.runs)]
        begin = time.perf_counter()
        page = write_page(runs, here / "page.html")
        print(f"written in             {time.perf_counter() - begin:8.2f} s")
        print(f"size                   {page.stat().st_size / 1e6:8.2f} MB")
        with headless.Browser(here / "browser") as browser:
            browser.open(page)
            browser.value("document.getElementById('curves').scrollIntoView()")
            browser.value("document.querySelectorAll('#curves summary').forEach((x) => x.click())")
            browser.until("document.querySelector('#curves .chart:not(.waiting)') !== null")
            load = browser.value("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
            print(f"loaded in              {load:8.2f} s")
            elements = browser.value("document.querySelectorAll('*').length")
            print(f"elements               {elements:8d}")
            for what, change in CHANGES.items():
                how = {"awaitPromise": True, "returnByValue": True}
                found = browser.send("Runtime.evaluate", expression=REDRAW.replace("CHANGE", change), **how)
                print(f"{what:<26}{found['result']['value']:5.2f} s")


if __name__ == "__main__":
    main()
