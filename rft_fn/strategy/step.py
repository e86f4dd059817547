"""Gradients and updates for parameters that are tensors, plain ones or DTensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import ckpt, dist, metric, optim, packing, tree
from rft_fn import model as model_lib
from rft_fn.loss.evaluate import evaluate
from rft_fn.model import blocks
from rft_fn.model.bind import Scorer, read_field, require_fields, to_params_device
from rft_fn.model.materialize import Residence
from rft_fn.optim.transforms import local_parts
from rft_fn.precision import wide
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.diagnose import NonFinite
from rft_fn.types import (
    Apply,
    Experience,
    LossFn,
    Packed,
    Rollout,
    Sampling,
    TokenOut,
    TrainState,
    Transform,
    experience,
)
from rft_fn.types.strategy import Gather, ScoreRows, Shard

__all__ = [
    "Session", "cast", "compile_blocks", "finite", "grad", "loss_and_metrics", "masters", "merge_metrics",
    "move_opt", "offload", "optimizer", "reload", "require_same_sampling", "scorer", "start", "update",
    "wrap_for_training",
]  # fmt: skip


# ---------- the resources of a strategy, which it owns and closes


class Session:
    """The processes of a strategy, its checkpoint writer, and the folder for dumps of faults."""

    def __init__(self, processes: dist.Processes | None = None):
        self.processes = processes or dist.Processes()
        self.writer = ckpt.Writer()
        self.dump_dir = Path(".")

    @property
    def current_phase(self) -> str:
        """The phase of this process: the innermost block, or the last one before the script's own code."""
        return self.processes.current_phase

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Call what this process does inside the block `name`; LostProcess where it loses another."""
        return self.processes.phase(name)

    def watch(self) -> AbstractContextManager[None]:
        """Raise LostProcess for an error in the block about a lost process."""
        return self.processes.watch()

    def set_dump_dir(self, folder: str | Path) -> None:
        """Set the folder that dumps of gradients that are not finite go to."""
        self.dump_dir = Path(folder)

    def close(self, release: Callable[[], None] | None = None) -> None:
        """Wait for the checkpoint writer, which may raise, then leave the processes. Twice is once.

        `release` is called between the two: the writer needs the other processes.
        """
        try:
            with self.watch():
                self.writer.finish()
        finally:
            try:
                if release is not None:
                    release()
            finally:
                self.processes.close()


# ---------- whole rows scored by a model: its outputs for every token of a batch, the same on every rank


def require_same_sampling(apply: Apply, drawn: Sampling | None) -> None:
    """ValueError for a language model that scores another distribution than a rollout was drawn from."""
    residence = getattr(apply, "residence", None)
    if drawn is None or residence is None:
        return
    for part in residence.root.modules():
        if isinstance(part, Scorer) and part.sampling.distribution != drawn.distribution:
            raise ValueError(
                f"sampling: expected a model bound with that of the rollout, {drawn.described}, got "
                f"{part.sampling.described}; give st.init and st.bind sampling=rollout.sampling, or "
                "tree.replace(rollout, sampling=None) where that is meant"
            )


def scorer(shard: Shard, gather: Gather) -> ScoreRows:
    """`Strategy.score` for a strategy that cuts batches by `shard` and puts them together by `gather`."""

    @torch.no_grad()
    def score(
        apply: Apply,
        params: Any,
        batch: Experience | Rollout,
        budget: int,
        *,
        fields: Sequence[str] = ("logp",),
    ) -> TokenOut:
        require_fields(fields)
        require_same_sampling(apply, batch.sampling)

        # every rank scores its own packs, and gets the rows of all
        exp = _all_rows(batch)
        packs = shard(exp, budget)
        outs = [apply(params, pack) for pack in to_params_device(apply, params, packs)]
        names = list(dict.fromkeys(["logp", *fields]))  # in the same order on every rank, as a set is not
        rows = {name: _rows(name, outs, packs, exp, gather) for name in names}
        return TokenOut(**rows)

    return score


def _all_rows(batch: Experience | Rollout) -> Experience:
    """The batch with a weight on every token in mask, so that no row is left out."""
    w = batch.mask.float()
    if isinstance(batch, Rollout):
        # its own log-probs may be NaN, which is what is looked into: they only say what was sampled
        old_logp = torch.nan_to_num(batch.logp, nan=-1.0)
        return experience(batch, adv=torch.zeros_like(w), w=w, old_logp=old_logp)
    return tree.replace(batch, w=w)


def _rows(
    name: str, outs: Sequence[TokenOut], packs: Sequence[Packed], exp: Experience, gather: Gather
) -> Tensor:
    """One field of the packs of all ranks as [B, S, ...], 0 outside mask."""
    mine = [read_field(out, name).to(exp.tokens.device) for out in outs]
    return gather(packing.unpack(mine, packs, exp.tokens)[None]).sum(0)


# ---------- gradients and updates for parameters that are tensors, plain ones or DTensors


NARROW = (torch.bfloat16, torch.float16)


def loss_and_metrics(loss_fn: LossFn, out: TokenOut, pack: Packed) -> tuple[Tensor, dict]:
    """(the pack's part of the total loss [], metrics); ValueError unless the loss is one number per token."""
    per_token, metrics = evaluate(loss_fn, out, pack)
    if per_token.shape != pack.w.shape:
        raise ValueError(
            f"loss: expected [T] = {list(pack.w.shape)}, one number a token, got {list(per_token.shape)}; "
            "the average is in w, so a loss must not reduce"
        )
    total = (pack.w * per_token).sum()
    return total, {"loss": metric.sum(total.detach()), **metrics}


def masters(config: StrategyConfig, params: Mapping[str, Tensor]) -> bool:
    """Whether the optimizer keeps float32 masters of the parameters that it trains.

    It does with use_mp_opt, and by default for parameters in 16 bits.

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


def optimizer(tx: Transform, config: StrategyConfig, params: Mapping[str, Tensor]) -> Transform:
    """`tx` wrapped as the config requests: clipped before, float32 masters of 16-bit `params` under it."""
    if config.max_norm:
        tx = optim.chain(optim.clip_by_global_norm(config.max_norm), tx)
    if masters(config, params):
        tx = optim.master_weights(tx)
    return tx


def cast(module: nn.Module, config: StrategyConfig) -> nn.Module:
    """The module in bfloat16 with use_mp_opt, in float32 with bf16, else unchanged."""
    if config.use_mp_opt:
        return module.to(torch.bfloat16)
    if config.bf16:
        return module.float()
    return module


def wrap_for_training(
    config: StrategyConfig,
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
) -> nn.Module:
    """`model.wrap_for_training` with the options of the config."""
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

    After `reader.settle`, so that its short questions are not compiled.
    """
    if config.compile_blocks:
        blocks.compile_blocks(root)


def start(
    params: tree.Named, tx: Transform, config: StrategyConfig, module: nn.Module, residence: Residence
) -> TrainState:
    """The state of the parameters of a module before the first update; ValueError without any."""
    if not params:
        raise ValueError("module: expected trainable parameters, got none with requires_grad")
    tx = optimizer(tx, config, params)
    opt = tx.init(params)
    state = TrainState(params=params, opt=opt, step=0, tx=tx, module=module, residence=residence)
    if config.adam_offload:
        return move_opt(state, "cpu")
    return state


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sums of 16-bit gradients are kept in float32: in bfloat16 they stop growing after 256 terms."""
    if part is None:
        return total
    part = part.to(wide(part.dtype))
    if total is None:
        return part
    torch._foreach_add_(local_parts([total]), local_parts([part]))
    return total


def grad(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], *, session: Session
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """(gradients by name of the sum over packs of (w loss).sum(), merged metrics).

    The only place that calls backward. A loss that does not depend on a parameter has a gradient of 0.
    ValueError for a parameter that no backward can reach, a copy of one: its gradient would be 0 whatever the
    loss.
    """
    # gradients of an earlier backward are not part of this sum
    _check_trains(state.params)
    metrics: dict[str, metric.Metric] = {}
    device = next(iter(state.params.values())).device
    sums: dict[str, Tensor | None] = dict.fromkeys(state.params)
    for p in state.params.values():
        p.grad = None

    # each pack's gradients are taken out at once, so that sums of 16-bit ones can be wider
    for pack in packs:
        pack = tree.map(lambda x: x.to(device), pack)
        with session.phase(f"forward of step {state.step + 1}"):
            total, more = loss_and_metrics(loss_fn, apply(state.params, pack), pack)
        with session.phase(f"backward of step {state.step + 1}"):
            if total.requires_grad:
                total.backward()
        metrics = metric.merge(metrics, more)
        for name, p in state.params.items():
            sums[name] = _add(sums[name], p.grad)
            p.grad = None

    # what no pack's loss depends on has a gradient of 0
    grads = tree.Named()
    for name, p in state.params.items():
        total = sums[name]
        if total is None:
            total = torch.zeros_like(p, dtype=wide(p.dtype))
        grads[name] = total.detach()
    return grads, metrics


def merge_metrics(mine: Mapping[str, metric.Metric], step: int, session: Session) -> dict[str, metric.Metric]:
    """The metrics of all ranks merged, the same everywhere."""
    with session.phase(f"metrics of step {step + 1}"):
        parts = dist.all_gather_object(tree.map(lambda x: x.cpu(), mine))
    metrics: dict[str, metric.Metric] = {}
    for part in parts:
        metrics = metric.merge(metrics, part)
    return metrics


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
    state: TrainState, grads: tree.Named, *, config: StrategyConfig, session: Session
) -> tuple[TrainState, dict[str, metric.Metric]]:
    """(the state one step on, metrics). Donates both: the step is in place, reading them again raises.

    Gradients with a NaN or an inf change nothing but the counts, and are `grad/skipped`; config.max_skips of
    them in a row raise NonFinite. With adam_offload the optimizer state is in host memory and steps there.
    """
    given, grads = grads, optim.by_name(state.params, grads, "grads")

    # the norm is of all ranks' gradients, so all take or skip the step alike
    with session.phase(f"update of step {state.step + 1}"):
        norm = optim.global_norm(grads)
    finite = bool(torch.isfinite(norm))
    skipped = state.skipped + 1
    if finite:
        skipped = 0
    if skipped >= config.max_skips:
        raise NonFinite(
            f"gradients: expected finite ones, got a norm of {float(norm)} in {skipped} updates in a row "
            f"(step {state.step + 1})"
        )

    # the step is in place, in the memory of the parameters
    opt = state.opt
    if finite:
        own = grads
        params = state.params
        if config.adam_offload:
            own = tree.map(lambda x: x.to("cpu"), own)
            params = tree.map(lambda x: x.to("cpu"), params)
        updates, opt = state.tx.update(own, state.opt, params)
        updates = optim.by_name(params, updates, "updates")
        optim.apply_updates(state.params, tree.map(lambda u, p: u.to(p.device), updates, state.params))

    # the old containers are closed, so the new state needs others
    new = tree.replace(state, opt=opt, step=state.step + 1, skipped=skipped)
    new = tree.map(lambda x: x, new)
    tree.donate(state, grads, given)
    return new, {"grad/norm": metric.sum(norm), "grad/skipped": metric.sum(torch.tensor(float(not finite)))}


def finite(grads: tree.Named) -> bool:
    """Whether every gradient is finite."""
    return bool(torch.isfinite(optim.global_norm(grads)))


def move_opt(state: TrainState, device: str | torch.device) -> TrainState:
    """The state with its optimizer's tensors on a device. Donates `state`."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device)

    new = tree.map(lambda x: x, tree.replace(state, opt=tree.map(move, state.opt)))
    tree.donate(state)
    return new


def offload(state: TrainState, /) -> TrainState:
    """The state with its optimizer on the host. Donates `state`."""
    return move_opt(state, "cpu")


def reload(state: TrainState, /) -> TrainState:
    """The state with its optimizer on the device of this process. Donates `state`."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return move_opt(state, device)
