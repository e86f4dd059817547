"""Arriving weights, checked against those that an engine's model has: shared by all engines."""

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.types.engine import Delivered

__all__ = ["Arrival", "Manifest", "manifest"]


class Manifest(NamedTuple):
    """The weights of a model: which may arrive, and which have to."""

    shape: dict[str, torch.Size]  # by name, with every name of a tied weight, and the buffers
    required: dict[str, frozenset[str]]  # each parameter, with all names that it is known by


def manifest(module: nn.Module) -> Manifest:
    """The Manifest of a module. Its parameters have to arrive, by any name of a tied one; buffers may."""
    names: dict[int, list[str]] = {}
    shape = {name: x.shape for name, x in module.named_buffers()}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
        shape[name] = p.shape
    return Manifest(shape, {tied[0]: frozenset(tied) for tied in names.values()})


class Arrival:
    """Counts the tensors of one load, and refuses unknown, misshapen and missing ones."""

    def __init__(self, expected: Manifest, weights: Iterable[tuple[str, Tensor]]):
        """`weights.frozen`, where there is such an attribute, names weights that need not arrive."""
        self.expected = expected
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))
        self.names: set[str] = set()
        self.bytes = 0
        self.began = time.perf_counter()

    def take(self, name: str, x: Tensor) -> None:
        """Count one tensor. ValueError for a name or shape that the model lacks, or a repeated name."""
        if name in self.names:
            raise ValueError(f"weights: {name}: expected each name once, got it twice")
        want = self.expected.shape.get(name)
        if want is None:
            raise ValueError(f"weights: {name}: expected a parameter of the model, got {list(x.shape)}")
        if want != x.shape:
            raise ValueError(f"weights: {name}: expected {list(want)}, got {list(x.shape)}")
        self.names.add(name)
        self.bytes += x.numel() * x.element_size()

    def unsent(self) -> set[str]:
        """The weights that did not arrive because they never change, each by one of its names."""
        known = self.expected.required.items()
        return {name for name, tied in known if tied & self.frozen and not tied & self.names}

    def finish(self, version: int) -> Delivered:
        """The record of the load. ValueError for a weight that has not arrived and is not frozen."""
        present = self.names | self.frozen
        missing = [name for name, tied in self.expected.required.items() if not tied & present]
        if missing:
            count = len(self.expected.required)
            raise ValueError(
                f"weights: {missing[0]}: expected it among the {count} weights of the engine's model, got "
                f"{len(self.names)} without it ({len(missing)} missing in all); load a whole model, or an "
                "export that has not been read yet"
            )
        return Delivered(len(self.names), self.bytes, time.perf_counter() - self.began, version)
