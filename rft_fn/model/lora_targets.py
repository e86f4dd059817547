"""Which layers get low-rank adapters, and which weights cannot have any."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from torch import nn

from rft_fn.model.frozen import TOWERS
from rft_fn.model.packed_attention import warn_once
from rft_fn.model.parts import find, path_of

__all__ = ["linear", "not_taken_for_experts", "target_paths", "warn_of_left_out"]


AUTO = "auto"
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


def warn_of_left_out(module: nn.Module) -> None:
    """Warn once of each kind of weight that no adapter can have."""
    # Two adapters would be merged into one weight.
    shared = _shared(module, linear(module))
    if shared:
        warn_once(
            f"lora: no adapters on {_last_names(shared)} ({len(shared)} layers), which share their weights "
            "with other layers"
        )

    # They are parameters of three dimensions, no linear layers.
    experts = _experts(module)
    if experts:
        size = sum(p.numel() for p in experts.values())
        share = size / sum(p.numel() for p in module.parameters())
        warn_once(
            f"lora: no adapters on routed experts ({_last_names(experts)}: {len(experts)} tensors, "
            f"{share:.0%} of all weights), which stay as they are"
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


def target_paths(
    module: nn.Module, target_modules: str | Sequence[str], exclude: Sequence[str] = ()
) -> list[str]:
    """Return the full paths of the layers that get adapters; see `apply_lora_configuration`."""
    # The layers that can have adapters, and which of them are in the text model.
    every = linear(module)
    closed = {*_read_by_owner(module, every), *_shared(module, every)}
    every = [path for path in every if path not in closed]
    text = _of_text(module, every)

    # Those that are asked for, less those that are excluded.
    groups = {AUTO: text, TOWERS: _of_towers(module, every), "all-linear": every}
    if isinstance(target_modules, str):
        target_modules = [name.strip() for name in target_modules.split(",")]
    _refuse_experts(module, every, target_modules)
    chosen = _named(every, groups, target_modules)

    unknown = [name for name in exclude if not _matching(every, [name])]
    if unknown:
        raise ValueError(f"exclude: expected parts of the paths of linear layers, got {unknown}")
    without = set(_matching(chosen, exclude))
    chosen = [path for path in chosen if path not in without]
    if not chosen:
        raise ValueError(f"target_modules: expected one linear layer or more, got none of {len(every)}")
    return chosen


def _refuse_experts(module: nn.Module, every: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a name that only weights of routed experts have."""
    experts = list(_experts(module))
    named = [name for name in names if _matching(experts, [name]) and not _matching(every, [name])]
    if named:
        raise ValueError(
            f"target_modules: expected linear layers, got {named}: routed experts are no layers and get no "
            "adapters; leave them out, or train all weights (lora_rank 0)"
        )


def _named(every: Sequence[str], groups: Mapping[str, Sequence[str]], names: Sequence[str]) -> list[str]:
    """Return the paths of `every` that match the names, or are in the groups with these names.

    ValueError for a name that matches none. A name that the text model has is meant there: a tower is
    adapted only by a path that leads there.
    """
    text = groups[AUTO]
    chosen: set[str] = set()
    unknown = []
    for name in names:
        found = groups.get(name) or _matching(text, [name]) or _matching(every, [name])
        chosen |= set(found)
        if not found:
            unknown.append(name)
    if unknown or not names:
        known = sorted({path.rpartition(".")[2] for path in text})
        raise ValueError(
            f"target_modules: expected auto, all-linear, towers or some of {known}, got {unknown}"
        )
    return [path for path in every if path in chosen]
