"""The media of rollouts that were kept without them."""

from collections.abc import Sequence
from typing import Any

from rft_fn import tree
from rft_fn.collect.part import part_of_rank
from rft_fn.rollout import take
from rft_fn.types import Media, Rollout, Strategy

__all__ = ["has_media", "with_media", "without_media"]


def has_media(prompt: Any) -> bool:
    """Whether a prompt has media, which are not read for it where it can say so by their names."""
    names = getattr(prompt, "media_names", None)
    if names is None:
        return bool(getattr(prompt, "media", None))
    return bool(names)


def without_media(rollout: Rollout) -> Rollout:
    """The rollout without media: a checkpoint is the same on all ranks, and prompts have their media anyway."""
    return tree.replace(rollout, media=None)


def with_media(strategy: Strategy, rollout: Rollout, prompts: Sequence[Any]) -> Rollout:
    """The rollout of the global batch with the media of its N prompts: B = N G rows, those of one side by side.

    Each rank reads the media of its part of the prompts, as after `gather_and_generate`. All ranks call it.
    """
    if not any(has_media(prompt) for prompt in prompts):
        return rollout
    mine = part_of_rank(strategy, len(prompts))
    n = len(rollout.tokens) // len(prompts)
    own = take(without_media(rollout), range(mine.start * n, mine.stop * n))
    media = [getattr(prompt, "media", None) for prompt in prompts[mine]]
    return strategy.gather(tree.replace(own, media=Media.of_prompts(media, n)))
