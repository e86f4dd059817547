"""The GPU half of linear_logprob.py: bfloat16, random weights, every engine, the rate of cuBLAS meanwhile.

The result is written to results/<name of the device>.json, or to --json. What does not fit into the memory of
the device has no numbers. Peak is what the allocator of torch gave out beyond the inputs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from cases import cases, make_inputs, matrix_products, table

ENGINES = {name: name for name in ("gemm", "triton", "streamed")}
COLUMNS = 8192  # of a slice in the GEMM limit


class Shape(NamedTuple):
    T: int
    D: int
    V: int


SHAPES = (Shape(16384, 3584, 151936), Shape(32768, 4096, 128256), Shape(16384, 896, 151936))


class Clock(NamedTuple):
    """How a call is measured."""

    seconds: Callable[[Callable[[], object]], float]
    peak_mb: Callable[[Callable[[], object]], float]


def device_seconds(call: Callable[[], object]) -> float:
    """From the first kernel to the end of the last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def device_peak_mb(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


CUDA = Clock(device_seconds, device_peak_mb)


def fits(call: Callable[[], object]) -> bool:
    """Whether it runs in the memory that there is; also the call that compiles and warms up."""
    try:
        call()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


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
    products, todo = matrix_products(x, min(COLUMNS, shape.V)), cases(engines, mixed=False, only=only)
    calls = [*products.values(), *(lambda c=c: c.call(x) for c in todo)]
    works = [fits(call) for call in calls]
    timed = [[clock.seconds(f) if ok else None for f, ok in zip(calls, works)] for _ in range(rounds)]
    seconds = [None if None in column else statistics.median(column) for column in zip(*timed)]
    peaks = [clock.peak_mb(f) if ok else None for f, ok in zip(calls, works)]
    limits, skip = dict(zip(products, seconds)), len(products)
    base = {c.operation: s for c, s in zip(todo, seconds[skip:]) if c.variant == "naive"}
    rows = []
    for c, s, peak in zip(todo, seconds[skip:], peaks[skip:]):
        naive, limit = base.get(c.operation), sum(limits[p] for p in c.products)
        numbers = {"seconds": s, "over_naive": s and naive and s / naive, "of_gemm_limit": s and limit / s}
        rows.append({"operation": c.operation, "variant": c.variant, **numbers, "peak_mb": peak})
    rates = {name: tflops(shape, s) for name, s in limits.items()}
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
