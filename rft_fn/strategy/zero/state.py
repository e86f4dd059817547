"""The training state of a model under DeepSpeed, and its form in a checkpoint.

A checkpoint has whole tensors by name, each rank with its rows of them: it resumes under every strategy, and
one of any strategy resumes here.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import ckpt, dist, optim, tree
from rft_fn.strategy.zero.engine import ZeroModel
from rft_fn.types import TrainState

__all__ = ["ZeroState", "model_of", "moved", "restore", "save", "state_of"]


@tree.struct
class ZeroState:
    """The optimizer state of a model whose moments DeepSpeed holds."""

    count: int  # steps done
    model: ZeroModel = tree.static()


def state_of(model: ZeroModel, *, count: int, done: int, skipped: int) -> TrainState:
    """The state after `done` updates.

    `count` of them were steps, and the last `skipped` were not.
    """
    params = tree.map(lambda p: p, model.params)
    opt: tuple = (ZeroState(count=count, model=model),)
    if model.lowered.decay is not None:
        opt += (optim.EmaState(average=model.average()),)
    return TrainState(params=params, opt=opt, step=done, skipped=skipped, tx=model.tx, module=model.module)


def model_of(state: TrainState) -> ZeroModel:
    """The model that a state is of."""
    return state.opt[0].model


@cache
def _hosts() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.world(),))


def _spread(x: Tensor) -> Tensor:
    """This rank's rows of a whole tensor, on the host."""
    x = x.detach().cpu()
    if dist.world() == 1:
        return x
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = _hosts()
    part = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    rows = part.to_local().clone()  # a view would keep all of x
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())


def _opt(spec: Mapping[str, Any], count: int, held: Mapping[str, tree.Named]) -> Any:
    """The optimizer state of the transform with this `spec`, from tensors by kind."""
    name = spec["name"]
    if name == "chain":
        return tuple(_opt(inner, count, held) for inner in spec["txs"])
    if name == "master_weights":
        return optim.MasterState(master=held["master"], inner=_opt(spec["tx"], count, held))
    if name == "ema":
        return optim.EmaState(average=held["average"])
    if name == "adamw":
        return optim.AdamState(count=count, m=held["m"], v=held["v"])
    return ()


def _found(opt: Any, kind: type) -> Any:
    """The part of an optimizer state that is of this kind, or None."""
    if isinstance(opt, kind):
        return opt
    for part in optim.parts(opt):
        found = _found(part, kind)
        if found is not None:
            return found
    return None


@torch.no_grad()
def _tensors(state: TrainState, *, values: bool) -> TrainState:
    """The state as one of tensors, each rank with its rows of them.

    Without `values` only their shapes and types are those of the state.
    """
    model = model_of(state)

    def every(get: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tree.Named:
        out = tree.Named()
        for name, p in state.params.items():
            shape = getattr(p, "ds_shape", p.shape)  # stage 3 leaves p itself empty
            whole = get(p) if values else torch.empty(shape)
            out[name] = _spread(whole.to(dtype))
        return out

    # float32 weights are masters beside narrow parameters, else the parameters themselves
    held = {name: every(partial(model.moment, name=name)) for name in model.moments}
    if model.config.use_mp_opt:
        held["master"] = every(model.weight)
        params = every(model.weight, torch.bfloat16)
    else:
        params = every(model.weight)
    opt = _opt(state.tx.spec, state.opt[0].count, held)
    return TrainState(
        params=params, opt=opt, step=state.step, skipped=state.skipped, tx=state.tx, module=state.module
    )


def _each(state: ckpt.States, f: Callable[..., Any], *more: Any) -> Any:
    """`f` of a state, or of each in a dict or list."""
    if isinstance(state, TrainState):
        return f(state, *more)
    if isinstance(state, Mapping):
        return {name: f(x, *(m[name] for m in more)) for name, x in state.items()}
    return [f(*parts) for parts in zip(state, *more)]


def save(
    path: str | Path,
    state: ckpt.States,
    extra: Any = None,
    *,
    score: float | None = None,
    writer: ckpt.Writer | None = None,
) -> Path:
    """`ckpt.save` of the weights and moments that DeepSpeed holds, by all ranks.

    Every strategy can resume from the folder.
    """
    return ckpt.save(path, _each(state, partial(_tensors, values=True)), extra, score=score, writer=writer)


def _whole(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor):
        return x.full_tensor()
    return x


@torch.no_grad()
def _adopt(like: TrainState, found: TrainState) -> TrainState:
    """`found` in the model of `like`, which is donated."""
    model = model_of(like)
    adam = _found(found.opt, optim.AdamState)
    held = {"m": adam.m, "v": adam.v}
    ema = _found(found.opt, optim.EmaState)
    if ema is not None:
        held["average"] = ema.average

    # masters, where there are any, are the weights without rounding
    weights = found.params
    wide = _found(found.opt, optim.MasterState)
    if wide is not None:
        weights = wide.master

    for name, p in model.params.items():
        model.assign(p, _whole(weights[name]), {kind: _whole(x[name]) for kind, x in held.items()})
    model.set_count(adam.count)
    model.turn += 1  # gradients that were there are of other weights
    tree.donate(like)
    return state_of(model, count=adam.count, done=found.step, skipped=found.skipped)


def restore(path: str | Path, like: ckpt.States, extra: Any = None) -> tuple[Any, Any]:
    """`ckpt.restore` into the models of `like`, which is donated.

    `like` is one state, or a dict or a list of them. Nothing has been changed if it raises.
    """
    found, extra = ckpt.restore(path, _each(like, partial(_tensors, values=False)), extra)
    return _each(like, _adopt, found), extra


def moved(state: TrainState, *, host: bool) -> TrainState:
    """The state with its moments on the host, or back. Donates `state`."""
    held = state.opt[0]
    held.model.place(host=host)
    new = state_of(held.model, count=held.count, done=state.step, skipped=state.skipped)
    tree.donate(state)
    return new
