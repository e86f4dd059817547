"""Models without memory, whose weights each process reads for itself: its own shards."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.convert import converted
from rft_fn.model.layers import is_finite
from rft_fn.model.parts import path_of
from rft_fn.model.pretrained import Stored, aliases, files, folder_of, kind_of, require_held, slices, stored
from rft_fn.model.save import local, put

__all__ = ["Mover", "Residence", "Where", "keep_part", "materialize", "on_meta"]


# ---------- where the weights of a bound model are, and their way between the device and the host


Where = Literal["device", "host"]


class Mover(NamedTuple):
    """The copies of a tensor between a device and the host."""

    to_host: Callable[[Tensor], Tensor]
    to_device: Callable[[Tensor], Tensor]


def mover_of(device: torch.device) -> Mover | None:
    """The copies between `device` and the host; None for a CPU, whose memory is the host's."""
    if device.type == "cpu":
        return None
    return Mover(partial(Tensor.to, device="cpu"), partial(Tensor.to, device=device))


class Residence:
    """Where the weights of one bound model are.

    What moves is every parameter and buffer of the module, trained or not. The parameters stay the same
    objects, so a tree of them stays valid: whoever reads one finds its values on either side.
    """

    def __init__(self, root: nn.Module, module: nn.Module):
        self.root = root  # the module behind the apply
        self.module = module  # that was bound
        self.name = _name(module)
        self.on_host = False
        self.mover: Mover | None = None  # chosen by the device of the weights when they first leave it

    def require_device(self, what: str) -> None:
        """ValueError while the weights are on the host; `what` is the argument that brought them."""
        if self.on_host:
            raise ValueError(
                f"{what}: expected the weights of {self.name} on the device, got them on the host; call "
                'st.place(apply, "device") first'
            )

    def move(self, where: Where) -> None:
        """Move the weights there; nothing happens where they are there already.

        A move that fails on its way leaves a model that counts as on the host: moving it to the device again
        completes it.
        """
        if where not in ("device", "host"):
            raise ValueError(f"where: expected 'device' or 'host', got {where!r}")
        if where == "host" and not self.on_host:
            self.mover = self.mover or mover_of(next(self.root.parameters()).device)
            self.on_host = True
            if self.mover is not None:
                self.apply(self.mover.to_host)
                _return_memory()
        if where == "device" and self.on_host:
            if self.mover is not None:
                self.apply(self.mover.to_device)
            self.on_host = False

    def apply(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put `copy` of each parameter and buffer in its place."""
        # as Module.to does it: FSDP2 then registers the shards that it finds in the new memory
        self.root._apply(copy)


def _name(module: nn.Module) -> str:
    """The class of a module, and the folder or name that it was loaded from."""
    origin = getattr(getattr(module, "config", None), "name_or_path", "")
    return f"{type(module).__name__} {origin}".strip()


def _return_memory() -> None:
    """Give the memory that torch keeps for itself back to the device, for engines that take theirs there."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------- models without memory, whose weights each process reads for itself: its own shards


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
    """The language model of a folder or hub name on the meta device.

    `factory` may be another auto class of transformers to make it with. `materialize` gives it memory on
    `device`, and its weights. ValueError for a model without safetensors, or whose files hold other tensors
    than it has.
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
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, **kwargs}
    made = require_held(str(folder), kind.config, factory or kind.factory, **options)
    _keep_wide(made, dtype)
    found = stored(made, paths)
    module = copy.deepcopy(made)
    module.rft_weights = _Weights(found, str(folder), device)
    return module


def _keep_wide(module: Any, dtype: torch.dtype) -> None:
    """Keep in float32 what transformers loads in float32: the norms of some models in float16."""
    plan = [re.compile(x.replace("*", ".*")) for x in module._get_dtype_plan(dtype)]
    for name, x in module.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in plan):
            x.data = x.data.float()


def keep_part(module: nn.Module, part: nn.Module) -> None:
    """Have a part of a module read its weights from the module's files.

    For a part that is kept without the rest. Does nothing for a module that has its weights.
    """
    source = _source(module)
    if source is None or source is part:
        return
    prefix = f"{path_of(part, source)}."
    part.rft_weights = source.__dict__.pop("rft_weights")._replace(prefix=prefix)


def _source(module: nn.Module) -> Any:
    """The module that `on_meta` made, perhaps inside `module`; else None."""
    return next((m for m in module.modules() if "rft_weights" in m.__dict__), None)


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """The same module, with memory and weights if `load(meta=True)` made it, sharded or not.

    Each process keeps the part of each tensor that it holds; persistent buffers are weights too. Adapters and
    heads that were added to it must have been made with memory, as `apply_lora_configuration` does.
    ValueError for weights with NaN or inf.
    """
    part = _source(module)
    if part is None:
        return module

    # Adapters and heads that were added have their values already.
    weights = part.__dict__.pop("rft_weights")
    kept = {name for name, p in part.named_parameters() if not p.is_meta}
    _allocate(part, weights.device)
    _fill(part, weights, kept)

    # transformers makes the buffers that no file holds, those of rotary embeddings. Not every family can
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

    def allocated(x: Tensor) -> Tensor:
        if x.is_meta:
            return torch.empty_like(x, device=device)
        return x

    module._apply(allocated)
    for places in ties.values():
        owner, own_name = places[0]
        for m, name in places[1:]:
            m._parameters[name] = owner._parameters[own_name]


def _homes(module: nn.Module, weights: _Weights, kept: set[str]) -> dict[str, Tensor]:
    """The tensor of `module` for each name of a tensor in the whole model.

    Tensors that are not in `module` have none, nor have its parameters that are named in `kept`.
    """
    plain: dict[str, Tensor] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if name not in kept:
            plain[weights.prefix + name.replace(".base_layer.", ".")] = x
    homes: dict[str, Tensor] = {}
    for names in aliases(weights.stored.skeleton).values():
        home = next((plain[name] for name in names if name in plain), None)
        if home is not None:
            homes |= dict.fromkeys(names, home)
    return homes


def _fill(module: nn.Module, weights: _Weights, kept: set[str]) -> None:
    """Read the weights of `module` from the files, one group at a time.

    Its parameters that are named in `kept` stay as they are.
    """
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

    # Every process raises for the same tensor, whichever of them holds the bad part.
    first = _first_of_all(module, min(bad, default=len(order)))
    if first < len(order):
        raise ValueError(f"model: {weights.folder}: {order[first]}: expected finite numbers, got NaN or inf")


def _first_of_all(module: nn.Module, index: int) -> int:
    """The smallest index over all processes, where the module is sharded.

    Each process sees its own part only.
    """
    sharded: Any = next((p for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if sharded is None:
        return index
    import torch.distributed as dist

    found = torch.tensor(index, device=sharded.device_mesh.device_type)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)
