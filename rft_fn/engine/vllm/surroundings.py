"""Saves and restores the process state that vLLM changes, and merges the requests of its ranks.

vLLM expects a process for itself. It seeds the global generators and draws from them, replaces
`torch.set_num_threads`, sets environment variables, binds memory to one NUMA node, freezes the garbage
collector's objects, and starts a process group where there is none.
"""

import gc
import os
import random
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from rft_fn import dist
from rft_fn.engine.requests import BadRequest
from rft_fn.types import Sampling

__all__ = [
    "Group", "import_vllm", "keep_groups", "leave", "name_shared_memory", "restore_process_state",
    "restore_random_state",
]  # fmt: skip


def import_vllm(name: str = "") -> Any:
    """Import a module of vLLM by its name within the package. ModuleNotFoundError without vLLM."""
    try:
        return import_module(f"vllm.{name}".rstrip("."))
    except ModuleNotFoundError as error:
        if error.name != "vllm" and not (error.name or "").startswith("vllm."):
            raise
        raise ModuleNotFoundError(
            f"engine vllm: expected the package vllm, got no module {error.name}; install it as "
            "docs/engines.md says"
        ) from None


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
def restore_process_state(*, engine: bool = True) -> Iterator[None]:
    """Restore, after an engine is built, what vLLM has changed about the process.

    Without `engine` none is built: vLLM is only imported.
    """
    import numpy

    environment = dict(os.environ)
    threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    dtype = torch.get_default_dtype()
    numpy_state = numpy.random.get_state()
    python_state = random.getstate()
    cores = _cores()
    frozen = gc.get_freeze_count()
    grouped = torch_dist.is_initialized()

    for name, x in OPTIONS.items():
        os.environ.setdefault(name, x)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with warnings.catch_warnings(), restore_random_state():
            warnings.simplefilter("ignore")
            yield
        _Alive.engines += int(engine)
    finally:
        # the thread count goes back by torch's own function: vLLM's does nothing
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)
        os.environ.clear()
        os.environ.update(environment)
        if cores is not None and _cores() != cores:
            os.sched_setaffinity(0, cores)
        if not frozen:
            gc.unfreeze()
        _Alive.began_group |= torch_dist.is_initialized() and not grouped
        _free_memory_nodes()


@contextmanager
def restore_random_state() -> Iterator[None]:
    """Restore torch's global generators: vLLM draws from them even where each request has a seed."""
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = [torch.cuda.current_device()] if has_cuda else []
    with torch.random.fork_rng(devices=devices):
        yield


def keep_groups() -> None:
    """Let an engine that ends, also by being collected, end no group of processes: `leave` does.

    vLLM's own end of an engine takes down every group of the process, the trainer's too.
    """
    import_vllm("v1.engine.core").cleanup_dist_env_and_memory = lambda: None


def leave() -> None:
    """Take down vLLM's groups of processes after its last engine, and the default one if vLLM began it."""
    _Alive.engines = max(_Alive.engines - 1, 0)
    if _Alive.engines:
        return
    state = import_vllm("distributed.parallel_state")
    state.destroy_model_parallel()
    # vLLM's own function for this ends the trainer's process group too, and so does that of its world group
    state._WORLD = None
    state._NODE_COUNT = None
    import_vllm("envs").disable_envs_cache()  # the next engine reads the environment afresh
    if _Alive.began_group and torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    _Alive.began_group = False


def _cores() -> Any:
    """Return the cores that this process may use, None where the system cannot say."""
    ask = getattr(os, "sched_getaffinity", None)
    return None if ask is None else ask(0)


def _free_memory_nodes() -> None:
    """Let memory come from all NUMA nodes again, where there are several: vLLM binds it to one."""
    bind = getattr(torch.ops._C, "init_cpu_memory_env", None)
    if bind is None:
        return  # not vLLM's build for CPUs
    nodes = import_vllm("utils.cpu_resource_utils").get_visible_memory_node()
    if len(nodes) > 1:
        bind(nodes)


T = TypeVar("T")


class Group:
    """The ranks of a tensor-parallel engine, which must all give vLLM the same requests."""

    def __init__(self, size: int):
        self.size = size
        self.rank = 0
        self.processes: Any = None
        if size > 1:
            group = import_vllm("distributed.parallel_state").get_tp_group()
            self.rank = group.rank_in_group
            self.processes = group.cpu_group

    def together(
        self, own: Sequence[T], sampling: Sampling, refused: BadRequest | None
    ) -> tuple[list[T], slice]:
        """Return the requests of all ranks in their order, and the slice of this rank's.

        BadRequest on every rank where one is refused, or where ranks sample otherwise: none may begin first.
        """
        part = list(own), sampling, refused and str(refused)
        parts = [part] if self.size == 1 else dist.all_gather_object(part, self.processes)
        if refused is not None:
            raise refused
        for rank, (_, other, why) in enumerate(parts):
            if why:
                raise BadRequest(f"rank {rank} of the engine's group: {why}")
            if other != sampling:
                raise BadRequest(
                    f"sampling: expected {sampling} on all ranks of the engine's group, got {other} on {rank}"
                )
        first = sum(len(rows) for rows, *_ in parts[: self.rank])
        return [row for rows, *_ in parts for row in rows], slice(first, first + len(own))


def name_shared_memory() -> None:
    """Give this run's groups on CPUs shared memory with a name of this run, the same on all ranks.

    vLLM names it alike in every run that another program has launched, so that the remains of a killed run,
    or another run, would stop this one.
    """
    own = dist.all_gather_object(secrets.token_hex(8))[0]
    shared = import_vllm("distributed.device_communicators.cpu_communicator")._CPUSHMDistributed
    named = shared.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"/{own}{named(communicator).lstrip('/')}"

    shared.make_group_name = staticmethod(make_group_name)
