"""A model as a folder that transformers or peft loads."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rft_fn import modality
from rft_fn.modality import ActorModality
from rft_fn.model import quantize
from rft_fn.model.classifier import pad_alike
from rft_fn.model.finite import require_finite
from rft_fn.model.lora_merged import Export, merged
from rft_fn.model.parts import inside_adapters
from rft_fn.model.sharded import full

__all__ = ["quiet", "save"]


_PROCESSOR = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _whole(x: Tensor) -> Tensor:
    """Put a tensor together on the host; a sharded one takes all ranks."""
    return full(x.detach()).cpu()


def _with_ties(module: nn.Module, new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `new`, with each tensor by all the names of its tied parameter."""
    ties: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        ties.setdefault(id(p), []).append(name)
    for names in ties.values():
        given = next((new[name] for name in names if name in new), None)
        if given is not None:
            new = new | dict.fromkeys(names, given)
    return new


@contextmanager
def _written_here(module: nn.Module) -> Iterator[None]:
    """Make transformers write on this rank, whatever its place in a process group.

    By itself it writes only on rank 0, and leaves an empty folder on the others. But the caller decides
    who writes: a module on one process is no part of the group.
    """
    had = hasattr(module, "should_save_on_this_rank")
    if had:
        module.__dict__["should_save_on_this_rank"] = bool
    try:
        yield
    finally:
        if had:
            del module.__dict__["should_save_on_this_rank"]


@contextmanager
def _in_full(module: Any) -> Iterator[None]:
    """Make transformers write a quantised model as one that is not, from dequantised weights."""
    quantizer = module.__dict__.get("hf_quantizer")
    if quantizer is None:
        yield
        return
    config = module.config.__dict__.pop("quantization_config")
    module.hf_quantizer = None
    try:
        yield
    finally:
        module.hf_quantizer = quantizer
        module.config.quantization_config = config


def save(
    folder: str | Path,
    module: Any,
    tokenizer: Any = None,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    *,
    merge: bool = False,
    write: bool = True,
) -> Path:
    """Write `module`, with `weights` substituted for its parameters, and its tokenizer as a folder.

    transformers loads it, or `load_critic` if it is a critic. For a module with adapters it holds only
    these, for peft or `load` to put on the base model; with `merge` it is the plain model, adapters
    multiplied into it. `tokenizer` may be None, or a processor. The files of the processor that a model
    was loaded with are kept. `weights` are those of `Strategy.export`, or pairs by the module's own names
    (with `merge` also by the plain model's).

    A sharded module is put together by all ranks; the one with `write` writes. ValueError for names that
    the module does not have, and for weights with NaN or inf.
    """
    # The module's whole state, with the given weights in it.
    given = weights.own() if isinstance(weights, Export) else weights or ()
    new = _with_ties(module, {name: _whole(x) for name, x in given})
    state = quantize.state(module)
    tensors = {name: new.pop(name) if name in new else _whole(x) for name, x in state.items()}

    # The plain model, if adapters are merged; weights may also be given by its names.
    if merge and hasattr(module, "get_base_model"):
        tensors = merged(module, tensors)
        module = inside_adapters(module)
        tensors |= {name: new.pop(name) for name in list(new) if name in tensors}

    # Nothing is written of weights that cannot be used.
    unknown = sorted(name for name in new if name not in state)
    if unknown:
        raise ValueError(
            f"weights: expected names of {type(module).__name__}, got {unknown[:3]}; adapters are saved "
            "from st.export(state) itself, merged weights with merge=True"
        )
    for name, x in tensors.items():
        require_finite(f"model: {folder} is not written", name, x)
    if write:
        with quiet(), _written_here(module), _in_full(module), _or_nothing(Path(folder)):
            module.save_pretrained(folder, state_dict=tensors)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
                pad_alike(folder, tokenizer)
            _keep_processor(module, Path(folder))
    return Path(folder)


def _keep_processor(module: Any, folder: Path) -> None:
    """Copy the processor's files of the folder that a model was loaded from into `folder`.

    Without them a model that sees or hears could not be given anything again. Files that are there stay.
    """
    config = getattr(module, "config", None)
    if config is None or modality.of_config(config) is ActorModality.LANGUAGE_ONLY:
        return
    for name in _PROCESSOR:
        source = _file_of(getattr(config, "name_or_path", ""), name)
        if source is None or (folder / name).exists():
            continue
        if name.startswith("chat_template") and any(folder.glob("chat_template*")):
            continue  # the tokenizer's own
        if source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)


def _file_of(model: str, name: str) -> Path | None:
    """Return a file of a model's folder, or of the cache of a hub name."""
    if not model:
        return None
    path = Path(model, name)
    if path.is_file():
        return path
    if Path(model).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, name)
    return Path(cached) if isinstance(cached, str) else None


@contextmanager
def _or_nothing(folder: Path) -> Iterator[None]:
    """Remove a new folder that could not be written whole; ValueError names it."""
    from safetensors import SafetensorError

    new = not folder.exists()
    try:
        yield
    except (OSError, SafetensorError) as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(
            f"model: {folder} could not be written: {error}; make room or choose another place, and run the "
            "same command again"
        ) from error
