"""Creates and destroys the process group."""

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from rft_fn.dist.collectives import rank, started

__all__ = ["join", "part", "settle", "store_client"]

_START = 180.0  # seconds that a process is given to start, at least: others import faster
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO = "gloo_serial"


def join(timeout: float) -> None:
    """Make the group of the processes that torchrun started, or of this one.

    timeout [s] bounds every wait for another process, once all have started.
    """
    device = None
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"  # here NCCL gathers sharded tensors, and gloo none
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        _register_gloo()
        backend = _GLOO

    store: torch_dist.Store = _meet(max(timeout, _START)) if "RANK" in os.environ else torch_dist.HashStore()
    wait = timedelta(seconds=timeout)
    # told its device, NCCL connects here, within this limit, and not in the first step
    torch_dist.init_process_group(
        backend, store=store, rank=rank(), world_size=started(), timeout=wait, device_id=device
    )


@cache
def _register_gloo() -> None:
    """Register gloo with one thread per group with torch; groups of some of the processes inherit it.

    Torch's own has two threads per group, and each writes the name of what it completed into one string
    without a lock (torch 2.13). A name of more than 15 characters, as of the gather of a DTensor, is on the
    heap: two threads that write at once free it twice, and some later `free` aborts the process. The
    collectives of a group begin in one order everywhere, so one thread is all they need.
    """
    torch_dist.Backend.register_backend(_GLOO, _make_gloo, extended_api=True, devices=["cpu"])


def _make_gloo(place: Any, _: Any) -> Any:
    """Make gloo for a group as torch does, but with one thread that starts without taking a core."""
    gloo: Any = torch_dist.ProcessGroupGloo
    options = gloo._Options()
    options._threads = 1
    options._timeout = place.timeout
    options.group_name = place.group_id
    options.global_ranks_in_group = place.global_ranks_in_group

    # a device starts a thread, and a group does
    with _batch_threads():
        options._devices = [gloo.create_default_device()]
        if names := os.environ.get("GLOO_SOCKET_IFNAME"):
            options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
        return gloo(place.store, place.group_rank, place.group_size, options)


@contextmanager
def _batch_threads() -> Iterator[None]:
    """Start threads within that take no core from a thread that runs, where the system can do that.

    Gloo writes to a connection under a lock. Where processes share cores, the reader that this wakes takes
    the core of the writer, which still holds the lock, and the writer's own reading thread, which needs the
    lock too, asks for it without a pause: up to half of the time of four processes on two cores.
    """
    batch = getattr(os, "SCHED_BATCH", None)  # only Linux has it
    if batch is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return

    # a thread inherits this from the one that starts it; a sandbox may refuse it
    plain = os.sched_param(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, batch, plain)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, plain)


def _meet(patience: float) -> torch_dist.Store:
    """Return a store prefix that only this launch has, within `patience` [s].

    A process that starts again at once may reach the store of the group before, which goes away with it:
    then it connects anew.
    """
    end = time.monotonic() + patience
    while True:
        try:
            store = _connect(end - time.monotonic())
            name = _name_session(store, end)
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return torch_dist.PrefixStore(name, store)


def _connect(timeout: float) -> torch_dist.Store:
    """Connect to the store at MASTER_ADDR and MASTER_PORT."""
    # one of torchrun's agents holds the store, unless nobody has set up one: then rank 0 does, where a store
    # that a former group of this process still holds is taken over
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return torch_dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank() == 0 and not agent,
        timeout=timedelta(seconds=max(timeout, 1.0)),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _name_session(store: torch_dist.Store, end: float) -> str:
    """Agree on a name that all processes of this start share, and no earlier start had.

    A restarted group that read the addresses which the killed one left in the store would connect to nobody.
    So each process writes a random number; rank 0 names the session by all numbers that it sees, until every
    process has confirmed that name. ValueError with the ranks that did not answer by the time `end`.
    """
    # every process introduces itself, under a number that no earlier start had
    began = time.monotonic()
    size = started()
    nonce = uuid.uuid4().hex
    store.set(f"rft/hello/{rank()}", nonce)

    # rank 0 renames the session until nobody new appears; the others confirm each name
    while time.monotonic() < end:
        if rank() == 0:
            numbers = [_read(store, f"rft/hello/{r}") for r in range(size)]
            name = hashlib.blake2b(" ".join(numbers).encode(), digest_size=8).hexdigest()
            store.set("rft/session", " ".join([name, *numbers]))

        # a name made without this process's number is of an earlier start, or came too early
        name, *numbers = _read(store, "rft/session").split(" ")
        if nonce in numbers:
            store.set(f"rft/answer/{rank()}", name)
            if all(_read(store, f"rft/answer/{r}") == name for r in range(size)):
                return f"rft/{name}"
        time.sleep(0.05)

    absent = [r for r in range(size) if not store.check([f"rft/hello/{r}"])]
    raise ValueError(
        f"ranks: expected {size} to answer within {end - began:.0f} s, got no answer from {absent or 'some'}"
    )


def _read(store: torch_dist.Store, key: str) -> str:
    """Return the text under a key, "" where there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def store_client(timeout: float) -> torch_dist.Store | None:
    """Open a second connection to the group's store, for another thread; None without a shared one.

    Every process gets, by its own count, the same part of the store: the first for its first call, and so on.
    """
    shared: Any = torch_dist.distributed_c10d._get_default_store()
    inner: torch_dist.Store = shared
    while isinstance(inner, torch_dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, torch_dist.TCPStore):
        return None

    # two threads must not share a connection
    number = shared.add(f"rft/clients/{rank()}", 1)
    if rank() == 0:
        shared.set(f"rft/space/{number}", uuid.uuid4().hex)
    space = shared.get(f"rft/space/{number}").decode()
    client = torch_dist.TCPStore(
        inner.host,
        inner.port,
        is_master=False,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    return torch_dist.PrefixStore(f"rft/client/{space}", client)


def part() -> None:
    """Destroy the group once gloo's threads are idle."""
    if torch_dist.is_initialized():
        settle()
        torch_dist.destroy_process_group()


def settle(limit: float = 10.0) -> None:
    """Wait until gloo's threads are idle, at most `limit` [s].

    A collective is over for its caller before gloo's thread has let go of its tensors. Python ends a thread
    that asks for the interpreter after that has gone, which aborts the process; and the group, whose end
    would wait for the thread, lives on in the meshes of the script.
    """
    end = time.monotonic() + limit
    quiet = 0
    # three looks, and a sleep before each: whoever waits for the interpreter gets it meanwhile
    while quiet < 3 and time.monotonic() < end:
        time.sleep(0.005)
        quiet = 0 if _gloo_runs() else quiet + 1


def _gloo_runs() -> bool:
    """Return whether a thread of gloo runs, or would with a processor; False if nothing tells."""
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it may have ended meanwhile
            name, state = (thread / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            if name == _GLOO_THREAD and state.split()[0] != "S":
                return True
    return False
