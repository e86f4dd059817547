"""Images, sounds and videos of a batch, held once per prompt."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import tree

__all__ = ["MEDIA_COST", "Media"]

MEDIA_COST = 1e-4  # the work of one number of media in an encoder, in tokens of the text model


@tree.struct
class Media:
    """Tensors of images, sounds and videos, held once per prompt.

    An owner is the media of one prompt, which all samples of the prompt read. Tensors have the processor's
    names, and are concatenated along dim 0 in the order of the owners. A process may hold the rows of only
    some owners; it has the numbers of all.
    """

    tensors: dict[str, Tensor]  # e.g. pixel_values [rows, ...], image_grid_thw [images, 3]; of owners in held
    rows: dict[str, Tensor]  # name -> [M] i64: the number of rows of it that each owner has
    of: Tensor  # [B] i64, the owner that each sequence reads; -1 for none
    held: Tensor  # [M] bool, whether this process has the rows of an owner

    @staticmethod
    def of_prompts(parts: Sequence[Mapping[str, Tensor] | None], n: int = 1) -> "Media | None":
        """Make the media of prompts, each read by `n` consecutive sequences.

        A part maps the processor's names to the tensors of one prompt; their dim 0 counts rows. The result is
        None if no prompt has media. ValueError for `n` below 1, or tensors of one name that differ in their
        number of dims.
        """
        if n < 1:
            raise ValueError(f"n: expected >= 1 sequences per prompt, got {n}")
        owners = [_of_one(part) for part in parts]
        whole = Media.concat(owners, [1] * len(parts))
        return None if whole is None else tree.replace(whole, of=whole.of.repeat_interleave(n))

    @staticmethod
    def concat(parts: Sequence["Media | None"], counts: Sequence[int]) -> "Media | None":
        """Join the media of several batches.

        `counts` are their numbers of sequences. The result is None if no batch has media. A batch that is
        None, or has no tensor of some name, has no rows of that name. Where further dims of one name differ,
        shorter ones are padded with 0 at the end, as processors pad. ValueError for a wrong count, or tensors
        of one name that differ in their number of dims.
        """
        present = [part for part in parts if part is not None]
        if not present:
            return None
        names = dict.fromkeys(name for part in present for name in part.tensors)
        tensors = {
            name: _joined(name, [m.tensors[name] for m in present if name in m.tensors]) for name in names
        }

        # every owner has a count of every name, also in batches without it
        none = [torch.zeros_like(m.held, dtype=torch.long) for m in present]
        rows = {name: torch.cat([m.rows.get(name, x) for m, x in zip(present, none)]) for name in names}

        # owners are numbered on from the batch before
        of, start = [], 0
        for part, count in zip(parts, counts, strict=True):
            reads = present[0].of.new_full((count,), -1)
            if part is not None:
                reads = torch.where(part.of >= 0, part.of + start, -1)
                start += len(part.held)
            if len(reads) != count:
                raise ValueError(f"counts: expected {len(reads)}, the sequences of the media, got {count}")
            of.append(reads)
        return Media(tensors=tensors, rows=rows, of=torch.cat(of), held=torch.cat([m.held for m in present]))

    def take(self, index: Sequence[int]) -> "Media":
        """Return the media of the sequences `index`, in that order, without owners that none reads."""
        of = self.of[torch.tensor(list(index), dtype=torch.long, device=self.of.device)]
        owners, numbers = of[of >= 0].unique(return_inverse=True)
        if len(owners) == len(self.held):
            return tree.replace(self, of=of)
        return tree.replace(self.owned(owners.tolist()), of=of.masked_scatter(of >= 0, numbers))

    def owned(self, owners: Sequence[int]) -> "Media":
        """Return the media of some owners, in that order, each read by one sequence."""
        at = torch.tensor(list(owners), dtype=torch.long, device=self.of.device)
        tensors = {name: torch.cat([x[:0], *self.split(name, owners)]) for name, x in self.tensors.items()}
        rows = {name: count[at] for name, count in self.rows.items()}
        of = torch.arange(len(at), device=at.device)
        return Media(tensors=tensors, rows=rows, of=of, held=self.held[at])

    def split(self, name: str, owners: Sequence[int]) -> list[Tensor]:
        """Return the rows of one name for each of `owners`; no rows of owners that are not held."""
        sizes = torch.where(self.held, self.rows[name], 0)
        parts = self.tensors[name].split(sizes.tolist())
        return [parts[m] for m in owners]

    def sequences(self) -> dict[str, Tensor]:
        """Return the rows of each sequence by name, repeated where several sequences read one owner.

        ValueError for an owner that this process does not hold.
        """
        self.require_held()
        readers = self.of[self.of >= 0].tolist()
        if readers == list(range(len(self.held))):
            return dict(self.tensors)
        return {name: torch.cat([x[:0], *self.split(name, readers)]) for name, x in self.tensors.items()}

    def count(self, name: str) -> Tensor:
        """Count the rows of one name that each sequence reads, [B] i64."""
        none = self.rows[name].new_zeros(1)
        return torch.cat([self.rows[name], none])[self.of]  # the last is that of -1

    def require_held(self) -> None:
        """Raise a ValueError if this process does not hold the rows of all owners."""
        if not bool(self.held.all()):
            missing = (~self.held).nonzero().flatten().tolist()
            raise ValueError(
                f"media: expected the rows of all {len(self.held)} owners on this process, got none of "
                f"{missing[:5]}: after Strategy.gather only their numbers are here; Strategy.shard and "
                "Strategy.score fetch what this process needs"
            )


def _of_one(part: Mapping[str, Tensor] | None) -> Media | None:
    """Make the media of one prompt, read by one sequence."""
    if not part:
        return None
    rows = {name: torch.tensor([len(x)]) for name, x in part.items()}
    held = torch.ones(1, dtype=torch.bool)
    return Media(tensors=dict(part), rows=rows, of=torch.zeros(1, dtype=torch.long), held=held)


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along dim 0; pad further dims with 0 at the end to the largest."""
    dims = {x.dim() for x in parts}
    if len(dims) > 1:
        raise ValueError(f"media: expected one number of dims of {name}, got {sorted(dims)}")
    if len({x.shape[1:] for x in parts}) == 1:
        return torch.cat(list(parts))
    size = [max(sizes) for sizes in zip(*(x.shape[1:] for x in parts))]
    padded = []
    for x in parts:
        more = [n - own for n, own in zip(size, x.shape[1:])]
        padded.append(F.pad(x, [k for m in reversed(more) for k in (0, m)]))
    return torch.cat(padded)
