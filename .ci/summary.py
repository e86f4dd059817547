"""One line for several runs of pytest: summary.py LOG FAILED adds up the last lines of all runs in LOG."""

import re
import sys
from collections import Counter
from pathlib import Path

COUNT = r"\d+ (?:passed|failed|skipped|xfailed|xpassed|deselected|warnings?|errors?)"
LINE = re.compile(rf"^=* ?({COUNT}(?:, {COUNT})*) in ([\d.]+)s\b", re.MULTILINE)


def summary(log: str, failed: bool) -> tuple[str, bool]:
    """(pytest's last line with the counts of all runs, whether all was well)."""
    counts: Counter[str] = Counter()
    seconds = 0.0
    for found, took in LINE.findall(log):
        seconds += float(took)
        for each in found.split(", "):
            number, kind = each.split()
            counts[kind.replace("warnings", "warning").replace("errors", "error")] += int(number)

    # a run that ended without a line of its own, or a linter that failed, is an error too
    if failed and not counts["failed"] and not counts["error"]:
        counts["error"] += 1
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")
    parts = [f"{counts[kind]} {kind}" for kind in order if counts[kind]]
    parts = [f"{part}s" if re.fullmatch(r"(?!1 )\d+ (warning|error)", part) else part for part in parts]
    sound = not failed and not counts["failed"] and not counts["error"] and counts["passed"] > 0
    return f" {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s ".center(80, "="), sound


if __name__ == "__main__":
    line, sound = summary(Path(sys.argv[1]).read_text(errors="replace"), sys.argv[2] != "0")
    print(line)
    sys.exit(not sound)
