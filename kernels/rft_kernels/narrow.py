"""Matrix products of bfloat16 on a CPU, by the way that a measurement finds fastest.

A processor with AMX multiplies bfloat16 several times as fast as float32, one with AVX512-BF16 twice as fast.
Without either, torch has slow stand-ins, and without AVX-512 oneDNN has no such products at all: there they
are made in float32. Libraries also differ in which layouts of the factors they read well. So the three
products of a layer are timed once on a machine, for a tenth of a second in all.
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
_FINE = 1e-5  # seconds: a clock of longer steps says nothing about one product
_STEPS = 100  # of the clock that a turn takes at least
_LIKELY = (1e-6, 100.0)  # seconds that a product here takes on any processor: others are no measurement
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
_LAYOUTS = (FORWARD, INPUT, WEIGHT)


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


@cache
def has_products() -> bool:
    """Return whether this processor multiplies bfloat16, as torch says; the stand-ins are slow."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return False


@cache
def packs() -> bool:
    """Return whether oneDNN packs weights of bfloat16 on this processor, found out by one product."""
    weight, x = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(4, 32, dtype=torch.bfloat16)
    try:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
            out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            return torch.equal(out, x @ weight.T)
    except (AttributeError, RuntimeError):
        return False


def is_fast() -> bool:
    """Return whether this processor is faster in bfloat16 than in float32, in each layout."""
    return "wide" not in ways().values()


def differs() -> bool:
    """Return whether some layout has a faster way than torch's own."""
    return set(ways().values()) != {"given"}


def packing() -> products.Packing:
    """Return what is worth packing: where products are fast, all but the smallest weights."""
    if is_fast() and packs():
        return products.Packing(1 << 16, rows=1)
    return products.Packing(math.inf, rows=1)


def ways() -> dict[Layout, str]:
    """Return the name of the fastest way for each layout of a layer's products."""
    return choose(measured()) if has_products() else dict.fromkeys(_LAYOUTS, "wide")


def choose(seconds: dict[Layout, dict[str, float]]) -> dict[Layout, str]:
    """Choose the way with the least seconds of each layout; "given" unless another is clearly faster."""
    found = {}
    for layout, of in seconds.items():
        best = min(of, key=lambda name: of[name])
        found[layout] = best if of[best] < _CLEAR * of["given"] else "given"
    return found


def gain() -> float:
    """Return by what factor the products of a layer are faster in bfloat16 than in float32 as a whole.

    0 where the processor has none in bfloat16.
    """
    if not has_products():
        return 0.0
    wide = sum(of["wide"] for of in measured().values())
    return wide / sum(min(x for name, x in of.items() if name != "wide") for of in measured().values())


@cache
def measured() -> dict[Layout, dict[str, float]]:
    """Return the seconds of the processor of each way for each layout of a layer's products.

    They are measured once on a machine, so that a run that goes on computes as it did: the file is in the
    folder $RFT_FN_CACHE, or ~/.cache/rft_fn, and may be deleted. What cannot be a measurement is made anew.
    """
    folder = Path(os.environ.get("RFT_FN_CACHE") or Path.home() / ".cache" / "rft_fn")
    here = [products.description(), platform.machine(), platform.processor(), torch.__version__]
    path = folder / f"bf16_{hashlib.sha256(repr(here).encode()).hexdigest()[:12]}.json"
    found = _read(path)
    if found is None:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            found = [_seconds(layout) for layout in _LAYOUTS]
        with suppress(OSError):  # a folder that nobody may write
            folder.mkdir(parents=True, exist_ok=True)
            own = path.with_suffix(f".{os.getpid()}")
            own.write_text(json.dumps(found))
            with suppress(FileExistsError):  # another process was first
                os.link(own, path)
            if _read(path) is None:  # a damaged file
                os.replace(own, path)
            own.unlink(missing_ok=True)
            found = _read(path) or found
    return dict(zip(_LAYOUTS, found))


def _read(path: Path) -> list[dict[str, float]] | None:
    """Return the seconds for each layout that a file has; None if it has none that can have been measured."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    least, most = _LIKELY
    if not isinstance(found, list) or len(found) != len(_LAYOUTS):
        return None
    for layout, of in zip(_LAYOUTS, found):
        if not isinstance(of, dict) or set(of) != set(_names(layout)):
            return None
        if not all(isinstance(x, float) and least <= x <= most for x in of.values()):
            return None
    return found


def _names(layout: Layout) -> list[str]:
    return [name for name in WAYS if name != "dense" or layout != FORWARD]  # which has no gaps


def _seconds(layout: Layout) -> dict[str, float]:
    """Return the least seconds of a few turns of each way."""
    rows, size = 256, 512
    a = torch.ones(size, rows).T if layout.a else torch.ones(rows, size)
    b = torch.ones(size, size).T if layout.b else torch.ones(size, size)
    a, b = a.bfloat16(), b.bfloat16()  # keeps the layout
    # the seconds of this process do not count what others take, but on some systems go in steps of 10 ms
    clock = time.process_time if _step(time.process_time) <= _FINE else time.perf_counter
    turn = _STEPS * _step(clock)
    least = dict.fromkeys(_names(layout), float("inf"))
    for name in least:
        WAYS[name](a, b)  # makes kernels
    for _ in range(_TURNS):
        for name in least:
            start, count, passed = clock(), 0, 0.0
            while passed < turn:
                WAYS[name](a, b)
                count, passed = count + 1, clock() - start
            least[name] = min(least[name], passed / count)
    return least


def _step(clock: Callable[[], float]) -> float:
    """Return the least seconds that a clock goes on by."""
    steps, before = [], clock()
    while len(steps) < 5:
        now = clock()
        if now != before:
            steps.append(now - before)
            before = now
    return min(steps[1:])  # the first one had begun before
