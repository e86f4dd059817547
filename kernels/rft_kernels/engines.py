"""Which engine works where. The modules that need triton are imported only once they are used."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_MODULES = {"streamed": "streamed", "gemm": "gemm", "triton": "triton"}


def load(name: str) -> ModuleType:
    """The module with `head`, `forward` and `backward` of an engine."""
    return import_module(f"rft_kernels.{_MODULES[name]}")


def check(name: str, h: Tensor, *, also: tuple[str, ...]) -> None:
    """ValueError unless name is an engine that runs where h is, or one that `pick` says more about."""
    kernels = ("gemm", "triton")
    names = ("auto", "streamed", *(kernels if h.is_cuda else ()), *also)
    if name not in names + kernels:
        raise ValueError(f"engine: expected {' or '.join(map(repr, names))}, got {name!r}")


def pick(name: str, h: Tensor, w: Tensor) -> str:
    """The engine that `name` stands for with h [T, D] and w [V, D]; ValueError if it cannot run there."""
    if name == "streamed":
        return name
    works = find_spec("triton") is not None and torch.float64 not in (h.dtype, w.dtype)
    if name == "auto":
        return automatic(h.device.index, h.shape[1]) if works and h.is_cuda else "streamed"
    if find_spec("triton") is None:
        raise ValueError(f"engine: expected 'auto' or 'streamed' without triton installed, got {name!r}")
    if not (h.is_cuda or _interpreted(h)):
        raise ValueError(
            f"engine: expected 'auto' or 'streamed' on {h.device.type} (kernels run on cuda, or anywhere in "
            f"triton's interpreter, TRITON_INTERPRET=1), got {name!r}"
        )
    return name


@torch.compiler.assume_constant_result  # it reads a file, which torch.compile cannot trace
def automatic(device: int | None, width: int) -> str:
    """What auto.json says for a CUDA device and a width."""
    major, minor = torch.cuda.get_device_capability(device)
    return choose(table(), f"sm_{major}{minor}", width)


def choose(rules: dict[str, list], device: str, width: int) -> str:
    """The engine of the first rule of a device (or of "default") with width <= its limit, or no limit."""
    for limit, name in rules.get(device, rules["default"]):
        if limit is None or width <= limit:
            return name
    raise ValueError(f"auto.json: expected a last rule without a limit for {device}, got {rules}")


@cache
def table() -> dict[str, list]:
    """auto.json: device -> [[largest D or null, engine], ...]."""
    content = json.loads(Path(__file__).with_name("auto.json").read_text())["engine"]
    return {device: entry["rules"] for device, entry in content.items()}


def _interpreted(h: Tensor) -> bool:
    return h.device.type == "cpu" and import_module("rft_kernels.row_kernels").INTERPRETED
