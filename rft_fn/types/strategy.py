"""Where and how a train step runs: the record of a strategy's functions.

Every function of a strategy is called by all ranks alike, in the same order. `help(st.grad)` shows what a
function takes and returns: its text is that of the backend's method (`strategy.common.Backend`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from rft_fn import tree
from rft_fn.types.batch import Packed, TokenOut
from rft_fn.types.functions import Apply
from rft_fn.types.training import TrainState

__all__ = ["Session", "Strategy"]


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


@tree.documented
class Strategy(NamedTuple):
    """Where and how a train step runs: the same record for every backend."""

    init: Callable[..., tuple[Apply, TrainState]]  # lays out a module that is trained
    bind: Callable[..., tuple[Apply, Any]]  # lays out a module that only scores
    shard: Callable[..., list[Packed]]  # cuts a batch into packs
    gather: Callable[[Any], Any]  # joins the batches of all ranks
    all_reduce: Callable[..., Any]  # reduces numbers over all ranks
    score: Callable[..., TokenOut]  # scores whole rows
    grad: Callable[..., tuple[Any, dict[str, Any]]]  # computes gradients; the only place that calls backward
    update: Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]  # takes one optimizer step
    export: Callable[..., Any]  # puts trained weights together: (name, full tensor) pairs
    save_pretrained: Callable[..., Path]  # writes a model as a folder that transformers or peft loads
    save: Callable[..., Path]  # writes a checkpoint
    restore: Callable[..., tuple[Any, Any]]  # reads one
    rotate: Callable[..., list[Path]]  # deletes old ones
    offload: Callable[[TrainState], TrainState]  # the optimizer's state to the host
    reload: Callable[[TrainState], TrainState]  # and back
    place: Callable[[Apply, Any], None]  # moves a model's weights to the "device" or to the "host"
    print: Callable[..., None]  # on rank 0 only, as `print` does
    report_memory: Callable[..., dict[str, int]]  # measures the memory of this process
    close: Callable[[], None]  # ends the strategy
    session: Session
    rank: int
    world: int
    device: torch.device
    config: Any  # the StrategyConfig
    make_room: Callable[[], None]  # with offload_models: all trained models to the host, for an engine

    if not TYPE_CHECKING:  # where every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with a hint for a method that strategies of other systems have."""
            from rft_fn.migrate import names  # above, and only for a name that is not there

            names.unknown("Strategy", names.STRATEGY, name)
