"""The pictures of a run: drawn at its end, and histograms of response lengths on the way."""

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rft_fn.data.decode import image, sound, video
from rft_fn.data.medium import Medium, read
from rft_fn.metric import Calibration, reliability
from rft_fn.reward import Judged
from rft_fn.tools import plot

__all__ = ["Pictures", "Sample", "draw", "spectrogram"]


# ---------- a picture of responses to prompts with media


_RATE = 16_000  # Hz, of the spectrograms
_WINDOW = 400  # samples of a frame
_HOP = 160  # samples from one frame to the next
_WIDTH = 46  # characters of a line
_INCHES = 0.077  # of a character
_MOST = 3  # media of a prompt that are shown


class Sample(NamedTuple):
    """One response, as the picture shows it."""

    media: Sequence[Medium]
    names: Sequence[str]
    prompt: str
    response: str
    reward: float
    answer: str = ""


def draw(samples: Sequence[Sample], out: str | Path, *, title: str = "") -> Path:
    """Draw samples as the rows of a PNG, the media on the left and the texts on the right."""
    from rft_fn.tools.plot import figure, save

    # as wide as the longest line of text asks for
    columns = min(max(len(sample.media) for sample in samples), _MOST)
    texts = [_text(sample) for sample in samples]
    longest = max(len(line) for text in texts for line in text.splitlines())
    widths = [2.0] * columns + [_INCHES * longest + 0.3]
    fig, axes = figure(len(samples), widths, height=1.9)
    for row, sample, text in zip(axes, samples, texts):
        for ax in row:
            ax.axis("off")
        for ax, medium, name in zip(row, sample.media[:_MOST], sample.names):
            _show(ax, medium, name)
        row[-1].text(0, 0.95, text, va="top", fontsize=9, family="monospace", parse_math=False)
    if title:
        fig.suptitle(title, fontsize=10)
    return save(fig, out)


def _text(sample: Sample) -> str:
    lines = [("prompt", sample.prompt), ("response", sample.response)]
    if sample.answer:
        lines.append(("answer", sample.answer))
    lines.append(("reward", f"{sample.reward:.3g}"))
    return "\n".join(_filled(f"{name + ':':<10}", text) for name, text in lines)


def _filled(name: str, text: str) -> str:
    """Return a text of up to four lines, with its name in front."""
    short = textwrap.shorten(text, 4 * _WIDTH)
    filled = textwrap.fill(short, _WIDTH, initial_indent=name, subsequent_indent=" " * len(name))
    return filled or name  # of an empty text textwrap leaves nothing


def _show(ax: Any, medium: Medium, name: str) -> None:
    """Draw one medium with its name; in place of one that cannot be read, write why."""
    ax.set_title(textwrap.shorten(name, 30), fontsize=7)
    try:
        content = read(medium)
        if medium.kind == "audio":
            _show_sound(ax, sound(content, rate=_RATE)[0])
        elif medium.kind == "video":
            frames, _ = video(content)
            ax.imshow(np.concatenate([np.asarray(frame) for frame in frames[:4]], 1), interpolation="nearest")
        else:
            ax.imshow(np.asarray(image(content)[0]), interpolation="nearest")
    except ValueError as error:
        ax.text(0, 0.5, textwrap.fill(str(error), 24), fontsize=6)


def _show_sound(ax: Any, samples: np.ndarray) -> None:
    """Draw a spectrogram over seconds and kilohertz."""
    extent = (0, len(samples) / _RATE, 0, _RATE / 2000)
    ax.imshow(spectrogram(samples), aspect="auto", origin="lower", cmap="magma", extent=extent)
    ax.axis("on")
    ax.set_xlabel("s", fontsize=6, labelpad=1)
    ax.set_ylabel("kHz", fontsize=6, labelpad=1)
    ax.tick_params(labelsize=6, length=2, pad=1)


def spectrogram(samples: np.ndarray) -> np.ndarray:
    """Return the loudness [201, frames] in dB of samples [n] at 16 kHz, by frequency from 0 to 8 kHz.

    It is 20 log10 |sum_n hann(n) x[160 m + n] exp(-2 pi i k n / 400)| for frame m and frequency 40 k Hz, at
    least -60.
    """
    padded = np.pad(samples, (0, max(_WINDOW - len(samples), 0)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]
    found = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW), axis=1)).T
    return 20 * np.log10(np.maximum(found, 1e-3))


# ---------- the pictures of a run: drawn at its end, and histograms of response lengths on the way


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
