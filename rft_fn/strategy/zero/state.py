"""The state of a model whose weights and moments an engine of DeepSpeed holds.

For a checkpoint it is turned into whole tensors by name, each rank with its rows of them, and back: such a
checkpoint resumes under every strategy, and one of any strategy resumes here.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_fn import ckpt, dist, optim, tree
from rft_fn.strategy.zero import engine as zero
from rft_fn.types import TrainState

__all__ = ["ZeroState", "moved", "restore", "save", "state_of"]


@tree.struct
class ZeroState:
    """The optimizer state of a model whose moments the engine holds."""

    count: int  # steps done
    engine: zero.Engine = tree.static()


def state_of(engine: zero.Engine, *, count: int, done: int, skipped: int) -> TrainState:
    """The state after `done` updates, of which `count` were steps and the last `skipped` were not."""
    params = tree.map(lambda p: p, engine.own)
    opt: tuple = (ZeroState(count=count, engine=engine),)
    if engine.lowered.decay is not None:
        opt += (optim.EmaState(average=engine.average()),)
    return TrainState(params=params, opt=opt, step=done, skipped=skipped, tx=engine.tx, module=engine.module)


@cache
def _hosts() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.world(),))


def _spread(x: Tensor) -> Tensor:
    """A whole tensor on the host, of which this rank keeps its share of the rows."""
    x = x.detach().cpu()
    if dist.world() == 1:
        return x
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = _hosts()
    part = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    own = part.to_local().clone()  # a view would keep all of x
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())


def _opt(spec: Mapping[str, Any], count: int, held: Mapping[str, tree.Named]) -> Any:
    """The optimizer state that the transform of `spec` would have, so that others can go on with it."""
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
    """The state of that kind in an optimizer state, or None."""
    if isinstance(opt, kind):
        return opt
    for part in optim.parts(opt):
        found = _found(part, kind)
        if found is not None:
            return found
    return None


@torch.no_grad()
def _tensors(state: TrainState, *, values: bool) -> TrainState:
    """The state as one of tensors, each rank with its rows of them: of what they are now, or only of their
    shapes."""
    held = state.opt[0]
    engine = held.engine

    def every(get: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tree.Named:
        out = tree.Named()
        for name, p in state.params.items():
            shape = getattr(p, "ds_shape", p.shape)  # stage 3 leaves p itself empty
            whole = get(p) if values else torch.empty(shape)
            out[name] = _spread(whole.to(dtype))
        return out

    kept = {name: every(partial(engine.moment, name=name)) for name in engine.moments}
    if engine.config.use_mp_opt:
        kept["master"] = every(engine.full)
        params = every(engine.full, torch.bfloat16)
    else:
        params = every(engine.full)
    opt = _opt(state.tx.spec, held.count, kept)
    return TrainState(
        params=params, opt=opt, step=state.step, skipped=state.skipped, tx=state.tx, module=state.module
    )


def _each(state: ckpt.States, f: Callable[..., Any], *more: Any) -> Any:
    """`f` of a state, or of each of several: by name, or in a list."""
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
    """`ckpt.save` of the weights and moments that the engine holds, by all ranks: a folder with which every
    strategy goes on."""
    return ckpt.save(path, _each(state, partial(_tensors, values=True)), extra, score=score, writer=writer)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


@torch.no_grad()
def _adopt(like: TrainState, found: TrainState) -> TrainState:
    """`found` in the engine of `like`, which is donated."""
    engine = like.opt[0].engine
    adam = _found(found.opt, optim.AdamState)
    held = {"m": adam.m, "v": adam.v}
    ema = _found(found.opt, optim.EmaState)
    if ema is not None:
        held["average"] = ema.average
    weights = found.params
    wide = _found(found.opt, optim.MasterState)
    if wide is not None:
        weights = wide.master

    for name, p in engine.own.items():
        engine.assign(p, _whole(weights[name]), {kind: _whole(x[name]) for kind, x in held.items()})
    engine.set_count(adam.count)
    engine.turn += 1  # gradients that were there are of other weights
    tree.donate(like)
    return state_of(engine, count=adam.count, done=found.step, skipped=found.skipped)


def restore(path: str | Path, like: ckpt.States, extra: Any = None) -> tuple[Any, Any]:
    """`ckpt.restore` into the engine of `like` (one state, a dict or a list of them), which is donated.

    Nothing has been changed if it raises.
    """
    found, extra = ckpt.restore(path, _each(like, partial(_tensors, values=False)), extra)
    return _each(like, _adopt, found), extra


def moved(state: TrainState, *, host: bool) -> TrainState:
    """The state with its moments on the host, or back. Donates `state`."""
    held = state.opt[0]
    held.engine.place(host=host)
    new = state_of(held.engine, count=held.count, done=state.step, skipped=state.skipped)
    tree.donate(state)
    return new
