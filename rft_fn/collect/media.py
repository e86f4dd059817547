"""The media of rollouts that were kept without them."""

from collections.abc import Sequence
from typing import Any

from rft_fn import dist, tree
from rft_fn.collect.part import part_of_rank
from rft_fn.rollout import Owner, Prefix, take
from rft_fn.types import Media, Rollout, Strategy

__all__ = ["has_media", "own_part", "with_media", "without_media"]


def own_part(strategy: Strategy, prompts: Sequence[Any]) -> list[Any]:
    """The prompts of this rank, in order, with the media of those that continue a row. All ranks call it.

    After a gather the rows of a prompt's media are on the rank that sampled it, which is not always the one
    that continues it.
    """
    mine = part_of_rank(strategy, len(prompts))
    part = list(prompts[mine])
    if strategy.world == 1:
        return part
    gathered = [p.prompt.batch for p in prompts if isinstance(p, Prefix) and isinstance(p.prompt, Owner)]
    for batch in {id(batch): batch for batch in gathered}.values():
        rows = [i for i, p in enumerate(part) if getattr(getattr(p, "prompt", None), "batch", None) is batch]
        of = [int(batch.of[part[i].prompt.row]) for i in rows]
        fetched = dist.fetch_media(batch, of)
        assert fetched is not None
        owners = {owner: Owner(fetched, part[i].prompt.row) for i, owner in zip(rows, of)}
        for i, owner in zip(rows, of):
            part[i] = Prefix(part[i], part[i].sampled, owners[owner])
    return part


def has_media(prompt: Any) -> bool:
    """Whether a prompt has media, which are not read for it where it can say so by their names."""
    names = getattr(prompt, "media_names", None)
    if names is None:
        return bool(getattr(prompt, "media", None))
    return bool(names)


def without_media(rollout: Rollout) -> Rollout:
    """The rollout without media, as a checkpoint has it, which is the same on all ranks."""
    return tree.replace(rollout, media=None)


def with_media(strategy: Strategy, rollout: Rollout, prompts: Sequence[Any]) -> Rollout:
    """The rollout of the global batch with the media of its N prompts.

    It has B = N G rows, those of a prompt side by side. Each rank reads the media of its part of the prompts,
    as in `gather_and_generate`. All ranks call it.
    """
    if not any(has_media(prompt) for prompt in prompts):
        return rollout
    mine = part_of_rank(strategy, len(prompts))
    n = len(rollout.tokens) // len(prompts)
    own = take(without_media(rollout), range(mine.start * n, mine.stop * n))
    media = [getattr(prompt, "media", None) for prompt in prompts[mine]]
    return strategy.gather(tree.replace(own, media=Media.of_prompts(media, n)))
