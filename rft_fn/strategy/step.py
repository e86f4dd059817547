"""Gradients and updates for parameters that are tensors, plain ones or DTensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import dist, metric, optim, tree
from rft_fn import model as model_lib
from rft_fn.loss.gradient import gradient, loss_and_metrics
from rft_fn.model import layers
from rft_fn.model.copies import mover_of, to_device
from rft_fn.model.layers import Residence
from rft_fn.optim.in_place import step_in_place
from rft_fn.optim.updates import local_parts
from rft_fn.precision import wide
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.strategy.session import Session
from rft_fn.types import (
    Apply,
    LossFn,
    Packed,
    Sampling,
    TrainState,
    Transform,
)

__all__ = [
    "cast", "check_trains", "compile_blocks", "finite", "grad", "loss_and_metrics", "masters",
    "merge_metrics", "move_opt", "noise_meter", "optimizer", "start", "update", "wrap_for_training",
]  # fmt: skip


NARROW = (torch.bfloat16, torch.float16)


def masters(config: StrategyConfig, params: Mapping[str, Tensor]) -> bool:
    """Return whether the optimizer keeps float32 masters of the parameters.

    It does with use_mp_opt, and by default for parameters in 16 bits. ValueError for 16 bits without
    masters: a learning rate of 1e-6 moves no bfloat16 weight above 5e-4.
    """
    narrow = [name for name, p in params.items() if p.dtype in NARROW]
    if narrow and config.use_mp_opt is False and not config.bf16:
        raise ValueError(
            f"use_mp_opt, bf16: expected one of them for {narrow[0]} in {params[narrow[0]].dtype}, got "
            "neither: its updates would be rounded away; leave out use_mp_opt for float32 masters, or set "
            "bf16 for float32 parameters"
        )
    return bool(config.use_mp_opt or (narrow and not config.bf16))


def optimizer(tx: Transform, config: StrategyConfig, params: Mapping[str, Tensor]) -> Transform:
    """Wrap `tx` as the config requests: clip before it, and step float32 masters of 16-bit `params`."""
    if config.max_norm:
        tx = optim.chain(optim.clip_by_global_norm(config.max_norm), tx)
    if masters(config, params):
        tx = optim.master_weights(tx)
    return tx


def cast(module: nn.Module, config: StrategyConfig) -> nn.Module:
    """Cast a module: to bfloat16 with use_mp_opt, to float32 with bf16, else not."""
    if config.use_mp_opt:
        return module.to(torch.bfloat16)
    return module.float() if config.bf16 else module


def wrap_for_training(
    config: StrategyConfig,
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
) -> nn.Module:
    """Call `model.wrap_for_training` with the options of the config."""
    return model_lib.wrap_for_training(
        module,
        sampling=sampling,
        entropy=entropy,
        aux=aux,
        fused=config.fused_linear_logprob,
        chunk_size=config.chunk_size,
        fast_linear=config.fast_linear,
        share_prefixes=config.share_prefixes,
    )


def compile_blocks(config: StrategyConfig, root: nn.Module) -> None:
    """Compile the decoder blocks of a bound module, if the config requests it.

    To be called after `reader.detect_packing`, so that its short forwards are not compiled.
    """
    if config.compile_blocks:
        layers.compile_blocks(root)


def start(
    params: tree.Named, tx: Transform, config: StrategyConfig, module: nn.Module, residence: Residence
) -> TrainState:
    """Return the state before the first update; ValueError for a module without trainable parameters."""
    if not params:
        raise ValueError("module: expected trainable parameters, got none with requires_grad")
    tx = optimizer(tx, config, params)
    opt = tx.init(params)
    state = TrainState(params=params, opt=opt, step=0, tx=tx, module=module, residence=residence)
    return move_opt(state, "cpu") if config.adam_offload else state


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], *, session: Session
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """Return (gradients by name of the sum over packs of (w loss).sum(), merged metrics).

    A loss that does not depend on a parameter has a gradient of 0. ValueError for a parameter that no
    backward can reach, a copy of one: its gradient would be 0 whatever the loss.
    """
    check_trains(state.params)
    device = next(iter(state.params.values())).device
    noise = noise_meter(packs)
    grads, metrics = gradient(
        state.params,
        apply,
        loss_fn,
        (to_device(pack, device) for pack in packs),
        phase=lambda name: session.phase(f"{name} of step {state.step + 1}"),
        note=None if noise is None else noise.note,
    )
    if noise is not None:
        metrics = {**metrics, **noise.metrics()}
    return grads, metrics


def noise_meter(packs: Sequence[Packed]) -> Any:
    """Return what reads the noise of gradients from the halves of packs; None for others."""
    if not any(pack.half for pack in packs):
        return None
    from rft_fn.analysis.noise import Meter  # above, and only for a step that asks

    return Meter(packs)


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


def move_opt(state: TrainState, device: str | torch.device) -> TrainState:
    """Move the optimizer's tensors to a device. Donates `state`."""

    mover = mover_of(next(iter(state.params.values())).device)
    to_host = torch.device(device).type == "cpu"

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if mover is None:
            return x.to(device)
        return mover.to_host(x) if to_host else mover.to_device(x)

    new = tree.map(lambda x: x, tree.replace(state, opt=tree.map(move, state.opt)))
    if mover is not None:
        mover.finish()
    tree.donate(state)
    return new
