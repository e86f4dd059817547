"""Gradients and updates for parameters that are tensors, plain ones or DTensors."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rft_fn import dist, metric, optim, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.model.copies import mover_of, to_device
from rft_fn.optim.in_place import step_in_place
from rft_fn.optim.updates import local_parts
from rft_fn.precision import wide
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.strategy.session import Session
from rft_fn.types import Apply, LossFn, Packed, TokenOut, TrainState

__all__ = [
    "check_trains", "finite", "grad", "loss_and_metrics", "merge_metrics", "update",
]  # fmt: skip


def loss_and_metrics(loss_fn: LossFn, out: TokenOut, pack: Packed) -> tuple[Tensor, dict]:
    """Return (the pack's part of the total loss [], metrics).

    ValueError unless the loss is one number per token.
    """
    per_token, metrics = evaluate(loss_fn, out, pack)
    if per_token.shape != pack.w.shape:
        raise ValueError(
            f"loss: expected [T] = {list(pack.w.shape)}, one number a token, got {list(per_token.shape)}; "
            "the average is in w, so a loss must not reduce"
        )
    total = (pack.w * per_token).sum()
    return total, {"loss": metric.sum(total.detach()), **metrics}


def _widen_gradients(sums: dict[str, Tensor], params: Mapping[str, Tensor]) -> None:
    """Move the 16-bit gradients of one pack from the parameters into wide sums.

    The others stay where they are: the next backward adds to them, parameter by parameter, so that there are
    never two whole gradients.
    """
    parts = {name: p.grad for name, p in params.items() if p.dtype != wide(p.dtype) and p.grad is not None}
    old = [name for name in parts if name in sums]
    if old:
        torch._foreach_add_(local_parts([sums[name] for name in old]), local_parts([parts[n] for n in old]))
    for name in list(parts):
        params[name].grad = None
        part = parts.pop(name)  # so that its memory is free before the next one is made wide
        if name not in sums:  # in bfloat16 a sum stops growing after 256 terms
            sums[name] = part.to(wide(part.dtype))


def _sums(narrow: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums so far, in the order of the parameters, of those that a loss depended on."""
    found = {name: narrow.get(name, p.grad) for name, p in params.items()}
    return {name: x for name, x in found.items() if x is not None}


def grad(
    state: TrainState,
    apply: Apply,
    loss_fn: LossFn,
    packs: Sequence[Packed],
    *,
    session: Session,
    note: Callable[[int, Mapping[str, Tensor]], None] | None = None,
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """Return (gradients by name of the sum over packs of (w loss).sum(), merged metrics).

    The only place that calls backward. A loss that does not depend on a parameter has a gradient of 0.
    `note(i, sums)` reads the sums of gradients by name after pack i, which the next backward adds to.
    ValueError for a parameter that no backward can reach, a copy of one: its gradient would be 0 whatever the
    loss.
    """
    # gradients of an earlier backward are not part of this sum
    check_trains(state.params)
    metrics: dict[str, metric.Metric] = {}
    device = next(iter(state.params.values())).device
    narrow: dict[str, Tensor] = {}
    for p in state.params.values():
        p.grad = None

    for i, pack in enumerate(packs):
        pack = to_device(pack, device)
        with session.phase(f"forward of step {state.step + 1}"):
            total, more = loss_and_metrics(loss_fn, apply(state.params, pack), pack)
        with session.phase(f"backward of step {state.step + 1}"):
            if total.requires_grad:
                total.backward()
        metrics = metric.merge(metrics, more)
        _widen_gradients(narrow, state.params)
        if note is not None:
            note(i, _sums(narrow, state.params))

    # what no pack's loss depends on has a gradient of 0
    grads, sums = tree.Named(), _sums(narrow, state.params)
    for name, p in state.params.items():
        p.grad, total = None, sums.get(name)
        grads[name] = torch.zeros_like(p, dtype=wide(p.dtype)) if total is None else total.detach()
    return grads, metrics


def merge_metrics(mine: Mapping[str, metric.Metric], step: int, session: Session) -> dict[str, metric.Metric]:
    """Merge the metrics of all ranks, on every rank."""
    with session.phase(f"metrics of step {step + 1}"):
        parts = dist.all_gather_object(tree.map(lambda x: x.cpu(), mine))
    metrics: dict[str, metric.Metric] = {}
    for part in parts:
        metrics = metric.merge(metrics, part)
    return metrics


def check_trains(params: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a parameter that no backward can reach."""
    for name, p in params.items():
        if not p.requires_grad or not p.is_leaf:
            sharded = hasattr(p, "device_mesh")  # there is no fork of a sharded module's state
            second = "st.init a second module and model.assign(its.params, st.export(state))"
            remedy = second if sharded else "strategy.fork(state) makes a copy that trains"
            raise ValueError(
                f"params: expected {name} to be a parameter that requires a gradient, got a copy or a frozen "
                f"one, which never learns; {remedy}"
            )


@torch.no_grad()
def update(
    state: TrainState, grads: tree.Named, *, config: StrategyConfig, session: Session
) -> tuple[TrainState, dict[str, metric.Metric]]:
    """Take a step in place: (the state one step on, metrics). Donates both arguments.

    Gradients with a NaN or an inf change nothing but the counts, and are `grad/skipped`; config.max_skips of
    them in a row raise NonFinite. With adam_offload the optimizer state is in host memory and steps there.
    """
    given, grads = grads, optim.by_name(state.params, grads, "grads")
    on_gpu = _on_gpu(state.params, grads)
    mover = None
    own, params = grads, state.params
    if config.adam_offload and on_gpu:  # on their way to the host while the norm is computed
        mover = mover_of(next(iter(params.values())).device)
    if mover is not None:
        own, params = tree.map(mover.to_host, grads), tree.map(mover.to_host, params)

    # the norm is of all ranks' gradients, so all take or skip the step alike
    with session.phase(f"update of step {state.step + 1}"):
        norm = optim.global_norm(grads)
    finite = bool(torch.isfinite(norm))
    if mover is not None:
        mover.finish()
    skipped = 0 if finite else state.skipped + 1
    if skipped >= config.max_skips:
        raise NonFinite(
            f"gradients: expected finite ones, got a norm of {float(norm)} in {skipped} updates in a row "
            f"(step {state.step + 1})"
        )

    # the step is in place, in the memory of the parameters
    opt = state.opt
    if finite and on_gpu:
        opt = step_in_place(state.tx, own, state.opt, params, norm.cpu() if config.adam_offload else norm)
        if config.adam_offload:
            for p, new in zip(local_parts(state.params), local_parts(params)):
                p.copy_(new, non_blocking=True)
    elif finite:
        if config.adam_offload:
            own, params = tree.map(lambda x: x.to("cpu"), own), tree.map(lambda x: x.to("cpu"), params)
        updates, opt = state.tx.update(own, state.opt, params)
        updates = optim.by_name(params, updates, "updates")
        optim.apply_updates(state.params, tree.map(lambda u, p: u.to(p.device), updates, state.params))

    # the old containers are closed, so the new state needs others
    new = tree.replace(state, opt=opt, step=state.step + 1, skipped=skipped)
    new = tree.map(lambda x: x, new)
    tree.donate(state, grads, given)
    return new, {"grad/norm": metric.sum(norm), "grad/skipped": metric.sum(torch.tensor(float(not finite)))}


def _on_gpu(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> bool:
    """Return whether parameters are on a GPU, with gradients in the type that they are summed in."""
    return all(p.device.type == "cuda" and grads[name].dtype == wide(p.dtype) for name, p in params.items())


def finite(grads: tree.Named) -> bool:
    """Return whether every gradient is finite."""
    return bool(torch.isfinite(optim.global_norm(grads)))
