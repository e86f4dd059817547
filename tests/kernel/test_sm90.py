"""Every kernel that `engine="auto"` and the sampler can launch compiles for sm_90 without spilling."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REGISTERS = {"absorb_kernel": 64, "differentiate_kernel": 64, "rescale_kernel": 40}
REGISTERS |= {"forward_kernel": 240, "backward_kernel": 255}
REGISTERS |= {
    "norm_kernel": 128,
    "rotate_kernel": 40,
    "attend_kernel": 160,
    "swiglu_kernel": 40,
    "draw_kernel": 64,
}
WIDE = 255  # of a tile of 256 columns, which may have all that there are: what holds it is the stack
SHARED = 227 * 1024  # of a program on sm_90


@pytest.mark.skipif(sys.platform != "linux", reason="triton has no builds for this system")
def test_registers_spills_and_shared_memory(tmp_path):
    path = os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/kernel/sm90.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert {x["kernel"] for x in seen} == set(REGISTERS)
    assert {x["aligned"] for x in seen} == {True, False}
    for x in seen:
        most = WIDE if "'BN': 256" in x["options"] else REGISTERS[x["kernel"]]
        assert x["stack"] == 0 and x["registers"] <= most and x["shared"] <= SHARED, x
