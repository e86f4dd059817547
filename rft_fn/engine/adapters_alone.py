"""Takes trained adapters that come alone: checks them, and writes folders of them.

vLLM and SGLang read adapters from a folder of peft's form. Each load has another folder and another name: an
engine that reads a path again keeps what its prefix cache has computed with the adapters before.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rft_fn.engine.weight_folder import Manifest, remove
from rft_fn.model.lora import BELOW
from rft_fn.model.lora_alone import A, B, layer_of
from rft_fn.types.engine import Delivered

__all__ = [
    "PROBE", "SLOTS", "AdapterLoad", "check_arrived", "check_places", "may_show", "pairs", "rank_of", "write",
]  # fmt: skip


# An engine calls its servers for one thing at a time: a rollout has ended before the next adapters come,
# ahead or not. So there are those that sample, and those that arrive.
SLOTS = 2
PROBE = range(3, 19)  # tokens whose log-probs show whether adapters have arrived
LEAST = 1e-5  # of a layer's output: a smaller change of all layers may be lost in the rounding of 16 bits


class AdapterLoad:
    """The matrices of one load, on the host; refuses those that belong to no layer of the engine's model."""

    def __init__(self, expected: Manifest):
        self.expected = expected
        self.tensors: dict[str, Tensor] = {}
        self.bytes = 0
        self.began = time.perf_counter()

    def take(self, name: str, x: Tensor) -> None:
        """Copy one matrix. ValueError for a name, a shape or a rank that does not fit, or a repeated name."""
        if name in self.tensors:
            raise ValueError(f"weights: {name}: expected each name once, got it twice")
        layer = layer_of(name)
        weight = self.expected.shape.get(f"{layer}.weight")
        if layer == name or weight is None or len(weight) != 2:
            raise ValueError(
                f"weights: {name}: expected adapters of a layer of the model, got {list(x.shape)}"
            )
        rank = x.shape[0 if name.endswith(A) else -1] if x.ndim == 2 else 0
        size = x.numel() // rank if rank else 0
        if size not in weight or (self.tensors and rank != rank_of(self.tensors)):
            want = f"the rank of the others, {rank_of(self.tensors)}" if self.tensors else "some rank"
            raise ValueError(
                f"weights: {name}: expected a matrix of {list(weight)} and {want}, got {list(x.shape)}"
            )
        self.tensors[name] = x.detach().to("cpu", copy=True)
        self.bytes += x.numel() * x.element_size()

    def finish(self, version: int) -> Delivered:
        """Return the record of the load. ValueError for a layer with one matrix of two."""
        both = {layer_of(name) + end for name in self.tensors for end in (A, B)}
        missing = sorted(both - self.tensors.keys())
        if missing or not both:
            raise ValueError(
                f"weights: {missing[0] if missing else 'adapters'}: expected it among the adapters, got "
                f"{len(self.tensors)} matrices without it"
            )
        return Delivered(len(self.tensors), self.bytes, time.perf_counter() - self.began, version)


def rank_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the rank of some matrices, which all of them have."""
    name, x = next(iter(tensors.items()))
    return x.shape[0 if name.endswith(A) else -1]


def pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) of each layer, by its path."""
    layers = dict.fromkeys(map(layer_of, tensors))
    return {layer: (tensors[layer + A], tensors[layer + B]) for layer in layers}


def may_show(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether adapters change log-probs by more than rounding: not at the first step, where B is 0."""
    largest = 0.0
    for a, b in pairs(tensors).values():
        a, b = a.double(), b.double()
        square = ((a @ a.T) * (b.T @ b)).sum()  # of the Frobenius norm of B A
        largest = max(largest, math.sqrt(max(float(square), 0.0) / len(b)))
    return largest >= LEAST


def check_places(without: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for a layer that no worker of vLLM has a place for; each tells those that it lacks."""
    lost = sorted(set(without[0]).intersection(*without[1:])) if without else []
    if lost:
        raise ValueError(
            f"weights: {lost[0]}: expected a place for its adapters in vLLM, got none ({len(lost)} layers "
            "without); send merged weights (engine_adapters merged)"
        )


def check_arrived(name: str, version: int, without: Sequence[float], under: Sequence[float]) -> None:
    """Raise ValueError where log-probs under adapters that must show are those of the base model."""
    if list(without) == list(under):
        raise ValueError(
            f"weights: version {version}: expected adapters {name} to change log-probs, got those of the "
            "base model: they have not arrived"
        )


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder of adapters as peft would, whole or not at all. OSError for a full disk."""
    from safetensors.torch import save_file

    rank = rank_of(tensors)
    layers = sorted({layer_of(name).rpartition(".")[2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": rank,  # the scale is 1
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "inference_mode": True,
    }
    part = folder.with_name(folder.name + ".part")
    remove(part)
    part.mkdir(parents=True)
    file = str(part / "adapter_model.safetensors")
    with torch.no_grad():
        stored = {BELOW + name: x.contiguous() for name, x in tensors.items()}
        save_file(stored, file, metadata={"format": "pt"})
    (part / "adapter_config.json").write_text(json.dumps(config))
    remove(folder)
    os.replace(part, folder)
