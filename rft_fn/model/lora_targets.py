"""Which layers and weights of experts get low-rank adapters, and which cannot have any."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from rft_fn.model.frozen import TOWERS
from rft_fn.model.lora_experts import products_of
from rft_fn.model.packed_attention import warn_once
from rft_fn.model.parts import find, path_of

__all__ = ["Targets", "find_targets", "linear", "not_taken_for_experts", "warn_of_left_out"]


AUTO = "auto"
EXPERTS = "experts"
_HEADS = {"classifier", "embed_out", "lm_head", "score", "v_head", "value_head"}


def linear(module: nn.Module) -> list[str]:
    """Return the paths of all linear layers but the head over the vocabulary.

    GPT-2's Conv1D is one. A linear layer of a class from a family's own file is one if it is made as
    torch's is: others are routers, or have more than one matrix.
    """
    from transformers.pytorch_utils import Conv1D

    head = find(module).head

    def as_torchs(kind: type[nn.Module]) -> bool:
        return not kind.__module__.startswith("transformers.models.") or kind.__init__ is nn.Linear.__init__

    layers = [(name, m) for name, m in module.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    return [name for name, m in layers if as_torchs(type(m)) and m is not head]


def _of_towers(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return the paths inside the parts that see or hear."""
    towers = [path_of(m, module) for m in find(module).towers]
    return [path for path in paths if any(path.startswith(f"{tower}.") for tower in towers)]


def _of_text(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return the paths inside the text model: no head, no tower."""
    parts = find(module)
    text = path_of(parts.text, module)
    in_towers = set(_of_towers(module, paths))
    in_text = [path for path in paths if not text or path.startswith(f"{text}.")]
    return [path for path in in_text if path not in in_towers and not set(path.split(".")) & _HEADS]


def _read_by_owner(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return the paths of layers with a weight that their owner reads: adapters would be passed by."""
    found = []
    for path in paths:
        owner, _, name = path.rpartition(".")
        kind = type(module.get_submodule(owner))
        if kind.__module__.startswith("transformers.models.") and name in _weights_read(kind):
            found.append(path)
    return found


@cache
def _weights_read(kind: type) -> frozenset[str]:
    """Return the names of layers with a weight that a class of modules reads, not only its type."""
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.)", inspect.getsource(kind)))


def _experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of routed experts by name, each [E, out, in]."""
    found: dict[str, nn.Parameter] = {}
    for path, m in module.named_modules():
        if "expert" not in path.lower() or isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            continue
        for name, p in m.named_parameters(recurse=False):
            if p.dim() == 3:
                found[f"{path}.{name}"] = p
    return found


def _in_groups(module: nn.Module) -> list[str]:
    """Return the names of routed experts' weights that can have adapters, inside the text model."""
    parts = dict(module.named_modules())
    names = [name.rpartition(".") for name in _experts(module)]
    return [f"{path}.{name}" for path, _, name in names if name in products_of(parts[path])]


def _last_names(paths: Iterable[str]) -> str:
    """Return the last parts of some paths, each once, as a list for a message."""
    return ", ".join(sorted({path.rpartition(".")[2] for path in paths}))


def not_taken_for_experts(module: Any, paths: Sequence[str]) -> list[str]:
    """Drop the paths that peft would take for routed experts.

    Warns once if there are some. Routed experts had names in older files that shared experts and dense
    layers of such a model have today.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=list(paths))
    convert_peft_config_for_transformers(config, module, None)
    kept = [path for path in paths if path in (config.target_modules or ())]
    names = _last_names(set(paths) - set(kept))
    if names:
        warn_once(
            f"lora: no adapters on {names} ({len(paths) - len(kept)} layers), which peft takes for the "
            "routed experts"
        )
    return kept


def _shared(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return the paths of layers that share their weight: two adapters would be merged into it."""
    owners: dict[int, list[str]] = {}
    for path in paths:
        weight = getattr(module.get_submodule(path), "weight", path)
        owners.setdefault(id(weight), []).append(path)
    return [path for same in owners.values() if len(same) > 1 for path in same]


def warn_of_left_out(module: nn.Module, adapted: Sequence[str] = ()) -> None:
    """Warn once of each kind of weight that has no adapters; `adapted` are the experts' that have some."""
    # Two adapters would be merged into one weight.
    shared = _shared(module, linear(module))
    if shared:
        warn_once(
            f"lora: no adapters on {_last_names(shared)} ({len(shared)} layers), which share their weights "
            "with other layers"
        )

    # They are parameters of three dimensions, no linear layers.
    experts = {name: p for name, p in _experts(module).items() if name not in adapted}
    if experts:
        size = sum(p.numel() for p in experts.values())
        share = size / sum(p.numel() for p in module.parameters())
        remedy = f"; the target {EXPERTS!r} takes them" if set(experts) <= {*_in_groups(module)} else ""
        warn_once(
            f"lora: no adapters on routed experts ({_last_names(experts)}: {len(experts)} tensors, "
            f"{share:.0%} of all weights), which stay as they are{remedy}"
        )

    # An adapter on these would be passed by.
    read = _read_by_owner(module, _of_text(module, linear(module)))
    if read:
        warn_once(
            f"lora: no adapters on {_last_names(read)} ({len(read)} layers), whose weights "
            f"{type(module).__name__} reads without calling them"
        )


def _matching(paths: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the paths that a name is the end or a part of; `*` matches anything."""
    names = list(names)
    return [path for path in paths if any(fnmatchcase(f".{path}.", f"*.{name}.*") for name in names)]


class Targets(NamedTuple):
    """What gets adapters, by full paths."""

    layers: list[str]
    experts: list[str]  # weights [E, out, in] of routed experts


def find_targets(
    module: nn.Module, target_modules: str | Sequence[str], exclude: Sequence[str] = ()
) -> Targets:
    """Return what gets adapters; see `apply_lora_configuration`."""
    # The layers that can have adapters, and which of them are in the text model.
    every = linear(module)
    closed = {*_read_by_owner(module, every), *_shared(module, every)}
    every = [path for path in every if path not in closed]
    text = _of_text(module, every)
    experts = _in_groups(module)

    # Those that are asked for, less those that are excluded.
    groups = {AUTO: text, TOWERS: _of_towers(module, every), "all-linear": every}
    if experts:
        groups[EXPERTS] = _of_text(module, experts)
    if isinstance(target_modules, str):
        target_modules = [name.strip() for name in target_modules.split(",")]
    _refuse_experts(module, [*every, *experts], target_modules)
    chosen = _named(every, experts, groups, target_modules)

    unknown = [name for name in exclude if not _matching([*every, *experts], [name])]
    if unknown:
        raise ValueError(f"exclude: expected parts of the paths of linear layers, got {unknown}")
    chosen -= set(_matching([*every, *experts], exclude))
    if not chosen:
        raise ValueError(f"target_modules: expected one linear layer or more, got none of {len(every)}")
    return Targets([x for x in every if x in chosen], [x for x in experts if x in chosen])


def _refuse_experts(module: nn.Module, known: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a name that only weights of experts have that cannot have adapters."""
    experts = list(_experts(module))
    named = [name for name in names if _matching(experts, [name]) and not _matching(known, [name])]
    if named:
        path = _matching(experts, named)[0].rpartition(".")[0]
        raise ValueError(
            f"target_modules: expected linear layers, got {named}: the routed experts of "
            f"{type(module.get_submodule(path)).__name__} have a product of their own, and get no adapters; "
            "leave them out, or train all weights (lora_rank 0)"
        )


def _named(
    every: Sequence[str], experts: Sequence[str], groups: Mapping[str, Sequence[str]], names: Sequence[str]
) -> set[str]:
    """Return the paths of layers and experts that match the names, or are in the groups with these names.

    ValueError for a name that matches none. A name that the text model has is meant there, and one of a
    layer is no expert's: a tower, and experts of the same name, are adapted only by a path that leads there.
    """
    text = groups[AUTO]
    chosen: set[str] = set()
    unknown = []
    for name in names:
        found = groups.get(name)
        for paths in (text, every, experts):
            found = found or _matching(paths, [name])
        chosen |= set(found or ())
        if not found:
            unknown.append(name)
    if unknown or not names:
        known = sorted({path.rpartition(".")[2] for path in [*text, *experts]})
        words = ", ".join(word for word in (AUTO, "all-linear", TOWERS, EXPERTS) if word in groups)
        raise ValueError(f"target_modules: expected {words} or some of {known}, got {unknown}")
    return chosen
