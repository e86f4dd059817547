"""A host for tests on a CPU: numpy's memory, so what leaves the device is missed by torch's allocator."""

import os
import weakref
from operator import itemgetter

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import profile

from rft_fn.model.copies import Mover
from rft_fn.strategy.placing import residence_of

MARK = 77_654_321  # bytes that no tensor of a test has
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below, each profile prints two lines that nobody reads


class Host:
    """Counts the bytes that it was given."""

    def __init__(self):
        self.bytes = 0
        self.mover = Mover(self.to_host, self.to_device)

    def to_host(self, x):
        """x in memory of numpy."""
        if isinstance(x, DTensor):
            return like(x, self.to_host(x.to_local()))
        if not x.numel():  # of a parameter that stage 3 of ZeRO has cut
            return x
        memory = np.empty(x.numel() * x.element_size(), np.uint8)
        self.bytes += memory.nbytes
        return torch.from_numpy(memory).view(x.dtype).view(x.shape).copy_(x)

    def to_device(self, x):
        """x in memory of torch's allocator."""
        if isinstance(x, DTensor):
            return like(x, x.to_local().clone())
        return x.clone()

    def serve(self, apply):
        """Have the weights of a model go to this host."""
        residence_of(apply).mover = self.mover
        return apply


class Storages:
    """The memory of a module's parameters and buffers on this process, each storage once."""

    def __init__(self, module):
        found = {}
        for x in [*module.parameters(), *module.buffers()]:
            for part in (x, getattr(x, "ds_tensor", None)):
                if part is not None:
                    storage = getattr(part, "_local_tensor", part).untyped_storage()
                    found[storage.data_ptr()] = storage
        self.bytes = sum(x.nbytes() for x in found.values())
        self.held = [(weakref.ref(x), x.nbytes()) for x in found.values()]

    def freed(self):
        """The bytes of those that nobody holds any more."""
        return sum(size for ref, size in self.held if ref() is None)


def allocated(f):
    """(what f returned, the peak of its allocations, what of them is left), by torch's own allocator on the
    CPU.

    What f frees of others' memory does not count: threads of gloo free the buffers of a collective when they
    get to it, and the profiler knows those of an earlier call of this function.
    """
    with profile(profile_memory=True) as prof:
        out = f()
    now = peak = 0
    blocks = {}
    for block, size in _allocations(prof.profiler.kineto_results.experimental_event_tree()):
        if size > 0:
            blocks[block] = size
            now += size
        else:
            now -= blocks.pop(block, 0)
        peak = max(peak, now)
    return out, peak, now


def _allocations(roots):
    """(address, bytes) of each allocation, and (address, -bytes) of each release, in the order of time."""
    found, waiting = [], list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(block, size) for _, block, size in sorted(found, key=itemgetter(0))]


def like(x, local):
    """A DTensor laid out as x, of other memory."""
    how = {"shape": x.shape, "stride": x.stride(), "run_check": False}
    return DTensor.from_local(local, x.device_mesh, x.placements, **how)


def marked(f):
    """{phase: (the peak of torch's allocator in it, what is left)} of f(mark); mark(name) ends a phase."""
    names = []

    def mark(name):
        torch.empty(MARK + len(names), dtype=torch.uint8)
        names.append(name)

    with profile(profile_memory=True) as prof:
        f(mark)
    found, now, peak = {}, 0, 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        order = abs(event.nbytes()) - MARK
        if 0 <= order < len(names):
            found.setdefault(names[order], (peak, now))
            peak = now
            continue
        now += event.nbytes()
        peak = max(peak, now)
    return found
