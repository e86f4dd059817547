"""Matrix products of float32, by the library that is faster on this CPU.

MKL, which `torch.mm` calls, picks its kernels by the maker of the processor: where that is not Intel, it
leaves AVX-512 alone and runs at half the rate of a Zen 5, or less. On a Zen 4, whose vector units are 256
bits wide, it takes a tenth longer than oneDNN, and up to a tenth less for gradients of weights. That other
library inside torch asks what the processor can do; `mkldnn::_linear_pointwise` is the operator through which
inductor calls it.

Sampling is another matter: its products have few rows, and every weight comes from memory. MKL copies the
weight for its kernels at each call, and oneDNN can keep a copy in its order.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_LARGE = 1 << 26  # multiplications; below, oneDNN does not win back the millisecond that a new shape costs
# The same for layers of a pack: a Zen 4 gains a tenth of a product, a Zen 5 half.
_LARGE_LAYER_ZEN4 = 1 << 26
_LARGE_LAYER_ELSEWHERE = 1 << 22
_KIND = (  # the lines of /proc/cpuinfo that are the same for all processors of one kind: x86, then ARM
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_ZEN4 = 25  # the family of AMD's processors with 256 bits a vector unit and AVX-512


class Packing(NamedTuple):
    """What oneDNN is to multiply in sampling, by a weight that it has packed once."""

    elements: float  # of a weight, at least
    rows: int  # of a product, at least


# By the vectors of AMD's processors. Few rows do little but read the weight, and MKL takes up to 6 times as
# long for that as oneDNN with a packed one on AVX-512, and up to 4 times on AVX2. There MKL is up to 2.5
# times as fast by one row.
_PACKING = {"AVX512": Packing(1 << 16, rows=1), "AVX2": Packing(1 << 19, rows=2)}


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a [M, K] b [K, N] as [M, N]: in out, or in new memory."""
    if not (by_onednn(a) and _suits(a, b)):
        return torch.mm(a, b, out=out)
    product = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    if out is None:
        return product
    return out.copy_(product)


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a [M, K] b [K, N] to total [M, N], in place."""
    if by_onednn(a) and _suits(a, b):
        return total.add_(mm(a, b))
    return total.addmm_(a, b)


def by_onednn(a: Tensor) -> bool:
    """Return whether large products of a are oneDNN's, which allocates each result."""
    return both_multiply(a) and mkl_is_half()


def both_multiply(a: Tensor) -> bool:
    """Return whether both libraries have products of a: of its type, on its device."""
    return a.dtype == torch.float32 and a.device.type == "cpu"


def sums_are_long(a: Tensor, b: Tensor) -> bool:
    """Return whether a bᵀ as a whole is large and oneDNN's.

    oneDNN adds up the products of an element one by one.
    """
    return by_onednn(a) and a.numel() * b.shape[0] >= _LARGE


def _suits(a: Tensor, b: Tensor) -> bool:
    """Return whether a b is large, a product that oneDNN wins, and of matrices without gaps.

    For those with gaps oneDNN has only plain loops.
    """
    dense = all(x.is_contiguous() or x.T.is_contiguous() for x in (a, b))
    multiplications = a.shape[0] * a.shape[1] * b.shape[1]
    return dense and multiplications >= _LARGE and wins(a)


def wins(a: Tensor) -> bool:
    """Return whether oneDNN is the faster one in a large product of a [M, K] and anything [K, N].

    It always is, but for a Zen 4 where a has to be read by columns: MKL is faster there. So it is in the
    gradient of a weight, whose a is the transposed gradient of the outputs.
    """
    return a.is_contiguous() or not is_zen4()


@torch.compiler.assume_constant_result  # it reads a file, which torch.compile cannot trace
def mkl_is_half() -> bool:
    """Return whether this processor has AVX-512 that MKL does not use because of its maker."""
    return _vectors() == "AVX512"


def packing() -> Packing:
    """Return what is worth packing on this processor; nothing has infinitely many elements."""
    return _PACKING.get(_vectors(), Packing(math.inf, rows=1))


@cache
def _vectors() -> str:
    """Return the vectors that torch sees in an AMD processor with both libraries; "" elsewhere."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return ""
    if processor("vendor_id") != "AuthenticAMD":
        return ""
    return torch.backends.cpu.get_cpu_capability()


@torch.compiler.assume_constant_result
def large_layer() -> int:
    """Return the multiplications from which on a layer of a pack of new shape is faster by oneDNN."""
    if is_zen4():
        return _LARGE_LAYER_ZEN4
    return _LARGE_LAYER_ELSEWHERE


@torch.compiler.assume_constant_result
def is_zen4() -> bool:
    """Return whether this is a Zen 4, or of its family."""
    return _family() == _ZEN4


@cache
def _family() -> int:
    return int(processor("cpu family") or 0)


def processor(what: str) -> str | None:
    """Return what Linux says of the first processor, such as its vendor_id; None without it."""
    return _first_processor().get(what)


def description() -> str:
    """Return what tells kinds of processors apart, and what limits this process to a part of one."""
    found = _first_processor()
    return repr([found.get(name) for name in _KIND] + [os.environ.get(name) for name in _LIMITS])


def _first_processor() -> dict[str, str]:
    """Return the lines of /proc/cpuinfo by name, or of the file $RFT_FN_CPUINFO of another processor."""
    try:
        first, *_ = Path(os.environ.get("RFT_FN_CPUINFO") or "/proc/cpuinfo").read_text().split("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
