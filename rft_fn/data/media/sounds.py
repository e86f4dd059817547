"""Audio as one channel of floats at a given rate."""

import io
import math
import wave
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft_fn.data.media.stored import Content

__all__ = ["resample", "sound"]

_ZEROS = 16  # zero crossings of the filter on each side
_HIGHEST = 1 << 24  # Hz
_LONGEST = 1 << 26  # resampled samples: 70 minutes at 16 kHz
_AT_ONCE = 1 << 20  # numbers of filters in memory


def sound(content: Content, *, rate: int) -> tuple[np.ndarray, str]:
    """(samples [n] f32 in [-1, 1], a note on how they were changed, or "").

    Channels are averaged, and another sampling rate [Hz] than `rate` is resampled. WAV files of integers are
    read by Python itself, all others by the package soundfile. ValueError for anything that is no audio.
    """
    samples, found = _decoded(content)
    if samples.ndim == 2:
        samples = samples.mean(int(samples.shape[0] > samples.shape[1]))
    if samples.ndim != 1 or not samples.size:
        raise ValueError(f"expected samples [n], got shape {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise ValueError("expected finite samples, got NaN or inf")
    if not 1 <= found <= _HIGHEST:
        raise ValueError(f"expected a sampling rate of 1 to {_HIGHEST:,} Hz, got {found}")
    samples = samples.astype(np.float32)
    if found == rate:
        return samples, ""
    if len(samples) * rate > _LONGEST * found:
        raise ValueError(
            f"expected at most {_LONGEST:,} samples at {rate} Hz, got {len(samples):,} samples at {found} Hz"
        )
    resampled = resample(torch.from_numpy(samples), found, rate).numpy()
    return resampled, f"{found} Hz are resampled to {rate} Hz"


def _decoded(content: Content) -> tuple[np.ndarray, int]:
    """(samples [n] or [n, channels], their rate [Hz])."""
    if isinstance(content, tuple):
        return np.asarray(content[0], dtype=np.float32), content[1]
    if not isinstance(content, bytes):
        raise ValueError("expected a file of audio, or {'array', 'sampling_rate'}: an array has no rate")
    if content[:4] == b"RIFF":
        try:
            return _wave(content)
        except (wave.Error, EOFError) as error:
            return _by_soundfile(content, f"a WAV file that Python cannot read ({error or 'it ends early'})")
    return _by_soundfile(content, f"{len(content)} bytes that begin with {content[:8]!r}")


def _wave(content: bytes) -> tuple[np.ndarray, int]:
    """The samples of a WAV file of 8, 16, 24 or 32 bits."""
    with wave.open(io.BytesIO(content)) as file:
        width = file.getsampwidth()
        channels = file.getnchannels()
        count = file.getnframes()
        raw = np.frombuffer(file.readframes(count), dtype=np.uint8)
        rate = file.getframerate()
    if len(raw) != count * width * channels or not count:
        raise EOFError(f"{len(raw)} of {count * width * channels} bytes of samples")

    # 8 bits are unsigned; wider ones are signed, and fill the upper bytes of 32 bits
    if width == 1:
        samples = (raw.astype(np.float32) - 128) / 128
    else:
        padded = np.zeros((len(raw) // width, 4), dtype=np.uint8)
        padded[:, 4 - width :] = raw.reshape(-1, width)
        samples = (padded.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return samples.reshape(-1, channels), rate


def _by_soundfile(content: bytes, got: str) -> tuple[np.ndarray, int]:
    """The samples of any audio file that the package soundfile reads."""
    try:
        import soundfile  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"expected a WAV file of integers, got {got}; other audio needs pip install soundfile"
        ) from None
    module: Any = soundfile
    try:
        return module.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # the errors of its library
        raise ValueError(f"expected audio, got {got}: {error}") from None


def resample(x: Tensor, rate: int, new: int) -> Tensor:
    """x [n] at `rate` as [ceil(n new / rate)] at `new` [Hz].

    y[m] = sum_n x[n] c sinc(c t) cos^2(pi c t / 32) over |c t| < 16, with t = n - m rate / new in samples of
    x, and c = 0.99 min(1, new / rate), which cuts off what the new rate cannot hold; x itself at equal rates.
    Source: J. O. Smith, "Digital Audio Resampling".
    """
    if rate == new:
        return x
    divisor = math.gcd(rate, new)
    step = rate // divisor  # samples of x after which the offsets of the output repeat
    phases = new // divisor
    cut = 0.99 * min(1.0, new / rate)
    reach = math.ceil(_ZEROS / cut)
    if phases * (2 * reach + step) > _AT_ONCE:
        return _resample_at_odd_rates(x, rate, new, cut, reach)

    # one filter for each offset between an output and the inputs beside it
    at = torch.arange(-reach, reach + step, dtype=torch.float64)
    filters = _filter(at - torch.arange(phases, dtype=torch.float64)[:, None] * step / phases, cut).to(
        x.dtype
    )

    # each stride of the convolution gives `phases` outputs
    size = math.ceil(len(x) * phases / step)
    padded = torch.nn.functional.pad(x, (reach, reach + step))
    out = torch.nn.functional.conv1d(padded[None, None], filters[:, None], stride=step)
    return out[0].T.flatten()[:size]


def _filter(t: Tensor, cut: float) -> Tensor:
    """The filter at times t [samples of x]."""
    t = t * cut
    return cut * torch.sinc(t) * torch.cos(math.pi * t / (2 * _ZEROS)).square() * (t.abs() < _ZEROS)


def _resample_at_odd_rates(x: Tensor, rate: int, new: int, cut: float, reach: int) -> Tensor:
    """`resample` where hardly an offset repeats: a filter for each output, some at once."""
    size = -(-len(x) * new // rate)
    width = min(2 * reach + 2, len(x))
    out = torch.empty(size, dtype=x.dtype)
    beside = torch.arange(width)
    for chunk in torch.arange(size).split(max(_AT_ONCE // width, 1)):
        near = chunk * rate // new  # the sample of x before each output
        at = (near - reach).clamp(0, len(x) - width)[:, None] + beside
        filters = _filter(at - near[:, None] - (chunk * rate % new).double()[:, None] / new, cut)
        out[chunk] = (filters.to(x.dtype) * x[at]).sum(-1)
    return out
