"""New weights in a running vLLM model, counted as they arrive in its layers.

vLLM leaves out in silence what it does not recognise, and a layer that got a part of its weights keeps
uninitialised memory in the rest. Its layerwise reload counts the elements that each layer got, so a drop is
found exactly: a count that differs from that of the first whole load.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn.engine.arrival import Arrival, Manifest
from rft_fn.engine.vllm.package import part

__all__ = ["Short", "arriving", "replace"]

Short = dict[str, tuple[int, int]]  # layers that got fewer elements than they hold: (got, held)


def arriving(
    arrival: Arrival, weights: Iterable[tuple[str, Tensor]], kept: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Check weights on their way, and give a tied one by all of its names; those in `kept` come last.

    vLLM may hold a packed copy of a tied head, which only the head's own name renews. ValueError for a tensor
    that the model does not have, that comes twice or not at all, or that has NaN or inf.
    """
    tied = _ties(arrival.expected)
    for name, x in weights:
        if name in arrival.names:
            raise ValueError(f"weights: {name}: expected it once, got it twice")
        arrival.take(name, x)
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise ValueError(f"weights: {name}: expected finite numbers, got NaN or inf")
        for each in tied.get(name, (name,)):
            yield each, x
    arrival.finish(0)  # names a weight that is missing, which vLLM's layer would not
    for name, x in kept:
        for each in tied.get(name, (name,)):
            yield each, x


def _ties(expected: Manifest) -> dict[str, Sequence[str]]:
    """All names of each tied weight, by each of them."""
    ties: dict[str, Sequence[str]] = {}
    for names in expected.required.values():
        if len(names) > 1:
            ties |= dict.fromkeys(names, sorted(names))
    return ties


@torch.no_grad()
def replace(worker: Any, weights: Iterable[tuple[str, Tensor]], expected: Short | None) -> Short:
    """Load weights into a worker's model; returns the layers that stayed short.

    Some always do: those with padding, scales and rotary tables. ValueError if they are not those of
    `expected`, from the first whole load. After any error the model must not be used again.
    """
    layerwise = part("model_executor.model_loader.reload.layerwise")
    model = worker.get_model()
    with part("config").set_current_vllm_config(worker.vllm_config):
        layerwise.initialize_layerwise_reload(model)
        model.load_weights(weights)
        short = _short(model, layerwise)
        if expected is not None and short != expected:
            raise ValueError(_difference(short, expected))
        layerwise.finalize_layerwise_reload(model, worker.model_runner.model_config)
    return short


def _short(model: Any, layerwise: Any) -> Short:
    """The layers that have not got all of their elements yet."""
    short: Short = {}
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.load_numel < info.load_numel_total:
            short[name] = info.load_numel, info.load_numel_total
    return short


def _difference(short: Short, expected: Short) -> str:
    """The first layer that did not get what it got in the first load."""
    names = sorted(name for name in short.keys() | expected.keys() if short.get(name) != expected.get(name))
    first = names[0]
    total = (short.get(first) or expected[first])[1]
    want = expected.get(first, (total, total))[0]
    got = short.get(first, (total, total))[0]
    return (
        f"weights: {first}: expected {want} elements to arrive in vLLM's layer, got {got} "
        f"({len(names)} layers differ from the first load)"
    )
