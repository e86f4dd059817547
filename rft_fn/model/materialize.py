"""Models without memory, which get their weights where these belong: each process reads its own shards."""

import copy
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.convert import converted
from rft_fn.model.finite import is_finite
from rft_fn.model.pretrained import quietly
from rft_fn.model.stored import Stored, aliases, files, folder_of, slices, stored

__all__ = ["empty", "materialize", "narrow", "put"]


class _Weights(NamedTuple):
    """Where a module without memory gets its weights; it has them as `rft_weights`."""

    stored: Stored
    folder: str
    device: torch.device
    prefix: str = ""  # of its tensors' names in the whole model


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

    folder = folder_of(name)
    paths = files(folder)
    config = quietly(AutoConfig, str(folder), trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"quantize: expected {folder} in full precision for several processes, got a quantised model; "
            "start one, or give a folder of it that is not quantised"
        )
    with torch.device("meta"):
        skeleton = (factory or AutoModelForCausalLM).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **kwargs
        )
    skeleton.to("meta")  # what a family makes of random numbers has memory even there
    _keep_wide(skeleton, dtype)
    found = stored(skeleton, paths)
    module = copy.deepcopy(skeleton)
    module.rft_weights = _Weights(found, str(folder), device)
    return module


def _keep_wide(module: nn.Module, dtype: torch.dtype) -> None:
    """In float32 what transformers loads in it whatever the type of the rest: biases of routers."""
    plan = [re.compile(x.replace("*", ".*")) for x in module._get_dtype_plan(dtype)]  # type: ignore[operator]
    for name, x in module.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in plan):
            x.data = x.data.float()


def narrow(module: nn.Module, part: nn.Module) -> None:
    """Have a part of a module, which is kept without the rest, get its weights from the module's files.

    Nothing for a module that has its weights.
    """
    source = _source(module)
    if source is None or source is part:
        return
    path = next(name for name, m in source.named_modules() if m is part)
    part.rft_weights = source.__dict__.pop("rft_weights")._replace(prefix=f"{path}.")


def _source(module: nn.Module) -> nn.Module | None:
    """The module that `empty` made, which may be inside another (adapters, a critic)."""
    return next((m for m in module.modules() if "rft_weights" in m.__dict__), None)


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """The same module; one that `load(meta=True)` made, sharded or not, has its memory and weights now.

    Each process keeps the part of each tensor that it holds; persistent buffers are weights too. Adapters and
    heads that were added to it must have been made with memory, as `apply_lora_configuration` does.
    ValueError for weights with NaN or inf.
    """
    part = _source(module)
    if part is None:
        return module
    weights = part.__dict__.pop("rft_weights")
    kept = {name for name, p in part.named_parameters() if not p.is_meta}
    _allocate(part, weights.device)
    _fill(part, weights, kept)
    for p in part.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    for m in part.modules():
        if next(m.buffers(), None) is None:  # nothing is left to make, which not every family does of shards
            m._is_hf_initialized = True  # type: ignore[assignment]
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


def _homes(module: nn.Module, weights: _Weights, kept: set[str]) -> dict[str, Tensor]:
    """Where each tensor of the whole model belongs, by all of its names: the parameters, but for those of the
    module that are named in `kept`, and the persistent buffers. What is not in `module` has no place."""
    state = {name: x for name, x in module.state_dict(keep_vars=True).items() if name not in kept}
    plain = {weights.prefix + name.replace(".base_layer.", "."): x for name, x in state.items()}
    homes: dict[str, Tensor] = {}
    for names in aliases(weights.stored.skeleton).values():
        home = next((plain[name] for name in names if name in plain), None)
        if home is not None:
            homes |= dict.fromkeys(names, home)
    return homes


def _fill(module: nn.Module, weights: _Weights, kept: set[str]) -> None:
    """Read the weights of `module` from the files, one group at a time, but for its parameters in `kept`."""
    homes = _homes(module, weights, kept)
    order = list(homes)
    bad: list[int] = []  # places in `order` of tensors that are not finite
    for names, group in weights.stored.groups.items():
        if not homes.keys() & set(names):
            continue  # of a part that the module was taken out of
        with slices(weights.stored, group) as read:
            for name, whole in converted(group, read, weights.stored.skeleton).items():
                if name not in homes:
                    continue
                put(homes[name], whole)
                homes[name]._is_hf_initialized = True  # type: ignore[attr-defined]
                if not is_finite(_local(homes[name])):
                    bad.append(order.index(name))
    first = _first_of_all(module, min(bad, default=len(order)))
    if first < len(order):
        raise ValueError(f"model: {weights.folder}: {order[first]}: expected finite numbers, got NaN or inf")


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
