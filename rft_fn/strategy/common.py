"""What all strategies do alike, around a backend's part of each function."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import ckpt, dist, memory, metric, optim, packing, tree
from rft_fn import model as model_lib
from rft_fn.model import quantize
from rft_fn.model.bind import Scorer, read_field, require_fields, to_params_device
from rft_fn.model.lora_merged import Export
from rft_fn.model.residence import Where
from rft_fn.model.save import full
from rft_fn.model.sharded import put
from rft_fn.optim.updates import local_parts
from rft_fn.strategy import diagnose, host, prepare, step
from rft_fn.strategy.config import StrategyConfig
from rft_fn.strategy.packer import Packer
from rft_fn.strategy.placing import (
    Placing,
    move_opt,
    require_device,
    require_own_apply,
    residence_below,
    residence_of,
)
from rft_fn.strategy.session import Session
from rft_fn.text import printable
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

__all__ = ["Backend", "all_true", "grad_with_noise", "noise_meter", "watched"]


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


def noise_meter(packs: Sequence[Packed]) -> Any:
    """Return what reads the noise of gradients from the halves of packs; None for others."""
    if not any(pack.half for pack in packs):
        return None
    from rft_fn.analysis.noise import Meter  # above, and only for a step that asks

    return Meter(packs)


def grad_with_noise(
    state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], *, session: Session
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """Compute `step.grad`; of packs in halves its metrics have the noise of the gradients."""
    meter = noise_meter(packs)
    if meter is None:
        return step.grad(state, apply, loss_fn, packs, session=session)
    grads, metrics = step.grad(state, apply, loss_fn, packs, session=session, note=meter.note)
    return grads, {**metrics, **meter.metrics()}


class Backend(ABC):
    """The functions of a strategy, with their texts; `types.record(Strategy, backend)` makes the record.

    A subclass lays out modules (`_bind`) and puts a parameter together (`_whole`). What begins with an
    underscore is the backend's part of the function of that name; by default it is that of plain tensors.
    A method that overrides one of these has its text from here.
    """

    whole_parameters = False  # whether parameters are whole tensors, which an update changes in place

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
        """Lay out a module that only scores: (apply, params), as `init` does, without an optimizer.

        `params` are a tree.Named of the trainable tensors by the module's own names. With offload_models the
        module is then on the host.
        """
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
        """Lay out a module: (apply, params)."""

    @watched
    def init(
        self,
        module: nn.Module,
        tx: Transform,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, TrainState]:
        """Lay out a module that is trained: (apply, state). It is sharded in place.

        `apply(params, pack)` gives a TokenOut, numbers [T] of the targets of a pack; `tx` makes the state's
        optimizer. `sampling` is how its tokens are drawn: log-probs are of that distribution. `entropy` and
        `aux` ask for these fields of TokenOut. `shard_size` overrides the config's for this module.
        ValueError unless `tx` is a Transform.
        """
        if not all(hasattr(tx, field) for field in Transform._fields):
            name = getattr(tx, "__name__", type(tx).__name__)
            raise ValueError(
                f"tx: expected a Transform, such as optim.adamw(1e-6), got {name}; one of your own is "
                "Transform(init, update, spec)"
            )
        apply, state = self._init(
            module, tx, sampling=sampling, entropy=entropy, aux=aux, shard_size=shard_size
        )
        residence_of(apply).bound = weakref.ref(apply)
        self.placing.begin(residence_of(apply), state)
        return apply, state

    def _init(self, module: nn.Module, tx: Transform, **options: Any) -> tuple[Apply, TrainState]:
        """Lay out a module that is trained: (apply, state); the options are those of `init`."""
        quantize.require_adapters(module)
        apply, params = self._bind(module, **options)
        return apply, prepare.start(params, tx, self.config, module, residence_of(apply))

    @watched
    def place(self, apply: Apply, where: Where, /) -> None:
        """Move all parameters and buffers of a bound model to the "device" or to the "host".

        On the host its weights can be neither used, updated nor exported: ValueError. They are the same to
        the bit when they are back. Where the device is a CPU both are one memory, and nothing is copied.
        With offload_models `score`, `grad`, `update` and `export` bring a model to the device themselves, and
        `bind` leaves it on the host, where `score` returns it.
        ValueError for an apply of another kind, and for a model that ZeRO trains.
        """
        residence_of(apply).move(where)

    @watched
    def make_room(self) -> None:
        """Move all trained models with their optimizers to the host, with offload_models."""
        self.placing.make_room()

    @watched
    def gather(self, x: Any, /) -> Any:
        """Concatenate the trees of all ranks along dim 0, [B, ...] each, on the host.

        Rows of media stay on the rank that has them; only their numbers travel.
        """
        return dist.gather(x)

    @watched
    def all_reduce(self, x: Any, op: str = "mean") -> Any:
        """Return each leaf's "mean", "sum", "max" or "min" over the ranks, the same on every rank."""
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
        """Return this rank's packs of the global batch, equally many on every rank.

        A pack has at most `budget` tokens. `unit` consecutive rows stay in one pack: 2 for losses of pairs;
        for ranked lists of any length it is the number of rows of each. Packs and ranks are balanced
        by tokens + media_cost * numbers of media, as in `packing.shard`. All ranks call it together
        where the batch has media: each fetches the rows that its packs read. ValueError for lists of
        different lengths with media in only some rows, where a model takes one sequence at a time.

        With `halves` no pack has prompts (`exp.group`) of both halves of the batch, and no prompt is in both:
        then `grad` has the metrics grad/snr and grad/noise_scale, the same on any number of processes. On one
        process the packs are the usual ones where these hold whole prompts; else, and on several processes,
        each half is cut by itself, which changes sums by rounding. None: only where one process would have
        the usual packs.
        """
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
        """Return `fields` of TokenOut for every token in mask [B, S, ...], 0 elsewhere.

        Every rank scores its own packs, of at most `budget` tokens and with units of rows as in `shard`, and
        every rank gets all rows, without gradient. Log-probs are always in it. ValueError for a field that
        TokenOut or the model does not have, and for a rollout that was drawn from another distribution than a
        language model was bound with.
        """
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

    def grad(
        self,
        state: TrainState,
        apply: Apply,
        loss_fn: LossFn,
        packs: Sequence[Packed],
        /,
        *,
        at: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Return (gradients, metrics) of the sum over all packs of all ranks of (w * loss).sum().

        The only place that calls backward. `loss_fn(out, pack)` gives loss [T], one number a target, or (loss
        [T], {name: Metric}); `shard` makes packs. The gradients are opaque: they go into `update`, and know
        what they were computed from. Nothing is donated. ValueError for an `apply` that `init` did not give
        with this state (or with the one that it forks), and for packs of a rollout that was drawn from
        another distribution than `apply` scores.

        With `at` they are the gradients at other parameters than the state's, for SAM, extragradient, Fisher
        products: tensors by the names of `state.params`, laid out as these are or whole on every rank (with
        ZeRO: whole). They take the type of the parameters, and their place while this runs, which costs a
        copy of this process's part of the parameters; afterwards the state's are the same to the bit.
        """
        with self.ready(state, apply, packs), self.moved(state, apply, at):
            grads, metrics = self._grad(state, apply, loss_fn, packs)
        return diagnose.with_source(grads, diagnose.Source(apply, loss_fn, packs, at)), metrics

    @contextmanager
    def ready(self, state: TrainState, apply: Apply, packs: Sequence[Packed]) -> Iterator[None]:
        """Have a model where it computes gradients in the block; ValueError for what is not of one."""
        with self.session.watch():
            self.session.writer.poll()  # a checkpoint that could not be written is news now, not at the next
        # not before: what the loading of models frees would fall into pieces, and be held for nothing
        if self.config.keep_memory and self.device.type == "cpu":
            host.disable_malloc_trim()
        require_own_apply(state, apply)
        for pack in packs:
            require_same_sampling(apply, pack.sampling)
        self.placing.bring(residence_of(apply))
        yield

    @contextmanager
    def moved(self, state: TrainState, apply: Apply, at: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Have the parameters `at` in place of a state's in the block; ValueError for others in shape."""
        if at is None:
            yield
            return
        new = optim.by_name(state.params, at, "at")
        for name, p in state.params.items():
            want, got = (list(getattr(x, "ds_shape", x.shape)) for x in (p, new[name]))
            if got != want:
                raise ValueError(f"at[{name!r}]: expected {want}, got {got}")
        held = [(x, x.clone()) for p in state.params.values() for x in self._held(p)]
        try:
            with torch.no_grad():
                for name, p in state.params.items():
                    self._put(p, new[name].detach())
            self._changed(apply)
            yield
        finally:
            with torch.no_grad():
                for x, old in held:
                    x.copy_(old)
            self._changed(apply)

    def _held(self, p: Tensor) -> list[Tensor]:
        """Return the memory of a trained parameter on this process."""
        return local_parts([p.detach()])

    def _put(self, p: Tensor, x: Tensor) -> None:
        """Copy x, a whole tensor or one that is laid out as `p`, into a trained parameter."""
        placed = getattr(x, "placements", None)
        if placed == getattr(p, "placements", None):
            local_parts([p])[0].copy_(local_parts([x])[0])
        else:
            put(p, full(x))

    def _changed(self, apply: Apply) -> None:  # noqa: B027 - not abstract: most models read their parameters
        """Have the next forward read parameters that were changed in place."""

    def _grad(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed]
    ) -> tuple[Any, dict[str, Any]]:
        return grad_with_noise(state, apply, loss_fn, packs, session=self.session)

    def update(self, state: TrainState, grads: Any, /) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step: (the state one step on, metrics).

        Donates both arguments: reading them afterwards raises UseAfterDonate. Gradients with a NaN or an inf
        change nothing but the counts; max_skips of them in a row raise NonFinite, which names the first
        sequence at fault.
        """
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
        with self.moved(state, source.apply, source.at):
            weights = {n: x.detach().cpu().clone() for n, x in self._export(state, finite=False)}
            return diagnose.dump(self.session.dump_dir, state.step + 1, broken, source.packs, weights)

    def offload(self, state: TrainState, /) -> TrainState:
        """Move the optimizer to the host. Donates `state`."""
        self.placing.move_opt(state, "host")
        return move_opt(state, "cpu")

    def reload(self, state: TrainState, /) -> TrainState:
        """Move the optimizer to the device of this process. Donates `state`."""
        self.placing.move_opt(state, "device")
        return move_opt(state, self.device)

    @abstractmethod
    def _whole(self, state: TrainState, p: Tensor) -> Tensor:
        """Return a trained parameter as a full tensor; all ranks call it."""

    def _export(self, state: TrainState, *, finite: bool = True, whole: bool = False) -> Export:
        """Return the trained weights; with `finite`, ValueError for one with NaN or inf."""
        return Export(
            state.params,
            state.module,
            partial(self._whole, state),
            finite=finite,
            rest=whole,
            whole=self.whole_parameters,
        )

    def export(self, state: TrainState, /, *, whole: bool = False) -> Export:
        """Yield the trained weights, full tensors by the plain model's names, adapters merged.

        Every rank iterates to the end. The tensors are copies, on every backend: a later update does not
        change them, unless who reads them calls the export's `share`. Frozen weights are left out, for an
        engine has them (`frozen` names them); with `whole` they are in it too, so that
        `dict(st.export(state, whole=True))` is all of a plain model, adapters or not.
        """
        self.placing.bring(state.residence)
        require_device(state)
        return self._export(state, whole=whole)

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
        """Write a model as a folder that transformers or peft loads.

        `weights` replace those of the module of the same names; with `merge` adapters become part of them.
        """
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
        """Write a state (or a dict or list of them) and `extra` to a folder, which is whole or absent.

        Without `wait` the files are written while training continues; the next save, `grad` or `close` raises
        their errors. `score` decides which checkpoints rotation keeps as the best.
        """
        with self.session.phase("checkpoint"):
            writer = None if wait else self.session.writer
            if wait:
                self.session.writer.finish()  # of a save before this one, which may have failed
            return self._save(path, state, extra, score=score, writer=writer)

    _save = staticmethod(ckpt.save)

    # these two read and delete folders, so they need not wait for a write under way
    def restore(self, path: str | Path, like: Any, extra: Any = None) -> tuple[Any, Any]:
        """Return (state, extra) of a checkpoint, laid out as `like`, which is donated.

        Nothing has changed if it raises.
        """
        with self.session.phase("restore"):
            return self._restore(path, like, extra)

    _restore = staticmethod(ckpt.restore)

    @watched
    def rotate(
        self, folder: str | Path, *, keep: int, best: int = 0, max_bytes: int | None = None
    ) -> list[Path]:
        """Delete all checkpoints except the `keep` newest and the `best` ones of the highest score.

        The deleted are returned. While a checkpoint is being written this waits for it, in the background,
        and [] is returned.
        """
        writer = self.session.writer
        return ckpt.rotate(folder, keep=keep, best=best, max_bytes=max_bytes, writer=writer)

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*map(printable, args), **options)

    @watched
    def report_memory(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of memory of this process by name; rank 0 prints the largest over the ranks."""
        return memory.report(prefix)

    def close(self) -> None:
        """Wait for the checkpoint writer, stop the heartbeat, and leave the process group if it began here.

        Raises the error of a checkpoint that could not be written. States and applies of the strategy are not
        to be used afterwards. Twice is once; at exit it happens by itself.
        """
        self.session.close(self._release)

    def _release(self) -> None:  # noqa: B027 - not abstract: most backends hold nothing
        """Give back what the backend itself holds."""
