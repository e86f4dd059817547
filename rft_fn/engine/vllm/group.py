"""The ranks that share one engine: requests of all of them are answered together, in order."""

import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from rft_fn import dist
from rft_fn.engine.requests import BadRequest
from rft_fn.engine.vllm.package import part
from rft_fn.types import Sampling

__all__ = ["Group", "name_shared_memory"]

T = TypeVar("T")


class Group:
    """The ranks of a tensor-parallel engine, which all have to give vLLM the same requests."""

    def __init__(self, size: int):
        self.size = size
        self.rank = 0
        self.processes: Any = None
        if size > 1:
            found = part("distributed.parallel_state").get_tp_group()
            self.rank = found.rank_in_group
            self.processes = found.cpu_group

    def together(
        self, own: Sequence[T], sampling: Sampling, refused: BadRequest | None
    ) -> tuple[list[T], slice]:
        """(the requests of all ranks in their order, which of them are this rank's).

        BadRequest on every rank where one is refused, or where ranks sample otherwise: none may begin alone.
        """
        if self.size == 1:
            parts = [(list(own), sampling, refused and str(refused))]
        else:
            parts = dist.all_gather_object((list(own), sampling, refused and str(refused)), self.processes)
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
    """Give this run's groups on CPUs shared memory of their own name, the same on all ranks.

    vLLM names it alike in every run that another program has launched, so that what a killed run has left
    behind, or one beside it, would stop this one.
    """
    own = dist.all_gather_object(secrets.token_hex(8))[0]
    shared = part("distributed.device_communicators.cpu_communicator")._CPUSHMDistributed
    named = shared.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"/{own}{named(communicator).lstrip('/')}"

    shared.make_group_name = staticmethod(make_group_name)
