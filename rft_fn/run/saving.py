"""Checkpoints of a run: restore the newest, save when it is time, and the weights at the end."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from rft_fn import ckpt, optim
from rft_fn.run import options
from rft_fn.run.folder import Run
from rft_fn.types import Strategy, TrainState

__all__ = ["checkpoint", "final_weights", "restore_latest"]


def restore_latest(st: Strategy, run: Run, state: Any, extra: Any = None) -> tuple[Any, Any]:
    """(state, extra) of the run's newest checkpoint; the given ones where it has none.

    `state` is donated.
    """
    saved = ckpt.latest(run.checkpoints)
    if saved is None:
        return state, extra
    return st.restore(saved, state, extra)


def final_weights(cfg: options.Updates, st: Strategy, state: TrainState) -> Iterable[tuple[str, Tensor]]:
    """Full tensors by name: the weights to save at the end, with `ema` their average."""
    if cfg.ema:
        return optim.ema_params(state.opt).items()
    return st.export(state)


def checkpoint(
    cfg: options.Run,
    st: Strategy,
    run: Run,
    step: int,
    state: Any,
    extra: Any = None,
    *,
    score: float | None = None,
    best: int = 0,
    before: Callable[[], None] | None = None,
) -> None:
    """Save the state after `step` steps when it is time, and stop if a signal asked for that.

    It is time every `save_every` steps, at the end of the run, and before the process stops, which raises
    `Stopped`. Only the newest `keep` checkpoints stay, and the `best` ones by `score`. `before` is called
    before a checkpoint is written, to put into `extra` what only a checkpoint needs. All ranks call it.
    """

    def save(*, wait: bool = True) -> None:
        with run.phase("save"):
            if before is not None:
                before()
            path = run.checkpoints / f"step_{step:08d}"
            st.save(path, state, extra, score=score, wait=wait)
            limit = cfg.max_bytes or None
            st.rotate(run.checkpoints, keep=cfg.keep, best=best, max_bytes=limit)

    # a run that ends waits for its last files; in between they are written while training continues
    done = step == run.total
    stop = run.stopping()
    run.reach(step, save)
    if done or stop or step % cfg.save_every == 0:
        save(wait=done or stop)
        run.reach(step, None)

    if stop and not done:
        run.stop(step)
