"""Images, and videos as lists of them."""

import io
import math
import warnings
from typing import Any

import numpy as np

from rft_fn.data.media.stored import Content

__all__ = ["image", "video"]


_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_COLOURS = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")  # modes of 8 bits, whose white Pillow knows
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def image(content: Content, *, max_pixels: int = 0) -> tuple[Any, str]:
    """(an image of PIL in RGB, a note on how it was changed, or "").

    An image of more than `max_pixels` is shrunk to as many; 0 is no limit. Grey of 16 and 32 bits and of
    floats in [0, 1] is brought to 8 bits; what is transparent is put on white. An array is [height, width],
    [height, width, 3] or [3, height, width], of unsigned integers, with the largest as white, or of floats in
    [0, 1]. ValueError for anything that is no image, or that ends early.
    """
    found = _opened(content, max_pixels)
    if min(found.size) < 1:
        raise ValueError(f"expected an image with pixels, got {found.size[0]} x {found.size[1]}")
    width, height = found.size
    if not max_pixels or width * height <= max_pixels:
        return found, ""
    scale = math.sqrt(max_pixels / (width * height))
    size = max(int(width * scale), 1), max(int(height * scale), 1)
    note = f"{width} x {height} pixels are shrunk to {size[0]} x {size[1]} for --max-pixels {max_pixels}"
    return found.resize(size), note


def _opened(content: Content, max_pixels: int) -> Any:
    """The image in its own size."""
    from PIL import Image, ImageOps

    if isinstance(content, np.ndarray):
        return _of_array(content)
    if isinstance(content, (list, tuple)):
        raise ValueError("expected one image, got a list")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            found = content
            if isinstance(content, bytes):
                Image.init()
                known = [name for name in _FORMATS if name in Image.OPEN]
                found = Image.open(io.BytesIO(content), formats=known)
                found.draft("RGB", _draft(found.size, max_pixels))  # a large JPEG is decoded at a fraction
            return _in_rgb(ImageOps.exif_transpose(found), getattr(found, "format", None))
    except Image.DecompressionBombError as error:
        raise ValueError(f"expected an image that fits into memory: {error}") from None
    except Image.UnidentifiedImageError:
        raise ValueError(f"expected an image, got {_begin(content)}: no {', '.join(_FORMATS)}") from None
    except Exception as error:  # whatever a decoder raises for a broken file
        reason = " ".join(str(error).partition(" <")[0].split()) or type(error).__name__
        raise ValueError(f"expected an image, got {_begin(content)}: {reason}") from None


def _in_rgb(found: Any, format_: str | None) -> Any:
    """An image of PIL in RGB: grey of 8 bits, on white. ValueError for a mode with another meaning."""
    from PIL import Image

    if found.mode.startswith(("I", "F")):
        grey = np.asarray(found)
        clear = grey == found.info.get("transparency", -1)
        return _of_array(np.where(clear, np.uint8(255), _of_wide(grey, found.mode, format_)))
    if found.mode in _ALPHA or found.has_transparency_data:
        if found.mode == "La":
            found = found.convert("LA")
        whole = found.convert("RGBA")
        white = Image.new("RGB", whole.size, "white")
        white.paste(whole, mask=whole.getchannel("A"))
        return white
    if found.mode not in _COLOURS:
        raise ValueError(f"mode {found.mode}, of which no colours are known; save it as RGB")
    return found.convert("RGB")


def _of_wide(x: np.ndarray, mode: str, format_: str | None = None) -> np.ndarray:
    """Numbers as bytes: floats in [0, 1] times 255, the upper 8 bits of integers.

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
    """The least size at which a large image may be decoded: above the limit, by at most 4 in area."""
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
    """(the frames of a video in RGB, a note on how they were changed, or "").

    A video is a list of images, or an array [frames, height, width, 3]. ValueError for a video file, which
    nothing here decodes, and for frames of different sizes.
    """
    if isinstance(content, bytes):
        raise ValueError("expected a video as a list of images or an array of frames, got a file")
    if isinstance(content, np.ndarray) and content.ndim != 4:
        raise ValueError(f"expected a video [frames, height, width, 3], got shape {list(content.shape)}")
    found = [image(frame, max_pixels=max_pixels) for frame in content]
    if not found:
        raise ValueError("expected a video with frames, got none")
    sizes = {frame.size for frame, _ in found}
    if len(sizes) > 1:
        raise ValueError(f"expected frames of one size, got {sorted(sizes)}")
    return [frame for frame, _ in found], found[0][1]
