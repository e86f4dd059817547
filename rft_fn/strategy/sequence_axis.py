"""Sequence parallelism: the processes of one group share the tokens of a pack."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft_fn import dist, packing, tree
from rft_fn.model.bounds import SequenceBounds
from rft_fn.types import Packed, TokenOut

__all__ = ["SequenceAxis"]


class SequenceAxis:
    """Sequence parallelism (Ulysses, arXiv 2309.14509) over one mesh axis [k].

    The processes of the axis share the tokens of a pack. Each has T / k tokens of everything but attention,
    which exchanges: heads instead of tokens on the way in, tokens instead of heads on the way out.
    Log-probs come back whole.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def split(self, pack: Packed) -> tuple[Packed, SequenceBounds]:
        """Return (this process's tokens [T / k] of the pack, the sequence boundaries of all [T]).

        T is padded to a multiple of k by masked tokens. Of a pack with media the boundaries have the whole,
        for the towers are run on all of it by each process, and only the text model has a part.
        """
        whole = packing.pad(pack, -(-pack.tokens.shape[0] // self.size) * self.size)
        sizes = torch.unique_consecutive(whole.seq, return_counts=True)[1].tolist()
        plain = tree.replace(whole, media=None, padding=0)
        part = tree.map(lambda x: x.chunk(self.size)[self.rank], plain)
        with_media = None if pack.media is None else whole
        return part, SequenceBounds(sizes, pack.seq.device, sequence=self, whole=with_media)

    def join(self, out: TokenOut, size: int) -> TokenOut:
        """Join values [T / k] of each process to [size] of all.

        The gradient of the whole is the same on every process, so each takes its part of it.
        """

        def whole(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
            return spread.full_tensor(grad_placements=[Replicate()])[:size]

        return tree.map(whole, out)

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the processes, in place and without gradient."""
        torch.distributed.all_reduce(x, group=self.mesh.get_group())
        return x

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange q [T / k, H, D], k and v [T / k, H', D] for all T tokens of a share of the heads.

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
        """Cut numbers of all heads [H] to this process's share [H / k], as `heads` does."""
        return x.chunk(self.size)[self.rank]

    def tokens(self, x: Tensor) -> Tensor:
        """Exchange all tokens of some heads [T, H / k, D] for all heads of some tokens [T / k, H, D]."""
        got = self._exchange(x.unflatten(0, (self.size, -1)))
        return got.transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send row i of x [k, ...] to process i; return what each sent here, in their order."""
        x = x.contiguous()
        return all_to_all_single(torch.empty_like(x), x, group=self.mesh.get_group())

    def exchange(self, packs: Sequence[Packed]) -> list[Packed]:
        """Return the packs of all processes of the axis, which work on each of them together."""
        host = [tree.map(lambda x: x.cpu(), b) for b in packs]
        everyone = dist.all_gather_object(host, self.mesh.get_group())
        return [b for row in zip(*everyone) for b in row]
