"""What every test stands on: hypothesis without deadlines, the same examples in every
CI run, one thread a worker."""

import atexit
import gc
import os
import subprocess
import threading
import time

import forks
import plain_runs
import pytest
import torch
from hypothesis import settings

settings.register_profile("rft", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("rft")

# The files that take longest, in this order: begun last, one of them would be waited for alone.
LONGEST = (
    "strategy/test_conformance",
    "scripts/test_scripts",
    "strategy/test_deepspeed",
    "kernel/test_sm90",
    "memory/test_memory",
    "scripts/test_torchrun",
    "tests/test_site",
    "scripts/test_train_rm",
    "scripts/test_ppo",
    "ckpt/test_ckpt_ranks",
    "engine/test_http_engine",
    "engine/test_parity",
    "run/test_installed",
    "scripts/test_media_scripts",
    "scripts/test_media_runs",
    "scripts/test_dpo",
    "model/test_blocks",
    "kernel/test_triton",
    "memory/test_memory_media",
    "model/test_materialize",
    "scripts/test_serve_reward",
    "scripts/test_straight_line",
    "scripts/test_scripts_ahead",
    "scripts/test_ahead_ranks",
    "model/test_families",
    "engine/test_process",
    "kernel/test_vocab_parallel",
    "tests/test_examples",
    "engine/test_media_sampler",
    "model/test_media",
    "tests/test_gpu_step",
    "kernel/test_kernel_bench",
    "model/test_lora",
    "tests/test_pages",
    "run/test_kept_engine",
    "tests/test_house",
    "run/test_placing",
    "run/test_commands",
    "scripts/test_multi_turn",
)


def pytest_collection_modifyitems(items):
    """The longest files first, every other where it is."""
    order = {name: number for number, name in enumerate(LONGEST)}
    named = lambda item: "/".join(item.path.with_suffix("").parts[-2:])  # noqa: E731
    items.sort(key=lambda item: order.get(named(item), len(order)))


def pytest_collection_finish():
    """No search for garbage goes through what is there before the first test: libraries, and all tests."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind reports what is not collected at the end


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores


@pytest.fixture(scope="module", autouse=True)
def no_thread_is_left_busy():
    """A thread that still runs when its module ends would take half of the time of all tests after it."""
    yield
    if all(work_while_asleep() > 0.5 for _ in range(10)):
        pytest.fail(f"a thread is busy: one of {[thread.name for thread in threading.enumerate()]}")


def work_while_asleep(seconds=0.02):
    """The share of a core that this process takes while this thread sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


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
    monkeypatch.setenv("PYTHONPATH", forks.PATH)
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)


@pytest.fixture(scope="module", name="plain_runs")
def leave_out_parts():
    """`usefixtures("plain_runs")`: scripts of a module draw no curves, forecast no memory, have no canary."""
    with pytest.MonkeyPatch.context() as patch:
        yield plain_runs.leave_out(patch.setattr)


@pytest.fixture
def whole_run(plain_runs, monkeypatch):
    """A test of such a module that looks at what the others leave out."""
    for owner, name, function in plain_runs:
        monkeypatch.setattr(owner, name, function)
