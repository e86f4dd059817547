"""Digests of every file that a run read before its first step, and what differs when it goes on.

A file of weights, or the config that says what they compute, may not change under a run; any other file is
announced. Rows and media have digests of their own, and libraries, caches and hidden files are free.
"""

import json
import os
import site
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn import border, opened
from rft_fn.file_digest import LARGE, digest
from rft_fn.model.model_names import cache_dir
from rft_fn.run.files import write_whole

__all__ = [
    "NAME", "Changes", "collect", "compare", "digest", "digest_in", "joined", "of_digests", "of_user", "read",
    "write",
]  # fmt: skip

NAME = "manifest.json"


class Changes(NamedTuple):
    """What is another than it was, by the names of files: each is followed by what has happened to it."""

    refused: dict[str, str]
    announced: dict[str, str]


def _described(path: Path, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a file; `old` is an earlier one, which stays where a large file is untouched."""
    about = path.stat()
    if about.st_size <= LARGE:
        return {"digest": digest(path)}
    stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]  # nobody can set st_ctime
    known = old.get("stamp") == stamp
    return {"digest": old["digest"] if known else digest(path), "stamp": stamp}


_MEDIA = {
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".wav", ".mp3", ".flac", ".ogg",
    ".m4a", ".mp4", ".avi", ".mkv", ".mov", ".webm",
}  # fmt: skip
_WEIGHTS = {".safetensors", ".bin", ".gguf"}
_COMPUTES = {"config.json", "adapter_config.json", "reward_heads.json"}
_TOKENS = ("tokenizer", "vocab", "merges.txt", "special_tokens_map", "added_tokens", "chat_template")


@cache
def _libraries() -> tuple[Path, ...]:
    """Return the folders of what is installed, of the system, and of caches."""
    library = Path(__file__).resolve().parents[1]
    kernels = library.parent / "kernels"
    paths = sysconfig.get_paths()
    own = [sys.prefix, sys.base_prefix, *(paths[x] for x in ("stdlib", "purelib", "platlib"))]
    own += [*site.getsitepackages(), site.getusersitepackages(), library, kernels]
    own += [os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"]
    own += ["/proc", "/sys", "/dev", "/etc", "/usr/lib", "/usr/share"]
    return tuple(Path(os.path.abspath(x)) for x in own)


def _counts(path: Path, free: Collection[Path]) -> bool:
    """Return whether a file that Python has read is one of the user's, and none of `free` holds it."""
    if path.suffix in _MEDIA or any(part.startswith(".") for part in path.parts[1:]):
        return False
    places = {path, *path.parents}
    return places.isdisjoint([*_libraries(), cache_dir().absolute(), *free]) and path.is_file()


def _shown(path: Path) -> str:
    """Return a path as it is stored: from the working directory where it is inside of it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def collect(before: Mapping[str, Any], free: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the manifest of what this process has read, without the files in `free` and below them.

    `before` is an earlier one: a large file that is untouched since is not read again.
    """
    found: dict[str, Path] = {}
    folders = []
    for name, folder in opened.models().items():
        folders.append(_shown(folder.absolute()) if Path(name).is_dir() else name)
        found |= {f"{folders[-1]}/{path.name}": path for path in opened.model_files(folder)}
    of_models = {path.absolute() for path in found.values()}
    others = set(map(os.path.realpath, of_models))
    outside = [Path(os.path.abspath(x)) for x in free]
    for path in opened.files():
        if os.path.realpath(path) not in others and _counts(path, outside):
            found[_shown(path)] = path
    known = before.get("files", {})
    files = {}
    for name, path in sorted(found.items()):
        files[name] = _described(path, known.get(name, {}))
    return {"models": sorted(set(folders)), "files": files}


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the files of an earlier one that were not read this time, apart from models'."""
    kept = {
        name: x for name, x in old.get("files", {}).items() if name.rpartition("/")[0] not in new["models"]
    }
    return {"models": new["models"], "files": kept | new["files"]}


def of_user(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files outside of models by their names, as config.json has them."""
    files = manifest["files"].items()
    return {name: x["digest"] for name, x in files if name.rpartition("/")[0] not in manifest["models"]}


def of_digests(files: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a run that has only the digests in its config.json."""
    found = {_shown(Path(os.path.abspath(name))): {"digest": x} for name, x in files.items()}
    return {"models": [], "files": found}


def digest_in(manifest: Mapping[str, Any], name: str) -> str | None:
    """Return the digest of a file, None where the manifest does not have it."""
    return manifest["files"].get(name, {}).get("digest")


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, tokenizer_is_told: bool) -> Changes:
    """Return what of `new` is another than in `old`, two manifests.

    A file that only one of the two has is told if it is in the folder of a model that both have: others may
    belong to an option that has changed. With `tokenizer_is_told` files of tokenizers are left out.
    """
    refused, announced = {}, {}
    was, now = old.get("files", {}), new["files"]
    both = set(old.get("models", ())) & set(new["models"])
    for name in sorted(was.keys() | now.keys()):
        folder, _, file = name.rpartition("/")
        what = ""
        if name in was and name in now:
            what = "is another than" if was[name]["digest"] != now[name]["digest"] else ""
        elif folder in both:
            what = "is new, it was not there" if name in now else "is gone, it was there"
        if not what or (tokenizer_is_told and file.startswith(_TOKENS)):
            continue
        weights = folder in new["models"] and (Path(file).suffix in _WEIGHTS or file in _COMPUTES)
        (refused if weights else announced)[name] = what
    return Changes(refused, announced)


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest in the folder of a run; an empty one where there is none. ValueError if damaged."""
    try:
        found = border.object_of(NAME, border.read_json((folder / NAME).read_text()))
        if not all(isinstance(x["digest"], str) for x in found["files"].values()):
            raise ValueError("a digest is no text")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"run folder {folder}: {NAME} is damaged ({type(error).__name__}: {error}); delete that file to "
            "continue without comparing files, or put back a copy"
        ) from error


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a run."""
    text = json.dumps(manifest, indent=1) + "\n"
    path = folder / NAME
    if not path.exists() or path.read_text() != text:
        write_whole(path, text)
