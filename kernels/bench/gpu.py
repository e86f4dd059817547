"""The GPU half of linear_logprob.py: every engine in bfloat16, beside the rate of cuBLAS.

Weights are random. The result is written to results/<name of the device>.json, or to --json. A case that does
not fit into the memory of the device has no numbers. Peak is the memory that torch's allocator gave out
beyond the inputs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from cases import cases, make_inputs, matrix_products, table

ENGINES = {name: name for name in ("gemm", "triton", "streamed")}
COLUMNS = 8192  # of a slice in the GEMM limit


class Shape(NamedTuple):
    """Tokens, width of the hidden states, vocabulary."""

    T: int
    D: int
    V: int


SHAPES = (Shape(16384, 3584, 151936), Shape(32768, 4096, 128256), Shape(16384, 896, 151936))


class Clock(NamedTuple):
    """The functions that measure a call."""

    seconds: Callable[[Callable[[], object]], float]
    peak_mb: Callable[[Callable[[], object]], float]


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds from the first kernel to the end of the last."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def device_peak_mb(call: Callable[[], object]) -> float:
    """The most memory that a call holds beyond what is held before, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


CUDA = Clock(device_seconds, device_peak_mb)


def fits(call: Callable[[], object]) -> bool:
    """Whether a call runs in the memory of the device.

    This is also the call that compiles and warms up.
    """
    try:
        call()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def medians(
    calls: Sequence[Callable[[], object]], clock: Clock, rounds: int
) -> list[tuple[float | None, float | None]]:
    """(median seconds, peak MB) of each call; None for both where it does not fit."""
    works = [fits(call) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]

    # Rounds are interleaved, so that a device whose clock changes does it to every call alike.
    for _ in range(rounds):
        for call, ok, kept in zip(calls, works, samples, strict=True):
            if ok:
                kept.append(clock.seconds(call))
    found: list[tuple[float | None, float | None]] = []
    for call, kept in zip(calls, samples, strict=True):
        if kept:
            found.append((statistics.median(kept), clock.peak_mb(call)))
        else:
            found.append((None, None))
    return found


def measure(
    shape: Shape,
    clock: Clock,
    *,
    rounds: int,
    device: str = "cuda",
    engines: dict[str, str] = ENGINES,
    only: list[str] | None = None,
) -> dict:
    """One shape: rates of the three matrix products in TFLOP/s, and a row for each case."""
    x = make_inputs(*shape, dtype=torch.bfloat16, device=device)
    products = matrix_products(x, min(COLUMNS, shape.V))
    todo = cases(engines, mixed=False, only=only)
    found = medians([*products.values(), *(partial(c.call, x) for c in todo)], clock, rounds)

    # A product that does not fit leaves nothing to hold the cases against.
    limits = {}
    for name, (seconds, _) in zip(products, found, strict=False):
        if seconds is None:
            raise RuntimeError(f"{shape}: expected room for the matrix products alone, got none")
        limits[name] = seconds
    measured = list(zip(todo, found[len(products) :], strict=True))
    naive = {c.operation: seconds for c, (seconds, _) in measured if c.variant == "naive"}
    rows = []
    for c, (seconds, peak) in measured:
        row = {"operation": c.operation, "variant": c.variant, "seconds": seconds}
        row |= {"over_naive": None, "of_gemm_limit": None, "peak_mb": peak}
        if seconds is not None:
            row["of_gemm_limit"] = sum(limits[p] for p in c.products) / seconds
            base = naive.get(c.operation)
            if base is not None:
                row["over_naive"] = seconds / base
        rows.append(row)
    rates = {name: tflops(shape, seconds) for name, seconds in limits.items()}
    return shape._asdict() | {"gemm_tflops": rates, "rows": rows}


def tflops(shape: Shape, seconds: float) -> float:
    """The rate of one matrix product, in 10^12 floating-point operations a second."""
    return 2 * shape.T * shape.D * shape.V / seconds / 1e12


def file_name(device: str) -> str:
    """'NVIDIA H200' -> 'nvidia_h200.json'"""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def provenance() -> dict:
    """Where and with what something was measured."""
    major, minor = torch.cuda.get_device_capability()
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "capability": f"sm_{major}{minor}",
        "torch": torch.__version__,
        "triton": triton,
        "dtype": "bfloat16",
    }


def main(args: argparse.Namespace) -> None:
    found = provenance() | {"rounds": args.rounds, "shapes": []}
    path = args.json or Path(__file__).with_name("results") / file_name(found["device"])
    for shape in SHAPES:
        one = measure(shape, CUDA, rounds=args.rounds, only=args.only)
        found["shapes"].append(one)
        path.write_text(json.dumps(found, indent=1) + "\n")  # after each shape: what is measured is kept
        rates = ", ".join(f"{k} {v:.0f}" for k, v in one["gemm_tflops"].items())
        print(f"T={shape.T} D={shape.D} V={shape.V} bfloat16, {found['device']}; TFLOP/s of cuBLAS: {rates}")
        print(table(one["rows"]), flush=True)
