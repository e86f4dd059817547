"""One model in a DeepSpeed engine: its steps, moves and checkpoints."""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import ckpt, dist, optim, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.copies import mover_of
from rft_fn.model.reader import Reader
from rft_fn.strategy import prepare
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.zero.stages import MOMENTS, lower, options, stage_of
from rft_fn.types import Packed, Sampling, TrainState, Transform

__all__ = [
    "Average", "Root", "ZeroModel", "ZeroState", "gather_with_root", "initialize", "library", "model_of",
    "moved", "restore", "save", "state_of", "wrap_for_training",
]  # fmt: skip


def library() -> Any:
    """Return the module deepspeed, silent but for errors. ValueError where it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at its import
    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires LOCAL_RANK even without torchrun
    try:
        import deepspeed
        from deepspeed.utils import logger
    except ImportError as error:
        raise ValueError(
            f"zero_stage: expected deepspeed, got {error}; pip install 'deepspeed>=0.19'"
        ) from error
    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # it calls those
    # sums over shared memory, which it would compile here and now; gloo needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Root(nn.Module):
    """A module with a dict of tensors as its output, for DeepSpeed's hooks."""

    inner: nn.Module

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, pack: Packed) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self.inner(pack)).items() if x is not None}


def wrap_for_training(
    config: StrategyConfig,
    module: nn.Module,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
) -> Root:
    """Wrap a module for training: pack -> the fields of a TokenOut.

    ValueError for float64 and float16, which DeepSpeed rounds.
    """
    quantize.require_whole(module, "DeepSpeed ZeRO")
    module = prepare.cast(model_lib.materialize(module), config)
    for dtype in (torch.float64, torch.float16):
        if any(p.dtype == dtype for p in module.parameters()):
            got = str(dtype).removeprefix("torch.")
            raise ValueError(f"zero_stage: expected a module in float32 or bfloat16, got one in {got}")
    return Root(
        model_lib.wrap_for_training(
            module,
            sampling=sampling,
            entropy=entropy,
            aux=aux,
            fused=config.fused_linear_logprob,
            chunk_size=config.chunk_size,
            fast_linear=False,  # stage 3 has a linear function instead of torch's, which frees weights
            share_prefixes=config.share_prefixes,
        )
    )


def initialize(config: StrategyConfig, root: Root, clip: float = 0.0, **optimizer: Any) -> Any:
    """Make DeepSpeed's engine of a root; without an `optimizer` it only scores."""
    how = options(config, root, clip)
    return library().initialize(model=root, config=how, dist_init_required=False, **optimizer)[0]


def gather_with_root(root: Root, module: nn.Module) -> None:
    """Have stage 3 gather the weights that are read outside of their own module's forward.

    They are a Scorer's fused head, and the parameters of a custom module itself.
    """
    outside = list(root.inner.parameters(recurse=False))
    if isinstance(root.inner, Reader) and root.inner.fused:
        lm: Any = module
        outside += lm.get_output_embeddings().parameters()
    for p in outside:
        library().zero.register_external_parameter(root, p)


class Average(tree.Named):
    """The average of each parameter by name, gathered when all ranks read it."""

    model: "ZeroModel"

    def __getitem__(self, name: str) -> Tensor:
        return self.model.moment(super().__getitem__(name), "average")

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)


class ZeroModel:
    """A model in training; DeepSpeed holds its gradients and optimizer."""

    def __init__(self, config: StrategyConfig, module: nn.Module, root: Root, tx: Transform):
        self.module = module
        self.turn = 0  # gradients of another turn are no longer in the engine
        self.params = tree.Named((n, p) for n, p in module.named_parameters() if p.requires_grad)
        if not self.params:
            raise ValueError("module: expected trainable parameters, got none with requires_grad")

        # the transform as another strategy would run it: checkpoints are of its state
        self.config = replace(config, use_mp_opt=prepare.masters(config, self.params))
        self.tx = prepare.optimizer(tx, config, self.params)

        # DeepSpeed has the masters; clipping and AdamW are lowered to it
        clip = optim.clip_by_global_norm(config.max_norm) if config.max_norm else optim.chain()
        self.lowered = lower(optim.chain(clip, tx).spec)
        self.moments = ["m", "v"] if self.lowered.decay is None else ["m", "v", "average"]

        optimizer = self.lowered.optimizer(self.params)
        self.deepspeed_engine = initialize(self.config, root, self.lowered.clip, optimizer=optimizer)
        self.adamw: Any = self.deepspeed_engine.basic_optimizer
        self.stage = stage_of(self.deepspeed_engine.optimizer, config.zero_stage)
        self._begin_moments()
        if config.zero_stage == 3:
            gather_with_root(root, module)

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield (this rank's flat weights, AdamW's state of them), group by group."""
        for flat in self.stage.flat_weights():
            yield flat, self.adamw.state[flat]

    def _begin_moments(self) -> None:
        """Make moments of 0, which torch makes in the first step only, and the average."""
        for flat, state in self._states():
            state[MOMENTS["m"]] = torch.zeros_like(flat)
            state[MOMENTS["v"]] = torch.zeros_like(flat)
            if "average" in self.moments:
                state[MOMENTS["average"]] = flat.detach().clone()
            state["step"] = torch.tensor(0.0)
        self.stage.link_moments()

    def clear(self) -> None:
        """Drop gradients that no step has used."""
        self.turn += 1
        self.stage.clear()

    def finite(self) -> bool:
        """Return whether the gradients have neither NaN nor inf on any rank."""
        return all(dist.all_gather_object(self.stage.finite()))

    def square(self) -> float:
        """Return the square of the gradients' norm, over all ranks, which all call it."""
        mine = sum(float(x.double().square().sum()) for x in self.stage.gradients())
        return sum(dist.all_gather_object(mine / self.stage.copies))

    def take_gradients(self) -> list[Tensor]:
        """Return a copy of this rank's part of the gradients, and drop them."""
        held = [x.clone() for x in self.stage.gradients()]
        self.stage.clear()
        return held

    def add_gradients(self, held: list[Tensor]) -> None:
        """Add what `take_gradients` returned, after the last backward of a batch."""
        for x, more in zip(self.stage.gradients(), held):
            x.add_(more)

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Add the gradient of `total` [] to the sum over packs and ranks.

        `last` is true for the last one before a step.
        """
        self.deepspeed_engine.set_gradient_accumulation_boundary(last)
        self.deepspeed_engine.backward(total * dist.world())  # it averages over ranks

    def step(self, count: int) -> float:
        """Step with the gradients, after `count` steps, and return their norm.

        Nothing changes where the norm is not finite.
        """
        if not self.finite():  # whether DeepSpeed looks itself depends on its version and the stage
            self.clear()
            return math.inf
        for group in self.adamw.param_groups:
            group["lr"] = float(self.lowered.schedule(count))
        self.deepspeed_engine.step()
        return math.inf if self.stage.overflowed() else float(self.deepspeed_engine.get_global_grad_norm())

    def place(self, *, host: bool) -> None:
        """Move the moments to the host, or to the device of the float32 weights.

        DeepSpeed's own offload_states is for its own Adam at stage 3, and forgets these links at 1 and 2.
        """
        mover = None
        for flat, state in self._states():
            mover = mover or mover_of(flat.device)
            for name in self.moments:
                if mover is not None:  # on a CPU they stay where they are
                    copy = mover.to_host if host else mover.to_device
                    state[MOMENTS[name]] = copy(state[MOMENTS[name]])
        if mover is not None:
            mover.finish()
        self.stage.link_moments()

    def average(self) -> Average:
        """Return the average of the weights, for optim.ema."""
        out = Average(self.params)
        out.model = self
        return out

    def weight(self, p: Tensor) -> Tensor:
        """Return a whole parameter, in float32 where it is stepped so. All ranks call it."""
        return self.stage.weight(p)

    def moment(self, p: Tensor, name: str) -> Tensor:
        """Return a whole moment ("m", "v" or "average") in float32. All ranks call it."""
        return self.stage.moment(p, MOMENTS[name])

    @torch.no_grad()
    def assign(self, p: Tensor, value: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Give a parameter its whole value and moments, the same on every rank."""
        from deepspeed import zero

        with zero.GatheredParameters([p], modifier_rank=0):
            p.data.copy_(value)
        self.stage.set_weight(p, value.to(device=p.device, dtype=torch.float32))
        for name, x in moments.items():
            self.stage.set_moment(p, MOMENTS[name], x.to(device=p.device, dtype=torch.float32))

    def set_count(self, count: int) -> None:
        """Set the number of steps in the moments."""
        for _, state in self._states():
            state["step"].fill_(count)


# ---------- the training state of a model under DeepSpeed, and its form in a checkpoint


@tree.struct
class ZeroState:
    """The optimizer state of a model with its moments in DeepSpeed."""

    count: int  # steps done
    model: ZeroModel = tree.static()


def state_of(model: ZeroModel, *, count: int, done: int, skipped: int) -> TrainState:
    """Return the state after `done` updates: `count` were steps, and the last `skipped` were not."""
    params = tree.map(lambda p: p, model.params)
    opt: tuple = (ZeroState(count=count, model=model),)
    if model.lowered.decay is not None:
        opt += (optim.EmaState(average=model.average()),)
    return TrainState(params=params, opt=opt, step=done, skipped=skipped, tx=model.tx, module=model.module)


def model_of(state: TrainState) -> ZeroModel:
    """Return the model of a state."""
    return state.opt[0].model


@cache
def _hosts() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.world(),))


def _spread(x: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, on the host."""
    x = x.detach().cpu()
    if dist.world() == 1:
        return x
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = _hosts()
    part = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    rows = part.to_local().clone()  # a view would keep all of x
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())


def _opt(spec: Mapping[str, Any], count: int, held: Mapping[str, tree.Named]) -> Any:
    """Build the optimizer state of the transform with this `spec`, from tensors by kind."""
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


def _part(opt: Any, kind: type) -> Any:
    """Return the part of an optimizer state of this kind, or None."""
    if isinstance(opt, kind):
        return opt
    parts = (_part(part, kind) for part in optim.parts(opt))
    return next((part for part in parts if part is not None), None)


@torch.no_grad()
def _tensors(state: TrainState, *, values: bool) -> TrainState:
    """Return the state as tensors, each rank with its rows; without `values` only of their shapes."""
    model = model_of(state)

    def every(get: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tree.Named:
        out = tree.Named()
        for name, p in state.params.items():
            shape = getattr(p, "ds_shape", p.shape)  # stage 3 leaves p itself empty
            whole = get(p) if values else torch.empty(shape)
            out[name] = _spread(whole.to(dtype))
        return out

    # float32 weights are masters of narrow parameters, else the parameters themselves
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
    """Apply `f` to a state, or to each in a dict or list."""
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
    """Save the weights and moments that DeepSpeed holds; every strategy can resume from the folder."""
    return ckpt.save(path, _each(state, partial(_tensors, values=True)), extra, score=score, writer=writer)


def _whole(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def _adopt(like: TrainState, saved: TrainState) -> TrainState:
    """Put a saved state into the model of `like`, which is donated."""
    model = model_of(like)
    adam = _part(saved.opt, optim.AdamState)
    held = {"m": adam.m, "v": adam.v}
    ema = _part(saved.opt, optim.EmaState)
    if ema is not None:
        held["average"] = ema.average

    # masters, where there are any, are the weights without rounding
    masters = _part(saved.opt, optim.MasterState)
    weights = saved.params if masters is None else masters.master

    for name, p in model.params.items():
        model.assign(p, _whole(weights[name]), {kind: _whole(x[name]) for kind, x in held.items()})
    model.set_count(adam.count)
    model.turn += 1  # gradients that were there are of other weights
    tree.donate(like)
    return state_of(model, count=adam.count, done=saved.step, skipped=saved.skipped)


def restore(path: str | Path, like: ckpt.States, extra: Any = None) -> tuple[Any, Any]:
    """Restore the models of `like`: one state, a dict or a list. Donates `like`.

    Nothing has changed if it raises.
    """
    saved, extra = ckpt.restore(path, _each(like, partial(_tensors, values=False)), extra)
    return _each(like, _adopt, saved), extra


def moved(state: TrainState, *, host: bool) -> TrainState:
    """Move the moments to the host, or back. Donates `state`."""
    held = state.opt[0]
    held.model.place(host=host)
    new = state_of(held.model, count=held.count, done=state.step, skipped=state.skipped)
    tree.donate(state)
    return new
