"""Samples the rollout of the global batch: each rank samples its part of the prompts, and all get all."""

from collections.abc import Sequence
from typing import Any

from rft_fn import dist, tree
from rft_fn.engine import requests
from rft_fn.engine.requests import Request
from rft_fn.rollout import Owner, Prefix, take
from rft_fn.types import Engine, Media, Rollout, Sampling, Strategy
from rft_fn.types.engine import OnRow

__all__ = [
    "check_prompts", "gather_and_generate", "has_media", "own_part", "shard_prompts", "with_media",
    "without_media",
]  # fmt: skip


def shard_prompts(strategy: Strategy, count: int) -> slice:
    """Return this rank's shard of the prompts: contiguous; the last ranks may have fewer."""
    size = -(-count // strategy.world)  # rounded up
    first = min(strategy.rank * size, count)
    return slice(first, min(first + size, count))


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
    temperature: Sequence[float] | None = None,
    on_row: OnRow | None = None,
    sleep_engine: bool = True,
) -> Rollout:
    """Sample the rollout of the global batch; each rank samples its part of the prompts, in order.

    The arguments are as of `Generate`, for the rows of the global batch; `on_row` hears of this rank's, where
    the engine tells of rows. The result is the same on every rank. Keys belong to prompts, so the samples do
    not depend on how the prompts were shared out. The engine is woken before, and sent to sleep after unless
    `sleep_engine` is False.

    BadRequest as of `Generate`, on every rank the same: for token ids before anything is sampled, for texts,
    which only an engine can encode, when each rank has done its part.
    """
    request = Request(prompts, keys, n, sampling, max_new, start, temperature, on_row)
    check_prompts(engine, request)
    mine = shard_prompts(strategy, len(prompts))
    own = request.part(mine)._replace(prompts=own_part(strategy, prompts))
    strategy.make_room()
    engine.wake()
    refused: requests.BadRequest | None = None
    rollout = requests.empty()
    with strategy.session.phase("generate"):
        try:
            # also on a rank without prompts: ranks may share an engine, or agree on whether it lives
            rollout = engine.generate(own.prompts, own.keys, n=n, sampling=sampling, **own.options(engine))
        except requests.BadPrompt as error:
            refused = error.moved(mine.start)  # numbered in the global batch
        except requests.BadRequest as error:
            refused = error

    # every rank raises the refusal of the first rank that has one
    everyone = [refused]
    if strategy.world > 1:
        with strategy.session.phase("gather"):
            everyone = dist.all_gather_object(refused)
    for error in everyone:
        if error is not None:
            raise error
    if sleep_engine:
        engine.sleep()

    # groups are numbered over the global batch; an engine of a user's need not know of the field
    rollout = requests.drawn_with(rollout, sampling, own.temperature)
    rollout = tree.replace(rollout, group=rollout.group + mine.start)
    with strategy.session.phase("gather"):
        return strategy.gather(rollout)


def check_prompts(engine: Engine, request: Request) -> None:
    """Raise BadRequest for a prompt of the global batch that is empty or too long.

    Every rank has all of the prompts, so all ranks refuse the same one. Texts are left to the engine.
    """
    if any(isinstance(prompt, str) for prompt in request.prompts):
        request.check_rows()
        return
    request.check(requests.token_ids(request.prompts), engine.status().get("window"))


# ---------- the media of prompts and rollouts


def own_part(strategy: Strategy, prompts: Sequence[Any]) -> list[Any]:
    """Return this rank's prompts, with the media of prompts that continue a row. All ranks call it.

    After a gather the rows of a prompt's media are on the rank that sampled it, which is not always the one
    that continues it.
    """
    mine = shard_prompts(strategy, len(prompts))
    part = list(prompts[mine])
    if strategy.world == 1:
        return part

    def gathered(p: Any) -> Media | None:
        return p.prompt.batch if isinstance(p, Prefix) and isinstance(p.prompt, Owner) else None

    batches = [batch for p in prompts if (batch := gathered(p)) is not None]
    for batch in {id(batch): batch for batch in batches}.values():
        rows = [i for i, p in enumerate(part) if gathered(p) is batch]
        of = [int(batch.of[part[i].prompt.row]) for i in rows]
        fetched = dist.fetch_media(batch, of)
        assert fetched is not None
        owners = {owner: Owner(fetched, part[i].prompt.row) for i, owner in zip(rows, of)}
        for i, owner in zip(rows, of):
            part[i] = Prefix(part[i], part[i].sampled, owners[owner])
    return part


def has_media(prompt: Any) -> bool:
    """Return whether a prompt has media, without reading them where it has their names."""
    names = getattr(prompt, "media_names", None)
    return bool(getattr(prompt, "media", None) if names is None else names)


def without_media(rollout: Rollout) -> Rollout:
    """Return the rollout without media, as checkpoints have it, the same on all ranks."""
    return tree.replace(rollout, media=None)


def with_media(strategy: Strategy, rollout: Rollout, prompts: Sequence[Any]) -> Rollout:
    """Return the rollout of the global batch with the media of its N prompts. All ranks call it.

    It has B = N G rows, grouped by prompt. Each rank reads the media of its part of the prompts, as in
    `gather_and_generate`.
    """
    if not any(has_media(prompt) for prompt in prompts):
        return rollout
    mine = shard_prompts(strategy, len(prompts))
    n = len(rollout.tokens) // len(prompts)
    own = take(without_media(rollout), range(mine.start * n, mine.stop * n))
    media = [getattr(prompt, "media", None) for prompt in prompts[mine]]
    return strategy.gather(tree.replace(own, media=Media.of_prompts(media, n)))
