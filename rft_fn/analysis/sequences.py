"""The gradient of each response: its norm, and its products with the batch's and a held-out one."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from rft_fn import check, packing, tree
from rft_fn.analysis.gradients import Kept, keep, products
from rft_fn.loss.evaluate import evaluate
from rft_fn.types import Apply, Experience, LossFn, Packed, Strategy, TrainState

__all__ = ["Sequences", "per_sequence"]


@tree.struct
class Sequences:
    """Norms and products of the gradients of B responses, or B parts, of a batch; they sum to its own."""

    norm: Tensor  # [B] f64
    with_batch: Tensor  # [B] f64, the product with the gradient of the batch; sums to its square
    with_held_out: Tensor | None  # [B] f64, with the gradient of a held-out loss; None without one
    batch_norm: Tensor  # [] f64
    held_out_norm: Tensor | None  # [] f64


def per_sequence(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    loss_fn: LossFn,
    exp: Experience,
    *,
    budget: int,
    held_out: tuple[LossFn, Sequence[Packed]] | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    chunk: int = 8,
    loop: bool | None = None,
) -> Sequences:
    """Return the norm of each response's gradient, and its products with two others, on every rank.

    A response's gradient is that of its (w loss).sum(), so that they sum to the batch's, of packs of at most
    `budget` tokens. `held_out` is a loss with this rank's packs of other rows: a step along -g lowers it by
    lr <g_b, its gradient> for response b, to first order. `parts` are the rows of each part, in place of each
    row: those of a prompt, say.

    On one process `torch.func` computes `chunk` responses at once; otherwise, and with `loop`,
    `Strategy.grad` computes one after the other: the same numbers to rounding. Memory: the gradients of the
    batch and of the held-out loss, and those of `chunk` responses (of one in a loop), never of all. A model
    or a loss that torch.func cannot trace is computed in a loop, with one line of a warning that names the
    layer; with loop=False that line is a ValueError.
    """
    rows = [[row] for row in range(len(exp.tokens))] if parts is None else [list(part) for part in parts]
    place = dict.fromkeys(state.params, 0)
    whole, held = _sums(st, state, apply, loss_fn, exp, budget, held_out)
    targets = [whole] if held is None else [whole, held]
    squares = [products(st, x, x, place) for x in targets]

    why_not = _why_in_a_loop(st, apply, exp, rows)
    if loop is False and why_not:
        raise ValueError(f"loop: expected True {why_not}, got False; leave it out")
    found = None
    if not loop and not why_not:
        try:
            found = _at_once(state, apply, loss_fn, exp, rows, targets, chunk)
        except _Untraceable as error:
            line = (
                f"apply: expected a model that torch.func can trace, got one where {error}; loop=True "
                "computes the same by st.grad, response by response"
            )
            if loop is False:
                raise ValueError(line) from error
            warnings.warn(line, stacklevel=2)
    if found is None:
        found = _one_by_one(st, state, apply, loss_fn, exp, rows, targets, place)
    return Sequences(
        norm=found[0].sqrt(),
        with_batch=found[1],
        with_held_out=None if held is None else found[2],
        batch_norm=squares[0][0].sqrt(),
        held_out_norm=None if held is None else squares[1][0].sqrt(),
    )


def _sums(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    loss_fn: LossFn,
    exp: Experience,
    budget: int,
    held_out: tuple[LossFn, Sequence[Packed]] | None,
) -> tuple[Kept, Kept | None]:
    """Return this process's part of the gradients of the batch and of the held-out loss."""
    held = None if held_out is None else keep(st, st.grad(state, apply, held_out[0], held_out[1])[0])
    return keep(st, st.grad(state, apply, loss_fn, st.shard(exp, budget))[0]), held


def _why_in_a_loop(st: Strategy, apply: Apply, exp: Experience, rows: Sequence[Sequence[int]]) -> str:
    """Return why torch.func is not asked at all, or an empty text."""
    if st.config.backend != "local":
        return f"with {st.config.backend}"
    if getattr(apply, "checkpointed", False):
        return "with gradient checkpointing"
    if exp.media is not None:
        return "with media"
    return "" if all(len(part) == 1 for part in rows) else "for parts of several rows"


def _one_by_one(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    loss_fn: LossFn,
    exp: Experience,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Kept],
    place: dict[str, int],
) -> Tensor:
    """Return (square, product with each target) of each part, [1 + targets, B], by `Strategy.grad`.

    Of several ranks one has the rows of a part, and the others an empty pack.
    """
    out = torch.zeros(1 + len(targets), len(rows), dtype=torch.float64)
    for i, part in enumerate(rows):
        pack = packing.pack(exp, part if i % st.world == st.rank else [])
        grads, _ = st.grad(state, apply, loss_fn, [pack])
        mine = keep(st, grads)
        for k, other in enumerate([mine, *targets]):
            out[k, i] = products(st, mine, other, place)[0]
        del grads, mine
    return out


# ---------- by torch.func


class _Untraceable(RuntimeError):
    """A model or a loss that torch.func cannot trace, with the place."""


def _at_once(
    state: TrainState,
    apply: Apply,
    loss_fn: LossFn,
    exp: Experience,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Kept],
    chunk: int,
) -> Tensor:
    """Return (square, product with each target) of each row, [1 + targets, B]; `chunk` rows at once."""
    params = tree.map(torch.Tensor.detach, state.params)
    device = next(iter(params.values())).device

    def total(params: Any, b: Packed) -> Tensor:
        loss, _ = evaluate(loss_fn, apply(params, b), b)
        check.shapes(w=(b.w, "T"), loss=(loss, "T"))
        return (b.w * loss).sum()

    each = vmap(grad(total), in_dims=(None, 0), randomness="different")
    columns = []
    for at in range(0, len(rows), chunk):
        index = torch.tensor([part[0] for part in rows[at : at + chunk]])
        packs = tree.map(lambda x: x.to(device), packing.stack(packing.take(exp, index)))
        with _named_errors(state.module), sdpa_kernel(SDPBackend.MATH):  # the others have no rule for vmap
            grads = each(params, packs)
        columns.append(_products_of_rows(grads, targets, len(index)))
        del grads
    return torch.cat(columns, 1)


def _products_of_rows(grads: Any, targets: Sequence[Kept], count: int) -> Tensor:
    """Return (square, product with each target) of gradients of rows, [1 + targets, count]."""
    device = next(iter(grads.values())).device
    out = torch.zeros(1 + len(targets), count, dtype=torch.float64, device=device)
    for name, x in grads.items():
        others = [target[name][0].flatten().double() for target in targets]
        for row, one in enumerate(x.detach().flatten(1)):  # one row in float64 at a time
            mine = one.double()
            out[:, row] += torch.stack([mine @ other for other in (mine, *others)])
    return out.cpu()


@contextmanager
def _named_errors(module: nn.Module | None) -> Iterator[None]:
    """Raise _Untraceable for an error in the block, with the innermost layer whose forward it ended."""
    names = {} if module is None else {id(m): name for name, m in module.named_modules()}
    inside: list[str] = []

    def enter(m: nn.Module, _: Any) -> None:
        inside.append(f"{names.get(id(m), '')} ({type(m).__name__})".strip())

    def leave(m: nn.Module, _: Any, __: Any) -> None:
        inside.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        where = inside[-1] if inside else "the loss or the backward"
        reason = str(error).strip().split("\n")[0][:200]
        raise _Untraceable(f"{where} fails: {reason}") from error
    finally:
        for hook in hooks:
            hook.remove()
