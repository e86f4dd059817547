"""What all strategies do alike, around a backend's part of each function."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import check, ckpt, dist, memory, packing, tree
from rft_fn import model as model_lib
from rft_fn.model.bind import Scorer, read_field, require_fields, to_params_device
from rft_fn.model.layers import Where
from rft_fn.model.lora import Export
from rft_fn.strategy import diagnose, host, step
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.packer import Packer
from rft_fn.strategy.placing import Placing, require_device, require_own_apply, residence_below, residence_of
from rft_fn.strategy.session import Session
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
from rft_fn.types.media import MEDIA_COST

__all__ = ["Backend", "all_true", "watched"]


# ---------- whole rows, scored by a model


def require_same_sampling(apply: Apply, drawn: Sampling | None) -> None:
    """Raise ValueError for a model that scores another distribution than a rollout was drawn from."""
    residence = residence_below(apply)
    if drawn is None or residence is None:
        return
    for part in residence.root.modules():
        if isinstance(part, Scorer) and part.sampling.distribution != drawn.distribution:
            raise ValueError(
                f"sampling: expected a model bound with that of the rollout, {drawn.described}, got "
                f"{part.sampling.described}; give st.init and st.bind sampling=rollout.sampling, or "
                "tree.replace(rollout, sampling=None) where that is meant"
            )


def _all_rows(batch: Experience | Rollout) -> Experience:
    """Return the batch with a weight on every token in mask, so that no row is left out."""
    w = batch.mask.float()
    if isinstance(batch, Rollout):
        # its own log-probs may be NaN, which is what is looked into: they only say what was sampled
        old_logp = torch.nan_to_num(batch.logp, nan=-1.0)
        return experience(batch, adv=torch.zeros_like(w), w=w, old_logp=old_logp)
    return tree.replace(batch, w=w)


# ---------- a strategy: what all of them do alike, around what differs


P = ParamSpec("P")
T = TypeVar("T")


def watched(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Describe lost processes in the errors of a method, which may wait for them."""

    @wraps(method)
    def call(self: Any, *args: P.args, **options: P.kwargs) -> T:
        with self.session.watch():
            return method(self, *args, **options)

    return call


def all_true(x: bool) -> bool:
    """Return whether x is true on every process."""
    return all(dist.all_gather_object(x))


class Backend(ABC):
    """The functions of a strategy; `types.record(Strategy, backend)` makes the record of them.

    A subclass lays out modules (`bind`) and puts a parameter together (`_whole`). What begins with an
    underscore is the backend's part of the function of that name; by default it is that of plain tensors.
    """

    def __init__(self, config: StrategyConfig, session: Session, *, rank: int = 0, world: int = 1):
        cuda = torch.cuda.is_available()
        self.config = config
        self.session = session
        self.rank = rank
        self.world = world
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.packer = Packer(config)
        self.placing = Placing(config)
        if config.deterministic:
            session.settings.enter_context(host.deterministic_algorithms())

    # ----- models

    @watched
    def bind(
        self,
        module: nn.Module,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, tree.Named]:
        """Lay out a module that only scores; with offload_models it is then on the host."""
        apply, params = self._bind(module, sampling=sampling, entropy=entropy, aux=aux, shard_size=shard_size)
        self.placing.rest(residence_of(apply))
        return apply, params

    @abstractmethod
    def _bind(
        self,
        module: nn.Module,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, tree.Named]:
        """Lay out a module: (apply, params); see `types.strategy.Bind`."""

    @watched
    def init(self, module: nn.Module, tx: Transform, **options: Any) -> tuple[Apply, TrainState]:
        """Lay out a module that is trained: (apply, state); ValueError unless `tx` is a Transform."""
        if not all(hasattr(tx, field) for field in Transform._fields):
            name = getattr(tx, "__name__", type(tx).__name__)
            raise ValueError(
                f"tx: expected a Transform, such as optim.adamw(1e-6), got {name}; one of your own is "
                "Transform(init, update, spec)"
            )
        apply, state = self._init(module, tx, **options)
        residence_of(apply).bound = weakref.ref(apply)
        self.placing.begin(residence_of(apply), state)
        return apply, state

    def _init(self, module: nn.Module, tx: Transform, **options: Any) -> tuple[Apply, TrainState]:
        apply, params = self._bind(module, **options)
        return apply, step.start(params, tx, self.config, module, residence_of(apply))

    @watched
    def place(self, apply: Apply, where: Where, /) -> None:
        """Move the weights of a bound model to the "device" or to the "host"."""
        residence_of(apply).move(where)

    @watched
    def make_room(self) -> None:
        """Move all trained models with their optimizers to the host, with offload_models."""
        self.placing.make_room()

    # ----- batches

    @watched
    def gather(self, x: Any, /) -> Any:
        """Join the trees of all ranks."""
        return dist.gather(x)

    @watched
    def all_reduce(self, x: Any, op: str = "mean") -> Any:
        """Reduce numbers over all ranks."""
        return dist.all_reduce(x, op)

    @watched
    def shard(
        self,
        exp: Experience,
        budget: int,
        *,
        unit: int | Sequence[int] = 1,
        media_cost: float = MEDIA_COST,
        halves: bool | None = False,
    ) -> list[Packed]:
        """Cut a batch into packs, and return this rank's."""
        plans = self.packer.rows(exp, budget, world=self.world, unit=unit, media_cost=media_cost)
        split = None
        if halves is not False:
            plans, split = self.packer.halved(
                exp, budget, plans, unit=unit, media_cost=media_cost, always=halves
            )
        least = self.packer.sequences(exp, plans, unit)

        # the plan is of numbers, which every rank has; of media it has those that its own packs read
        plan = plans[self.rank]
        exp = tree.replace(exp, media=dist.fetch_media(exp.media, packing.owners(exp, plan)))
        packs = [packing.pack(exp, rows, unit=packing.units_of(unit, rows)) for rows in plan]
        packs = [packing.fill(b, least) for b in packs]
        if split is None:
            return packs
        return [tree.replace(b, half=(int(i >= split.packs), *split.prompts)) for i, b in enumerate(packs)]

    @torch.no_grad()
    @watched
    def score(
        self,
        apply: Apply,
        params: Any,
        batch: Experience | Rollout,
        budget: int,
        *,
        fields: Sequence[str] = ("logp",),
        unit: int | Sequence[int] = 1,
    ) -> TokenOut:
        """Score whole rows: every rank its own packs, and every rank gets all rows."""
        require_fields(fields)
        require_same_sampling(apply, batch.sampling)
        exp = _all_rows(batch)
        packs = self.shard(exp, budget, unit=unit)
        with self.placing.brought(residence_below(apply)):
            params = self._read(apply, params)
            outs = [apply(params, pack) for pack in to_params_device(apply, params, packs)]

        def rows(name: str) -> Tensor:
            """Return one field of the packs of all ranks as [B, S, ...], 0 outside mask."""
            mine = [read_field(out, name).to(exp.tokens.device) for out in outs]
            return self.gather(packing.unpack(mine, packs, exp.tokens)[None]).sum(0)

        # in the same order on every rank, as a set is not
        return TokenOut(**{name: rows(name) for name in dict.fromkeys(["logp", *fields])})

    def _read(self, apply: Apply, params: Any) -> Any:
        """Return the parameters as the packs of one call read them."""
        return params

    # ----- gradients and updates

    def grad(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], /
    ) -> tuple[Any, dict[str, Any]]:
        """Compute gradients, after checks of what they are of; they know what they were computed from."""
        with self.session.watch():
            self.session.writer.poll()  # a checkpoint that could not be written is news now, not at the next
        # not before: what the loading of models frees would fall into pieces, and be held for nothing
        if self.config.keep_memory and self.device.type == "cpu":
            host.disable_malloc_trim()
        require_own_apply(state, apply)
        for pack in packs:
            require_same_sampling(apply, pack.sampling)
        self.placing.bring(residence_of(apply))
        grads, metrics = self._grad(state, apply, loss_fn, packs)
        return diagnose.with_source(grads, diagnose.Source(apply, loss_fn, packs)), metrics

    def _grad(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
    ) -> tuple[Any, dict[str, Any]]:
        return step.grad(state, apply, loss_fn, packs, session=self.session)

    def update(self, state: TrainState, grads: Any, /) -> tuple[TrainState, dict[str, Any]]:
        """Take a step; gradients that are not finite are diagnosed when they stop the run."""
        self.placing.bring(state.residence, opt=True)
        require_device(state)
        source = getattr(grads, "source", None)
        try:
            new, metrics = self._update(state, grads)
        except diagnose.NonFinite as error:
            if source is None:  # gradients that a script made itself
                raise
            with self.session.phase(f"diagnosis of step {state.step + 1}"):
                line = self._diagnose(state, source)
            raise diagnose.NonFinite(f"{error}; {line}") from None
        self.placing.follow(new)
        return new, metrics

    def _update(self, state: TrainState, grads: Any) -> tuple[TrainState, dict[str, Any]]:
        return step.update(state, grads, config=self.config, session=self.session)

    def _finite(self, grads: Any) -> bool:
        """Return whether all gradients are finite, the same on every rank."""
        return step.finite(grads)

    def _diagnose(self, state: TrainState, source: diagnose.Source) -> str:
        """Dump the first sequence without finite gradients, and return a line about it."""

        def broken(packs: Sequence[Packed]) -> bool:
            grads, _ = self._grad(state, source.apply, source.loss_fn, packs)
            return not self._finite(grads)

        # weights that are not finite are dumped too
        weights = {n: x.detach().cpu().clone() for n, x in self._export(state, finite=False)}
        return diagnose.dump(self.session.dump_dir, state.step + 1, broken, source.packs, weights)

    def offload(self, state: TrainState, /) -> TrainState:
        """Move the optimizer to the host. Donates `state`."""
        self.placing.move_opt(state, "host")
        return step.move_opt(state, "cpu")

    def reload(self, state: TrainState, /) -> TrainState:
        """Move the optimizer to the device of this process. Donates `state`."""
        self.placing.move_opt(state, "device")
        return step.move_opt(state, self.device)

    # ----- weights and checkpoints

    @abstractmethod
    def _whole(self, state: TrainState, p: Tensor) -> Tensor:
        """Return a trained parameter as a full tensor; all ranks call it."""

    def _export(self, state: TrainState, *, finite: bool = True) -> Export:
        """Return the trained weights; with `finite`, ValueError for one with NaN or inf."""
        return Export(state.params, state.module, partial(self._whole, state), finite=finite)

    def export(self, state: TrainState, /) -> Export:
        """Return the trained weights by the plain model's names, adapters merged."""
        self.placing.bring(state.residence)
        require_device(state)
        return self._export(state)

    @watched
    def save_pretrained(
        self,
        folder: str | Path,
        module: Any,
        tokenizer: Any = None,
        weights: Any = (),
        *,
        merge: bool = False,
    ) -> Path:
        """Write a model as a folder."""
        return model_lib.save(folder, module, tokenizer, weights, merge=merge, write=self.rank == 0)

    def save(
        self,
        path: str | Path,
        state: Any,
        extra: Any = None,
        *,
        score: float | None = None,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint; without `wait` while training continues."""
        with self.session.phase("checkpoint"):
            writer = None if wait else self.session.writer
            if wait:
                self.session.writer.finish()  # of a save before this one, which may have failed
            return self._save(path, state, extra, score=score, writer=writer)

    _save = staticmethod(ckpt.save)

    # these two read and delete folders, so they need not wait for a write under way
    def restore(self, path: str | Path, like: Any, extra: Any = None) -> tuple[Any, Any]:
        """Read a checkpoint: (state, extra). Donates `like`."""
        with self.session.phase("restore"):
            return self._restore(path, like, extra)

    _restore = staticmethod(ckpt.restore)

    @watched
    def rotate(
        self, folder: str | Path, *, keep: int, best: int = 0, max_bytes: int | None = None
    ) -> list[Path]:
        """Delete old checkpoints, and return them."""
        writer = self.session.writer
        return ckpt.rotate(folder, keep=keep, best=best, max_bytes=max_bytes, writer=writer)

    # ----- the process

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*map(check.printable, args), **options)

    @watched
    def report_memory(self, prefix: str = "") -> dict[str, int]:
        """Measure the memory of this process."""
        return memory.report(prefix)

    def close(self) -> None:
        """Wait for the checkpoint writer, and leave the processes."""
        self.session.close(self._release)

    def _release(self) -> None:  # noqa: B027 - not abstract: most backends hold nothing
        """Give back what the backend itself holds."""
