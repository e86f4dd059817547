"""What every test stands on: hypothesis without deadlines, the same examples in every
CI run, one thread a worker."""

import os
import subprocess

import forks
import pytest
import torch
from hypothesis import settings

settings.register_profile("rft", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("rft")

# The files that take longest, in this order: begun last, one of them would be waited for alone.
LONGEST = (
    "strategy/test_conformance",
    "scripts/test_scripts",
    "scripts/test_ahead_ranks",
    "scripts/test_scripts_ahead",
    "strategy/test_deepspeed",
    "scripts/test_torchrun",
    "memory/test_memory",
    "scripts/test_ppo",
    "tests/test_site",
    "ckpt/test_ckpt_ranks",
    "rft_kernels/test_sm90",
    "engine/test_http_engine",
    "scripts/test_train_rm",
    "scripts/test_media_runs",
    "engine/test_process",
    "engine/test_parity",
    "scripts/test_dpo",
    "run/test_installed",
    "rft_kernels/test_triton",
    "model/test_blocks",
    "rft_kernels/test_vocab_parallel",
    "model/test_materialize",
    "scripts/test_serve_reward",
    "model/test_probe",
    "model/test_families",
    "rft_kernels/test_kernel_bench",
    "memory/test_memory_media",
    "run/test_commands",
    "tests/test_examples",
    "scripts/test_straight_line",
    "model/test_freeze",
    "tests/test_house",
    "tests/test_bench_step",
    "run/test_placing",
    "tests/test_algorithm",
    "model/test_media",
    "model/test_actors",
    "tests/test_pages",
    "scripts/test_multi_turn",
    "engine/test_media_sampler",
)


def pytest_collection_modifyitems(items):
    """The longest files first, every other where it is."""
    order = {name: number for number, name in enumerate(LONGEST)}
    named = lambda item: "/".join(item.path.with_suffix("").parts[-2:])  # noqa: E731
    items.sort(key=lambda item: order.get(named(item), len(order)))


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores


@pytest.fixture(scope="module")
def float64():
    """float64 as the default type of a module's tests: `pytestmark = pytest.mark.usefixtures("float64")`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def forked_children(monkeypatch):
    """The Python processes that a test's own process starts are forks: `usefixtures("forked_children")`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(forks.ROOT), str(forks.ROOT / "kernels")]))
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)
