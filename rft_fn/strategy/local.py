"""One process, one plain module: the reference for every other backend."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rft_fn import ckpt, metric, optim, tree
from rft_fn import model as model_lib
from rft_fn.types import Apply, LossFn, Packed, Sampling, Strategy, TokenOut, TrainState, Transform

__all__ = ["local"]


def loss_and_metrics(loss_fn: LossFn, out: TokenOut, pack: Packed) -> tuple[Tensor, dict]:
    """(the pack's part of the total loss [], metrics). ValueError unless the loss is one number a token."""
    result = loss_fn(out, pack)
    per_token, metrics = result if isinstance(result, tuple) else (result, {})
    if per_token.shape != pack.w.shape:
        raise ValueError(
            f"loss: expected [T] = {list(pack.w.shape)}, one number a token, got {list(per_token.shape)}; "
            "the average is in w, so a loss must not reduce"
        )
    total = (pack.w * per_token).sum()
    return total, {"loss": metric.sum(total.detach()), **metrics}


def init(
    module: nn.Module, tx: Transform, *, sampling: Sampling | None = None, entropy: bool = False
) -> tuple[Apply, TrainState]:
    """(apply, state) of a module that is trained with `tx`."""
    apply, params = model_lib.bind(module, sampling=sampling, entropy=entropy)
    if not params:
        raise ValueError("module: expected trainable parameters, got none with requires_grad")
    return apply, TrainState(params=params, opt=tx.init(params), step=0, tx=tx)


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """(gradients by name of the sum over packs of (w loss).sum(), merged metrics).
    The only place that calls backward."""
    metrics: dict[str, metric.Metric] = {}
    device = next(iter(state.params.values())).device
    for p in state.params.values():
        p.grad = None
    for pack in packs:
        pack = tree.map(lambda x: x.to(device), pack)
        total, more = loss_and_metrics(loss_fn, apply(state.params, pack), pack)
        if total.requires_grad:
            total.backward()
        metrics = metric.merge(metrics, more)
    grads = tree.Named(
        (n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in state.params.items()
    )
    for p in state.params.values():
        p.grad = None
    return grads, metrics


@torch.no_grad()
def update(state: TrainState, grads: tree.Named) -> tuple[TrainState, dict[str, metric.Metric]]:
    """(the state one step on, metrics). Donates both arguments: the step is
    in place, reading them again raises.

    Gradients with a NaN or an inf change nothing but the step, and count as `grad/skipped`.
    """
    norm = optim.global_norm(grads)
    finite = bool(torch.isfinite(norm))
    opt = state.opt
    if finite:
        updates, opt = state.tx.update(grads, state.opt, state.params)
        optim.apply_updates(state.params, updates)
    new = TrainState(params=state.params, opt=opt, step=state.step + 1, tx=state.tx)
    new = tree.map(lambda x: x, new)  # fresh containers: the old ones are closed now
    tree.donate(state, grads)
    return new, {"grad/norm": metric.sum(norm), "grad/skipped": metric.sum(torch.tensor(float(not finite)))}


def export(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Full tensors by the model's own names."""
    for name, p in state.params.items():
        yield name, p.detach()


def _move_opt(state: TrainState, device: str | torch.device) -> TrainState:
    move = lambda x: x.to(device) if isinstance(x, Tensor) else x  # noqa: E731
    new = TrainState(
        params=tree.map(lambda x: x, state.params),
        opt=tree.map(move, state.opt),
        step=state.step,
        tx=state.tx,
    )
    tree.donate(state)
    return new


def local(device: torch.device | None = None) -> Strategy:
    """The Strategy of one process: real code on one device and no mocks."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Strategy(
        init=init,
        gather=lambda x: x,
        grad=grad,
        update=update,
        export=export,
        save=ckpt.save,
        restore=ckpt.restore,
        offload=lambda state: _move_opt(state, "cpu"),
        reload=lambda state: _move_opt(state, device),
        rank=0,
        world=1,
        device=device,
    )
