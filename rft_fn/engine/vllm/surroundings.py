"""The process around vLLM: what it changes there is put back.

vLLM expects a process of its own. It seeds the global generators and draws from them, replaces
`torch.set_num_threads`, sets environment variables, binds memory to one NUMA node, freezes the garbage
collector's objects, and starts a process group where there is none.
"""

import gc
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as torch_dist

__all__ = ["keep_groups", "kept", "kept_random", "leave", "part"]


# ---------- the package vllm, which is imported only where its engine is chosen


def part(name: str = "") -> Any:
    """A module of vLLM by its name within the package. ModuleNotFoundError without vLLM."""
    full = f"vllm.{name}".rstrip(".")
    try:
        return import_module(full)
    except ModuleNotFoundError as error:
        if error.name != "vllm" and not (error.name or "").startswith("vllm."):
            raise
        raise ModuleNotFoundError(
            f"engine vllm: expected the package vllm, got no module {error.name}; install it as "
            "docs/engines.md says"
        ) from None


# ---------- the process around vLLM: what it changes there is put back


# of vLLM, where the user has not set them: the engine in this process, quiet, and reporting to nobody
OPTIONS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class _Alive:
    """Engines of vLLM in this process, which share its groups of processes."""

    engines = 0
    began_group = False  # whether vLLM started the default process group


@contextmanager
def kept(*, engine: bool = True) -> Iterator[None]:
    """Put back, after building an engine, what vLLM has changed about the process.

    Without `engine` none is built: vLLM is only imported.
    """
    import numpy

    environment = dict(os.environ)
    threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    dtype = torch.get_default_dtype()
    numpys = numpy.random.get_state()
    pythons = random.getstate()
    cores = _cores()
    frozen = gc.get_freeze_count()
    grouped = torch_dist.is_initialized()

    for name, x in OPTIONS.items():
        os.environ.setdefault(name, x)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with warnings.catch_warnings(), kept_random():
            warnings.simplefilter("ignore")
            yield
        _Alive.engines += int(engine)
    finally:
        # the thread count goes back by torch's own function: vLLM's does nothing
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        numpy.random.set_state(numpys)
        random.setstate(pythons)
        os.environ.clear()
        os.environ.update(environment)
        _restore_cores(cores)
        if not frozen:
            gc.unfreeze()
        _Alive.began_group |= torch_dist.is_initialized() and not grouped
        _free_memory_nodes()


@contextmanager
def kept_random() -> Iterator[None]:
    """Put torch's global generators back: vLLM draws from them even where each request has a seed."""
    devices: list[int] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        yield


def keep_groups() -> None:
    """Let an engine that ends, also by being collected, end no group of processes: `leave` does.

    vLLM's own end of an engine takes down every group of the process, those of the trainer included.
    """
    part("v1.engine.core").cleanup_dist_env_and_memory = _nothing


def _nothing() -> None:
    """The end of one engine, as far as the groups of the process go."""


def leave() -> None:
    """Take down vLLM's groups of processes after its last engine, and the default one if vLLM began it."""
    _Alive.engines = max(_Alive.engines - 1, 0)
    if _Alive.engines:
        return
    state = part("distributed.parallel_state")
    state.destroy_model_parallel()
    # vLLM's own function for this ends the trainer's process group too, and so does that of its world group
    state._WORLD = None
    state._NODE_COUNT = None
    part("envs").disable_envs_cache()  # the next engine reads the environment afresh
    if _Alive.began_group and torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    _Alive.began_group = False


def _cores() -> Any:
    """The cores that this process may use, None where the system cannot say."""
    ask = getattr(os, "sched_getaffinity", None)
    if ask is None:
        return None
    return ask(0)


def _restore_cores(cores: Any) -> None:
    if cores is not None and _cores() != cores:
        os.sched_setaffinity(0, cores)


def _free_memory_nodes() -> None:
    """Let memory come from all NUMA nodes again, where there are several: vLLM binds it to one."""
    bind = getattr(torch.ops._C, "init_cpu_memory_env", None)
    if bind is None:
        return  # not vLLM's build for CPUs
    nodes = part("utils.cpu_resource_utils").get_visible_memory_node()
    if len(nodes) > 1:
        bind(nodes)
