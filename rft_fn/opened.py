"""The files that this process reads, noted where they are opened.

Python's own reads are told by an audit hook, also those of a reward's tables or of a template. Weights and
tokenizers are read by other libraries, which tell nothing: `model.resolve` notes the folder of every model.
"""

import os
import sys
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

__all__ = ["begin", "end", "files", "model_files", "models", "note_model", "note_rows"]

_READ: dict[str, None] = {}  # absolute paths, in the order of their first read
_ROWS: set[str] = set()  # those that hold rows, which are compared one by one
_MODELS: dict[str, None] = {}  # folders and hub names
_state = {"hooked": False, "noting": False}


def begin() -> None:
    """Note what is opened from here on, and forget what was noted before."""
    _READ.clear()
    _ROWS.clear()
    _MODELS.clear()
    _state["noting"] = True
    if not _state["hooked"]:  # a hook cannot be taken off again
        _state["hooked"] = True
        sys.addaudithook(_hear)


def end() -> None:
    """Note nothing more."""
    _state["noting"] = False


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _state["noting"]:
        return
    path, _, flags = args
    named = isinstance(path, str | os.PathLike) and isinstance(flags, int)
    if named and flags & (os.O_ACCMODE | os.O_CREAT) == os.O_RDONLY:
        _READ.setdefault(os.path.abspath(os.fspath(path)))


def note_model(name: str) -> None:
    """Note that the model of a folder or hub name is read."""
    if _state["noting"]:
        _MODELS.setdefault(name)


def note_rows(path: Path) -> None:
    """Note that a file holds rows of data."""
    if _state["noting"]:
        _ROWS.add(os.path.abspath(path))


def files() -> list[Path]:
    """Return the files that Python has read, and the files of imported modules; not those with rows."""
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    names = [*_READ, *(os.path.abspath(name) for name in modules if isinstance(name, str))]
    return list(dict.fromkeys(Path(_source(name)) for name in names if name not in _ROWS))


def _source(name: str) -> str:
    """Return the file that a compiled one was made of; any other file itself."""
    try:
        return source_from_cache(name) if name.endswith(".pyc") else name
    except ValueError:
        return name


_OF_A_MODEL = {
    ".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py",
}  # fmt: skip


def models() -> dict[str, Path]:
    """Return the folder of each model that was noted, by its folder or hub name."""
    found = {}
    for name in _MODELS:
        folder = Path(name) if Path(name).is_dir() else _cached(name)
        if folder is not None:
            found[_of_hub(folder) or name] = folder
    return found


def model_files(folder: Path) -> list[Path]:
    """Return the files in the folder of a model that it may be made of."""
    found = sorted(p for p in folder.iterdir() if p.suffix in _OF_A_MODEL and p.is_file())
    if any(p.suffix == ".safetensors" for p in found):  # then nobody reads the older format
        found = [p for p in found if p.suffix != ".bin"]
    return [p for p in found if not p.name.startswith(".")]


def _cached(name: str) -> Path | None:
    """Return the folder of a hub name in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _of_hub(folder: Path) -> str:
    """Return the hub name of a folder in the cache of the hub; "" of any other."""
    parts = folder.parts[-3:]
    if len(parts) < 3 or parts[1] != "snapshots" or not parts[0].startswith("models--"):
        return ""
    return parts[0].removeprefix("models--").replace("--", "/")
