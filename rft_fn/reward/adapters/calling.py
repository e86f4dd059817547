"""The arguments of functions of other libraries.

Columns have the library's names, and texts its form.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rft_fn.data.rows import column_at
from rft_fn.reward.convention import Columns, column_names, parameters, required, taken, text

__all__ = ["ForeignFn", "call", "like", "missing", "read_columns", "required_columns", "whole_texts"]


Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])


class ForeignFn(Protocol):
    """A reward function in the convention of another library."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        """A result of that convention, for one completion or for all."""
        ...


def required_columns(fn: ForeignFn, paths: Mapping[str, str]) -> tuple[str, ...]:
    """The columns behind the parameters that a function cannot do without.

    `paths` is parameter -> column.
    """
    return tuple(paths[name] for name in required(fn) if name in paths)


def read_columns(
    fn: ForeignFn, paths: Mapping[str, str], columns: Columns, count: int
) -> dict[str, list[Any]]:
    """The arguments of a function that are columns, `count` values each.

    `paths` is parameter -> column. A column that is missing is None where the function has a default for it,
    else ValueError.
    """
    needed = required_columns(fn, paths)
    found: dict[str, list[Any]] = {}
    for name, path in paths.items():
        found[name] = column_at(columns, path, count, default=None)
        if path in needed and None in found[name]:
            raise ValueError(missing(path, name, columns))
    return found


def call(fn: ForeignFn, given: Mapping[str, Any]) -> Any:
    """Call a function by name, or in order where its names are others.

    ValueError where a name that it shares stands in another place, or where it needs more than there is.
    """
    if set(required(fn)) <= given.keys():
        return fn(**taken(fn, given))
    places = [p.name for p in parameters(fn) if p.kind is not p.KEYWORD_ONLY]
    shared = [name == known or name not in given for name, known in zip(places, given)]
    if not all(shared) or len(required(fn)) > len(given):
        raise ValueError(
            f"expected a reward of ({', '.join(given)}), by these names or in this order, got one of "
            f"({', '.join(places)})"
        )
    return fn(*list(given.values())[: len(places)])


_KEPT = ("close", "deadline")


def like(fn: object) -> Callable[[Wrapper], Wrapper]:
    """Give a wrapper of `fn` what others ask of a reward beside its numbers, as a decorator."""

    def keep(wrapper: Wrapper) -> Wrapper:
        wrapper.__dict__.update({name: getattr(fn, name) for name in _KEPT if hasattr(fn, name)})
        return wrapper

    return keep


def missing(path: str, name: str, columns: Columns) -> str:
    """The error for a column that a function cannot do without."""
    return (
        f"column {path!r}, the reward's {name}: not in every row of the dataset; "
        f"its columns are: {column_names(columns)}"
    )


def whole_texts(prompts: Sequence[Any], completions: Sequence[Any], prompt_texts: Any) -> list[str]:
    """Prompt and response as one text each.

    The prompt as the model read it where `prompt_texts` is known.
    """
    asked = prompt_texts or [text(x) for x in prompts]
    return [p + text(c) for p, c in zip(asked, completions, strict=True)]
