"""Models without memory: each process reads their weights, only its own shards.

The tensors of files are converted to the model's by transformers' rules: a file may hold a tensor for each
expert where the model has one for all of them, or names of an older time.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.finite import is_finite
from rft_fn.model.parts import path_of
from rft_fn.model.pretrained import incomplete, kind_of, require_held, unreadable
from rft_fn.model.save import local, put

__all__ = [
    "Group", "Stored", "aliases", "converted", "files", "folder_of", "groups", "keep_part", "materialize",
    "on_meta", "slices", "stored",
]  # fmt: skip


# ---------- tensors of a model's files converted to the model's, one group at a time


class Group(NamedTuple):
    """Tensors of the files, and the rule that converts them."""

    name: str  # of the first tensor that they become
    rule: Any  # transformers' WeightConverter; None for one tensor, perhaps by another name
    sources: list[tuple[str, str]]  # (the rule's pattern that it matches, name in the files)


def groups(module: Any, stored: Iterable[str]) -> tuple[list[Group], list[str]]:
    """Return (groups of the names in a model's files, names unknown to the model).

    `module` is as transformers makes it. It remembers the rules that applied: it is saved by them again.
    """
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    # A rule changes a name, or makes tensors out of several.
    rules = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern: dict[str | None, Any] = {}
    for rule in converters:
        of_pattern |= dict.fromkeys(rule.source_patterns, rule)

    # Names that become one tensor are one group.
    own: dict = module.state_dict()
    found: dict[str, Group] = {}
    unexpected: list[str] = []
    for key in sorted(stored, key=loading.dot_natural_key):  # experts in the order of their numbers
        name, pattern = loading.rename_source_key(key, renamings, converters, module.base_model_prefix, own)
        if name not in own and key in own:  # a file that has the new name already
            name, pattern = key, None
        if name in own:
            group = found.setdefault(name, Group(name, of_pattern.get(pattern), []))
            group.sources.append((pattern or key, key))
        else:
            unexpected.append(name)
    module._weight_conversions = [rule for rule in rules if rule.was_used()]
    return list(found.values()), unexpected


def converted(group: Group, read: Callable[[str], Any], skeleton: Any) -> dict[str, Any]:
    """Return the tensors of the model that a group becomes, by name.

    `read` gives the tensor of a name in the files, or a slice to read it by; a group without a rule passes
    it on unread. `skeleton` is the model as transformers makes it: some rules look at its shapes.
    """
    if group.rule is None:
        return {group.name: read(group.sources[0][1])}
    rule = copy.deepcopy(group.rule)
    for pattern, key in group.sources:
        rule.add_tensor(group.name, key, pattern, lambda key=key: read(key)[...])
    made = rule.convert(group.name, model=skeleton, config=skeleton.config)
    return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


# ---------- the files of a model, and the tensors in them


class Stored(NamedTuple):
    """The files of a model, and the groups of tensors that become the model's."""

    where: dict[str, Path]  # the file of each tensor, by its name there
    groups: dict[tuple[str, ...], Group]  # by the names of the tensors that each becomes
    skeleton: Any  # the model on the meta device, as transformers makes it


def folder_of(name: str) -> Path:
    """Return the folder of a model; a hub name is fetched into its cache first."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


def files(folder: Path) -> list[Path]:
    """Return the files with a model's weights, by transformers' names if there are. ValueError for none."""
    named = sorted([*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")])
    found = named or sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(
            f"model: expected *.safetensors in {folder}, got none, and several processes read no other "
            "format; load it with transformers and save_pretrained it to a folder, which will have them"
        )
    return found


def stored(skeleton: nn.Module, paths: list[Path]) -> Stored:
    """Return the tensors that files hold for a model on the meta device.

    `skeleton` is as transformers makes it. ValueError for a file that is cut off, and for tensors that are
    missing, unexpected or of another shape.
    """
    shapes, where = _headers(paths)
    found, unexpected = groups(skeleton, shapes)

    # Make every tensor without memory, to see its name and shape.
    made: dict[str, Tensor] = {}
    by_names: dict[tuple[str, ...], Group] = {}
    for group in found:
        try:
            tensors = converted(group, shapes.__getitem__, skeleton)
        except (ValueError, RuntimeError, AttributeError) as error:
            what = f"{len(group.sources)} like {group.sources[0][1]}"
            raise ValueError(
                f"model: {paths[0].parent}: expected tensors that {group.name} can be made of, got {what}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        made |= tensors
        by_names[tuple(tensors)] = group

    out = Stored(where, by_names, skeleton)
    _check_names(out, made, unexpected)
    _untie(out)
    return out


def _headers(paths: list[Path]) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """Return (a tensor without memory for each one in the files, the file of each)."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, Tensor] = {}
    where: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as f:
                for key in f.keys():  # noqa: SIM118
                    shapes[key] = torch.empty(f.get_slice(key).get_shape(), device="meta")
                    where[key] = path
        except SafetensorError as error:
            raise unreadable(path.parent, error) from error
    return shapes, where


def _check_names(out: Stored, made: Mapping[str, Tensor], unexpected: list[str]) -> None:
    """Raise ValueError for tensors that are missing, unexpected or of another shape."""
    own = out.skeleton.state_dict(keep_vars=True)
    shapes = []
    for name, x in made.items():
        if name in own and x.shape != own[name].shape:
            shapes.append(f"{name} {list(x.shape)} instead of {list(own[name].shape)}")
    missing = {names[0] for names in aliases(out.skeleton).values() if not made.keys() & set(names)}

    # The model's own code explains some. A parameter must be read all the same: nobody else fills it.
    told = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unexpected))
    out.skeleton._adjust_missing_and_unexpected_keys(told)
    parameters = {name for name in missing if isinstance(own[name], nn.Parameter)}
    incomplete(
        next(iter(out.where.values())).parent, told.missing_keys | parameters, told.unexpected_keys, shapes
    )


def _untie(out: Stored) -> None:
    """Separate tied tensors of the skeleton that differ in the files, as transformers does."""
    plain = {group.name: group for group in out.groups.values() if group.rule is None}
    for names in aliases(out.skeleton).values():
        held = [plain[name] for name in names if name in plain]
        for other in held[1:]:
            with slices(out, held[0], other) as read:
                one = read(held[0].sources[0][1])[...]
                two = read(other.sources[0][1])[...]
            if torch.equal(one, two):
                continue
            path, _, last = other.name.rpartition(".")
            owner = out.skeleton.get_submodule(path)
            p = owner.get_parameter(last)
            setattr(owner, last, nn.Parameter(p.detach().clone(), p.requires_grad))
            out.skeleton.all_tied_weights_keys.pop(other.name, None)


def aliases(skeleton: nn.Module) -> dict[str, list[str]]:
    """Return all names of each tensor in a model's state, by the first of them."""
    same: dict[int, list[str]] = {}
    for name, x in skeleton.state_dict(keep_vars=True).items():
        same.setdefault(id(x), []).append(name)
    return {names[0]: names for names in same.values()}


@contextmanager
def slices(out: Stored, *some: Group) -> Iterator[Callable[[str], Any]]:
    """Yield a function from a tensor's name in the files to its slice.

    Only the files of these groups are open, and only meanwhile: the part of a file that was read stays in
    memory until it is closed.
    """
    from safetensors import safe_open

    paths = {out.where[key] for group in some for _, key in group.sources}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {path: stack.enter_context(safe_open(path, "pt")) for path in paths}
        yield lambda key: opened[out.where[key]].get_slice(key)


# ---------- models without memory, and the memory and weights that they get


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
    """Make a part that is kept without its module read its weights from the module's files."""
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
            plain[weights.prefix + name.replace(".base_layer.", ".")] = x
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
