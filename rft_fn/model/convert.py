"""Tensors of a model's files converted to the model's, by transformers' rules.

They are converted one group at a time.

A file may hold a tensor for each expert where the model has one for all of them, or names of an older time. A
group is the tensors that become one or several of the model's together: nothing is held but one group.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

__all__ = ["Group", "converted", "groups"]


class Group(NamedTuple):
    """Tensors of the files, and the rule that converts them."""

    name: str  # of the first tensor that they become
    rule: Any  # transformers' WeightConverter; None for one tensor, perhaps by another name
    sources: list[tuple[str, str]]  # (the rule's pattern that it matches, name in the files)


def groups(module: Any, stored: Iterable[str]) -> tuple[list[Group], list[str]]:
    """(groups of the names in a model's files, names unknown to the model).

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
            name = key
            pattern = None
        if name in own:
            group = found.setdefault(name, Group(name, of_pattern.get(pattern), []))
            group.sources.append((pattern or key, key))
        else:
            unexpected.append(name)
    module._weight_conversions = [rule for rule in rules if rule.was_used()]
    return list(found.values()), unexpected


def converted(group: Group, read: Callable[[str], Any], skeleton: Any) -> dict[str, Any]:
    """The tensors of the model that a group becomes, by name.

    `read` gives the tensor of a name in the files, or a slice to read it by; a group without a rule passes it
    on unread. `skeleton` is the model as transformers makes it, whose shapes some rules look at.
    """
    if group.rule is None:
        return {group.name: read(group.sources[0][1])}
    rule = copy.deepcopy(group.rule)
    for pattern, key in group.sources:
        rule.add_tensor(group.name, key, pattern, partial(_whole, read, key))
    made = rule.convert(group.name, model=skeleton, config=skeleton.config)
    out = {}
    for name, x in made.items():
        if isinstance(x, list):
            x = x[0]
        out[name] = x
    return out


def _whole(read: Callable[[str], Any], key: str) -> Any:
    return read(key)[...]
