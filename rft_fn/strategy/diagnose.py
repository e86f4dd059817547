"""Gradients that are not finite: the error, the first sequence at fault, and its dump in a folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_fn import border, dist, packing, tree
from rft_fn.types import Apply, LossFn, Media, Packed

__all__ = ["NonFinite", "Source", "dump", "first_offender", "load_fault", "with_source"]


class NonFinite(FloatingPointError):
    """Gradients were not finite in too many updates in a row."""


@dataclass(frozen=True, eq=False)
class Source:
    """The inputs that gradients were computed from."""

    apply: Apply
    loss_fn: LossFn
    packs: Sequence[Packed]
    at: Mapping[str, Tensor] | None = None  # the parameters, where they are not the state's


def with_source(grads: Any, source: Source) -> Any:
    """Attach its source to gradients; it goes when they are donated."""
    if isinstance(grads, tree.Named):
        grads.source = source
        return grads
    return tree.replace(grads, source=source)


def _units(packs: Sequence[Packed]) -> list[Packed]:
    """Cut the packs into their units: one sequence each, or the sequences that belong together."""
    out: list[Packed] = []
    for b in packs:
        count = packing.count_filled(b)
        out += [packing.single_unit(b, i) for i in range(count)]
        if not count:
            out.append(b)
    return out


def _smallest(count: int, bad: Callable[[int], bool]) -> int | None:
    """Find the smallest n <= count with bad(n), if bad stays so; None if bad(count) is False."""
    if not bad(count):
        return None
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if bad(middle):
            high = middle
        else:
            low = middle
    return high


def first_offender(
    probe: Callable[[Sequence[Packed]], bool], packs: Sequence[Packed]
) -> tuple[int, Packed] | None:
    """Return (rank, pack of one unit) of the first sequence without a finite gradient, or None.

    None if no single one is at fault. First in the order of ranks, packs and sequences. Called by all ranks
    alike; the result is the same on each. `probe(packs)` tells on every rank whether the summed gradient
    of these packs of all ranks is not finite. By bisection: a NaN in a sum stays.
    """
    # first the pack, then the unit in it: all ranks try as many packs as the one with most
    pack = _first(probe, packs, like=packs[0])
    if pack is None:
        return None
    owner, index, _ = pack
    unit = _first(probe, _units([packs[index]]) if owner == dist.rank() else [], like=packs[0])
    if unit is None:
        return None
    owner, _, part = unit
    return owner, part


def _first(
    probe: Callable[[Sequence[Packed]], bool], parts: Sequence[Packed], *, like: Packed
) -> tuple[int, int, Packed] | None:
    """Return (rank, its number there, the part) of the first of all ranks' parts that is not finite."""
    # parts are numbered over all ranks, in their order
    counts = dist.all_gather_object(len(parts))
    starts = [sum(counts[:r]) for r in range(len(counts))]
    start = starts[dist.rank()]

    # where each sequence is a forward, lists of any length were filled up to one number of sequences
    units = dist.all_gather_object(packing.sizes_of(like))
    least = like.num_seqs if len({size for sizes in units for size in sizes}) > 1 else 0

    def broken(n: int) -> bool:
        """Return whether the first n parts of all ranks are bad; placeholders replace the others."""
        mine = [packing.placeholder(like)] * max(counts)
        for i, part in enumerate(parts):
            mine[i] = part if start + i < n else packing.placeholder(part)
        return probe([packing.fill(part, least) for part in mine])

    # n counts to the first bad part, which lies on the last rank that begins before it
    n = _smallest(sum(counts), broken)
    if n is None:
        return None
    owner = max(r for r, begin in enumerate(starts) if begin < n)
    index = n - 1 - starts[owner]
    one = tree.map(lambda x: x.cpu(), parts[index]) if owner == dist.rank() else None
    return owner, index, dist.all_gather_object(one)[owner]


def dump(
    folder: Path,
    step: int,
    broken: Callable[[Sequence[Packed]], bool],
    packs: Sequence[Packed],
    weights: dict[str, Tensor],
) -> str:
    """Write the first sequence with a gradient that is not finite to fault_STEP/; return a line.

    `broken(packs)` tells on every rank whether the gradient of these packs of all ranks is not finite;
    `weights` are what the sequence met. All ranks call it; rank 0 writes, for `load_fault`.
    """
    offender = first_offender(broken, packs)
    folder = folder / f"fault_{step:08d}"
    if dist.is_main():
        _write(folder, step, offender, weights)
    single = offender is not None
    first = "the first sequence with such a gradient is"
    what = first if single else "no sequence alone has such a gradient, the weights are"
    return f"{what} in {folder}: look at it with replay.py"


def _write(folder: Path, step: int, offender: tuple[int, Packed] | None, weights: dict[str, Tensor]) -> None:
    """Write the sequence and the weights as safetensors, and what is known as JSON."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"step": step, "rank": None, "row": None}
    if offender is not None:
        rank, pack = offender
        pack = packing.drop_borrowed(pack)  # the towers need not run where one process looks at it
        about |= {"rank": rank, "row": next(iter(pack.rows), None), "num_seqs": pack.num_seqs}
        named = {n: x.contiguous() for n, x in tree.leaves_with_path(pack)}
        save_file(named, folder / "sequence.safetensors")
    save_file({n: x.contiguous() for n, x in weights.items()}, folder / "weights.safetensors")
    (folder / "fault.json").write_text(json.dumps(about) + "\n")


def load_fault(folder: str | Path) -> tuple[Packed, dict[str, Tensor], dict[str, Any]]:
    """Read (the sequence as a pack, the weights by name, what is known) of a folder fault_STEP.

    ValueError for a folder without a sequence, and for one whose files are damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / "sequence.safetensors").is_file():
        raise ValueError(f"fault: expected a folder fault_STEP with sequence.safetensors, got {folder}")

    # columns of the user's lie under extra/, and media under media/
    try:
        flat: dict[str, Any] = load_file(folder / "sequence.safetensors")
        weights = load_file(folder / "weights.safetensors")
        about = border.object_of("fault.json", border.read_json((folder / "fault.json").read_text()))
        if not {"step", "rank", "row"} <= set(about):
            raise ValueError("fault.json has no step, rank or row")
        border.integer("step", about["step"], low=0)
        for name in {"rank", "row", "num_seqs"} & about.keys():
            if about[name] is not None:
                border.integer(name, about[name], low=0)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise ValueError(f"fault: the files of {folder} are damaged: {error}") from None
    extra = _below("extra", flat)
    media = _below("media", flat)
    if media:
        flat["media"] = Media(tensors=_below("tensors", media), rows=_below("rows", media), **media)
    size = about.get("num_seqs", 1)  # 2 where a loss of pairs broke
    pack = Packed(**flat, extra=extra or None, num_seqs=size, unit=(size,), rows=())
    return pack, weights, about


def _below(name: str, flat: dict[str, Any]) -> dict[str, Any]:
    """Take out the entries NAME/..., named by the rest."""
    names = [n for n in flat if n.startswith(f"{name}/")]
    return {n.removeprefix(f"{name}/"): flat.pop(n) for n in names}
