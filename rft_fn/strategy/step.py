"""Gradients and updates, the same on every backend whose parameters are tensors (plain ones or DTensors)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import ckpt, dist, faults, metric, optim, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.precision import wide
from rft_fn.types import Apply, LossFn, Packed, TokenOut, TrainState, Transform

__all__ = [
    "cast", "grad", "guarded", "loss_and_metrics", "masters", "move_opt", "optimizer", "start", "update",
]  # fmt: skip


NARROW = (torch.bfloat16, torch.float16)


def loss_and_metrics(loss_fn: LossFn, out: TokenOut, pack: Packed) -> tuple[Tensor, dict]:
    """(the pack's part of the total loss [], metrics). ValueError unless the loss is one number a token."""
    per_token, metrics = evaluate(loss_fn, out, pack)
    if per_token.shape != pack.w.shape:
        raise ValueError(
            f"loss: expected [T] = {list(pack.w.shape)}, one number a token, got {list(per_token.shape)}; "
            "the average is in w, so a loss must not reduce"
        )
    total = (pack.w * per_token).sum()
    return total, {"loss": metric.sum(total.detach()), **metrics}


def masters(config: Any, params: Mapping[str, Tensor]) -> bool:
    """Whether the optimizer keeps float32 masters of these parameters, which it trains: where it is told to,
    and unasked where they are in 16 bits.

    ValueError for 16 bits without masters: a learning rate of 1e-6 moves no bfloat16 weight above 5e-4.
    """
    narrow = [name for name, p in params.items() if p.dtype in NARROW]
    if narrow and config.use_mp_opt is False and not config.bf16:
        raise ValueError(
            f"use_mp_opt, bf16: expected one of them for {narrow[0]} in {params[narrow[0]].dtype}, got "
            "neither: its updates would be rounded away; leave out use_mp_opt for float32 masters, or set "
            "bf16 for float32 parameters"
        )
    return bool(config.use_mp_opt or (narrow and not config.bf16))


def optimizer(tx: Transform, config: Any, params: Mapping[str, Tensor]) -> Transform:
    """`tx` with what the config asks for around it: clipping before it, float32 masters of 16-bit `params`
    under it."""
    if config.max_norm:
        tx = optim.chain(optim.clip_by_global_norm(config.max_norm), tx)
    if masters(config, params):
        tx = optim.master_weights(tx)
    return tx


def cast(module: nn.Module, config: Any) -> nn.Module:
    """The module in the type that its parameters are kept in: bfloat16 with use_mp_opt, float32 with bf16,
    else as it is."""
    if config.use_mp_opt:
        return module.to(torch.bfloat16)
    return module.float() if config.bf16 else module


def start(params: Any, tx: Transform, config: Any) -> TrainState:
    """The state of parameters before the first update. ValueError without any."""
    if not params:
        raise ValueError("module: expected trainable parameters, got none with requires_grad")
    tx = optimizer(tx, config, params)
    state = TrainState(params=params, opt=tx.init(params), step=0, tx=tx)
    return move_opt(state, "cpu") if config.adam_offload else state


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sums of 16-bit gradients are kept in float32: in bfloat16 they stop growing after 256 terms."""
    if part is None:
        return total
    part = part.to(wide(part.dtype))
    return part if total is None else total.add_(part)


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """(gradients by name of the sum over packs of (w loss).sum(), merged metrics). The only place that calls
    backward.

    A loss that does not depend on a parameter has a gradient of 0. ValueError for a parameter that no
    backward can reach, a copy of one: its gradient would be 0 whatever the loss.
    """
    _check_trains(state.params)
    metrics: dict[str, metric.Metric] = {}
    device = next(iter(state.params.values())).device
    sums: dict[str, Tensor | None] = dict.fromkeys(state.params)
    for p in state.params.values():
        p.grad = None
    for pack in packs:
        pack = tree.map(lambda x: x.to(device), pack)
        with dist.phase(f"forward of step {state.step + 1}"):
            total, more = loss_and_metrics(loss_fn, apply(state.params, pack), pack)
        with dist.phase(f"backward of step {state.step + 1}"):
            if total.requires_grad:
                total.backward()
        metrics = metric.merge(metrics, more)
        for name, p in state.params.items():
            sums[name] = _add(sums[name], p.grad)
            p.grad = None
    grads = tree.Named()
    for name, p in state.params.items():
        total = sums[name]
        if total is None:
            total = torch.zeros_like(p, dtype=wide(p.dtype))
        grads[name] = total.detach()
    return grads, metrics


def _check_trains(params: Mapping[str, Tensor]) -> None:
    for name, p in params.items():
        if not p.requires_grad or not p.is_leaf:
            remedy = "strategy.fork(state) makes a copy that trains"
            if hasattr(p, "device_mesh"):  # there is no fork of a sharded module's state
                remedy = "st.init a second module and model.assign(its.params, st.export(state))"
            raise ValueError(
                f"params: expected {name} to be a parameter that requires a gradient, got a copy or a frozen "
                f"one, which never learns; {remedy}"
            )


@torch.no_grad()
def update(
    state: TrainState, grads: tree.Named, *, max_skips: int = 8, host: bool = False
) -> tuple[TrainState, dict[str, metric.Metric]]:
    """(the state one step on, metrics). Donates both arguments: the step is in place, reading them again
    raises.

    Gradients with a NaN or an inf change nothing but the counts, and are `grad/skipped`; after `max_skips` of
    them in a row faults.NonFinite. With `host` the optimizer state is in host memory and steps there.
    """
    with dist.phase(f"update of step {state.step + 1}"):
        norm = optim.global_norm(grads)
    finite = bool(torch.isfinite(norm))
    if not finite and state.skipped + 1 >= max_skips:
        raise faults.NonFinite(
            f"gradients: expected finite ones, got a norm of {float(norm)} in {state.skipped + 1} updates "
            f"in a row (step {state.step + 1})"
        )
    opt = state.opt
    if finite:
        here, params = grads, state.params
        if host:
            here, params = (tree.map(lambda x: x.to("cpu"), x) for x in (grads, state.params))
        updates, opt = state.tx.update(here, state.opt, params)
        optim.apply_updates(state.params, tree.map(lambda u, p: u.to(p.device), updates, state.params))
    skipped = 0 if finite else state.skipped + 1
    new = TrainState(
        params=state.params, opt=opt, step=state.step + 1, skipped=skipped, tx=state.tx, module=state.module
    )
    new = tree.map(lambda x: x, new)  # fresh containers: the old ones are closed now
    tree.donate(state, grads)
    return new, {"grad/norm": metric.sum(norm), "grad/skipped": metric.sum(torch.tensor(float(not finite)))}


Grad = Callable[..., tuple[Any, dict]]


def _finite(grads: Any) -> bool:
    return bool(torch.isfinite(optim.global_norm(grads)))


def guarded(
    grad: Grad, update: Callable, export: Callable, finite: Callable[[Any], bool] = _finite
) -> tuple[Grad, Callable]:
    """`grad` and `update`, such that an update that raises faults.NonFinite leaves the sequence at fault and
    the weights in a folder that the error names. `finite` says of gradients whether all of them are."""
    last: dict[int, tuple] = {}  # by model: what its gradients were made of

    def name(state: TrainState) -> int:
        return id(next(iter(state.params.values())))

    def remembered(state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]) -> Any:
        ckpt.poll()  # a checkpoint that could not be written is news now, not when the next one is due
        last[name(state)] = (apply, loss_fn, packs)
        return grad(state, apply, loss_fn, packs)

    def safe(state: TrainState, grads: Any) -> Any:
        model = name(state)
        try:
            out = update(state, grads)
        except faults.NonFinite as error:
            if model not in last:
                raise
            apply, loss_fn, packs = last[model]

            def bad(some: Sequence[Packed]) -> bool:
                return not finite(grad(state, apply, loss_fn, some)[0])

            offender = faults.first_offender(bad, packs)
            weights = {n: x.detach().cpu().clone() for n, x in export(state)}
            folder = faults.write(state, offender, weights)
            what = "the first sequence with such a gradient is"
            if offender is None:
                what = "no sequence alone has such a gradient, the weights are"
            raise faults.NonFinite(f"{error}; {what} in {folder}: look at it with replay.py") from None
        last.pop(model, None)  # the packs are used up
        return out

    return remembered, safe


def move_opt(state: TrainState, device: str | torch.device) -> TrainState:
    """The state with its optimizer's tensors on a device. Donates `state`."""

    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    new = tree.map(lambda x: x, tree.replace(state, opt=tree.map(move, state.opt)))
    tree.donate(state)
    return new
