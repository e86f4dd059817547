"""Models without memory, which get their weights where these belong: each process reads its own shards."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["empty", "materialize"]


def empty(name: str, dtype: torch.dtype, device: torch.device, **kwargs: Any) -> nn.Module:
    """The causal language model of a folder or hub name on the meta device. `materialize` gives it memory on
    `device`, and its weights. ValueError for a model without safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _folder(name)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: expected *.safetensors in {folder}, got none; load it without meta")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    module.rft_weights = (files, device)
    return module


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


def _source(module: nn.Module) -> tuple[str, nn.Module] | None:
    """(prefix, part) of the module that `empty` made, which may be inside another (adapters, a critic)."""
    found = [(n, m) for n, m in module.named_modules() if "rft_weights" in m.__dict__]
    return found[0] if found else None


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """The same module; one that `load(meta=True)` made, sharded or not, has its memory and weights now.

    Each process reads the part of each tensor that it holds. Adapters and heads that were added to it must
    have been made with memory. ValueError for a parameter that is not in the files.
    """
    source = _source(module)
    if source is None:
        return module
    part = source[1]
    files, device = part.__dict__.pop("rft_weights")
    _allocate(part, device)
    _fill(part, files)
    for p in part.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    part.initialize_weights()  # type: ignore[operator]  # what no file holds: buffers, of rotary embeddings
    return module


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Memory for what is on the meta device; parameters that were one before are one after."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                ties.setdefault(id(p), []).append((m, name))
    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    for first, *others in ties.values():
        for m, name in others:
            m._parameters[name] = first[0]._parameters[first[1]]


def _fill(module: nn.Module, files: list[Path]) -> None:
    from safetensors import safe_open

    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    missing = {id(p): p for p in module.parameters()}
    for file in files:
        with safe_open(file, "pt") as f:
            held = set(f.keys())
            for key, p in list(missing.items()):
                name = next((n for n in names[key] if n in held), None)
                if name is not None:
                    _copy(p, f.get_slice(name), name)
                    del missing[key]
    if missing:
        odd = [names[key][0] for key in missing][:3]
        raise ValueError(
            f"model: expected {odd} in {files[0].parent}, got no such tensors; load it without meta"
        )


def _copy(p: Tensor, stored: Any, name: str) -> None:
    if list(stored.get_shape()) != list(p.shape):
        raise ValueError(
            f"model: {name}: expected {list(p.shape)}, got {list(stored.get_shape())} in the file"
        )
    if not hasattr(p, "device_mesh"):
        p.copy_(stored[...])
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    index = tuple(slice(o, o + n) for o, n in zip(offset, shape))
    local = p.to_local()  # type: ignore[operator]
    if local.numel():
        local.copy_(stored[index])
