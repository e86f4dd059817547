"""The manifest: which tensors a sync has to send, by the trainer's own module."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.model.finite import is_finite
from rft_fn.model.lora import plain_name
from rft_fn.model.quantize import is_low
from rft_fn.types import TrainState

__all__ = ["Expected", "ManifestError", "check_tensor", "manifest_of", "missing"]


class ManifestError(ValueError):
    """Weights that the trainer must not send: the fault is not the engine's."""


class Expected(NamedTuple):
    """A tensor that a sync has to send."""

    shape: torch.Size | None  # None: not known before it is put together
    dtype: torch.dtype | None  # it may be wider, not narrower
    names: tuple[str, ...]  # all by which the plain model knows it; several where it is tied


def manifest_of(state: TrainState) -> dict[str, Expected]:
    """The tensors of the plain model, each under all of its names, from the module of `state`.

    Nothing is gathered. Adapters are not among them, since they are sent as part of their layers' weights.
    Empty for a state without a module.
    """
    module: nn.Module | None = state.module
    if module is None:
        return {}
    tied: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            tied.setdefault(id(p), []).append(plain_name(module, name))
            found[id(p)] = p
    manifest: dict[str, Expected] = {}
    for key, names in tied.items():
        manifest |= dict.fromkeys(names, _expected(found[key], names))
    return manifest


def _expected(p: nn.Parameter, names: list[str]) -> Expected:
    if is_low(p):  # stored in another shape and type than it is sent in
        return Expected(None, None, tuple(names))
    shape = getattr(p, "ds_shape", p.shape)  # of the whole parameter, also where ZeRO 3 has taken it away
    return Expected(torch.Size(shape), p.dtype, tuple(names))


def check_tensor(manifest: Mapping[str, Expected], name: str, x: Tensor) -> None:
    """ManifestError for a tensor that is not the module's: by its name, shape, type, or NaN and inf."""
    if not is_finite(x):
        raise ManifestError(f"weights: {name}: expected finite numbers, got NaN or inf")
    if not manifest:
        return
    want = manifest.get(name)
    if want is None:
        raise ManifestError(f"weights: {name}: expected a parameter of the model, got {list(x.shape)}")
    if want.shape is not None and want.shape != x.shape:
        raise ManifestError(f"weights: {name}: expected {list(want.shape)}, got {list(x.shape)}")
    if want.dtype is not None and torch.promote_types(want.dtype, x.dtype) != x.dtype:
        raise ManifestError(f"weights: {name}: expected {want.dtype} or wider, got {x.dtype}")


def missing(manifest: Mapping[str, Expected], sent: set[str], frozen: frozenset[str]) -> list[str]:
    """The weights that were neither sent nor frozen, by the first of their names."""
    present = sent | frozen
    firsts = dict.fromkeys(want.names for want in manifest.values())
    return [names[0] for names in firsts if not present & set(names)]
