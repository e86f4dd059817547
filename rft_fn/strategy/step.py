"""Gradients and updates for parameters that are tensors, plain ones or DTensors."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rft_fn import dist, metric, optim, tree
from rft_fn.loss.gradient import gradient
from rft_fn.model.copies import mover_of, to_device
from rft_fn.optim.in_place import step_in_place
from rft_fn.optim.updates import local_parts
from rft_fn.precision import wide
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.strategy.session import Session
from rft_fn.types import Apply, LossFn, Packed, TrainState

__all__ = ["check_trains", "finite", "grad", "merge_metrics", "update"]


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

    A loss that does not depend on a parameter has a gradient of 0. `note(i, sums)` reads the sums of
    gradients by name after pack i, which the next backward adds to. ValueError for a parameter that no
    backward can reach, a copy of one: its gradient would be 0 whatever the loss.
    """
    check_trains(state.params)
    device = next(iter(state.params.values())).device
    return gradient(
        state.params,
        apply,
        loss_fn,
        (to_device(pack, device) for pack in packs),
        phase=lambda name: session.phase(f"{name} of step {state.step + 1}"),
        note=note,
    )


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
