"""Gradients of several losses on one buffer: their norms and cosines, by layer too."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import check, metric, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.precision import wide
from rft_fn.types import Apply, LossFn, Packed, Strategy, TokenOut, TrainState

__all__ = ["Gradients", "gradients", "keep", "layer_of", "local_parts", "products"]


@tree.struct
class Gradients:
    """Inner products of the gradients of K losses, in L layers."""

    products: Tensor  # [L, K, K] f64, NaN for a pair that was not asked for
    names: tuple[str, ...] = tree.static()  # of the K losses
    layers: tuple[str, ...] = tree.static()  # such as model.layers.0, in the order of the parameters
    metrics: dict[str, dict[str, float]] = tree.static()  # of each loss, and "loss", its value

    @property
    def norm(self) -> Tensor:
        """Return the norm of each gradient, [K]."""
        return self.products.sum(0).diagonal().sqrt()

    @property
    def cosine(self) -> Tensor:
        """Return the cosine of each pair of gradients, [K, K]; NaN for a gradient of 0."""
        return _cosine(self.products.sum(0))

    @property
    def layer_norm(self) -> Tensor:
        """Return the norm of each layer's part of each gradient, [L, K]."""
        return self.products.diagonal(dim1=-2, dim2=-1).sqrt()

    @property
    def layer_cosine(self) -> Tensor:
        """Return the cosine of each pair in each layer, [L, K, K]; NaN where one is 0."""
        return _cosine(self.products)


def _cosine(products: Tensor) -> Tensor:
    norm = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / (norm.unsqueeze(-1) * norm.unsqueeze(-2))


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its name up to the first number, else without its last part."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def gradients(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    loss_fns: Mapping[str, LossFn],
    packs: Sequence[Packed],
    *,
    reference: str | None = None,
    layer: Callable[[str], str] = layer_of,
    one_forward: bool | None = None,
) -> Gradients:
    """Return the inner products of the gradients of several losses, summed over packs and ranks.

    `loss_fns` are by name; each is as in `Strategy.grad`. All ranks call it, with their own packs, and all
    get the same numbers. With `reference`, the name of one loss, only products with its gradient are computed
    (and every norm): K gradients. `layer` says which layer a parameter of a name belongs to.

    `one_forward` runs each pack's forward once, and K backwards: on one process, for a module without
    gradient checkpointing and without bf16's cast, which is where it is the default. It holds K + 2
    gradients, and the activations of one pack. Otherwise `Strategy.grad` runs for each loss in turn, and at
    most two gradients are in memory at once (in shards where they are sharded; under ZeRO, which holds the
    last one itself, also one whole parameter): K (K - 1) / 2 + 1 gradients without a `reference`. Under ZeRO
    the gradients of earlier calls of `st.grad` are gone afterwards. ValueError for no loss, for a reference
    that is none of them, and for one_forward=True where it cannot be.
    """
    names = tuple(loss_fns)
    if not names:
        raise ValueError("loss_fns: expected one or more losses by name, got none")
    if reference is not None and reference not in names:
        raise ValueError(f"reference: expected one of {', '.join(names)}, got {reference!r}")
    why_not = _why_in_turn(st, apply)
    if one_forward and why_not:
        raise ValueError(f"one_forward: expected False {why_not}, got True; leave it out")
    layers = tuple(dict.fromkeys(layer(name) for name in state.params))
    place = {name: layers.index(layer(name)) for name in state.params}
    out = torch.full((len(layers), len(names), len(names)), torch.nan, dtype=torch.float64)
    metrics: dict[str, dict[str, float]] = {}

    if one_forward is not False and not why_not:
        sums, found = _all_at_once(st, state, apply, list(loss_fns.values()), packs)
        for i, name in enumerate(names):
            metrics[name] = metric.results(found[i])
            for j in range(i + 1):
                if reference in (None, names[i], names[j]) or i == j:
                    out[:, i, j] = out[:, j, i] = products(st, sums[i], sums[j], place)
        return Gradients(products=out, names=names, layers=layers, metrics=metrics)

    def compare(i: int, j: int, *, last: bool) -> Kept:
        """Compute gradient j and its products with gradient i; return it if it is stored."""
        grads, found = st.grad(state, apply, loss_fns[names[j]], packs)
        metrics[names[j]] = metric.results(found)
        out[:, j, j] = products(st, grads, grads, place)
        if i != j:
            out[:, i, j] = out[:, j, i] = products(st, held, grads, place)
        return keep(st, grads) if last else Kept()

    # one gradient is held while the others are computed in turn; the last of them is the next to be held
    left = list(range(len(names)))
    at = left.pop(0 if reference is None else names.index(reference))
    held = compare(at, at, last=True)
    while left:
        found = [compare(at, j, last=reference is None and j == left[-1]) for j in left]
        if reference is not None:
            break
        at, held = left.pop(), found.pop()
    in_order = {name: metrics[name] for name in names}
    return Gradients(products=out, names=names, layers=layers, metrics=in_order)


def _why_in_turn(st: Strategy, apply: Apply) -> str:
    """Return why losses cannot share a forward, or an empty text."""
    if st.config.backend != "local":
        return f"with {st.config.backend}"
    if getattr(apply, "checkpointed", False):
        return "with gradient checkpointing"
    return "with bf16" if st.config.bf16 else ""


def _all_at_once(
    st: Strategy, state: TrainState, apply: Apply, loss_fns: Sequence[LossFn], packs: Sequence[Packed]
) -> tuple[list[tree.Named], list[dict[str, metric.Metric]]]:
    """Return (gradients, metrics) of each loss, from one forward of each pack.

    It is a call of `Strategy.grad` with a loss that has no gradient, and takes those of all losses.
    """
    params = list(state.params.values())
    sums = [tree.Named((n, torch.zeros_like(p, dtype=wide(p.dtype))) for n, p in state.params.items())
            for _ in loss_fns]  # fmt: skip
    found: list[dict[str, metric.Metric]] = [{} for _ in loss_fns]

    def every(out: TokenOut, b: Packed) -> Tensor:
        for k, loss_fn in enumerate(loss_fns):
            loss, metrics = evaluate(loss_fn, out, b)
            check.shapes(w=(b.w, "T"), loss=(loss, "T"))
            total = (b.w * loss).sum()
            found[k] = metric.merge(found[k], {"loss": metric.sum(total.detach()), **metrics})
            if total.requires_grad:
                parts = torch.autograd.grad(total, params, retain_graph=True, allow_unused=True)
                for x, part in zip(sums[k].values(), parts):
                    if part is not None:
                        x += part
        return torch.zeros_like(b.w)

    st.grad(state, apply, every, packs)
    return sums, found


# ---------- inner products of gradients, wherever they are


class Kept(dict[str, tuple[Tensor, int]]):
    """This process's part of gradients: name -> (part, how many processes have the same)."""


def local_parts(st: Strategy, grads: Any) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, this process's part of a gradient, how many processes have the same).

    Under ZeRO one whole parameter's gradient is in memory at a time. All ranks iterate to the end.
    """
    for name, x in grads.items():
        if isinstance(x, tuple):
            yield name, *x
        elif hasattr(x, "device_mesh"):
            copies = 1
            for i, placement in enumerate(x.placements):
                copies *= 1 if placement.is_shard() else x.device_mesh.size(i)
            yield name, x.to_local(), copies
        elif isinstance(grads, tree.Named):
            yield name, x, st.world
        else:  # of ZeRO: whole ones, gathered one after the other
            yield name, x.flatten().tensor_split(st.world)[st.rank].clone(), 1


def keep(st: Strategy, grads: Any) -> Kept:
    """Return this process's part of gradients, which a later `Strategy.grad` does not change."""
    return Kept((name, (x, copies)) for name, x, copies in local_parts(st, grads))


def products(st: Strategy, a: Any, b: Any, place: Mapping[str, int]) -> Tensor:
    """Return the inner products [L] f64 of two gradients, by the layer `place` of each parameter's name.

    Summed over all ranks, which all call it. `a` is kept, or `b` itself.
    """
    out = torch.zeros(max(place.values()) + 1, dtype=torch.float64)
    mine = {} if a is b else {name: x for name, x, _ in local_parts(st, a)}
    for name, x, copies in local_parts(st, b):
        other = mine.get(name, x).flatten().double()
        out[place[name]] += float(other @ x.flatten().double()) / copies
    return st.all_reduce(out, "sum") if st.world > 1 else out
