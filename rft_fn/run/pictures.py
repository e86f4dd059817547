"""The pictures of a run: drawn at its end, and histograms of response lengths on the way."""

from collections.abc import Sequence
from pathlib import Path

from rft_fn.run import plot

__all__ = ["Pictures"]


class Pictures:
    """The pictures of the run in `run`, drawn into `folder`."""

    def __init__(self, run: Path, folder: Path, *, every: int):
        """`every` is the number of steps between two histograms of lengths; 0: only at the end."""
        self.run = run
        self.folder = folder
        self.every = every
        self.lengths: list[int] = []  # [tokens] of the responses of the last step

    @property
    def curve(self) -> Path:
        """The picture of all curves."""
        return self.folder / "curve.png"

    def note_lengths(self, step: int, lengths: Sequence[int]) -> None:
        """Keep the lengths of a step's responses, and draw them where it is time for that."""
        self.lengths = list(lengths)
        if self.every and (step + 1) % self.every == 0:
            plot.length_histogram(self.lengths, self.folder / f"lengths_{step + 1:08d}.png")

    def draw(self) -> None:
        """Draw all of them."""
        metrics = self.run / "metrics.jsonl"
        if metrics.exists():
            plot.curve(metrics, self.curve, title=self.run.name)
            plot.phases(self.run / "timing.jsonl", self.folder / "phases.png")
        if self.lengths:
            plot.length_histogram(self.lengths, self.folder / "lengths.png")
