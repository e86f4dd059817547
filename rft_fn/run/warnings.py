"""The warnings of a run: each symptom is shown once, and noted in the metrics of every later step."""

from collections.abc import Sequence

from rft_fn.run.symptoms import Row, symptoms

__all__ = ["WARNING", "Warnings"]

WARNING = "warning/"
"""How the name of a symptom's metric begins."""


class Warnings:
    """The symptoms of a run whose steps so far have the metrics `rows`."""

    def __init__(self, rows: Sequence[Row] = ()):
        self.rows = list(rows)
        self.shown: dict[str, None] = {}  # names, in the order in which they were found
        for row in rows:
            for name in row:
                if name.startswith(WARNING):
                    self.shown[name.removeprefix(WARNING)] = None

    def note(self, row: Row) -> tuple[list[str], dict[str, float]]:
        """(lines to show, metrics to add) after a step with the metrics `row`.

        The metric of a symptom is 1 where the run has it, 0 where it had it before, and else absent.
        """
        self.rows.append(row)
        found = symptoms(self.rows)
        lines = [x.line for x in found if x.name not in self.shown]
        self.shown |= dict.fromkeys(x.name for x in found)
        here = {x.name for x in found}
        return lines, {WARNING + name: float(name in here) for name in self.shown}
