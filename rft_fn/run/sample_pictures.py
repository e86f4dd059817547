"""A picture of responses to prompts with media: each next to its images, frames or spectrograms."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rft_fn.data.decode import image, sound, video
from rft_fn.data.medium import Medium, read
from rft_fn.run.plot import figure, save

__all__ = ["Sample", "draw", "spectrogram"]

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
