"""The media of prompts as rewards get them: bytes of a file, and its type."""

import io
import mimetypes
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np

from rft_fn.data.decode import image
from rft_fn.data.medium import Content, Medium, label, read

__all__ = ["media_records"]


_BEGINNINGS = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"fLaC": "audio/flac",
    b"ID3": "audio/mpeg",
    b"OggS": "audio/ogg",
}
"""How files of a type begin."""


def media_records(media: Sequence[Medium]) -> list[dict[str, Any]]:
    """Return one record for each medium, in their order: its kind, its type, and the bytes of its file.

    {"kind": "image", "mime": "image/png", "bytes": ...}; of a URL, which is not fetched, {"kind", "mime",
    "url"}. The kind is image, video or audio; an unknown type is application/octet-stream. An array becomes a
    PNG or a WAV file, a video of frames an animated PNG. ValueError as the data's own reader raises it.
    """
    records: list[dict[str, Any]] = []
    for medium in media:
        name = label(medium.source)
        if name.startswith(("http://", "https://")):
            records.append({"kind": medium.kind, "mime": _mime(b"", name), "url": name})
        else:
            file = _file(medium.kind, read(medium))
            records.append({"kind": medium.kind, "mime": _mime(file, name), "bytes": file})
    return records


def _file(kind: str, content: Content) -> bytes:
    """Return the content of a medium as a file."""
    if isinstance(content, bytes):
        return content
    if kind == "audio":
        return _wav(content)
    pictures = [image(frame)[0] for frame in ([content] if kind == "image" else content)]
    file = io.BytesIO()
    pictures[0].save(file, "PNG", save_all=len(pictures) > 1, append_images=pictures[1:])
    return file.getvalue()


def _wav(content: Any) -> bytes:
    """Return (samples [n] or [n, channels] in [-1, 1], rate) as a WAV file of 16 bits."""
    if not isinstance(content, tuple):
        raise ValueError("audio: expected a file, or {'array', 'sampling_rate'}: an array has no rate")
    samples = np.asarray(content[0], dtype=np.float64)
    samples = samples.reshape(len(samples), -1)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(content[1])
        out.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def _mime(file: bytes, name: str) -> str:
    """Return the type of a file, by how it begins, else by its name."""
    for beginning, mime in _BEGINNINGS.items():
        if file.startswith(beginning):
            return mime
    if file.startswith(b"RIFF"):
        return {b"WAVE": "audio/wav", b"WEBP": "image/webp"}.get(file[8:12], "video/x-msvideo")
    return mimetypes.guess_type(name)[0] or "application/octet-stream"
