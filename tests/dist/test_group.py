"""The process group of a run."""

import os
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as torch_dist

from rft_fn import dist
from rft_fn.dist.group import _GLOO_THREAD, join, settle


def gloo_threads():
    names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").glob("*")]
    return names.count(_GLOO_THREAD)


def begin_groups(rank):
    """The threads of gloo with the group of all, and with one more; what many gathers at once get."""
    dist.begin(60.0)
    dist.barrier()
    threads = [gloo_threads()]
    group = torch_dist.new_group([0, 1])

    # a DTensor is put together by this operation
    ops = torch.ops._c10d_functional
    mine = torch.arange(3.0) + 10 * rank
    found = [ops.all_gather_into_tensor(mine + i, 2, group.group_name) for i in range(64)]
    found = [ops.wait_tensor(x).tolist() for x in found]
    settle()
    return [*threads, gloo_threads()], found


def test_each_group_has_one_thread_of_gloo(monkeypatch):
    """Torch's two write one string without a lock: a rare abort in the gather of a DTensor."""
    whole = [[float(i + n) for n in (0, 1, 2, 10, 11, 12)] for i in range(64)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert ranks.run(2, "test_group:begin_groups") == [([1, 2], whole)] * 2
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert ranks.run(2, "test_group:begin_groups") == [([1, 2], whole)] * 2


def test_nccl_is_told_its_device(monkeypatch):
    """So that it connects when the group is made; gloo on a CPU has no such device."""
    began, chosen = [], []
    monkeypatch.setattr(torch_dist, "init_process_group", lambda *args, **how: began.append((args, how)))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    join(60.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    join(60.0)
    host, gpu = began
    assert host[1]["device_id"] is None
    assert gpu[0] == ("cpu:gloo,cuda:nccl",) and gpu[1]["device_id"] == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


def forbidden(*_):
    raise PermissionError(1, "Operation not permitted")


def policies(rank, allowed):
    """How the system schedules this thread, before and after, and each thread of gloo of two groups."""
    before = os.sched_getscheduler(0)
    if not allowed:
        os.sched_setscheduler = forbidden
    dist.begin(60.0)
    torch_dist.new_group([0])

    # a thread takes its name only once it runs
    end = time.monotonic() + 30
    gloo = []
    while len(gloo) < 4 and time.monotonic() < end:
        names = {thread.name: (thread / "comm").read_text() for thread in Path("/proc/self/task").glob("*")}
        gloo = [os.sched_getscheduler(int(thread)) for thread, name in names.items() if "gloo" in name]
        time.sleep(0.01)
    return before, os.sched_getscheduler(0), gloo


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_threads_of_gloo_take_no_core_from_one_that_runs():
    """The caller is scheduled as before; where the system forbids a change, there is a group all the same."""
    for allowed in (True, False):
        [(before, after, threads)] = ranks.run(1, "test_group:policies", allowed)
        assert before == after == os.SCHED_OTHER
        assert len(threads) == 4 and set(threads) == {os.SCHED_BATCH if allowed else os.SCHED_OTHER}
