"""Processors that one machine can stand for: `RFT_FN_TEST_CPU=avx2 pytest tests/kernel`, or `make test-cpus`.

Each library reads a variable of its own at its first product, so conftest.py imports this before anything is
computed; processes that a test starts inherit it. What an ARM processor multiplies cannot be had on
another: "arm" has no library to choose from, and no bfloat16.
"""

import os
from pathlib import Path
from typing import NamedTuple

NAME = "RFT_FN_TEST_CPU"
FOLDER = Path(__file__).parent / "kernel" / "cpuinfo"


class Level(NamedTuple):
    torch: str  # the vectors of torch's own kernels
    onednn: str  # the most that oneDNN uses
    mkl: str  # the most that MKL uses
    bfloat16: bool  # whether oneDNN has products of it
    needs: str  # the flag of /proc/cpuinfo that a machine has which can stand for it
    cpuinfo: str = ""  # the file in FOLDER that stands for /proc/cpuinfo; this machine's without


LEVELS = {
    "arm": Level("DEFAULT", "SSE41", "SSE4_2", False, "sse4_2", "neoverse_n1"),
    "avx2": Level("AVX2", "AVX2", "AVX2", False, "avx2"),
    "avx512": Level("AVX512", "AVX512_CORE", "AVX512", True, "avx512bw"),
    "avx512_bf16": Level("AVX512", "AVX512_CORE_BF16", "AVX512", True, "avx512_bf16"),
    "zen3": Level("AVX2", "AVX2", "AVX2", False, "avx2", "zen3"),
    "zen4": Level("AVX512", "AVX512_CORE_BF16", "AVX2", True, "avx512_bf16", "zen4"),
    "zen5": Level("AVX512", "AVX512_CORE_BF16", "AVX2", True, "avx512_bf16", "zen5"),
}


def forced() -> Level | None:
    """The level that this process stands for; None where it is what it is."""
    return LEVELS[os.environ[NAME]] if os.environ.get(NAME) else None


def can(level: Level) -> bool:
    """Whether this machine can stand for a level."""
    info = Path("/proc/cpuinfo")
    return info.exists() and level.needs in info.read_text().split()


def variables(level: Level) -> dict[str, str]:
    found = {
        "ATEN_CPU_CAPABILITY": level.torch.lower(),
        "ONEDNN_MAX_CPU_ISA": level.onednn,
        "MKL_ENABLE_INSTRUCTIONS": level.mkl,
    }
    return found | ({"RFT_FN_CPUINFO": str(FOLDER / f"{level.cpuinfo}.txt")} if level.cpuinfo else {})


if level := forced():
    os.environ.update(variables(level))
