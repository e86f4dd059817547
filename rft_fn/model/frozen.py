"""Parts of a model that are not trained."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from rft_fn.model.parts import find

__all__ = ["TOWERS", "freeze"]


TOWERS = "towers"


def freeze(module: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Freeze the parameters of `module` that one of the patterns matches, and return it.

    A pattern is a part of a parameter's path, or several with dots between them; `*` matches anything:
    "visual", "layers.0", "blocks.*.norm1". "towers" is all parts that see or hear, with what joins them to
    the text model. A tensor with two names, like a tied head, is frozen by either.

    Frozen parameters are in no `params` of `bind` or `init`, so they have no moments and are in no
    checkpoint; a saved model has them all. ValueError for a pattern that matches none, with names that are
    near, and if nothing would be left to train. The module is then as it was.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    frozen: list[nn.Parameter] = []
    for pattern in patterns:
        frozen += _matched(module, named, pattern)

    # Adapters may be the only ones that were left.
    closed = {id(p) for p in frozen}
    left = [name for name, p in named.items() if p.requires_grad and id(p) not in closed]
    if patterns and not left:
        raise ValueError(
            f"freeze: expected weights that are left to train, got {list(patterns)}: all of them"
        )
    for p in frozen:
        p.requires_grad_(False)
    return module


def _matched(module: nn.Module, named: Mapping[str, nn.Parameter], pattern: str) -> list[nn.Parameter]:
    """Return the parameters that a pattern matches. ValueError for none."""
    found = [p for name, p in named.items() if fnmatchcase(f".{name}.", f"*.{pattern}.*")]
    if pattern == TOWERS and not found:
        found = [p for tower in find(module).towers for p in tower.parameters()]
        if not found:
            raise ValueError(f"freeze: expected a model that sees or hears for 'towers', got {_kind(module)}")
    if not found:
        near = ", ".join(_near(pattern, named))
        raise ValueError(f"freeze: expected parts of {_kind(module)}, got {pattern!r}; it has {near}")
    return found


def _kind(module: nn.Module) -> str:
    return type(find(module).model).__name__


def _near(pattern: str, named: Mapping[str, Tensor]) -> list[str]:
    """Return parts of the parameters' paths that are spelled like a pattern; else the largest parts."""
    parts: dict[str, None] = {}
    largest: dict[str, None] = {}
    for name in named:
        path = name.split(".")[:-1]
        parts |= dict.fromkeys(part for part in path if not part.isdigit())
        largest[".".join(path[:2])] = None
    words = [word for word in pattern.split(".") if not word.isdigit()]
    return get_close_matches("".join(words[-1:]), parts, n=4) or sorted(largest)[:6]
