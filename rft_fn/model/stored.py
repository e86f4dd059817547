"""The files of a model, and the tensors in them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.convert import Group, converted, groups
from rft_fn.model.pretrained import incomplete, unreadable

__all__ = ["Stored", "aliases", "files", "folder_of", "slices", "stored"]


class Stored(NamedTuple):
    """The files of a model, and the groups of tensors that become the model's."""

    where: dict[str, Path]  # the file of each tensor, by its name there
    groups: dict[tuple[str, ...], Group]  # by the names of the tensors that each becomes
    skeleton: Any  # the model on the meta device, as transformers makes it


def folder_of(name: str) -> Path:
    """The folder of a model; a hub name is fetched into its cache first."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


def files(folder: Path) -> list[Path]:
    """The files with a model's weights.

    Where some have transformers' names, these alone. ValueError for none.
    """
    named = sorted([*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")])
    found = named or sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(
            f"model: expected *.safetensors in {folder}, got none, and several processes read no other "
            "format; load it with transformers and save_pretrained it to a folder, which will have them"
        )
    return found


def stored(skeleton: nn.Module, paths: list[Path]) -> Stored:
    """The tensors that files hold for a model on the meta device.

    `skeleton` is as transformers makes it. ValueError for a file that is cut off, and for tensors that are
    missing, unexpected or of another shape.
    """
    shapes, where = _headers(paths)
    found, unexpected = groups(skeleton, shapes)

    # Make every tensor without memory, to see its name and shape.
    made: dict[str, Tensor] = {}
    by_names: dict[tuple[str, ...], Group] = {}
    for group in found:
        tensors = _shaped(group, shapes, skeleton, paths[0].parent)
        made |= tensors
        by_names[tuple(tensors)] = group

    out = Stored(where, by_names, skeleton)
    _check_names(out, made, unexpected)
    _untie(out)
    return out


def _headers(paths: list[Path]) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """(a tensor without memory for each one in the files, the file of each)."""
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


def _shaped(
    group: Group, shapes: Mapping[str, Tensor], skeleton: nn.Module, folder: Path
) -> dict[str, Tensor]:
    """The tensors that a group becomes, without memory.

    ValueError where its rule does not fit.
    """
    try:
        return converted(group, shapes.__getitem__, skeleton)
    except (ValueError, RuntimeError, AttributeError) as error:
        what = f"{len(group.sources)} like {group.sources[0][1]}"
        raise ValueError(
            f"model: {folder}: expected tensors that {group.name} can be made of, got {what}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _check_names(out: Stored, made: Mapping[str, Tensor], unexpected: list[str]) -> None:
    """ValueError for tensors that are missing, unexpected or of another shape."""
    own = out.skeleton.state_dict(keep_vars=True)
    shapes = []
    for name, x in made.items():
        if name in own and x.shape != own[name].shape:
            shapes.append(f"{name} {list(x.shape)} instead of {list(own[name].shape)}")
    missing = {names[0] for names in aliases(out.skeleton).values() if not made.keys() & set(names)}

    # The model's own code explains some. A parameter has to be read all the same, for nobody else fills it.
    told = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unexpected))
    out.skeleton._adjust_missing_and_unexpected_keys(told)
    parameters = {name for name in missing if isinstance(own[name], nn.Parameter)}
    incomplete(_folder(out), told.missing_keys | parameters, told.unexpected_keys, shapes)


def _untie(out: Stored) -> None:
    """Separate tied tensors of the skeleton that differ in the files.

    transformers does so too, whatever the config ties.
    """
    plain = {group.name: group for group in out.groups.values() if group.rule is None}
    for names in aliases(out.skeleton).values():
        held = [plain[name] for name in names if name in plain]
        for other in held[1:]:
            with slices(out, held[0], other) as read:
                one = read(held[0].sources[0][1])[...]
                two = read(other.sources[0][1])[...]
                if not torch.equal(one, two):
                    _separate(out.skeleton, other.name)


def _separate(module: Any, name: str) -> None:
    """Give a tied tensor its own parameter."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    p = owner.get_parameter(last)
    setattr(owner, last, nn.Parameter(p.detach().clone(), p.requires_grad))
    module.all_tied_weights_keys.pop(name, None)


def _folder(out: Stored) -> Path:
    return next(iter(out.where.values())).parent


def aliases(skeleton: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor in a model's state, by the first of them."""
    same: dict[int, list[str]] = {}
    for name, x in skeleton.state_dict(keep_vars=True).items():
        same.setdefault(id(x), []).append(name)
    return {names[0]: names for names in same.values()}


@contextmanager
def slices(out: Stored, *some: Group) -> Iterator[Callable[[str], Any]]:
    """A function from a tensor's name in the files to its slice.

    Only the files of these groups are open, and only meanwhile: the part of a file that was read stays in
    memory until it is closed.
    """
    from safetensors import safe_open

    paths = {out.where[key] for group in some for _, key in group.sources}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for path in paths:
            opened[path] = stack.enter_context(safe_open(path, "pt"))
        yield lambda key: opened[out.where[key]].get_slice(key)
