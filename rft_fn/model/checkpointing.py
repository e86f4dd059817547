"""What checkpointed blocks keep for their backward, and where it waits until then."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rft_fn.model.dropout import checkpointed
from rft_fn.model.inputs_on_host import OnHost
from rft_fn.model.mlp_slices import slice_mlps

__all__ = ["LADDER", "Checkpointing", "checkpoint", "kind_of", "on_host"]


Checkpointing: TypeAlias = Literal[False, True, "products", "slices", "host"]
"""What a block keeps for its backward: all, its input, its input and what takes long to compute; its input
with its MLP over slices of tokens; the same with that input in memory of the host."""

LADDER: tuple[Checkpointing, ...] = (False, "products", True, "slices", "host")
"""From the fastest to the longest rows."""


def checkpoint(module: Any, kind: Checkpointing) -> None:
    """Have the blocks of a model keep what `kind` says, and compute the rest again in the backward.

    ValueError for a kind that is none, and for a model whose blocks transformers does not checkpoint.
    """
    if kind not in LADDER:
        raise ValueError(f"gradient_checkpointing: expected one of {_listed()}, got {kind!r}")
    if kind is False:
        return
    enable = getattr(module, "activation_checkpointing_enable", None)  # its name since 5.23
    enable = enable or module.gradient_checkpointing_enable
    more = {"context_fn": _products} if kind == "products" else {}
    enable({"use_reentrant": False, **more})
    layers = checkpointed(module)
    if kind in ("slices", "host"):
        slice_mlps(layers)
    if kind == "host" and layers:
        function = OnHost(layers[0]._gradient_checkpointing_func)  # one of all, to know their order
        for layer in layers:
            layer._gradient_checkpointing_func = function


def kind_of(module: nn.Module) -> Checkpointing:
    """Return what the checkpointed blocks of a model keep."""
    layers = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    functions = [_inner(m) for m in layers if hasattr(m, "_gradient_checkpointing_func")]
    if any(isinstance(f, OnHost) for f in functions):
        return "host"
    if any(hasattr(m, "rft_sliced") for m in module.modules()):
        return "slices"
    if any(getattr(f, "keywords", {}).get("context_fn") is _products for f in functions):
        return "products"
    return bool(layers)


def on_host(module: nn.Module) -> list[OnHost]:
    """Return the functions of a model that move inputs to the host."""
    found = [_inner(m) for m in module.modules() if hasattr(m, "_gradient_checkpointing_func")]
    return list({id(f): f for f in found if isinstance(f, OnHost)}.values())


def _inner(layer: Any) -> Any:
    """Return the checkpointing function of a layer, without the one that runs it in evaluation mode."""
    function = layer._gradient_checkpointing_func
    return function if isinstance(function, OnHost) else getattr(function, "function", function)


def _listed() -> str:
    return ", ".join(map(str, get_args(Checkpointing)))


# ---------- "products": results that take long to compute are kept beside the inputs


_PRODUCTS = r"aten::_?(mm|addmm|bmm|baddbmm|grouped_mm|linear)|(mkldnn|mkl)::\w*linear\w*"
_LONG = re.compile(rf"({_PRODUCTS}|aten::_scaled_dot_product\w*|aten::_\w*attention_forward)$")


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_long(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_long(op: Any) -> bool:
    return bool(_LONG.match(op.name().partition(".")[0]))


def _products() -> Any:
    forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _kept_as_they_were(again)


@contextmanager
def _kept_as_they_were(again: Any) -> Iterator[None]:
    """Compute a block again; ValueError for one that has written into a product that was kept."""
    try:
        with again:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise ValueError(
            "gradient_checkpointing: expected a model that leaves the results of its products as they are "
            "for 'products', this one writes into them; take True"
        ) from error
