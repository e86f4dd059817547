"""The tensors of a model's files, converted to the model's by transformers' rules.

A file may hold a tensor for each expert where the model has one for all of them, or names of an older time.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.pretrained import incomplete, unreadable

__all__ = ["Group", "Stored", "aliases", "converted", "files", "folder_of", "groups", "slices", "stored"]


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
