"""The rollout of the global batch, sampled by all ranks."""

from collections.abc import Sequence
from typing import Any

from rft_fn import dist, tree
from rft_fn.collect.media import own_part
from rft_fn.collect.part import part_of_rank
from rft_fn.engine import requests
from rft_fn.types import Engine, Rollout, Sampling, Strategy

__all__ = ["check_prompts", "gather_and_generate"]


def gather_and_generate(
    engine: Engine,
    strategy: Strategy,
    prompts: Sequence[Any],
    keys: Sequence[Any],
    *,
    n: int,
    sampling: Sampling,
    max_new: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
    sleep_engine: bool = True,
) -> Rollout:
    """Sample the rollout of the global batch; each rank samples its part of the prompts, in order.

    The arguments are those of `Generate`, for the rows of the global batch. The result is the same on every
    rank. Keys belong to prompts, so the samples do not depend on how the prompts were shared out. The engine
    is woken before, and sent to sleep after unless `sleep_engine` is False.

    BadRequest as of `Generate`, on every rank the same: for token ids before anything is sampled, for texts,
    which only an engine can encode, when each rank has done its part.
    """
    check_prompts(engine, prompts, keys, n=n, sampling=sampling, max_new=max_new, start=start)
    mine = part_of_rank(strategy, len(prompts))
    rows = slice(mine.start * n, mine.stop * n)
    of_rows = {name: x[rows] for name, x in requests.given(max_new, start).items()}

    prompts = own_part(strategy, prompts)
    engine.wake()
    refused: requests.BadRequest | None = None
    rollout = requests.empty()
    with strategy.session.phase("generate"):
        try:
            # also on a rank without prompts: ranks may share an engine, or agree on whether it lives
            rollout = engine.generate(prompts, keys[mine], n=n, sampling=sampling, **of_rows)
        except requests.BadPrompt as error:
            refused = error.moved(mine.start)  # numbered in the global batch
        except requests.BadRequest as error:
            refused = error
    _raise_refused(strategy, refused)
    if sleep_engine:
        engine.sleep()

    # groups are numbered over the global batch; an engine of a user's need not know of the field
    rollout = tree.replace(rollout, group=rollout.group + mine.start, sampling=sampling)
    with strategy.session.phase("gather"):
        return strategy.gather(rollout)


def check_prompts(
    engine: Engine,
    prompts: Sequence[Any],
    keys: Sequence[Any],
    *,
    n: int,
    sampling: Sampling,
    max_new: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
) -> None:
    """BadRequest for a prompt of the global batch that is empty or too long, before anything is sampled.

    Every rank has all of the prompts, so all ranks refuse the same one. Texts are left to the engine.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        requests.check_rows(len(prompts), keys, n, sampling, max_new=max_new, start=start)
        return
    window = engine.status().get("window")
    requests.check(requests.token_ids(prompts), keys, n, sampling, window, max_new=max_new, start=start)


def _raise_refused(strategy: Strategy, refused: requests.BadRequest | None) -> None:
    """Raise the refusal of the first rank that has one, on every rank."""
    everyone = [refused]
    if strategy.world > 1:
        with strategy.session.phase("gather"):
            everyone = dist.all_gather_object(refused)
    for error in everyone:
        if error is not None:
            raise error
