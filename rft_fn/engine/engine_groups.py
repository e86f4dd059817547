"""Sends weights over groups of the engines' own: vLLM's by NCCL, SGLang's by torch.

Such a server loads each tensor as it comes, and one that has got a part holds neither the old weights nor the
new ones. So before the first it gets a version that nobody samples from, and it holds back what others ask.
After a failure the group is given up, and only whole weights make the server one that samples again.
"""

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor
from torch.cuda import nccl

from rft_fn import border
from rft_fn.engine.server_protocol import Client, Fault, Refused, expected
from rft_fn.engine.weight_channel import Channel, Parcel, listen, own_address
from rft_fn.engine.weight_sender import (
    FINISH,
    HOLD,
    INIT,
    MEET,
    START,
    UPDATE,
    WORDS,
    answered,
    hold_back,
    line,
    seconds_left,
    together,
    workers,
)

__all__ = ["ARRIVING", "NcclGroups", "TorchGroups"]

ARRIVING = " arriving"  # ends the version of a server that has got a part of its weights
DEVICE = "cuda"  # of vLLM's backend


class _Groups(ABC):
    """The order of the phases, with one deadline for all of them."""

    hold: tuple[str, str]  # the routes that hold requests back, and let them go on
    held: ClassVar[dict[str, Any]]  # the body of the first
    version: ClassVar[dict[str, Any]]  # further fields of a new version

    def __init__(self, client: Client, seconds: float, *, holds: bool = True):
        """`seconds` is the limit of all phases of one load; with `holds` it holds back what others ask."""
        self.client = client
        self.seconds = seconds
        self.holds = holds
        self.open: dict[str, Any] = {}
        self.last = Client(client.key_env)  # for words that are sent after the others are broken off

    @abstractmethod
    def meet(self, server: str, end: float) -> Any:
        """Return a group with the workers of a server."""
        ...

    @abstractmethod
    def begin(self, server: str, end: float) -> None:
        """Make the server ready for weights."""
        ...

    @abstractmethod
    def update(self, group: Any, names: list[list[Any]], last: bool) -> tuple[str, dict[str, Any]]:
        """Return the request that makes the workers receive tensors of [name, type, shape]."""
        ...

    @abstractmethod
    def move(self, group: Any, tensors: Sequence[Tensor], end: float) -> None:
        """Give tensors to the workers, which receive them."""
        ...

    @abstractmethod
    def finish(self, server: str, end: float) -> None:
        """Make the server use its weights."""
        ...

    @abstractmethod
    def leave(self, server: str, group: Any, end: float) -> None:
        """Let the server forget a group."""
        ...

    def send(self, server: str, parcel: Parcel, label: str) -> None:
        """Send all of `parcel`. Fault or Refused where it has not arrived; `settle` sets `label`."""
        end = time.monotonic() + self.seconds
        try:
            if server not in self.open:
                self.open[server] = self.meet(server, end)
            group = self.open[server]
            held = hold_back(self.client, server, self.hold, self.held, end)
            with held if self.holds else nullcontext():
                self.set_version(server, label + ARRIVING, end)
                self.begin(server, end)
                for bucket in parcel.buckets:
                    described, tensors = bucket.described(), [x for _, x in bucket.tensors()]
                    path, body = self.update(group, described, bucket is parcel.buckets[-1])
                    post = partial(self.post, server, path, body, end)
                    together(path, post, partial(self.move, group, tensors, end), end)
                self.finish(server, end)
        except BaseException:
            self.give_up(server)
            raise

    def set_version(self, server: str, version: str, end: float) -> None:
        """Set the version of a server's weights."""
        self.post(server, "/update_weight_version", {"new_version": version} | self.version, end)

    def give_up(self, server: str) -> None:
        """Leave the group with a server, which may be gone."""
        group = self.open.pop(server, None)
        with suppress(Fault, Refused):
            if group is not None:
                self.leave(server, group, time.monotonic() + WORDS)

    def close(self) -> None:
        """Leave all groups."""
        for server in [*self.open]:
            self.give_up(server)

    def post(self, server: str, path: str, body: dict[str, Any], end: float) -> Any:
        """Return the answer to a POST."""
        return self.client.call(server, path, body, seconds=seconds_left(end))


class NcclGroups(_Groups):
    """Sends to vLLM's backend `nccl`, as rank 0 of a communicator that torch makes from a unique id."""

    hold = HOLD
    held: ClassVar[dict[str, Any]] = {}
    version: ClassVar[dict[str, Any]] = {}

    def has(self, server: str) -> bool:
        """Return whether a server has this backend, and this process a GPU to meet it with."""
        if not torch.cuda.is_available():
            return False
        with suppress(Fault, Refused):
            path = "/server_info?config_format=json"
            answer = self.client.call(server, path, seconds=min(MEET, self.seconds))
            with expected("the config of a server", answer):
                return (answer["vllm_config"]["weight_transfer_config"] or {}).get("backend") == "nccl"
        return False

    def meet(self, server: str, end: float) -> Any:
        """Return a communicator with the workers of a server."""
        world = 1 + workers(self.client, server, end)
        unique = nccl.unique_id()
        told = base64.b64encode(unique).decode()
        body = {"init_info": {"rank_offset": 1, "world_size": world, "nccl_unique_id_b64": told}}

        post = partial(self.post, server, INIT, body, end)
        return together(INIT, post, partial(_communicator, world, unique), end)

    def begin(self, server: str, end: float) -> None:
        """Begin the reload; one that a trainer has left is ended as vLLM ends one, by an error."""
        try:
            self.post(server, START, {}, end)
        except (Fault, Refused) as error:
            if not answered(error):
                raise
            with suppress(Fault, Refused):
                self.post(server, UPDATE, {"update_info": {}}, end)
            self.post(server, START, {}, end)

    def update(self, group: Any, names: list[list[Any]], last: bool) -> tuple[str, dict[str, Any]]:
        """Return the request that makes the workers receive tensors of [name, type, shape]."""
        columns = dict(zip(("names", "dtype_names", "shapes"), map(list, zip(*names, strict=True))))
        return UPDATE, {"update_info": columns}

    def move(self, group: Any, tensors: Sequence[Tensor], end: float) -> None:
        """Give tensors to the workers, which receive them."""
        there = [x.to(DEVICE) for x in tensors]
        for x in there:
            nccl.broadcast([x], comms=[group])
        torch.cuda.synchronize()

    def finish(self, server: str, end: float) -> None:
        """Make the server use its weights."""
        self.post(server, FINISH, {}, end)

    def leave(self, server: str, group: Any, end: float) -> None:
        """Let the server forget a group."""
        self.last.call(server, "/shutdown_weight_transfer_engine", {}, seconds=seconds_left(end))


def _communicator(world: int, unique: bytes) -> Any:
    """Return rank 0 of a communicator of NCCL; vLLM's workers begin with a sum of one element."""
    group = nccl.init_rank(world, unique, 0)
    nccl.all_reduce([torch.zeros(1, device=DEVICE)], comms=[group])
    torch.cuda.synchronize()
    return group


class _Torch(NamedTuple):
    """A process group, with the name that the server knows it by."""

    name: str
    channel: Channel


class TorchGroups(_Groups):
    """Sends to SGLang by a process group of torch: NCCL where both sides have a GPU, else gloo."""

    hold = "/pause_generation", "/continue_generation"
    held: ClassVar[dict[str, Any]] = {"mode": "retract"}  # what is under way begins again afterwards
    version: ClassVar[dict[str, Any]] = {"abort_all_requests": False}

    def has(self, server: str) -> bool:
        """Ask whether a server has such groups: one that is not there is refused with status 400."""
        try:
            self._destroy(server, "rft", time.monotonic() + min(MEET, self.seconds))
        except (Fault, Refused) as error:
            return ": status 400" in str(error)
        return True

    def meet(self, server: str, end: float) -> _Torch:
        """Return a group of torch's with the workers of a server, which meets them by a store of its own."""
        options = self.client.call(server, "/server_info", seconds=seconds_left(end))
        with expected("tp_size, pp_size and device", options):
            world = 1 + border.integer("tp_size", options["tp_size"], low=1)
            stages = border.integer("pp_size", options.get("pp_size", 1), low=1)
            cuda = border.text("device", options["device"]).startswith("cuda")
        if stages > 1:
            raise Fault(f"pp_size: expected 1 for weights by a group, got {stages}")
        kind = "nccl" if cuda and torch.cuda.is_available() else "gloo"
        name = f"rft-{uuid4().hex[:8]}"
        seconds = min(MEET, seconds_left(end))
        path = "/init_weights_update_group"
        try:
            address = own_address(urlsplit(server).hostname or "")
            store = listen(address, seconds)
        except (OSError, RuntimeError) as error:
            raise Fault(f"{path}: {line(error)}") from error
        body = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": name,
            "backend": kind,
        }
        prefixes = (name, f"{name}/", "cuda/" if kind == "nccl" else "cpu/")  # as torch meets in a group
        met = partial(Channel, store, kind, address, rank=0, world=world, seconds=seconds, prefixes=prefixes)
        post = partial(self.post, server, path, body, end)
        # a worker leaves a key as it comes: gloo is not entered for one that was refused
        return _Torch(name, together(path, post, met, end, lambda: store.num_keys() > 0))

    def begin(self, server: str, end: float) -> None:
        """Open a session, where the server knows such; one that a trainer has left is closed."""
        try:
            self.post(server, "/begin_weight_update", {}, end)
        except Refused as error:
            if "status 404" in str(error):
                return
            self.finish(server, end)
            self.post(server, "/begin_weight_update", {}, end)

    def update(self, group: _Torch, names: list[list[Any]], last: bool) -> tuple[str, dict[str, Any]]:
        """Return the request that makes the workers receive tensors of [name, type, shape]."""
        columns = dict(zip(("names", "dtypes", "shapes"), map(list, zip(*names, strict=True))))
        body = columns | {"group_name": group.name, "flush_cache": last}
        return "/update_weights_from_distributed", body

    def move(self, group: _Torch, tensors: Sequence[Tensor], end: float) -> None:
        """Give tensors to the workers, which receive them."""
        for x in tensors:
            group.channel.broadcast(x, seconds_left(end))

    def finish(self, server: str, end: float) -> None:
        """Close the session."""
        try:
            self.post(server, "/end_weight_update", {}, end)
        except Refused as error:
            if "status 404" not in str(error):
                raise

    def leave(self, server: str, group: _Torch, end: float) -> None:
        """Let the server forget a group."""
        self._destroy(server, group.name, end)

    def _destroy(self, server: str, name: str, end: float) -> None:
        body = {"group_name": name}
        self.last.call(server, "/destroy_weights_update_group", body, seconds=seconds_left(end))
