"""Makes tokens and tensors of text with media, by a model's processor, once for each content."""

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import border
from rft_fn.data.decode import image, sound, video
from rft_fn.data.medium import Content, Medium, digest, name_of, read

__all__ = ["Cache", "Encoded", "MediaLimits", "Processing"]

_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_DECODING = "decoded 2"  # another number where files give other pixels or samples than before
# their processors put one dimension of prompts before the tiles
_BY_PROMPT = ("Idefics2", "Idefics3", "SmolVLM")


# ---------- what a processor made of media, kept by its content


_MEMORY = 1 << 28  # bytes of tensors in memory


class Encoded(NamedTuple):
    """The tokens of a text with its media, and the processor's tensors of these."""

    ids: list[int]
    media: dict[str, Tensor]
    names: tuple[str, ...] = ()  # of the media
    notes: tuple[str, ...] = ()  # how media were changed


class Cache:
    """Encoded texts by key: the last ones in memory, all of them in a folder if there is one."""

    def __init__(self, folder: str | Path = "", *, memory: int = _MEMORY):
        self._folder = folder and Path(folder)
        self._memory = memory
        self._held: OrderedDict[str, Encoded] = OrderedDict()
        self._size = 0

    def get(self, key: str) -> Encoded | None:
        """Return what was put under a key, or None."""
        encoded = self._held.get(key)
        if encoded is not None:
            self._held.move_to_end(key)
            return encoded
        encoded = self._stored(key)
        if encoded is not None:
            self._hold(key, encoded)
        return encoded

    def put(self, key: str, encoded: Encoded) -> None:
        """Keep an encoded text."""
        self._hold(key, encoded)
        if self._folder:
            _write(Path(self._folder) / f"{key}.safetensors", encoded)

    def _hold(self, key: str, encoded: Encoded) -> None:
        """Keep it in memory; those that were not asked for the longest make room."""
        self._held[key] = encoded
        self._size += _bytes(encoded)
        while self._size > self._memory and len(self._held) > 1:
            _, gone = self._held.popitem(last=False)
            self._size -= _bytes(gone)

    def _stored(self, key: str) -> Encoded | None:
        from safetensors import SafetensorError, safe_open

        if not self._folder:
            return None
        path = Path(self._folder) / f"{key}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                about = border.object_of("about", border.read_json(file.metadata()["about"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
            ids = border.integers("ids", tensors.pop("ids").tolist(), low=0)
            names, notes = (border.entries(name, about[name], None) for name in ("names", "notes"))
        except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):  # broken: made again
            return None
        return Encoded(ids, tensors, tuple(names), tuple(notes))


def _bytes(encoded: Encoded) -> int:
    return sum(x.numel() * x.element_size() for x in encoded.media.values())


def _write(path: Path, encoded: Encoded) -> None:
    """Write a file whole, for other processes may read it."""
    from safetensors.torch import save_file

    tensors: Mapping[str, Tensor] = {"ids": torch.tensor(encoded.ids), **encoded.media}
    about = json.dumps({"names": encoded.names, "notes": encoded.notes})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    save_file({name: x.contiguous() for name, x in tensors.items()}, part, metadata={"about": about})
    os.replace(part, path)


# ---------- a processor with limits


class MediaLimits(NamedTuple):
    """Which media may be read, and how large images may be."""

    max_pixels: int = 1 << 20  # larger images are shrunk; 0 is no limit
    folder: str = ""  # relative paths begin here, and stay inside; empty: where the rows are
    urls: bool = False  # whether URLs are fetched
    cache: str = ""  # a folder of processed media; empty: only in memory


class Processing:
    """A processor of transformers, or of `model.load_processor`, with limits and a cache."""

    def __init__(self, processor: Any, limits: MediaLimits = MediaLimits()):  # noqa: B008, it is frozen
        self.processor = processor
        self.limits = limits
        self.tokenizer = processor.tokenizer
        self.kinds = frozenset(
            kind for kind, part in _PARTS.items() if getattr(processor, part, None) is not None
        )
        self._cache = Cache(limits.cache)
        self._about = _about(processor, limits)
        if not self.tokenizer.chat_template:  # older folders hold it with the processor
            self.tokenizer.chat_template = getattr(processor, "chat_template", None)

    @property
    def rate(self) -> int:
        """The sampling rate [Hz] that audio is brought to."""
        return int(self.processor.feature_extractor.sampling_rate)

    def mark(self, kind: str) -> str:
        """Return the text that stands for one medium before its place is widened to its tokens."""
        marks = self.marks(kind)
        if not marks:
            raise ValueError(f"the processor {type(self.processor).__name__} has no token for {kind}s")
        return marks[0]

    def marks(self, kind: str) -> list[str]:
        """Return the texts that stand for media of a kind: the one that stands for a medium, then others.

        The first is what templates write, before its place is widened to its tokens. None without any.
        """
        names = (f"{_BEGIN[kind]}_token", f"{kind}_token")
        texts = [getattr(self.processor, name, None) for name in names]
        return list(dict.fromkeys(text for text in texts if isinstance(text, str)))

    def rooted(self, medium: Medium) -> Medium:
        """Return a medium with the folder of the limits."""
        return medium._replace(folder=Path(self.limits.folder)) if self.limits.folder else medium

    def encode(self, text: str, media: Sequence[Medium]) -> Encoded:
        """Return the tokens of a text with its media, the places widened, and the processor's tensors.

        Text and media that were seen before come from the cache. ValueError for media that cannot be read or
        are too long for the model, for another number of places than of media, and for what the processor
        refuses.
        """
        contents = [self._read(medium) for medium in media]
        names = tuple(name_of(medium, content) for medium, content in zip(media, contents))
        key = hashlib.blake2b(self._about.encode(), digest_size=16)
        key.update(json.dumps([text, [x.kind for x in media], [digest(x) for x in contents], names]).encode())
        known = self._cache.get(key.hexdigest())
        if known is not None:
            return known

        self.check_places(text, media)
        given: dict[str, list[Any]] = {}
        notes = []
        for medium, name, content in zip(media, names, contents):
            decoded, note = self._decode(medium.kind, name, content)
            given.setdefault(medium.kind, []).append(decoded)
            if note:
                notes.append(f"{name}: {note}")
        ids, tensors = self._run(text, given)
        made = Encoded(ids, tensors, names, tuple(notes))
        self._cache.put(key.hexdigest(), made)
        return made

    def _read(self, medium: Medium) -> Content:
        try:
            return read(self.rooted(medium), urls=self.limits.urls)
        except ValueError as error:
            raise ValueError(f"{medium.kind}: {error}") from None

    def _decode(self, kind: str, name: str, content: Content) -> tuple[Any, str]:
        """Return (what the processor takes, how it was changed)."""
        try:
            if kind == "image":
                return image(content, max_pixels=self.limits.max_pixels)
            if kind == "video":
                return video(content, max_pixels=self.limits.max_pixels)
            samples, note = sound(content, rate=self.rate)
            most = getattr(self.processor.feature_extractor, "n_samples", None)
            # the feature extractor would cut it off silently
            if most is not None and len(samples) > most and not getattr(self.processor, "in_chunks", False):
                raise ValueError(
                    f"expected at most {most / self.rate:g} s, got {len(samples) / self.rate:.4g} s"
                )
            return samples, note
        except ValueError as error:
            raise ValueError(f"{kind} {name}: {error}") from None

    def check_places(self, text: str, media: Sequence[Medium]) -> None:
        """Raise ValueError where a rendered text has another number of places than there are media.

        A chat template without media drops them, and text may hold the mark of a place by itself. It is asked
        of every text that a model with a processor reads, also of one without media.
        """
        for kind in sorted(self.kinds):
            have = sum(medium.kind == kind for medium in media)
            if have:
                self.mark(kind)  # a processor may have none
            for mark, expected in zip(self.marks(kind), (have, 0)):
                places = text.count(mark)
                if places != expected:
                    typed = "; no text may hold one by itself" if places > expected else ""
                    raise ValueError(
                        f"expected the chat template to render {expected} places of {kind}s ({mark}), got "
                        f"{places}{typed}"
                    )

    def _run(self, text: str, given: Mapping[str, list[Any]]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return (ids, tensors) by the processor."""
        process = partial(self.processor, text=[text], return_tensors="pt", add_special_tokens=False)
        if "image" in given:
            process = partial(process, images=given["image"])
        if "video" in given:
            process = partial(process, videos=given["video"])
        if "audio" in given:
            process = partial(process, audio=given["audio"], sampling_rate=self.rate)
        try:
            out = dict(process())
        except Exception as error:  # processors raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{type(self.processor).__name__} refuses the media: {lines[0]}") from error
        ids = out["input_ids"][0].tolist()
        tensors = {name: x for name, x in out.items() if name not in _OF_TEXT and torch.is_tensor(x)}
        if given and not tensors:
            raise ValueError(f"{type(self.processor).__name__} made no tensors of the media")
        if type(self.processor).__name__.startswith(_BY_PROMPT):
            tensors = {name: x[0] for name, x in tensors.items()}
        return ids, tensors


_BEGIN = {"image": "boi", "video": "bov", "audio": "boa"}  # what Gemma has before the soft tokens
_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}


def _about(processor: Any, limits: MediaLimits) -> str:
    """Write down all that the outcome depends on but text and media, for the cache's keys."""
    parts = [type(processor).__name__, f"{limits.max_pixels}", _DECODING]
    for name in _PARTS.values():
        part = getattr(processor, name, None)
        if part is not None:
            parts.append(json.dumps(part.to_dict(), sort_keys=True, default=str))
    vocabulary = sorted(processor.tokenizer.get_vocab().items(), key=lambda x: x[1])
    parts.append(hashlib.blake2b(repr(vocabulary).encode(), digest_size=16).hexdigest())
    return "\n".join(parts)
