"""Processes that work together: their group, trees that travel between them, and the phase they are in.

Everything here works on one process too, where it does nothing. Host data (rollouts, metrics, plans) travels
over gloo also where gradients travel over NCCL.
"""

import atexit
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from rft_fn import tree
from rft_fn.types import Media

__all__ = [
    "all_gather_object",
    "all_reduce",
    "barrier",
    "begin",
    "differences",
    "gather",
    "is_main",
    "phase",
    "rank",
    "world",
]

_START = 180.0  # seconds that a process is given to start, at least: others import faster
_GLOO_THREAD = "pt_gloo_runloop"
_state: dict[str, Any] = {"phase": "start", "depth": 0, "session": ""}


def begin(timeout: float) -> None:
    """Join the processes that torchrun started (or make a group of one), unless that is done already.

    timeout [s] bounds every wait for another process, once all have started. The group is taken down at exit.
    """
    if torch_dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    wait, mine, size = timedelta(seconds=timeout), rank(), started()
    if "RANK" not in os.environ:
        store: Any = torch_dist.HashStore()
    else:
        # one of torchrun's agents holds the store, unless nobody has set up one: then rank 0 does
        master = mine == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience = max(timeout, _START)
        store = client(patience, is_master=master, world_size=size)
        _state["session"] = _session(store, mine, size, patience)
        store = torch_dist.PrefixStore(_state["session"], store)
    torch_dist.init_process_group(backend, store=store, rank=mine, world_size=size, timeout=wait)
    atexit.register(_end)


def client(timeout: float, **options: Any) -> Any:
    """A connection to the store of the group, at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options = {"is_master": False, "timeout": timedelta(seconds=timeout)} | options
    return torch_dist.TCPStore(address, port, **options)


def _session(store: Any, mine: int, size: int, timeout: float) -> str:
    """A name that all processes of this start share, and no earlier start had: a restarted group that read
    the addresses which the killed one left in the store would connect to nobody.

    Each process says a number of its own; rank 0 names the session by all numbers that it sees, until
    everybody has answered to that name.
    """
    end, nonce = time.monotonic() + timeout, uuid.uuid4().hex
    store.set(f"rft/hello/{mine}", nonce)
    read = lambda key: store.get(key).decode() if store.check([key]) else ""  # noqa: E731
    while time.monotonic() < end:
        if mine == 0:
            said = [read(f"rft/hello/{r}") for r in range(size)]
            name = hashlib.blake2b(" ".join(said).encode(), digest_size=8).hexdigest()
            store.set("rft/session", " ".join([name, *said]))
        name, *said = read("rft/session").split(" ")
        if nonce in said:
            store.set(f"rft/answer/{mine}", name)
            if all(read(f"rft/answer/{r}") == name for r in range(size)):
                return f"rft/{name}"
        time.sleep(0.05)
    gone = [r for r in range(size) if not store.check([f"rft/hello/{r}"])]
    raise ValueError(
        f"ranks: expected {size} to answer within {timeout:g} s, got no answer from {gone or 'some'}"
    )


def _end() -> None:
    if torch_dist.is_initialized():
        _settle()
        torch_dist.destroy_process_group()


def _settle(limit: float = 10.0) -> None:
    """Wait until the threads of gloo are at rest, at most `limit` [s].

    A collective is over for its caller before gloo's thread has let go of its tensors. Python ends a thread
    that asks for the interpreter after that has gone, which aborts the process; and the group, whose end
    would wait for the thread, lives on in the meshes of the script.
    """
    end, quiet = time.monotonic() + limit, 0
    # three looks, and a sleep before each: whoever waits for the interpreter gets it meanwhile
    while quiet < 3 and time.monotonic() < end:
        time.sleep(0.005)
        quiet = 0 if _gloo_runs() else quiet + 1


def _gloo_runs() -> bool:
    """Whether a thread of gloo runs, or would if it had a processor. False where the system does not say."""
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it may have ended meanwhile
            name, state = (thread / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            if name == _GLOO_THREAD and state.split()[0] != "S":
                return True
    return False


def started() -> int:
    """Processes that torchrun started for this run, or that have a group already; 1 without either."""
    return world() if torch_dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among all of them."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes work together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if world() > 1:
        all_gather_object(None)


def all_gather_object(x: Any, group: Any = None) -> list[Any]:
    """The x of every process, in their order: any object that pickles, small ones."""
    if world() == 1:
        return [x]
    out: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(out, x, group=group)
    return out


def gather(x: Any) -> Any:
    """A tree of each process -> the tree of all of them: leaves concatenated along dim 0 in the order of the
    ranks, numbers and [] as [world]. The input is left alone.

    Further dims may differ between processes: shorter ones are padded with 0 at the end, so rows [b, s] of
    each become [B, S]. The structure must be the same everywhere, but for the media of a struct: the rows of
    a process that lacks them, or some of their names, have none of them. ValueError for another structure.
    """
    if world() == 1:
        return _gather(x)
    owners = [s for s in tree.leaves(x, is_leaf=_has_media) if _has_media(s)]
    media = iter([_gather_media(s) for s in owners])
    out = _gather(tree.map(lambda s: _with_media(s, None), x, is_leaf=_has_media))
    return tree.map(lambda s: _with_media(s, next(media)) if _has_media(s) else s, out, is_leaf=_has_media)


def _has_media(x: Any) -> bool:
    return "media" in getattr(type(x), "__dataclass_fields__", {})


def _with_media(x: Any, media: Media | None) -> Any:
    return tree.replace(x, media=media) if _has_media(x) else x


def _gather_media(x: Any) -> Media | None:
    """The media of the structs `x` of all processes; of a kind that this one has none of, no rows."""
    count, mine = len(tree.leaves(_with_media(x, None))[0]), x.media or Media(tensors={}, rows={})
    kinds = {name: (tuple(t.shape[1:]), t.dtype) for name, t in mine.tensors.items()}
    everyone = all_gather_object(None if x.media is None else kinds)
    if not any(found is not None for found in everyone):
        return None
    every = {name: kind for found in everyone for name, kind in (found or {}).items()}
    none = torch.zeros(count, dtype=torch.long)
    whole = Media(
        tensors={n: mine.tensors.get(n, torch.empty(0, *size, dtype=t)) for n, (size, t) in every.items()},
        rows={n: mine.rows.get(n, none) for n in every},
    )
    return _gather(whole)


def _gather(x: Any) -> Any:
    """`gather` of trees that have one structure."""
    leaves = {name: torch.as_tensor(v) for name, v in tree.leaves_with_path(x)}
    if world() == 1:
        return tree.unflatten_like(x, [v if v.dim() else v[None] for v in leaves.values()])
    plans = all_gather_object({name: (tuple(v.shape) or (1,), v.dtype) for name, v in leaves.items()})
    names = dict.fromkeys(name for plan in plans for name in plan)
    if list(names) != list(leaves):
        raise ValueError(
            f"gather: expected the same tree on every rank, rank {rank()} lacks some of {list(names)}"
        )
    return tree.unflatten_like(x, [_gather_leaf(v, [plan[n] for plan in plans]) for n, v in leaves.items()])


def _gather_leaf(x: Tensor, plan: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensor:
    shapes = [shape for shape, _ in plan]
    size = [max(s[i] for s in shapes) for i in range(len(shapes[0]))]
    bits = torch.uint8 if x.dtype == torch.bool else x.dtype
    mine = torch.zeros(size, dtype=bits)
    mine[tuple(slice(n) for n in (x.shape or (1,)))] = x.detach().cpu().to(bits)
    parts = [torch.empty_like(mine) for _ in plan]
    torch_dist.all_gather(parts, mine)
    return torch.cat([p[: s[0]] for p, s in zip(parts, shapes)]).to(device=x.device, dtype=x.dtype)


_OPS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0, dtype=x.dtype if x.is_floating_point() else torch.float64),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


def all_reduce(x: Any, op: str = "mean") -> Any:
    """A tree of each process -> the same tree everywhere, each leaf the "mean", "sum", "max" or "min" over
    the processes; numbers come back as numbers. Added in the order of the ranks, so every rank has the same
    bits. The input is left alone. ValueError for another op."""
    if op not in _OPS:
        raise ValueError(f"op: expected {', '.join(_OPS)}, got {op!r}")

    def reduce(v: Any) -> Any:
        out = _OPS[op](gather({"x": torch.as_tensor(v)[None]})["x"])
        return out if isinstance(v, Tensor) else out.item()

    return tree.map(reduce, x)


def differences(named: dict[str, str]) -> list[str]:
    """What differs between processes, as lines "name: rank 0 has a, rank 1 has b". Values are compared by
    hash and shown by their first 200 characters."""
    digest = {k: hashlib.blake2b(v.encode(), digest_size=16).hexdigest() for k, v in named.items()}
    everyone = all_gather_object(digest)
    odd = [k for k in dict.fromkeys(k for d in everyone for k in d) if len({d.get(k) for d in everyone}) > 1]
    shown = all_gather_object({k: named.get(k, "nothing")[:200] for k in odd})
    lines = []
    for k in odd:
        other = next(i for i, d in enumerate(everyone) if d.get(k) != everyone[0].get(k))
        lines.append(f"{k}: rank 0 has {shown[0][k]}, rank {other} has {shown[other][k]}")
    return lines


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What this process does meanwhile is `name`: for the line that says where it lost the others. The name
    stays when an error leaves the block; after the outermost block it is that of the script's own code."""
    before, outermost = _state["phase"], not _state["depth"]
    _state.update(phase=name, depth=_state["depth"] + 1)
    try:
        yield
    finally:
        _state["depth"] -= 1
    _state["phase"] = f"the script after {name}" if outermost else before


def session() -> str:
    """The prefix of this start's keys in the store, "" without one."""
    return _state["session"]


def current_phase() -> str:
    """The innermost phase of this process, the last one before the script's own code, or the one in which an
    error occurred."""
    return _state["phase"]
