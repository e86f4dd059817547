"""The rollout of the global batch, sampled by all ranks."""

from collections.abc import Sequence
from typing import Any

from rft_fn import tree
from rft_fn.collect.part import part_of_rank
from rft_fn.types import Engine, Rollout, Sampling, Strategy

__all__ = ["gather_and_generate"]


def gather_and_generate(
    engine: Engine,
    strategy: Strategy,
    prompts: Sequence[Any],
    keys: Sequence[int],
    *,
    n: int,
    sampling: Sampling,
    sleep_engine: bool = True,
) -> Rollout:
    """Sample the rollout of the global batch; each rank samples its part of the prompts, in order.

    The result is the same on every rank. Keys belong to prompts, so the samples do not depend on how the
    prompts were shared out. The engine is woken before, and sent to sleep after unless `sleep_engine` is
    False.
    """
    mine = part_of_rank(strategy, len(prompts))
    idle = mine.start == mine.stop
    asked = mine
    if idle:
        asked = slice(0, 1)  # more ranks than prompts: a rollout without rows needs the shapes of one with

    engine.wake()
    with strategy.session.phase("generate"):
        rollout = engine.generate(prompts[asked], keys[asked], n=n, sampling=sampling)
    if sleep_engine:
        engine.sleep()

    # groups are numbered over the global batch
    rollout = tree.replace(rollout, group=rollout.group + mine.start)
    if idle:
        rollout = _without_rows(rollout)
    with strategy.session.phase("gather"):
        return strategy.gather(rollout)


def _without_rows(rollout: Rollout) -> Rollout:
    """The rollout with none of its rows."""
    media = rollout.media
    if media is not None:
        media = media.take([])
    plain = tree.map(lambda x: x[:0], tree.replace(rollout, media=None))
    return tree.replace(plain, media=media)
