"""Decode images, videos as lists of them, and audio."""

import io
import math
import warnings
import wave
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft_fn.data.medium import Content

__all__ = ["image", "resample", "sound", "video"]


# ---------- images, and videos as lists of them


_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_COLOURS = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")  # modes of 8 bits: Pillow knows their white
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def image(content: Content, *, max_pixels: int = 0) -> tuple[Any, str]:
    """Return (an image of PIL in RGB, a note on how it was changed, or "").

    An image of more than `max_pixels` is shrunk to as many; 0 is no limit. Grey of 16 and 32 bits and of
    floats in [0, 1] is brought to 8 bits; what is transparent is put on white. An array is [height, width],
    [height, width, 3] or [3, height, width], of unsigned integers, with the largest as white, or of floats in
    [0, 1]. ValueError for anything that is no image, or that ends early.
    """
    picture = _opened(content, max_pixels)
    if min(picture.size) < 1:
        raise ValueError(f"expected an image with pixels, got {picture.size[0]} x {picture.size[1]}")
    width, height = picture.size
    if not max_pixels or width * height <= max_pixels:
        return picture, ""
    scale = math.sqrt(max_pixels / (width * height))
    size = max(int(width * scale), 1), max(int(height * scale), 1)
    note = f"{width} x {height} pixels are shrunk to {size[0]} x {size[1]} for --max-pixels {max_pixels}"
    return picture.resize(size), note


def _opened(content: Content, max_pixels: int) -> Any:
    """Return the image in its own size."""
    from PIL import Image, ImageOps

    if isinstance(content, np.ndarray):
        return _of_array(content)
    if isinstance(content, (list, tuple)):
        raise ValueError("expected one image, got a list")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = content
            if isinstance(content, bytes):
                Image.init()
                known = [name for name in _FORMATS if name in Image.OPEN]
                picture = Image.open(io.BytesIO(content), formats=known)
                # a large JPEG is decoded at a fraction
                picture.draft("RGB", _draft(picture.size, max_pixels))
            return _in_rgb(ImageOps.exif_transpose(picture), getattr(picture, "format", None))
    except Image.DecompressionBombError as error:
        raise ValueError(f"expected an image that fits into memory: {error}") from None
    except Image.UnidentifiedImageError:
        raise ValueError(f"expected an image, got {_begin(content)}: no {', '.join(_FORMATS)}") from None
    except Exception as error:  # whatever a decoder raises for a broken file
        reason = " ".join(str(error).partition(" <")[0].split()) or type(error).__name__
        raise ValueError(f"expected an image, got {_begin(content)}: {reason}") from None


def _in_rgb(picture: Any, format_: str | None) -> Any:
    """Return an image of PIL in RGB: grey of 8 bits, on white. ValueError for a mode with another meaning."""
    from PIL import Image

    if picture.mode.startswith(("I", "F")):
        grey = np.asarray(picture)
        clear = grey == picture.info.get("transparency", -1)
        return _of_array(np.where(clear, np.uint8(255), _of_wide(grey, picture.mode, format_)))
    if picture.mode in _ALPHA or picture.has_transparency_data:
        if picture.mode == "La":
            picture = picture.convert("LA")
        whole = picture.convert("RGBA")
        white = Image.new("RGB", whole.size, "white")
        white.paste(whole, mask=whole.getchannel("A"))
        return white
    if picture.mode not in _COLOURS:
        raise ValueError(f"mode {picture.mode}, of which no colours are known; save it as RGB")
    return picture.convert("RGB")


def _of_wide(x: np.ndarray, mode: str, format_: str | None = None) -> np.ndarray:
    """Return numbers as bytes: floats in [0, 1] times 255, the upper 8 bits of integers.

    Pillow itself reads RGB of 16 bits so. `mode` names them in errors. PIL's mode I is grey of 16 bits in a
    PNG or PPM, else of as many as the numbers need; below 256 they may be of 8 bits, too, and are refused.
    """
    low, high = float(x.min()), float(x.max())
    if x.dtype.kind == "f":
        if not (low >= 0 and high <= 1):
            raise ValueError(f"expected an image of bytes or in [0, 1], got floats in [{low:g}, {high:g}]")
        return np.round(x * 255).astype(np.uint8)
    if x.dtype.kind == "u":
        bits = x.dtype.itemsize * 8
    elif mode == "I" and low >= 0 and (format_ in ("PNG", "PPM") or high > 255 or high == 0):
        bits = 16 if high < 2**16 else 31
    else:
        raise ValueError(
            f"expected an image with a known white, got mode {mode} in [{low:g}, {high:g}]; save it as uint8"
        )
    return (x >> (bits - 8)).astype(np.uint8)


def _draft(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    """Return the least size at which a large image may be decoded: above the limit, by at most 4 in area."""
    if not max_pixels:
        return size
    scale = min(math.sqrt(max_pixels / (size[0] * size[1])), 1.0)
    return math.ceil(size[0] * scale), math.ceil(size[1] * scale)


def _begin(content: Content) -> str:
    if isinstance(content, bytes):
        return f"{len(content)} bytes that begin with {content[:8]!r}"
    return type(content).__name__


def _of_array(x: np.ndarray) -> Any:
    from PIL import Image

    if x.ndim == 3 and x.shape[0] == 3 and x.shape[-1] != 3:
        x = x.transpose(1, 2, 0)
    if not (x.ndim == 2 or (x.ndim == 3 and x.shape[-1] == 3)) or not x.size:
        raise ValueError(f"expected an image [height, width, 3], got an array of shape {list(x.shape)}")
    if x.dtype.kind not in "buif":
        raise ValueError(f"expected an image of numbers, got an array of {x.dtype}")
    if x.dtype == bool:
        x = x.astype(np.uint8) * np.uint8(255)
    if x.dtype != np.uint8:
        x = _of_wide(x, str(x.dtype))
    return Image.fromarray(x).convert("RGB")


def video(content: Content, *, max_pixels: int = 0) -> tuple[list[Any], str]:
    """Return (the frames of a video in RGB, a note on how they were changed, or "").

    A video is a list of images, or an array [frames, height, width, 3]. ValueError for a video file, which
    nothing here decodes, and for frames of different sizes.
    """
    if isinstance(content, bytes):
        raise ValueError("expected a video as a list of images or an array of frames, got a file")
    if isinstance(content, np.ndarray) and content.ndim != 4:
        raise ValueError(f"expected a video [frames, height, width, 3], got shape {list(content.shape)}")
    frames = [image(frame, max_pixels=max_pixels) for frame in content]
    if not frames:
        raise ValueError("expected a video with frames, got none")
    sizes = {frame.size for frame, _ in frames}
    if len(sizes) > 1:
        raise ValueError(f"expected frames of one size, got {sorted(sizes)}")
    return [frame for frame, _ in frames], frames[0][1]


# ---------- audio as one channel of floats at a given rate


_ZEROS = 16  # zero crossings of the filter on each side
_HIGHEST = 1 << 24  # Hz
_LONGEST = 1 << 26  # resampled samples: 70 minutes at 16 kHz
_AT_ONCE = 1 << 20  # numbers of filters in memory


def sound(content: Content, *, rate: int) -> tuple[np.ndarray, str]:
    """Return (samples [n] f32 in [-1, 1], a note on how they were changed, or "").

    Channels are averaged, and another sampling rate [Hz] than `rate` is resampled. WAV files of integers are
    read by Python itself, all others by the package soundfile. ValueError for anything that is no audio.
    """
    samples, own = _decoded(content)
    if samples.ndim == 2:
        samples = samples.mean(int(samples.shape[0] > samples.shape[1]))
    if samples.ndim != 1 or not samples.size:
        raise ValueError(f"expected samples [n], got shape {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise ValueError("expected finite samples, got NaN or inf")
    if not 1 <= own <= _HIGHEST:
        raise ValueError(f"expected a sampling rate of 1 to {_HIGHEST:,} Hz, got {own}")
    samples = samples.astype(np.float32)
    if own == rate:
        return samples, ""
    if len(samples) * rate > _LONGEST * own:
        raise ValueError(
            f"expected at most {_LONGEST:,} samples at {rate} Hz, got {len(samples):,} samples at {own} Hz"
        )
    resampled = resample(torch.from_numpy(samples), own, rate).numpy()
    return resampled, f"{own} Hz are resampled to {rate} Hz"


def _decoded(content: Content) -> tuple[np.ndarray, int]:
    """Return (samples [n] or [n, channels], their rate [Hz])."""
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
    """Return the samples of a WAV file of 8, 16, 24 or 32 bits."""
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
    """Return the samples of any audio file that the package soundfile reads."""
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
    """Resample x [n] at `rate` to [ceil(n new / rate)] at `new` [Hz].

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

    # one filter for each offset between an output and the inputs near it
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
    """Return the filter at times t [samples of x]."""
    t = t * cut
    return cut * torch.sinc(t) * torch.cos(math.pi * t / (2 * _ZEROS)).square() * (t.abs() < _ZEROS)


def _resample_at_odd_rates(x: Tensor, rate: int, new: int, cut: float, reach: int) -> Tensor:
    """Resample where hardly an offset repeats: a filter for each output, some at once."""
    size = -(-len(x) * new // rate)
    width = min(2 * reach + 2, len(x))
    out = torch.empty(size, dtype=x.dtype)
    offsets = torch.arange(width)
    for chunk in torch.arange(size).split(max(_AT_ONCE // width, 1)):
        near = chunk * rate // new  # the sample of x before each output
        at = (near - reach).clamp(0, len(x) - width)[:, None] + offsets
        filters = _filter(at - near[:, None] - (chunk * rate % new).double()[:, None] / new, cut)
        out[chunk] = (filters.to(x.dtype) * x[at]).sum(-1)
    return out
