"""Frozen dataclasses as pytrees, and functions to traverse them.

optree and torch's own pytree disagree on None (a leaf for torch) and on the order of dicts, so a `struct`
is registered with both and this project traverses only through this module, where None is always an absent
field and never a leaf.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import optree
import torch
from torch.utils import _pytree as torch_pytree

__all__ = ["Named", "UseAfterDonate", "copy", "donate", "leaves", "map", "replace", "static", "struct"]

_NAMESPACE = "rft_fn"
_register_optree: Any = optree.register_pytree_node  # its types expect collections, which structs are not
_register_torch: Any = torch_pytree.register_pytree_node
T = TypeVar("T")


class UseAfterDonate(RuntimeError):
    """A value was read that a function has consumed, and perhaps reused the memory of."""


def static(**kwargs: Any) -> Any:
    """Make a static struct field, which is no leaf.

    It is part of the structure, for example an int or a function.
    """
    return dataclasses.field(metadata={"static": True}, **kwargs)


class _Docstring:
    """The docstring of a class with its fields as they are written, read from the source when asked for."""

    def __init__(self, text: str | None):
        self.text = inspect.cleandoc(text or "")

    def __get__(self, instance: Any, cls: type) -> str:
        return f"{self.text}\n\nFields:\n\n{_written_fields(cls)}".rstrip()


def _written_fields(cls: type) -> str:
    """Return the lines of the fields of a class, with their comments; without its source only the names."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return "\n".join(f"    {name}" for name in cls.__annotations__)
    lines, fields = source.splitlines(), []
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            first = node.lineno - 1
            while lines[first - 1].strip().startswith("# "):
                first -= 1
            fields += lines[first : node.end_lineno]
    return "\n".join(fields)


def documented(cls: type[T]) -> type[T]:
    """Make `help` of a class show its fields as written in the source, with the shapes in their comments."""
    cls.__doc__ = _Docstring(cls.__doc__)  # type: ignore[assignment]
    return cls


def field_names(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of leaf fields, names of static fields) of a struct."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    return children, tuple(f.name for f in fields if f.metadata.get("static"))


def _missing(self: Any, name: str) -> Any:
    """Raise for a missing attribute of a struct: a field of a donated one, or a typo."""
    if name in type(self).__dataclass_fields__:
        raise UseAfterDonate(
            f"{type(self).__name__}.{name}: this {type(self).__name__} was donated (an update consumed it); "
            "use the value that the update returned"
        )
    raise AttributeError(f"{type(self).__name__} has no field {name!r}")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree of optree and torch, with keyword-only fields."""
    # eq=False: comparing tensors gives tensors, and a struct stays hashable by identity
    cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)  # type: ignore[assignment]
    cls.__getattr__ = _missing  # type: ignore[attr-defined]
    documented(cls)
    children, statics = field_names(cls)

    def aux(x: Any) -> tuple:
        return tuple(getattr(x, name) for name in statics)

    def unflatten(values: Any, meta: tuple) -> T:
        return cls(**dict(zip(children, values)), **dict(zip(statics, meta)))

    def flatten_torch(x: Any) -> tuple[list, tuple]:
        # torch counts None as a leaf, so an absent field becomes part of the structure
        present = tuple(name for name in children if getattr(x, name) is not None)
        return [getattr(x, name) for name in present], (present, aux(x))

    def unflatten_torch(values: Any, meta: tuple) -> T:
        absent = dict.fromkeys(children)
        return cls(**absent | dict(zip(meta[0], values)), **dict(zip(statics, meta[1])))

    # the two libraries order the arguments of unflatten differently
    _register_optree(
        cls,
        lambda x: (tuple(getattr(x, name) for name in children), aux(x), children),
        lambda meta, values: unflatten(values, meta),
        namespace=_NAMESPACE,
    )
    _register_torch(cls, flatten_torch, unflatten_torch, serialized_type_name=f"rft_fn.{cls.__qualname__}")
    return cls


class Named(dict):
    """A dict of named tensors that can be donated; then every read raises UseAfterDonate."""

    source: Any = None  # of gradients: what they were computed from, until they are donated

    def __reduce__(self) -> tuple:
        """Copy and pickle only the tensors."""
        return Named, (dict(self),)


class _Donated(Named):
    def _gone(self, *_: Any, **__: Any) -> Any:
        raise UseAfterDonate(
            "these tensors were donated (an update consumed them); use what the update returned"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _gone
    keys = values = items = get = pop = copy = _gone  # type: ignore[assignment]


_register_optree(
    Named,
    lambda x: (tuple(x.values()), tuple(x), tuple(x)),
    lambda names, values: Named(zip(names, values)),
    namespace=_NAMESPACE,
)
_register_torch(
    Named,
    lambda x: (list(x.values()), tuple(x)),
    lambda values, names: Named(zip(names, values)),
    serialized_type_name="rft_fn.Named",
)
# without these a traversal of donated tensors would find one opaque leaf, and raise no error
_register_optree(_Donated, _Donated._gone, _Donated._gone, namespace=_NAMESPACE)
_register_torch(_Donated, _Donated._gone, _Donated._gone)


def replace(x: T, **fields: Any) -> T:
    """Copy a struct with some fields changed; TypeError for a field that it does not have."""
    return dataclasses.replace(x, **fields)  # type: ignore[type-var]


def map(f: Callable[..., Any], *trees: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply a function to the leaves of trees of equal structure.

    Parts for which `is_leaf` is true count as leaves. None is structure: it stays None.
    """
    return optree.tree_map(f, *trees, is_leaf=is_leaf, namespace=_NAMESPACE)


def copy(tree: Any) -> Any:
    """Copy a tree with all of its tensors, which share no memory and no graph with the old ones.

    An update in place, or one that donates the old tree, changes nothing of the copy: `copy(state.params)`
    is what a frozen policy was. Shards of a tensor stay shards, and nothing is sent.
    """
    return map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def leaves(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of a tree, in the order of the fields.

    Parts for which `is_leaf` is true count as leaves.
    """
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=_NAMESPACE)


def leaves_with_path(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf), the path as in checkpoints: "opt/0/m/model.norm.weight"."""
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace=_NAMESPACE)
    for path, leaf in zip(paths, values):
        yield "/".join(str(part) for part in path), leaf


def unflatten_like(like: Any, values: list[Any]) -> Any:
    """Make a tree with the structure of `like` and other leaves."""
    return optree.tree_unflatten(optree.tree_structure(like, namespace=_NAMESPACE), values)


def donate(*trees: Any) -> None:
    """Mark structs and `Named` tensors, with everything inside, as consumed.

    A later read raises UseAfterDonate. The tensors themselves live on in whatever the caller built from
    them; only the way to them through the old value is closed. Reading a value that was not donated costs
    nothing extra: the check sits where Python looks for missing fields.
    """
    for x in trees:
        if isinstance(x, Named):
            dict.clear(x)
            x.source = None
            x.__class__ = _Donated
        elif dataclasses.is_dataclass(x):
            children, _ = field_names(type(x))
            donate(*(x.__dict__[name] for name in children if name in x.__dict__))
            x.__dict__.clear()
        elif isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
            donate(*x)
        elif isinstance(x, dict):
            donate(*x.values())
