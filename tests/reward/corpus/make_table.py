"""Writes the table of docs/rewards.md: judges every function of the corpus and prints what it gave.

PYTHONPATH=tests:tests/reward python -m corpus.make_table
"""

from collections.abc import Sequence
from pathlib import Path

from corpus.cases import CASES, Case
from corpus.harness import judged, parsed, part_of

from rft_fn import reward

DOCS = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"
BEGIN, END = "<!-- corpus:begin -->", "<!-- corpus:end -->"
HEAD = (
    "| written for | `--reward` | columns of the data | unchanged | right | wrong | unreadable |\n"
    "|---|---|---|---|---|---|---|"
)


def line(case: Case, values: Sequence[float | None]) -> str:
    """The row of one function; `values` are those of the first three responses, () where it cannot run."""
    answer = "yes"
    if case.needs:
        answer = f"needs {case.needs}"
    read = ", ".join(f"`{name}`" for name in reward.columns(parsed(case._replace(beside=()))))
    shown = [f"{x + 0.0:.3g}" for x in values] or ["", "", ""]  # + 0.0: no -0
    return f"| {case.system} | `{case.spec}` | {read} | {answer} | {' | '.join(shown)} |"


def values_of(case: Case) -> Sequence[float | None]:
    """What the function gives a right, a wrong and an unreadable response."""
    if case.needs:  # so that the page is the same on a machine that has it
        return ()
    return part_of(case, judged(case))[0][:3]


def table() -> str:
    """All rows, and how many of the functions run."""
    rows = [line(case, values_of(case)) for case in CASES]
    able = sum(not case.needs for case in CASES)
    count = f"{able} of {len(CASES)} run unchanged; the others name what they lack."
    return "\n".join([count, "", HEAD, *rows])


def section(text: str, new: str) -> str:
    """The page with `new` between the two marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{new}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    DOCS.write_text(section(DOCS.read_text(), table()))
    print(f"{DOCS}: {len(CASES)} functions")


if __name__ == "__main__":
    main()
