"""Dropout off for good, also in layers that are checkpointed."""

from collections.abc import Callable
from typing import Any

from torch import nn

from rft_fn.model import packed_states, routing

__all__ = ["checkpointed", "disable_dropout"]


class _EvalCheckpoint:
    """The checkpointing function of a layer that runs in evaluation mode.

    transformers checkpoints a layer only in training mode, and many layers read their mode for dropout. So
    the layer is in training mode when transformers looks, and not while it runs.
    """

    def __init__(self, layer: nn.Module, function: Callable[..., Any]):
        self.layer = layer
        self.function = function

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        # of this pack, also when the backward runs the layer again
        sequences, experts = packed_states.current(), routing.current()

        def in_eval(*inputs: Any) -> Any:
            self.layer.training = False
            try:
                with packed_states.apart(sequences), routing.replayed(experts):
                    return forward(*inputs)
            finally:
                self.layer.training = True

        return self.function(in_eval, *args)


def checkpointed(module: nn.Module) -> list[Any]:
    """Return the checkpointed layers. ValueError for a model that checkpoints in another way."""

    def is_on(m: nn.Module) -> bool:
        return getattr(m, "gradient_checkpointing", False) and hasattr(m, "_gradient_checkpointing_func")

    on = [m for m in module.modules() if is_on(m)]
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
    """Turn dropout off for good, also in checkpointed layers: log-probs are a function of (params, pack)."""
    module.eval()
    for layer in checkpointed(module):
        layer.training = True
        if not isinstance(layer._gradient_checkpointing_func, _EvalCheckpoint):
            layer._gradient_checkpointing_func = _EvalCheckpoint(layer, layer._gradient_checkpointing_func)
