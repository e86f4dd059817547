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
    "scripts/test_ahead_ranks",
    "engine/test_http_engine",
    "scripts/test_serve_reward",
    "strategy/test_deepspeed",
    "engine/test_parity",
    "rft_kernels/test_triton",
    "scripts/test_ppo",
    "scripts/test_multi_turn",
    "memory/test_memory",
    "ckpt/test_ckpt_ranks",
    "tests/test_contributing",
    "model/test_blocks",
    "scripts/test_dpo",
    "model/test_materialize",
    "scripts/test_media_runs",
    "scripts/test_train_rm",
    "engine/test_http_loop",
    "engine/test_process",
    "memory/test_memory_media",
    "engine/test_engine_deadline",
    "model/test_families",
    "tests/test_examples",
    "rft_kernels/test_sm90",
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
