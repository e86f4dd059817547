"""Models without memory: each process reads their weights, only its own shards."""

import copy
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.finite import is_finite
from rft_fn.model.parts import outside_layers, path_of
from rft_fn.model.pretrained import kind_of, require_held
from rft_fn.model.sharded import local, put
from rft_fn.model.weight_files import Stored, aliases, converted, files, folder_of, slices, stored

__all__ = ["keep_part", "materialize", "on_meta"]


class _Weights(NamedTuple):
    """The source of a module's weights, kept as its `rft_weights`."""

    stored: Stored
    folder: str
    device: torch.device
    prefix: str = ""  # of its tensors' names in the whole model


def on_meta(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    factory: Any = None,
    **kwargs: Any,
) -> nn.Module:
    """Make the language model of a folder or hub name on the meta device.

    `factory` may be another auto class of transformers to make it with. `materialize` gives it memory on
    `device`, and its weights. ValueError for a model without safetensors, or with files that hold other
    tensors than it has.
    """
    # The files are read again when the model gets memory.
    folder = folder_of(name)
    paths = files(folder)
    kind = kind_of(str(folder), trust_remote_code)
    if getattr(kind.config, "quantization_config", None):
        raise ValueError(
            f"quantize: expected {folder} in full precision for several processes, got a quantised model; "
            "start one, or give a folder of it that is not quantised"
        )

    # The skeleton stays as transformers makes it; the module may be sharded or get adapters.
    made = require_held(
        str(folder),
        kind.config,
        factory or kind.factory,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **kwargs,
    )

    # transformers loads some of it in float32: the norms of some models in float16
    wide = [re.compile(x.replace("*", ".*")) for x in made._get_dtype_plan(dtype)]
    for name, x in made.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in wide):
            x.data = x.data.float()
    weights = stored(made, paths)
    module = copy.deepcopy(made)
    module.rft_weights = _Weights(weights, str(folder), device)
    return module


def keep_part(module: nn.Module, part: nn.Module) -> None:
    """Have a part that is used without its module read its weights from the module's files."""
    source = _source(module)
    if source is None or source is part:
        return
    prefix = f"{path_of(part, source)}."
    part.rft_weights = source.__dict__.pop("rft_weights")._replace(prefix=prefix)


def _source(module: nn.Module) -> Any:
    """Return the module that `on_meta` made, perhaps inside `module`; else None."""
    return next((m for m in module.modules() if "rft_weights" in m.__dict__), None)


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """Give a module that `load(meta=True)` made memory and weights, sharded or not, and return it.

    Each process keeps its part of each tensor; persistent buffers are weights too. Adapters and heads that
    were added to it must have memory, as `apply_lora_configuration` makes them. ValueError for weights
    with NaN or inf.
    """
    part = _source(module)
    if part is None:
        return module

    # Adapters and heads that were added have their values already.
    weights = part.__dict__.pop("rft_weights")
    kept = {name for name, p in part.named_parameters() if not p.is_meta}
    _allocate(part, weights.device)
    _fill(part, weights, kept)

    # transformers makes the buffers that no file holds, as for rotary embeddings. Not every family can
    # initialize shards, so modules without buffers are marked as done.
    for p in part.parameters():
        p._is_hf_initialized = True
    for m in part.modules():
        if next(m.buffers(), None) is None:
            m._is_hf_initialized = True
    part.initialize_weights()
    return module


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate whatever is on the meta device; tied parameters stay tied."""
    # Tensors of the meta device are replaced one by one, so remember which were one.
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                ties.setdefault(id(p), []).append((m, name))

    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    for places in ties.values():
        owner, own_name = places[0]
        for m, name in places[1:]:
            m._parameters[name] = owner._parameters[own_name]


def _homes(module: nn.Module, weights: _Weights, kept: set[str]) -> dict[str, Tensor]:
    """Return the tensor of `module`, if it is not in `kept`, for each name in the whole model."""
    plain: dict[str, Tensor] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if name not in kept:
            plain[weights.prefix + outside_layers(name)] = x
    homes: dict[str, Tensor] = {}
    for names in aliases(weights.stored.skeleton).values():
        home = next((plain[name] for name in names if name in plain), None)
        if home is not None:
            homes |= dict.fromkeys(names, home)
    return homes


def _fill(module: nn.Module, weights: _Weights, kept: set[str]) -> None:
    """Read the weights of `module` from the files, one group at a time; those in `kept` stay."""
    # Only tensors that have a place are converted and read.
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
                home: Any = homes[name]
                put(home, whole)
                home._is_hf_initialized = True
                if not is_finite(local(home)):
                    bad.append(order.index(name))

    # Every process raises for the same tensor, whichever of them holds the bad part of a sharded module.
    first = min(bad, default=len(order))
    sharded: Any = next((p for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if sharded is not None:
        import torch.distributed as dist

        smallest = torch.tensor(first, device=sharded.device_mesh.device_type)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        first = int(smallest)
    if first < len(order):
        raise ValueError(f"model: {weights.folder}: {order[first]}: expected finite numbers, got NaN or inf")
