"""Matrix products of bfloat16 on a CPU, by the way that a measurement finds fastest.

A processor with AMX multiplies bfloat16 several times as fast as float32, one with AVX512-BF16 twice as fast.
Without either, torch has slow stand-ins. Libraries also differ in which layouts of the factors they read
well. So the three products of a layer are timed once on a machine, for a tenth of a second in all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_kernels import products

_TURNS = 8
_CLEAR = 0.6  # of the seconds: a choice of what takes more would vary from run to run


def _given(a: Tensor, b: Tensor) -> Tensor:
    return F.linear(a, b)


def _dense(a: Tensor, b: Tensor) -> Tensor:
    return F.linear(a.contiguous(), b.contiguous())


def _wide(a: Tensor, b: Tensor) -> Tensor:
    return products.mm(a.float(), b.float().T).to(a.dtype)


# the factors as they are, copied to rows without gaps, and in float32
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"given": _given, "dense": _dense, "wide": _wide}


class Layout(NamedTuple):
    """Whether the factors of a [M, K] bᵀ [K, N] are read by columns."""

    a: bool
    b: bool


FORWARD, INPUT, WEIGHT = Layout(False, False), Layout(False, True), Layout(True, True)  # those of a layer


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] bᵀ [K, N] of bfloat16 on a CPU, summed in float32 and rounded once."""
    layout = Layout(not a.is_contiguous(), not b.is_contiguous())
    return WAYS[ways().get(layout, "given")](a, b)


def mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Do as `products.mm`; of bfloat16 into an out of any type."""
    return out.copy_(product(a, b.T)) if fits(a) else products.mm(a, b, out)


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Do as `products.add_mm`; of bfloat16 into a total of any type."""
    return total.add_(product(a, b.T)) if fits(a) else products.add_mm(total, a, b)


def fits(a: Tensor) -> bool:
    """Return whether a is of bfloat16 on a CPU."""
    return a.dtype == torch.bfloat16 and a.device.type == "cpu"


def is_fast() -> bool:
    """Return whether this processor is faster in bfloat16 than in float32, in each layout."""
    return "wide" not in ways().values()


def differs() -> bool:
    """Return whether some layout has a faster way than torch's own."""
    return set(ways().values()) != {"given"}


def packing() -> products.Packing:
    """Return what is worth packing: where products are fast, all but the smallest weights."""
    if is_fast() and torch.backends.mkldnn.is_available():
        return products.Packing(1 << 16, rows=1)
    return products.Packing(math.inf, rows=1)


def ways() -> dict[Layout, str]:
    """Return the name of the fastest way for each layout of a layer's products."""
    return choose(measured())


def choose(seconds: dict[Layout, dict[str, float]]) -> dict[Layout, str]:
    """Choose the way with the least seconds of each layout; "given" unless another is clearly faster."""
    found = {}
    for layout, of in seconds.items():
        best = min(of, key=lambda name: of[name])
        found[layout] = best if of[best] < _CLEAR * of["given"] else "given"
    return found


def gain() -> float:
    """Return by what factor the products of a layer are faster in bfloat16 than in float32 as a whole."""
    wide = sum(of["wide"] for of in measured().values())
    return wide / sum(min(x for name, x in of.items() if name != "wide") for of in measured().values())


@cache
def measured() -> dict[Layout, dict[str, float]]:
    """Return the seconds of the processor of each way for each layout of a layer's products.

    They are measured once on a machine, so that a run that goes on computes as it did: the file is in the
    folder $RFT_FN_CACHE, or ~/.cache/rft_fn, and may be deleted.
    """
    layouts = FORWARD, INPUT, WEIGHT
    folder = Path(os.environ.get("RFT_FN_CACHE") or Path.home() / ".cache" / "rft_fn")
    here = [
        products.processor("model name"),
        products.processor("flags"),
        platform.machine(),
        torch.__version__,
    ]
    path = folder / f"bf16_{hashlib.sha256(repr(here).encode()).hexdigest()[:12]}.json"
    with suppress(OSError, ValueError):
        return dict(zip(layouts, json.loads(path.read_text()), strict=True))

    with torch.autocast("cpu", enabled=False), torch.no_grad():
        found = [_seconds(layout) for layout in layouts]
    with suppress(OSError):  # a folder that nobody may write
        folder.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(found))
        with suppress(FileExistsError):  # another process was first
            os.link(own, path)
        own.unlink()
        found = json.loads(path.read_text())
    return dict(zip(layouts, found, strict=True))


def _seconds(layout: Layout) -> dict[str, float]:
    """Return the least seconds of a few turns of each way."""
    rows, size = 256, 512
    a = torch.ones(size, rows).T if layout.a else torch.ones(rows, size)
    b = torch.ones(size, size).T if layout.b else torch.ones(size, size)
    a, b = a.bfloat16(), b.bfloat16()  # keeps the layout
    names = [name for name in WAYS if name != "dense" or layout != FORWARD]  # which has no gaps
    least = dict.fromkeys(names, float("inf"))
    for turn in range(_TURNS + 1):
        for name in names:
            start = time.process_time()
            WAYS[name](a, b)
            if turn:  # the first one makes kernels
                least[name] = min(least[name], time.process_time() - start)
    return least
