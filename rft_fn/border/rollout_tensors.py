"""The tensors of a file as a rollout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.border.foreign_code import quoted
from rft_fn.border.sampled import LEAST_LOGP, ROUNDING
from rft_fn.border.values import INT64, LARGEST
from rft_fn.types import Rollout

__all__ = ["rollout_of"]


_FIELDS: dict[str, tuple[torch.dtype, str]] = {  # of routing, 16 bits where there are so many experts
    "tokens": (torch.int64, "B S"),
    "mask": (torch.bool, "B S"),
    "logp": (torch.float32, "B S"),
    "length": (torch.int64, "B"),
    "truncated": (torch.bool, "B"),
    "group": (torch.int64, "B"),
    "version": (torch.int64, "B"),
    "temperature": (torch.float32, "B"),
    "routing": (torch.uint8, "B S M K"),
    "kept": (torch.int32, "B S W"),
    "versions": (torch.int64, "B S"),
    "reward": (torch.float32, "N G"),
}


def rollout_of(tensors: Mapping[str, Tensor], *, vocabulary: int | None = None) -> tuple[Rollout, Tensor]:
    """Return the rollout and the rewards [N, G] that named tensors are.

    ValueError unless every field has its type and shape, tokens are ids (of the vocabulary, where one is
    given), the mask lies within the lengths and behind the first token, log-probs are finite, none above 0
    and 0 outside mask, each of N prompts has G rows, one after the other, and rewards are finite.
    """
    unknown = sorted(set(tensors) - set(_FIELDS))
    missing = sorted(set(_FIELDS) - set(tensors) - {"temperature", "routing", "kept", "versions"})
    if unknown or missing:
        raise ValueError(
            f"expected the tensors {', '.join(_FIELDS)}, got {', '.join(sorted(tensors)) or 'none'}"
        )
    for name, x in tensors.items():
        if x.dtype != _FIELDS[name][0] and (name, x.dtype) != ("routing", torch.int16):
            raise ValueError(f"{name}: expected {_FIELDS[name][0]}, got {x.dtype}")
    sizes = check.shapes(
        **{name: (tensors[name], dims) for name, (_, dims) in _FIELDS.items() if name in tensors}
    )
    fields: dict[str, Any] = dict(tensors)
    reward: Tensor = fields.pop("reward")
    found = Rollout(**fields)
    rows, size, prompts, each = (sizes[dim] for dim in "BSNG")
    if not rows or rows != prompts * each:
        raise ValueError(
            f"reward: expected {rows} numbers, one for each response, got {prompts} times {each}"
        )

    most = INT64 - 1 if vocabulary is None else vocabulary - 1
    _within("tokens", found.tokens, 0, most)
    _within("length", found.length, 1, size)
    _within("version", found.version, 0, INT64 - 1)
    groups = torch.arange(prompts).repeat_interleave(each)
    if not torch.equal(found.group, groups):
        raise ValueError(
            f"group: expected {each} rows of each of {prompts} prompts in order, got "
            f"{quoted(found.group.tolist())}"
        )
    place = torch.arange(size)
    if bool((found.mask & ((place == 0) | (place >= found.length[:, None]))).any()):
        raise ValueError("mask: expected tokens behind the first and within the length, got others")
    _within("logp", found.logp, LEAST_LOGP, ROUNDING)
    if bool(found.logp[~found.mask].any()):
        raise ValueError("logp: expected 0 outside mask, got other numbers")
    _within("reward", reward, -LARGEST, LARGEST)
    if found.temperature is not None and not bool(
        (found.temperature.isfinite() & (found.temperature > 0)).all()
    ):
        raise ValueError("temperature: expected finite numbers above 0, got others")
    if found.routing is not None:
        _within("routing", found.routing, 0, torch.iinfo(found.routing.dtype).max)
        if bool(found.routing[place >= found.length[:, None] - 1].any()):
            raise ValueError("routing: expected 0 from the last token of a row on, got experts")
    if found.kept is not None:
        _within("kept", found.kept.long(), 0, INT64 - 1 if vocabulary is None else vocabulary)
        if bool(found.kept[~found.mask].any()):
            raise ValueError("kept: expected 0 outside mask, got other numbers")
    if found.versions is not None:
        least = torch.where(found.mask, found.versions, INT64 - 1).amin(-1)
        if bool((found.version > least).any()):
            raise ValueError("versions: expected none below the version of its row, got others")
        if bool(found.versions[~found.mask].any()):
            raise ValueError("versions: expected 0 outside mask, got other numbers")
    return found, reward


def _within(name: str, x: Tensor, low: float, high: float) -> None:
    """Raise ValueError for a number of a tensor outside of [low, high]; NaN is outside."""
    wrong = x[~((x >= low) & (x <= high))]
    if len(wrong):
        limits = f"of at least {low}" if high == INT64 - 1 else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected numbers {limits}, got {wrong[0].item()}")
