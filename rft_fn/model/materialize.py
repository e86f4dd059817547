"""Models without memory, which get their weights where these belong: each process reads its own shards."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.finite import is_finite
from rft_fn.model.pretrained import incomplete, quietly, unreadable

__all__ = ["empty", "materialize", "narrow", "put"]


class _Weights(NamedTuple):
    """Where a module without memory gets its weights; it has them as `rft_weights`."""

    files: list[Path]
    device: torch.device
    prefix: str = ""  # of its parameters' names in the files


def empty(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    factory: Any = None,
    **kwargs: Any,
) -> nn.Module:
    """The causal language model of a folder or hub name on the meta device, or what the auto class `factory`
    makes of it.

    `materialize` gives it memory on `device`, and its weights. ValueError for a model without safetensors, or
    whose files hold other tensors than it has.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _folder(name)
    files = _files(folder)
    if not files:
        raise ValueError(f"model: expected *.safetensors in {folder}, got none; load it without meta")
    config = quietly(AutoConfig, str(folder), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        module = (factory or AutoModelForCausalLM).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **kwargs
        )
    _check(module, files)
    module.rft_weights = _Weights(files, device)
    return module


def narrow(module: nn.Module, part: nn.Module) -> None:
    """Have a part of a module, which is kept without the rest, get its weights from the module's files.

    Nothing for a module that has its weights.
    """
    source = _source(module)
    if source is None or source is part:
        return
    path = next(name for name, m in source.named_modules() if m is part)
    part.rft_weights = source.__dict__.pop("rft_weights")._replace(prefix=f"{path}.")


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


def _files(folder: Path) -> list[Path]:
    """The files with a model's weights, by transformers' names; others beside them are somebody else's."""
    found = sorted([*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")])
    return found or sorted(folder.glob("*.safetensors"))


def _names(module: nn.Module, prefix: str = "") -> dict[int, list[str]]:
    """The names of each parameter in the files, several where it is tied: those without adapters."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(prefix + name.replace(".base_layer.", "."))
    return names


def _check(module: nn.Module, files: list[Path]) -> None:
    """ValueError for tensors that are missing in the files, unexpected, or of another shape."""
    from safetensors import SafetensorError, safe_open

    stored: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as f:
                stored |= {key: list(f.get_slice(key).get_shape()) for key in f.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise unreadable(file.parent, error) from error
    names = _names(module)
    shapes: list[str] = []
    missing: list[str] = []
    for p in module.parameters():
        name = next((n for n in names[id(p)] if n in stored), None)
        if name is None:
            missing.append(names[id(p)][0])
        elif stored[name] != list(p.shape):
            shapes.append(f"{name} {stored[name]} instead of {list(p.shape)}")
    known = {n for same in names.values() for n in same} | {n for n, _ in module.named_buffers()}
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or []
    ignored = [*ignored, r"rotary_emb\.inv_freq"]
    unexpected = [n for n in stored.keys() - known if not any(re.search(x, n) for x in ignored)]
    incomplete(files[0].parent, missing, unexpected, shapes)


def _source(module: nn.Module) -> nn.Module | None:
    """The module that `empty` made, which may be inside another (adapters, a critic)."""
    return next((m for m in module.modules() if "rft_weights" in m.__dict__), None)


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """The same module; one that `load(meta=True)` made, sharded or not, has its memory and weights now.

    Each process reads the part of each tensor that it holds. Adapters and heads that were added to it must
    have been made with memory, as `apply_lora_configuration` does. ValueError for weights with NaN or inf.
    """
    part = _source(module)
    if part is None:
        return module
    weights = part.__dict__.pop("rft_weights")
    empty_ones = {name for name, p in part.named_parameters() if p.is_meta}
    _allocate(part, weights.device)
    _fill(part, weights, empty_ones)
    for p in part.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    part.initialize_weights()  # type: ignore[operator]  # what no file holds: buffers, of rotary embeddings
    return module


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Memory for what is on the meta device; tied parameters stay tied."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                ties.setdefault(id(p), []).append((m, name))
    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    for first, *others in ties.values():
        for m, name in others:
            m._parameters[name] = first[0]._parameters[first[1]]


def _fill(module: nn.Module, weights: _Weights, wanted: set[str]) -> None:
    """Read the parameters named `wanted` from the files."""
    from safetensors import safe_open

    files = weights.files
    names = _names(module, weights.prefix)
    bad: list[int] = []  # places in `order` of parameters that are not finite
    missing = {id(p): p for name, p in module.named_parameters() if name in wanted}
    order = [names[key][0] for key in missing]
    for file in files:
        with safe_open(file, "pt") as f:
            held = set(f.keys())
            for key, p in list(missing.items()):
                name = next((n for n in names[key] if n in held), None)
                if name is not None:
                    put(p, f.get_slice(name))
                    if not is_finite(_local(p)):
                        bad.append(order.index(names[key][0]))
                    del missing[key]
    if missing:
        odd = [names[key][0] for key in missing][:3]
        raise ValueError(
            f"model: expected {odd} in {files[0].parent}, got no such tensors; load it without meta"
        )
    first = _first_of_all(module, min(bad, default=len(order)))
    if first < len(order):
        raise ValueError(f"model: {files[0].parent}: {order[first]}: expected finite numbers, got NaN or inf")


def _first_of_all(module: nn.Module, index: int) -> int:
    """The smallest index of all processes where the module is sharded: each sees its own part only."""
    sharded = next((p for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if sharded is None:
        return index
    import torch.distributed as dist

    found = torch.tensor(index, device=sharded.device_mesh.device_type)  # type: ignore[attr-defined]
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def _local(p: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return p.to_local() if hasattr(p, "device_mesh") else p  # type: ignore[operator]


def put(p: Tensor, whole: Any) -> None:
    """Copy a whole tensor, or the slice of one in a file, into `p`: this process's part where `p` is
    sharded."""
    if not hasattr(p, "device_mesh"):
        p.copy_(whole[...])
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    index = tuple(slice(o, o + n) for o, n in zip(offset, shape))
    local = _local(p)
    if local.numel():
        local.copy_(whole[index])
