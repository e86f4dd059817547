"""The rollout of the global batch, sampled by all ranks."""

from collections.abc import Sequence
from typing import Any

from rft_fn import tree
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
    """The rollout of the global batch, the same on every rank: each rank samples its
    share of the prompts, in order.

    Keys belong to prompts, so the samples do not depend on how the prompts were shared out. The engine is
    woken before, and sent to sleep after unless `sleep_engine` is False.
    """
    size = -(-len(prompts) // strategy.world)
    mine = slice(strategy.rank * size, (strategy.rank + 1) * size)
    idle = mine.start >= len(prompts)  # more ranks than prompts: this one samples one of them for nothing
    mine = slice(0, 1) if idle else mine
    engine.wake()
    with strategy.session.phase("generate"):
        rollout = engine.generate(prompts[mine], keys[mine], n=n, sampling=sampling)
    if sleep_engine:
        engine.sleep()
    rollout = tree.replace(rollout, group=rollout.group + mine.start)
    if idle:
        media = None if rollout.media is None else rollout.media.take([])
        rollout = tree.replace(tree.map(lambda x: x[:0], tree.replace(rollout, media=None)), media=media)
    with strategy.session.phase("gather"):
        return strategy.gather(rollout)
