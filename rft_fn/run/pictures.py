"""The pictures of a run: drawn at its end, and histograms of response lengths on the way."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_fn.metric import Calibration, reliability
from rft_fn.reward import Judged
from rft_fn.run import plot
from rft_fn.run.sample_pictures import Sample, draw

__all__ = ["Pictures"]

_SECONDS = 20  # between two pictures of samples; to draw one takes a good part of a second


class Pictures:
    """The pictures of the run in `run`, drawn into `folder`."""

    def __init__(self, run: Path, folder: Path, *, every: int, config: Mapping[str, Any] | None = None):
        """Prepare pictures, with a histogram of lengths after every `every` steps; 0: only at the end.

        `config` are the options of the run, by which limits are drawn.
        """
        self.run = run
        self.config = config
        self.folder = folder
        self.every = every
        self.lengths: list[int] = []  # [tokens] of the responses of the last step
        self._shown: list[Sample] = []  # responses to prompts with media, of the last step
        self._title = ""
        self._calibration: Calibration | None = None  # of held-out rows
        self._drawn = -math.inf  # when they were drawn [seconds]
        self._done = False  # both pictures of responses show the last step

    @property
    def curve(self) -> Path:
        """Return the path of the picture of all curves."""
        return self.folder / "curve.png"

    def note_lengths(self, step: int, lengths: Sequence[int]) -> None:
        """Keep the lengths of a step's responses, and draw them where it is time for that."""
        self.lengths = list(lengths)
        self._done = False
        if self.every and (step + 1) % self.every == 0:
            plot.length_histogram(self.lengths, self.folder / f"lengths_{step + 1:08d}.png")

    def note_samples(self, step: int, prompts: Sequence[Any], judged: Judged, *, count: int) -> None:
        """Keep the first responses to the first prompts with media, and draw them every 20 seconds."""
        group = judged.reward.shape[1]
        found = []
        for i, prompt in enumerate(prompts[:count]):
            if getattr(prompt, "sources", ()):
                answer = str(prompt.columns.get("answer", ""))
                texts = prompt.text, judged.texts[i * group], float(judged.reward[i, 0]), answer
                found.append(Sample(prompt.sources, prompt.media_names, *texts))
        if not found:
            return
        self._shown = found
        self._title = f"{self.run.name}, step {step + 1}"
        if time.monotonic() - self._drawn > _SECONDS:
            self._draw_samples()

    def note_reliability(self, found: Calibration) -> None:
        """Keep how often predictions on held-out rows come true."""
        self._calibration = found

    def _draw_samples(self) -> None:
        draw(self._shown, self.folder / "samples.png", title=self._title)
        self._drawn = time.monotonic()

    def draw_responses(self) -> None:
        """Draw the responses of the last step, and their lengths."""
        if self._shown:
            self._draw_samples()
        if self.lengths:
            plot.length_histogram(self.lengths, self.folder / "lengths.png")
        self._done = True

    def draw(self) -> None:
        """Draw all of them."""
        if not self._done:
            self.draw_responses()
        metrics = self.run / "metrics.jsonl"
        if metrics.exists():
            plot.curve(metrics, self.curve, title=self.run.name, config=self.config)
            plot.phases(self.run / "timing.jsonl", self.folder / "phases.png")
        if self._calibration is not None:
            found = self._calibration
            plot.reliability(
                reliability(found),
                self.folder / "reliability.png",
                ece=float(found.value()),
                title=self.run.name,
            )
