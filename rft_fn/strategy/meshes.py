"""The meshes of FSDP2: which processes share parameters, and which share a sequence."""

import uuid

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rft_fn import dist
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.sequence_axis import SequenceAxis

__all__ = ["meshes", "shared_meshes"]


def meshes(
    config: StrategyConfig, shard_size: int = 0, *, name: str = ""
) -> tuple[DeviceMesh, SequenceAxis | None]:
    """Return (a model's mesh (replicate, shard), the sequence axis or None).

    The processes are a mesh (replicate, shard, sequence) with the sequence axis innermost; parameters are
    sharded over shard and sequence together. The names of the axes end in `name`. ValueError for sizes
    that do not divide the world.
    """
    # every size must divide the next larger one
    world = dist.world()
    sp = config.sp_size
    if world % sp:
        raise ValueError(f"sp_size: expected a divisor of the {world} processes, got {sp}")
    size = shard_size or config.shard_size or world
    if world % size or size % sp:
        raise ValueError(
            f"shard_size: expected a divisor of the {world} processes and a multiple of sp_size {sp}, "
            f"got {size}"
        )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    replicate = f"replicate{name}"
    shard = f"shard{name}"
    sequence = None
    if sp > 1:
        names = (replicate, shard, f"sequence{name}")
        whole = init_device_mesh(device, (world // size, size // sp, sp), mesh_dim_names=names)
        sequence = SequenceAxis(whole[names[-1]])
    if size == world:
        return init_device_mesh(device, (size,), mesh_dim_names=(shard,)), sequence
    mesh = init_device_mesh(device, (world // size, size), mesh_dim_names=(replicate, shard))
    return mesh, sequence


class _Meshes:
    """The meshes over one group of all processes, by their sizes.

    DTensor keeps what it computed for a mesh, with its groups, and takes meshes of the same sizes and names
    for one. So the names have a mark, the same on every rank, that no other group has.
    """

    def __init__(self) -> None:
        self.name = f"_{dist.all_gather_object(uuid.uuid4().hex[:8])[0]}"
        self.made: dict[tuple[int, int], tuple[DeviceMesh, SequenceAxis | None]] = {}


# Process groups are torch's, and live as long as the group of all processes. These are of the last one.
_of_world: dict[torch_dist.ProcessGroup, _Meshes] = {}


def shared_meshes(
    config: StrategyConfig, shard_size: int | None = None
) -> tuple[DeviceMesh, SequenceAxis | None]:
    """Return `meshes`, made once for all strategies over these processes.

    Every mesh has process groups, each with threads and connections. A process that makes many strategies
    one after another would collect them: torch lets go of a group only with the last tensor that knows it.
    """
    world = torch_dist.group.WORLD
    assert world is not None  # a strategy has begun it
    if world not in _of_world:
        _of_world.clear()
        _of_world[world] = _Meshes()
    known = _of_world[world]
    size = shard_size or config.shard_size or dist.world()
    key = (size, config.sp_size)
    if key not in known.made:
        known.made[key] = meshes(config, size, name=known.name)
    return known.made[key]
