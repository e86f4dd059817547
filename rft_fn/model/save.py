"""A model as a folder that transformers or peft loads."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rft_fn.model import quantize
from rft_fn.model.finite import require_finite
from rft_fn.model.lora import Export, merged

__all__ = ["quiet", "save"]


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars and reports."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _whole(x: Tensor) -> Tensor:
    """A tensor on the host; a sharded one put together, which takes all ranks."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu()  # type: ignore[operator]


def _with_ties(module: nn.Module, new: dict[str, Tensor]) -> dict[str, Tensor]:
    """`new` with the tied names of each parameter beside the one that is given."""
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
    """transformers writes on rank 0 of a process group alone, and leaves an empty folder on the others. Who
    writes is the caller's to decide: a module on one process is no part of the group."""
    had = hasattr(module, "should_save_on_this_rank")
    if had:
        module.__dict__["should_save_on_this_rank"] = bool
    try:
        yield
    finally:
        if had:
            del module.__dict__["should_save_on_this_rank"]


@contextmanager
def _in_full(module: nn.Module) -> Iterator[None]:
    """A quantised model of transformers as one that is not: what is written of it is dequantised."""
    quantizer = module.__dict__.get("hf_quantizer")
    if quantizer is None:
        yield
        return
    config = module.config.__dict__.pop("quantization_config")
    module.hf_quantizer = None  # type: ignore[assignment]
    try:
        yield
    finally:
        module.hf_quantizer = quantizer
        module.config.quantization_config = config


def save(
    folder: str | Path,
    module: Any,
    tokenizer: Any,
    weights: Iterable[tuple[str, Tensor]] = (),
    *,
    merge: bool = False,
    write: bool = True,
) -> Path:
    """`module` with `weights` substituted for its parameters, and its tokenizer (or None), as a folder.

    transformers loads it, or `load_critic` where it is a critic. Of a module with adapters it holds these
    alone, for peft or `load` to put on the base model; with `merge` it is the plain model, adapters
    multiplied into it. `weights` are what `Strategy.export` gives, or pairs by the module's own names (with
    `merge` also by the plain model's). A sharded module is put together by all ranks; the one with `write`
    writes. ValueError for names that the module does not have, and for weights with NaN or inf.
    """
    given = weights.own() if isinstance(weights, Export) else weights
    new = _with_ties(module, {name: _whole(x) for name, x in given})
    state = quantize.state(module)
    full = {name: new.pop(name) if name in new else _whole(x) for name, x in state.items()}
    if merge and hasattr(module, "get_base_model"):
        full, module = merged(module, full), module.get_base_model()
        full |= {name: new.pop(name) for name in list(new) if name in full}
    unknown = sorted(name for name in new if name not in state)
    if unknown:
        raise ValueError(
            f"weights: expected names of {type(module).__name__}, got {unknown[:3]}; adapters are saved "
            "from st.export(state) itself, merged weights with merge=True"
        )
    for name, x in full.items():
        require_finite(f"model: {folder} is not written", name, x)
    if write:
        with quiet(), _written_here(module), _in_full(module), _or_nothing(Path(folder)):
            module.save_pretrained(folder, state_dict=full)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return Path(folder)


@contextmanager
def _or_nothing(folder: Path) -> Iterator[None]:
    """A new folder that could not be written whole goes away again; ValueError names it."""
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
