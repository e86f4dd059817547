"""Where and how a train step runs: the record, and the signatures of its functions.

Every function of a strategy is called by all ranks alike, in the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rft_fn.types.batch import Experience, Packed, Rollout, Sampling, TokenOut, TrainState, Transform
from rft_fn.types.engine import record_of_functions
from rft_fn.types.functions import Apply, LossFn
from rft_fn.types.media import MEDIA_COST

__all__ = ["Session", "Strategy"]


class Init(Protocol):
    """Lays out a module that is trained."""

    def __call__(
        self,
        module: nn.Module,
        tx: Transform,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, TrainState]:
        """Return (apply, state) of a module, which is sharded in place.

        `apply(params, pack)` gives a TokenOut, numbers [T] of the targets of a pack; `tx` makes the state's
        optimizer. `sampling` is how its tokens are drawn: log-probs are of that distribution. `entropy` and
        `aux` ask for these fields of TokenOut. `shard_size` overrides the config's for this module.
        """
        ...


class Bind(Protocol):
    """Lays out a module that only scores."""

    def __call__(
        self,
        module: nn.Module,
        *,
        sampling: Sampling | None = None,
        entropy: bool = False,
        aux: bool = False,
        shard_size: int | None = None,
    ) -> tuple[Apply, Any]:
        """Return (apply, params) of a module, as `init` does, without an optimizer.

        `params` are a tree.Named of the trainable tensors by the module's own names.
        """
        ...


class Shard(Protocol):
    """Cuts a batch into packs."""

    def __call__(
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
        ...


class Gather(Protocol):
    """Puts the batches of all ranks together."""

    def __call__(self, x: Any, /) -> Any:
        """Concatenate the trees of all ranks along dim 0, [B, ...] each, on the host.

        Rows of media stay on the rank that has them; only their numbers travel.
        """
        ...


class AllReduce(Protocol):
    """Reduces numbers over all ranks."""

    def __call__(self, x: Any, op: str = "mean") -> Any:
        """Return each leaf's "mean", "sum", "max" or "min" over the ranks, the same on every rank."""
        ...


class Grad(Protocol):
    """Computes gradients; the only place that calls backward."""

    def __call__(
        self, state: TrainState, apply: Apply, loss_fn: LossFn, packs: Sequence[Packed], /
    ) -> tuple[Any, dict[str, Any]]:
        """Return (gradients, metrics) of the sum over all packs of all ranks of (w * loss).sum().

        `loss_fn(out, pack)` gives loss [T], one number a target, or (loss [T], {name: Metric}); `shard` makes
        packs. The gradients are opaque: they go into `update`. Nothing is donated. ValueError for an `apply`
        that `init` did not give with this state (or with the one that it forks), and for packs of a rollout
        that was drawn from another distribution than `apply` scores.
        """
        ...


class ScoreRows(Protocol):
    """Scores whole rows."""

    def __call__(
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

        The result is the same on every rank, without gradient, in packs of at most `budget` tokens, with
        units of rows as in `shard`. Log-probs are always in it. ValueError for a field that TokenOut or the
        model does not have, and for a rollout that was drawn from another distribution than a language model
        was bound with.
        """
        ...


class Update(Protocol):
    """Takes one optimizer step."""

    def __call__(self, state: TrainState, grads: Any, /) -> tuple[TrainState, dict[str, Any]]:
        """Return (the state one step on, metrics).

        Donates both arguments: reading them afterwards raises UseAfterDonate. Gradients with a NaN or an inf
        change nothing but the counts; max_skips of them in a row raise NonFinite.
        """
        ...


class ExportWeights(Protocol):
    """Puts trained weights together."""

    def __call__(self, state: TrainState, /) -> Iterable[tuple[str, Tensor]]:
        """Yield full tensors by the plain model's names, adapters merged.

        Every rank iterates to the end. The tensors are copies, on every backend: a later update does not
        change them.
        """
        ...


class SavePretrained(Protocol):
    """Writes a model as a folder that transformers or peft loads."""

    def __call__(
        self,
        folder: str | Path,
        module: Any,
        tokenizer: Any,
        weights: Iterable[tuple[str, Tensor]] = (),
        *,
        merge: bool = False,
    ) -> Path:
        """Write a module with `weights` in place of its own; with `merge` adapters become part of them."""
        ...


class Save(Protocol):
    """Writes a checkpoint."""

    def __call__(
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
        ...


class Restore(Protocol):
    """Reads a checkpoint."""

    def __call__(self, path: str | Path, like: Any, extra: Any = None) -> tuple[Any, Any]:
        """Return (state, extra) as saved, laid out as `like`, which is donated.

        Nothing has changed if it raises.
        """
        ...


class Rotate(Protocol):
    """Deletes old checkpoints."""

    def __call__(
        self, folder: str | Path, *, keep: int, best: int = 0, max_bytes: int | None = None
    ) -> list[Path]:
        """Delete all checkpoints except the `keep` newest and the `best` ones of the highest score.

        The deleted are returned. While a checkpoint is being written this waits for it, in the background,
        and [] is returned.
        """
        ...


class MoveState(Protocol):
    """Moves the optimizer's state between the device and the host."""

    def __call__(self, state: TrainState, /) -> TrainState:
        """Move the optimizer's state: `offload` to the host, `reload` to the device. Donates `state`."""
        ...


class Place(Protocol):
    """Moves the weights of a model between the device and the host."""

    def __call__(self, apply: Apply, where: Literal["device", "host"], /) -> None:
        """Move all parameters and buffers of the model that `init` or `bind` gave `apply` for.

        On the host its weights can be neither used, updated nor exported: ValueError. They are the same to
        the bit when they are back. Where the device is a CPU both are one memory, and nothing is copied.
        With offload_models `score`, `grad`, `update` and `export` bring a model to the device themselves, and
        `bind` leaves it on the host, where `score` returns it.
        ValueError for an apply of another kind, and for a model that ZeRO trains.
        """
        ...


class ReportMemory(Protocol):
    """Measures the memory of this process."""

    def __call__(self, prefix: str = "") -> dict[str, int]:
        """Return bytes by name; rank 0 prints a line with the largest over the ranks."""
        ...


class Close(Protocol):
    """Ends a strategy."""

    def __call__(self) -> None:
        """Wait for the checkpoint writer, stop the heartbeat, and leave the process group if it began here.

        Raises the error of a checkpoint that could not be written. States and applies of the strategy are not
        to be used afterwards. Twice is once; at exit it happens by itself.
        """
        ...


class Session(Protocol):
    """The resources of a strategy: its processes, its checkpoint writer, the folder for dumps of faults."""

    @property
    def current_phase(self) -> str:
        """Return the phase of this process: the innermost block, or the last before script code."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Call what this process does inside the block `name`, for the line about lost processes.

        LostProcess, with that line, where the block loses another process.
        """
        ...

    def watch(self) -> AbstractContextManager[None]:
        """Describe the error of a lost process in the block; `phase` without a name."""
        ...

    def set_dump_dir(self, folder: str | Path) -> None:
        """Set the folder that dumps of gradients that are not finite go to."""
        ...


@record_of_functions
class Strategy(NamedTuple):
    """Where and how a train step runs: the same record for every backend."""

    init: Init
    bind: Bind
    shard: Shard
    gather: Gather
    all_reduce: AllReduce
    score: ScoreRows
    grad: Grad
    update: Update
    export: ExportWeights
    save_pretrained: SavePretrained
    save: Save
    restore: Restore
    rotate: Rotate
    offload: MoveState  # the optimizer's state to the host
    reload: MoveState  # and back
    place: Place  # a model's weights
    print: Callable[..., None]  # on rank 0 only, as `print` does
    report_memory: ReportMemory
    close: Close
    session: Session
    rank: int
    world: int
    device: torch.device
    config: Any  # the StrategyConfig
    make_room: Callable[[], None]  # with offload_models: all trained models to the host, for an engine

    if not TYPE_CHECKING:  # where every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with a hint for a method that strategies of other systems have."""
            from rft_fn.tools.other_libraries import names  # above, and only for a name that is not there

            names.unknown("Strategy", names.STRATEGY, name)
