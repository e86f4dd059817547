"""What every test stands on: hypothesis without deadlines, the same examples in every
CI run, one thread a worker."""

import atexit
import gc
import os
import re
import signal
import subprocess
import threading
import time
from importlib.util import find_spec

import forks
import processors
import pytest
import script_runs
import torch
from hypothesis import settings

settings.register_profile("rft", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("rft")

# a shell's background job ignores Ctrl-C, and so would the processes whose tests send it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """No search for garbage goes through what is there before the first test: libraries, and all tests."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind reports what is not collected at the end


def pytest_sessionstart():
    """A processor that this machine cannot stand for has no tests here."""
    level = processors.forced()
    if level and not processors.can(level):
        pytest.exit(f"{os.environ[processors.NAME]}: this machine has no {level.needs}", returncode=0)


# what a test may need beyond the package's own requirements: extras, and tools of the tests
OPTIONAL = {
    "accelerate", "basedpyright", "bitsandbytes", "deepspeed", "editables", "gguf", "hatchling", "mkdocs",
    "mkdocstrings", "peft", "prometheus_client", "ruff", "soundfile", "starlette", "tensorboard", "torchao",
    "torchvision", "trackio", "triton", "uvicorn", "wandb",
}  # fmt: skip


# what a process writes whose import failed: Python's line, or a script's; in the repr of its output, too
_LACKED = re.compile(r"(?:ModuleNotFoundError|error(?: on rank \d+)?): [^\n]*?No module named \\*'(\w+)")


def lacked(error):
    """The packages whose import failed behind an error: here by name, in processes by what they wrote."""
    if isinstance(error, ImportError):
        return {error.name.partition(".")[0]} if error.name else set()
    inner = [*getattr(error, "exceptions", ()), error.__cause__ or error.__context__]
    found = set().union(*(lacked(x) for x in inner if x is not None))
    return found or set(_LACKED.findall(f"{error} {getattr(error, 'stderr', '')}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that failed, here or in a process that it started, because it needs an optional package."""
    report = yield
    if report.failed and call.excinfo is not None:
        missed = sorted(name for name in lacked(call.excinfo.value) & OPTIONAL if find_spec(name) is None)
        if missed:
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, f"Skipped: needs {', '.join(missed)}, which is not installed")
    return report


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
        yield script_runs.leave_out(patch.setattr)


@pytest.fixture
def whole_run(plain_runs, monkeypatch):
    """A test of such a module that looks at what the others leave out."""
    for owner, name, function in plain_runs:
        monkeypatch.setattr(owner, name, function)
