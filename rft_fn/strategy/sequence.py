"""Sequence parallelism: the processes of one group share the tokens of a pack.

Each holds T / k tokens of everything but attention, which exchanges: heads instead of tokens on the way in,
tokens instead of heads on the way out (Ulysses, arXiv 2309.14509). Log-probs come back whole.
"""

import uuid
from collections.abc import Sequence as Seq
from math import gcd

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft_fn import dist, packing, tree
from rft_fn.model import attention
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Packed, TokenOut

__all__ = ["Sequence", "meshes", "shared_meshes"]


# ---------- sequence parallelism: the processes of one group share the tokens of a pack


class Sequence:
    """Ulysses sequence parallelism over one mesh axis [k]."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def split(self, pack: Packed) -> tuple[Packed, attention.SequenceBounds]:
        """(this process's tokens [T / k] of the pack, the sequence boundaries of all [T]).

        T is padded to a multiple of k by masked tokens. Of a pack with media the boundaries have the whole,
        for the towers are run on all of it by each process, and only the text model has a part.
        """
        whole = packing.pad(pack, -(-pack.tokens.shape[0] // self.size) * self.size)
        sizes = torch.unique_consecutive(whole.seq, return_counts=True)[1].tolist()
        plain = tree.replace(whole, media=None, padding=0)
        part = tree.map(lambda x: x.chunk(self.size)[self.rank], plain)
        seen = None
        if pack.media is not None:
            seen = whole
        return part, attention.SequenceBounds(sizes, pack.seq.device, sequence=self, whole=seen)

    def join(self, out: TokenOut, size: int) -> TokenOut:
        """Values [T / k] of each process -> [size] of all.

        The gradient of the whole is the same on every process, so each takes its part of it.
        """

        def whole(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
            return spread.full_tensor(grad_placements=[Replicate()])[:size]

        return tree.map(whole, out)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the processes, in place and without gradient."""
        torch.distributed.all_reduce(x, group=self.mesh.get_group())
        return x

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T / k, H, D], k and v [T / k, H', D] -> all T tokens of this process's share of the heads.

        Heads of k and v are repeated where there are fewer than processes. ValueError for a H that k does not
        divide.
        """
        if q.shape[1] % self.size:
            raise ValueError(
                f"sp_size: expected a divisor of the {q.shape[1]} attention heads, got {self.size}"
            )
        repeat = self.size // gcd(k.shape[1], self.size)
        if repeat > 1:
            k = k.repeat_interleave(repeat, dim=1)
            v = v.repeat_interleave(repeat, dim=1)
        # each process's share of all three is a row of [k, T / k, numbers], so they travel at once
        shares = [x.unflatten(1, (self.size, -1)).flatten(2) for x in (q, k, v)]
        got = self._exchange(torch.cat(shares, -1).transpose(0, 1)).flatten(0, 1)
        mine = got.split([x.shape[-1] for x in shares], -1)
        q, k, v = (x.unflatten(-1, (-1, old.shape[-1])) for x, old in zip(mine, (q, k, v)))
        return q, k, v

    def share(self, x: Tensor) -> Tensor:
        """Numbers of all heads [H] -> those of this process's share [H / k], split as `heads` splits."""
        return x.chunk(self.size)[self.rank]

    def tokens(self, x: Tensor) -> Tensor:
        """All tokens of some heads [T, H / k, D] -> all heads of some tokens [T / k, H, D]."""
        got = self._exchange(x.unflatten(0, (self.size, -1)))
        return got.transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Row i of x [k, ...] goes to process i; what each of them sent here, in their order."""
        x = x.contiguous()
        return all_to_all_single(torch.empty_like(x), x, group=self.mesh.get_group())

    def exchange(self, packs: Seq[Packed]) -> list[Packed]:
        """The packs of all processes of the group, which work on each of them together."""
        host = [tree.map(lambda x: x.cpu(), b) for b in packs]
        everyone = dist.all_gather_object(host, self.mesh.get_group())
        return [b for row in zip(*everyone) for b in row]


# ---------- the meshes of FSDP2: which processes share parameters, and which share a sequence


def meshes(
    config: StrategyConfig, shard_size: int = 0, *, name: str = ""
) -> tuple[DeviceMesh, Sequence | None]:
    """(the mesh of a model's parameters (replicate, shard), the sequence axis or None without one).

    The processes are a mesh (replicate, shard, sequence) with the sequence axis innermost; parameters are
    sharded over shard and sequence together. The names of the axes end in `name`. ValueError for sizes that
    do not divide the world.
    """
    # every size has to divide the next larger one
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

    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    replicate = f"replicate{name}"
    shard = f"shard{name}"
    sequence = None
    if sp > 1:
        names = (replicate, shard, f"sequence{name}")
        whole = init_device_mesh(device, (world // size, size // sp, sp), mesh_dim_names=names)
        sequence = Sequence(whole[names[-1]])
    if size == world:
        return init_device_mesh(device, (size,), mesh_dim_names=(shard,)), sequence
    mesh = init_device_mesh(device, (world // size, size), mesh_dim_names=(replicate, shard))
    return mesh, sequence


class _Meshes:
    """The meshes over one group of all processes, by their sizes.

    DTensor keeps what it computed for a mesh, with its groups, and takes meshes of the same sizes and names
    for one. So the names have a mark, the same on every rank, that those of no other group have.
    """

    def __init__(self) -> None:
        self.name = f"_{dist.all_gather_object(uuid.uuid4().hex[:8])[0]}"
        self.made: dict[tuple[int, int], tuple[DeviceMesh, Sequence | None]] = {}


# Process groups are torch's, and live as long as that of all processes. Here are those of the last one.
_of_world: dict[torch_dist.ProcessGroup, _Meshes] = {}


def shared_meshes(
    config: StrategyConfig, shard_size: int | None = None
) -> tuple[DeviceMesh, Sequence | None]:
    """`meshes`, made once for all strategies over these processes.

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
