"""Plan which process writes and reads which part of a tensor.

The planners of torch.distributed.checkpoint know every placement of a DTensor, give each part that several
processes hold to one of them, and map the parts of one number of processes onto those of another. The files
are not theirs: safetensors and JSON, which need no unpickling.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from rft_fn import dist
from rft_fn.ckpt import writing

__all__ = ["local", "mine", "read"]

Table = dict[str, dict[str, Any]]  # name -> {"dtype", "shape", "chunks": [[rank, offsets, sizes], ...]}


def local(x: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in its own memory."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def mine(tensors: Mapping[str, Tensor], *, copy: bool) -> tuple[dict[str, Tensor], Table]:
    """Return (the parts that this process writes, in host memory; the place of all parts).

    The places are of every part of every tensor.

    Of parts that several processes hold, the one with least to write writes it. All ranks call it. With
    `copy` nothing in it is the memory of the tensors given.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({n: x.detach() for n, x in tensors.items()}, None, dist.is_main())
    own = planner.create_local_plan()
    filled = [i for i in own.items if i.tensor_data is not None and i.tensor_data.chunk.sizes.numel()]
    plan, plans = _shared(planner, dataclasses.replace(own, items=filled))
    out: dict[str, Tensor] = {}
    for item in plan.items:
        x = planner.resolve_data(item)
        assert isinstance(x, Tensor)
        out[item.index.fqn] = x.detach().to("cpu", copy=copy).contiguous()
    return out, _table(tensors, plans)


def _shared(planner: DefaultSavePlanner, own: SavePlan) -> tuple[SavePlan, list[SavePlan]]:
    """Return (this process's part of the plan, on rank 0 all parts): rank 0 decides."""
    if dist.world() == 1:
        plans, _ = planner.create_global_plan([own])
        return plans[0], plans
    gathered: list[Any] | None = [None] * dist.world() if dist.is_main() else None
    torch_dist.gather_object(own, gathered, dst=0)

    plans: list[SavePlan] = planner.create_global_plan(gathered)[0] if gathered is not None else []
    given: list[Any] = [None]
    torch_dist.scatter_object_list(given, plans or None, src=0)
    return given[0], plans


def _table(tensors: Mapping[str, Tensor], plans: list[SavePlan]) -> Table:
    table: Table = {
        name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "chunks": []}
        for name, x in tensors.items()
    }
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            table[item.index.fqn]["chunks"].append([rank, list(chunk.offsets), list(chunk.sizes)])
    return table


def _metadata(table: Table) -> Metadata:
    tensors = {}
    for name, entry in table.items():
        dtype = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for _, at, n in entry["chunks"]]
        tensors[name] = TensorStorageMetadata(dtype, torch.Size(entry["shape"]), chunks)
    return Metadata(tensors)


def read(folder: Path, table: Table, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read name -> the part of that tensor that `like` holds on this process, in host memory.

    Nothing travels between processes. SafetensorError or OSError for files that do not match the table.
    """
    from safetensors import safe_open

    # which pieces of which files make up the parts, file by file
    named = {name: x.detach() for name, x in like.items()}
    out = {name: torch.empty(local(x).shape, dtype=x.dtype) for name, x in named.items()}
    where = {(n, tuple(c[1])): c[0] for n, entry in table.items() for c in entry["chunks"]}
    by_file: dict[int, list[Any]] = {}
    for item in create_default_local_load_plan(named, _metadata(table)).items:
        at = item.storage_index
        by_file.setdefault(where[at.fqn, tuple(at.offset or ())], []).append(item)

    # each piece is a box of a tensor in the file, and goes to a box of a part
    for rank, items in by_file.items():
        with safe_open(folder / writing.file_name(rank), "pt") as f:
            for item in items:
                part = writing.read_part(f, item.storage_index.fqn, item.storage_offsets, item.lengths)
                to = out[item.dest_index.fqn]
                for dim, (start, n) in enumerate(zip(item.dest_offsets, item.lengths)):
                    to = to.narrow(dim, start, n)
                to.copy_(part)
    return out
