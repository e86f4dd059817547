"""Parts of a model that are not trained."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.parts import find
from rft_fn.model.quantize import whole

__all__ = ["TOWERS", "checkpointed", "disable_dropout", "freeze", "is_finite", "require_finite"]


# ---------- parts of a model that are not trained


TOWERS = "towers"


def freeze(module: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """`module`, without a gradient for the parameters that one of the patterns matches.

    A pattern is a part of a parameter's path, or several with dots between them; `*` stands for anything:
    "visual", "layers.0", "blocks.*.norm1". "towers" is all parts that see or hear, with what joins them to
    the text model. A tensor with two names, like a tied head, is frozen by either.

    Frozen parameters are in no `params` of `bind` or `init`, so they have no moments and are in no
    checkpoint; a saved model has them all. ValueError for a pattern that matches none, with names that are
    near, and where nothing would be left to train. The module is then as it was.
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
    """The parameters that a pattern matches. ValueError for none."""
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
    """Parts of the parameters' paths that are spelled like a pattern; else the largest parts."""
    parts: dict[str, None] = {}
    largest: dict[str, None] = {}
    for name in named:
        path = name.split(".")[:-1]
        parts |= dict.fromkeys(part for part in path if not part.isdigit())
        largest[".".join(path[:2])] = None
    words = [word for word in pattern.split(".") if not word.isdigit()]
    return get_close_matches("".join(words[-1:]), parts, n=4) or sorted(largest)[:6]


# ---------- dropout off for good, also in layers that are checkpointed


class _EvalCheckpoint:
    """The checkpointing function of a layer that runs in evaluation mode.

    transformers checkpoints a layer only in training mode, and many layers read their mode for dropout. So
    the layer is in training mode when transformers looks, and not while it runs.
    """

    def __init__(self, layer: nn.Module, function: Callable[..., Any]):
        self.layer = layer
        self.function = function

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        def in_eval(*inputs: Any) -> Any:
            self.layer.training = False
            try:
                return forward(*inputs)
            finally:
                self.layer.training = True

        return self.function(in_eval, *args)


def checkpointed(module: nn.Module) -> list[Any]:
    """The layers of transformers that are checkpointed.

    ValueError for a model that checkpoints in another way.
    """
    on = []
    for m in module.modules():
        if getattr(m, "gradient_checkpointing", False) and hasattr(m, "_gradient_checkpointing_func"):
            on.append(m)
    if not on:
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in on if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"gradient_checkpointing: expected layers of transformers' GradientCheckpointingLayer, "
            f"{type(module).__name__} has none; load it without"
        )
    return layers


def disable_dropout(module: nn.Module) -> None:
    """Turn dropout off for good: a log-prob is a function of (params, pack).

    Checkpointed layers stay checkpointed.
    """
    module.eval()
    for layer in checkpointed(module):
        layer.training = True
        if not isinstance(layer._gradient_checkpointing_func, _EvalCheckpoint):
            layer._gradient_checkpointing_func = _EvalCheckpoint(layer, layer._gradient_checkpointing_func)


# ---------- the check of weights for NaN and inf, in one pass and without memory


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has neither NaN nor inf."""
    x = whole(x).detach()
    if not x.is_floating_point() or x.is_meta or not x.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())  # NaN is in the minimum of what holds it


def require_finite(what: str, name: str, x: Tensor) -> None:
    """ValueError that names a tensor with NaN or inf."""
    if not is_finite(x):
        raise ValueError(f"{what}: {name}: expected finite numbers, got NaN or inf")
