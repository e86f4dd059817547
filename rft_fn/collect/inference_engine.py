"""Holds the engine of a run by the names that LightRFT gives it, on explicit state."""

from typing import Any, Literal

from torch import nn

from rft_fn import sync
from rft_fn.engine import config_of, get_engine
from rft_fn.types import Engine, Strategy, TrainState
from rft_fn.types.engine import Delivered

__all__ = [
    "inference_engine_status", "setup_inference_engine", "sleep_inference_engine", "update_engine_weights",
    "wakeup_inference_engine",
]  # fmt: skip


def setup_inference_engine(
    strategy: Strategy,
    model: str | nn.Module,
    tokenizer: Any = None,
    *,
    state: TrainState | None = None,
    version: int = 0,
) -> Engine:
    """Return the engine of the strategy's config with the weights of `state`, asleep if it can be.

    Every rank calls it. Without `state` it keeps the weights of `model`. ValueError as of `get_engine` and
    `sync.push`; an engine that did not get its weights is closed.
    """
    engine = get_engine(config_of(strategy.config), model, tokenizer)
    if state is not None:
        try:
            sync.push(strategy, state, engine, version=version)
        except BaseException:
            engine.close()
            raise
    engine.sleep()
    return engine


def update_engine_weights(
    strategy: Strategy, state: TrainState, engine: Engine, *, version: int
) -> Delivered:
    """Send the trained weights to the engine; it is asleep afterwards if it was before."""
    return sync.push(strategy, state, engine, version=version)


def wakeup_inference_engine(engine: Engine) -> None:
    """Bring the engine's weights back to the device."""
    engine.wake()


def sleep_inference_engine(engine: Engine) -> bool:
    """Send the engine to sleep where it can, and return whether it is asleep."""
    engine.sleep()
    return engine.status()["asleep"]


def inference_engine_status(engine: Engine) -> Literal["dead", "asleep", "awake"]:
    """Return the state of the engine in one word; `Engine.status` has the details."""
    status = engine.status()
    if not status["alive"]:
        return "dead"
    return "asleep" if status["asleep"] else "awake"
