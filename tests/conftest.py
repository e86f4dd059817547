"""What every test stands on: hypothesis without deadlines, the same examples in every
CI run, one thread a worker."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("rft", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("rft")

# The files that take longest, in this order: begun last, one of them would be waited for alone.
LONGEST = (
    "strategy/test_conformance",
    "scripts/test_scripts",
    "scripts/test_torchrun",
    "scripts/test_scripts_ahead",
    "scripts/test_serve_reward",
    "strategy/test_deepspeed",
    "scripts/test_ahead_ranks",
    "engine/test_http_engine",
    "memory/test_memory",
    "rft_kernels/test_sm90",
    "tests/test_site",
    "rft_kernels/test_triton",
    "scripts/test_ppo",
    "engine/test_parity",
    "scripts/test_straight_line",
    "scripts/test_media_runs",
    "ckpt/test_ckpt_ranks",
    "scripts/test_train_rm",
    "scripts/test_dpo",
    "run/test_installed",
    "scripts/test_multi_turn",
    "tests/test_house",
    "model/test_blocks",
    "run/test_placing",
    "engine/test_process",
    "engine/test_http_loop",
    "model/test_materialize",
    "tests/test_gpu_step",
    "tests/test_examples",
    "strategy/test_session",
    "tests/test_pages",
    "tests/test_bench_step",
    "scripts/test_media_scripts",
    "engine/test_media_sampler",
    "model/test_media",
    "model/test_families",
    "tests/test_experiments",
    "run/test_commands",
    "rft_kernels/test_vocab_parallel",
    "engine/test_engine_deadline",
    "memory/test_memory_media",
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
