"""Media of prompts inside text: small PNG pictures and WAV sounds as data URIs."""

import base64
import io
import wave
from typing import Any

import numpy as np

from rft_fn.data.decode import image, sound, video
from rft_fn.data.medium import Medium, read

__all__ = ["data_uri", "shown"]


_MOST = 3  # media of a prompt
_PIXELS = 192  # of the longer side of a picture
_RATE = 16_000  # Hz
_SECONDS = 4  # of a sound


def shown(prompt: Any) -> dict[str, Any]:
    """Return {"media": [(kind, name, data URI) ...]} of the first media of a prompt, or {} without any."""
    sources = getattr(prompt, "sources", ())[:_MOST]
    if not sources:
        return {}
    named = zip(sources, prompt.media_names)
    return {"media": [(medium.kind, name, data_uri(medium)) for medium, name in named]}


def data_uri(medium: Medium) -> str:
    """Return a medium as a data URI: a picture, the first frame of a video, the start of a sound.

    Empty for one that can no longer be read.
    """
    try:
        content = read(medium)
        if medium.kind == "audio":
            return _uri("audio/wav", _wav(sound(content, rate=_RATE)[0]))
        if medium.kind == "video":
            return _uri("image/png", _png(video(content)[0][0]))
        return _uri("image/png", _png(image(content)[0]))
    except ValueError:
        return ""


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _png(picture: Any) -> bytes:
    """Return a picture, shrunk, as PNG."""
    from PIL import Image

    if not isinstance(picture, Image.Image):
        picture = Image.fromarray(np.asarray(picture))
    small = picture.convert("RGB")
    small.thumbnail((_PIXELS, _PIXELS))
    file = io.BytesIO()
    small.save(file, "PNG", optimize=True)
    return file.getvalue()


def _wav(samples: np.ndarray) -> bytes:
    """Return samples [n] in [-1, 1] at 16 kHz as a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        cut = samples[: _SECONDS * _RATE].clip(-1, 1)
        out.writeframes((cut * 32767).astype("<i2").tobytes())
    return file.getvalue()
