"""The table of engines, and which of them works where.

The modules that need triton are imported only once they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from rft_kernels import streamed
from rft_kernels.interface import Engine


def _streamed() -> Engine:
    return Engine(streamed.forward, streamed.backward)


def _gemm() -> Engine:
    from rft_kernels import gemm

    return Engine(gemm.forward, gemm.backward)


def _triton() -> Engine:
    from rft_kernels import triton

    return Engine(triton.forward, triton.backward)


ENGINES: dict[str, Callable[[], Engine]] = {"streamed": _streamed, "gemm": _gemm, "triton": _triton}
_NEED_TRITON = ("gemm", "triton")
_HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile of 2.11 cannot trace the question


def load(name: str) -> Engine:
    """Load the engine of a name in ENGINES."""
    return ENGINES[name]()


def check(name: str, h: Tensor, *, also: tuple[str, ...]) -> None:
    """Raise ValueError unless `name` is an engine, "auto" or one of `also`.

    An engine that does not run where h is passes: `pick` raises with the reason.
    """
    if name in ("auto", *ENGINES, *also):
        return
    names = ["auto", "streamed"]
    if h.is_cuda:
        names += _NEED_TRITON
    expected = " or ".join(repr(n) for n in (*names, *also))
    raise ValueError(f"engine: expected {expected}, got {name!r}")


def runs_kernels(x: Tensor) -> bool:
    """Return whether kernels of triton run where x is."""
    return _HAS_TRITON and (x.is_cuda or _interpreted(x))


def pick(name: str, h: Tensor, w: Tensor) -> str:
    """Pick the engine that `name` means with h [T, D] and w [V, D].

    Raises ValueError if it cannot run there.
    """
    if name in ENGINES and name not in _NEED_TRITON:
        return name
    if name == "auto":
        if _HAS_TRITON and h.is_cuda and torch.float64 not in (h.dtype, w.dtype):
            return automatic(h.device.index, h.shape[1])
        return "streamed"
    if not _HAS_TRITON:
        raise ValueError(f"engine: expected 'auto' or 'streamed' without triton installed, got {name!r}")
    if not (h.is_cuda or _interpreted(h)):
        raise ValueError(
            f"engine: expected 'auto' or 'streamed' on {h.device.type} (kernels run on cuda, or anywhere in "
            f"triton's interpreter, TRITON_INTERPRET=1), got {name!r}"
        )
    return name


@torch.compiler.assume_constant_result  # it reads a file, which torch.compile cannot trace
def automatic(device: int | None, width: int) -> str:
    """Return the engine that auto.json names for a CUDA device and a width."""
    major, minor = torch.cuda.get_device_capability(device)
    return choose(table(), f"sm_{major}{minor}", width)


def choose(rules: dict[str, list], device: str, width: int) -> str:
    """Choose the engine of the first rule with a limit not below the width.

    Rules are for the device, or for "default"; a limit of None holds for every width.
    """
    for limit, name in rules.get(device, rules["default"]):
        if limit is None or width <= limit:
            return name
    raise ValueError(f"auto.json: expected a last rule without a limit for {device}, got {rules}")


@cache
def table() -> dict[str, list]:
    """Read auto.json: device -> [[largest D or null, engine], ...]."""
    content = json.loads(Path(__file__).with_name("auto.json").read_text())["engine"]
    return {device: entry["rules"] for device, entry in content.items()}


def _interpreted(h: Tensor) -> bool:
    """Return whether h is on a CPU, and triton's interpreter is on."""
    if h.device.type != "cpu":
        return False
    from rft_kernels import row_kernels

    return row_kernels.INTERPRETED
