"""The parts that all strategies share: the cut of a batch, and the record around a backend."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from rft_fn import check, ckpt, dist, memory, packing, tree
from rft_fn.model import reader
from rft_fn.model.lora import Export
from rft_fn.model.materialize import Residence, Where
from rft_fn.model.text import ALONE
from rft_fn.strategy import diagnose
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.step import Session, require_same_sampling, scorer
from rft_fn.types import Apply, Experience, LossFn, Packed, Strategy, TrainState, Transform
from rft_fn.types.media import MEDIA_COST
from rft_fn.types.strategy import (
    Bind,
    ExportWeights,
    Gather,
    Grad,
    Init,
    MoveState,
    Restore,
    SavePretrained,
    Update,
)

__all__ = [
    "Backend", "Cut", "assemble", "everywhere", "keep_freed", "place", "require_device",
    "require_own_apply", "residence_of",
]  # fmt: skip


# ---------- the weights of models on the device in some phases of a run, on the host in others


def residence_of(apply: Apply) -> Residence:
    """Where the weights of a bound model are. ValueError for an apply that no strategy gave."""
    found = getattr(apply, "residence", None)
    if found is None:
        raise ValueError(f"apply: expected one that st.init or st.bind gave, got {type(apply).__name__}")
    return found


def require_own_apply(state: TrainState, apply: Apply) -> None:
    """ValueError for an apply that `init` did not give with this state, or with the state that it forks."""
    residence = getattr(apply, "residence", None)
    own = residence is not None and residence is state.residence
    if state.residence is None:  # a fork, or a state of ZeRO, which knows its own
        own = residence is not None and (state.module is None or residence.module is state.module)
    if not own:
        found = getattr(apply, "__name__", type(apply).__name__)
        if residence is not None:
            found = f"that of another {residence.name}"
        raise ValueError(
            f"apply: expected the one that init gave with this state, got {found}; a model that computes "
            "something else is a module of its own: apply, state = st.init(module, tx)"
        )


def place(apply: Apply, where: Where, /) -> None:
    """Move the weights of a bound model to the "device" or to the "host"; see `types.strategy.Place`."""
    residence_of(apply).move(where)


def require_device(state: TrainState) -> None:
    """ValueError for a state whose weights are on the host."""
    if state.residence is not None:
        state.residence.require_device("state")


# ---------- memory of the host that is freed and soon needed again


# names and values of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGE = 1 << 30  # bytes from which on an allocation is the system's own, and goes back to it at once


def keep_freed() -> bool:
    """Have this process keep the memory that it frees, in blocks of up to 1 GiB.

    Returns whether it does from then on: only with glibc. A gradient frees its activations, and the next pack
    needs as much. By default glibc hands large blocks back to the system, which gives them out again page by
    page, each filled with zeros. Again is no different.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE) and mallopt(_TRIM_THRESHOLD, _NEVER))


# ---------- the parts that all strategies share: the cut of a batch, and the record around a backend


P = ParamSpec("P")
T = TypeVar("T")


class Cut:
    """How a strategy cuts batches into packs.

    A pack has one sequence (one unit) once a model of the strategy mixes those of a pack, and the rows of a
    prompt together once one computes tokens that begin alike once; each model is tested for that when it is
    bound.
    """

    def __init__(self, config: StrategyConfig, agree: Callable[[bool], bool] = bool):
        self.config = config
        self.agree = agree
        self.alone = False
        self.shared = False

    def settle(self, root: nn.Module, call: Callable[..., Any] | None = None) -> None:
        """`reader.settle`, by all processes alike; `call` is the module as it is run."""
        reader.settle(root, call=call, agree=self.agree)
        self.alone |= getattr(root, "way", None) == ALONE
        self.shared |= getattr(root, "shared", False)

    def rows(
        self,
        exp: Experience,
        budget: int,
        *,
        world: int = 1,
        unit: int | Sequence[int] = 1,
        media_cost: float = MEDIA_COST,
    ) -> list[list[list[int]]]:
        """`packing.cut` with the options of the config: the rows of each pack of each rank.

        Packs have at most `budget` tokens and micro_train_batch_size sequences; without packing_samples
        exactly so many (the last one fewer), whatever their tokens.
        """
        most = self.config.micro_train_batch_size
        if not self.config.packing_samples:
            budget = 0
            most = max([most, *check.units(unit, len(exp.tokens))])
        if self.alone:
            most = 0
        options = {"unit": unit, "most": most, "alone": self.alone, "media_cost": media_cost}
        options["share_prefixes"] = self.shared and self.config.packing_samples
        return packing.cut(exp, budget, world, **options)

    def sequences(
        self, exp: Experience, plans: Sequence[Sequence[Sequence[int]]], unit: int | Sequence[int]
    ) -> int:
        """The sequences that every pack of some plans must have; 0 if they may differ.

        They must not where lists of different lengths meet a model that takes one sequence at a time: each
        is a forward then, and processes that share a model run equally many. ValueError for media in only
        some rows: towers would run more often on one process than on another.
        """
        if not self.alone or isinstance(unit, int):
            return 0
        for name, count in packing.counts(exp.media).items():
            if not bool(count.all()):
                row = int((count == 0).nonzero()[0])
                raise ValueError(
                    f"media: expected {name} in every row or in none, for lists of different lengths and a "
                    f"model that mixes the sequences of a pack, got none in row {row}"
                )
        return max(len(rows) for part in plans for rows in part)


def everywhere(x: bool) -> bool:
    """Whether x is true on every process."""
    return all(dist.all_gather_object(x))


class SaveState(Protocol):
    """Writes a checkpoint, as `ckpt.save` does."""

    def __call__(
        self,
        path: str | Path,
        state: ckpt.States,
        extra: Any = None,
        *,
        score: float | None = None,
        writer: ckpt.Writer | None = None,
    ) -> Path:
        """Write the states; with a `writer` in the background."""
        ...


class ExportState(Protocol):
    """Puts trained weights together."""

    def __call__(self, state: TrainState, *, finite: bool = True) -> Export:
        """Full tensors by name; with `finite`, ValueError for one with NaN or inf."""
        ...


class Backend(NamedTuple):
    """The functions in which strategies differ."""

    init: Init
    bind: Bind
    grad: Grad
    update: Update
    export: ExportState
    finite: Callable[[Any], bool]  # whether all gradients are, the same on every rank
    save_pretrained: SavePretrained
    save: SaveState
    restore: Restore
    offload: MoveState
    reload: MoveState
    release: Callable[[], None]  # gives back what the backend itself holds, when the strategy is closed


def assemble(
    backend: Backend,
    config: StrategyConfig,
    session: Session,
    cut: Cut,
    *,
    rank: int,
    world: int,
    gather: Gather,
) -> Strategy:
    """The strategy of a backend, whose functions run inside the phases of the session."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())

    # functions with phases of their parts, then the small ones that no backend changes
    grad, update = _train_step(backend, session, keep=config.keep_memory and device.type == "cpu")
    save, restore, rotate = _checkpoints(backend, session)

    def shard(
        exp: Experience,
        budget: int,
        *,
        unit: int | Sequence[int] = 1,
        media_cost: float = MEDIA_COST,
    ) -> list[Packed]:
        plans = cut.rows(exp, budget, world=world, unit=unit, media_cost=media_cost)
        least = cut.sequences(exp, plans, unit)

        # the plan is of numbers, which every rank has; of media it has those that its own packs read
        packs = plans[rank]
        media = dist.fetch_media(exp.media, packing.owners(exp, packs))
        exp = tree.replace(exp, media=media)
        made = [packing.pack(exp, rows, unit=packing.among(unit, rows)) for rows in packs]
        return [packing.fill(b, least) for b in made]

    def print_on_main(*args: Any, **options: Any) -> None:
        if rank == 0:
            print(*map(check.printable, args), **options)

    def close() -> None:
        session.close(backend.release)

    # whatever waits for other processes describes the loss of one
    return Strategy(
        init=_watched(_init(backend), session),
        bind=_watched(backend.bind, session),
        shard=_watched(shard, session),
        score=_watched(scorer(shard, gather), session),
        gather=_watched(gather, session),
        all_reduce=_watched(dist.all_reduce, session),
        grad=grad,
        update=update,
        export=_export(backend),
        save_pretrained=_watched(backend.save_pretrained, session),
        save=save,
        restore=restore,
        rotate=rotate,
        offload=backend.offload,
        reload=backend.reload,
        place=_watched(place, session),
        print=print_on_main,
        report_memory=_watched(memory.report, session),
        close=close,
        session=session,
        rank=rank,
        world=world,
        device=device,
        config=config,
    )


def _watched(f: Callable[P, T], session: Session) -> Callable[P, T]:
    """`f`, with the errors of lost processes described."""

    def watched(*args: P.args, **options: P.kwargs) -> T:
        with session.watch():
            return f(*args, **options)

    return watched


def _init(backend: Backend) -> Init:
    """The init of a backend, for optimizers of this library's kind."""

    def init(module: nn.Module, tx: Transform, **options: Any) -> tuple[Apply, TrainState]:
        if not all(hasattr(tx, field) for field in Transform._fields):
            name = getattr(tx, "__name__", type(tx).__name__)
            raise ValueError(
                f"tx: expected a Transform, such as optim.adamw(1e-6), got {name}; one of your own is "
                "Transform(init, update, spec)"
            )
        return backend.init(module, tx, **options)

    return init


def _train_step(backend: Backend, session: Session, *, keep: bool) -> tuple[Grad, Update]:
    """(grad, update) of a backend; gradients that are not finite are diagnosed when they stop the run.

    With `keep` the process keeps the memory that it frees, from the first gradient on.
    """

    def grad(
        state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], /
    ) -> tuple[Any, dict[str, Any]]:
        with session.watch():
            session.writer.poll()  # a checkpoint that could not be written is news now, not at the next one
        # not before: what the loading of models frees would fall into pieces, and be held for nothing
        if keep:
            keep_freed()
        require_own_apply(state, apply)
        for pack in packs:
            require_same_sampling(apply, pack.sampling)
        grads, metrics = backend.grad(state, apply, loss_fn, packs)
        return diagnose.with_source(grads, diagnose.Source(apply, loss_fn, packs)), metrics

    # the backend's own gradients are tried again, in parts, when an update raises
    def update(state: TrainState, grads: Any, /) -> tuple[TrainState, dict[str, Any]]:
        require_device(state)
        source = getattr(grads, "source", None)
        try:
            return backend.update(state, grads)
        except diagnose.NonFinite as error:
            if source is None:  # gradients that a script made itself
                raise
            with session.phase(f"diagnosis of step {state.step + 1}"):
                found = _diagnosed(backend, session, state, source)
            raise diagnose.NonFinite(f"{error}; {found}") from None

    return grad, update


def _export(backend: Backend) -> ExportWeights:
    """The export of a backend, for weights on the device."""

    def export(state: TrainState, /) -> Export:
        require_device(state)
        return backend.export(state)

    return export


def _diagnosed(backend: Backend, session: Session, state: TrainState, source: diagnose.Source) -> str:
    """Dump the first sequence without finite gradients, and say where it is."""

    def broken(packs: Sequence[Packed]) -> bool:
        grads, _ = backend.grad(state, source.apply, source.loss_fn, packs)
        return not backend.finite(grads)

    # weights that are not finite are dumped as they are
    weights = {n: x.detach().cpu().clone() for n, x in backend.export(state, finite=False)}
    return diagnose.dump(session.dump_dir, state.step + 1, broken, source.packs, weights)


def _checkpoints(backend: Backend, session: Session) -> tuple[Any, Any, Any]:
    """(save, restore, rotate), which share the session's writer."""

    def save(
        path: str | Path, state: Any, extra: Any = None, *, score: float | None = None, wait: bool = True
    ) -> Path:
        with session.phase("checkpoint"):
            if not wait:
                return backend.save(path, state, extra, score=score, writer=session.writer)
            session.writer.finish()  # of a save before this one, which may have failed
            return backend.save(path, state, extra, score=score)

    # these two read and delete folders, so they need not wait for a write under way
    def restore(path: str | Path, like: Any, extra: Any = None) -> tuple[Any, Any]:
        with session.phase("restore"):
            return backend.restore(path, like, extra)

    def rotate(folder: str | Path, *, keep: int, best: int = 0, max_bytes: int | None = None) -> list[Path]:
        with session.watch():
            return ckpt.rotate(folder, keep=keep, best=best, max_bytes=max_bytes, writer=session.writer)

    return save, restore, rotate


def nothing() -> None:
    """The release of a backend that holds nothing."""
