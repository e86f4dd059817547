"""Starts what takes time about responses that have ended, while others are still sampled.

A reward says by `Reward.begin` that there is something to start. It is told of whole responses, one at a
time, and gives nothing back: what it has started shortens the call that judges the rollout, and changes no
reward of it.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rft_fn.reward.combine import components_of
from rft_fn.reward.reward_record import taken
from rft_fn.reward.row_weights import weights_of
from rft_fn.reward.signature import Score, as_messages

__all__ = ["begin", "starts_early"]


def starts_early(score: Score) -> bool:
    """Return whether a part of a score has something to start before a rollout is judged."""
    return any(reward.begin is not None for reward, _ in components_of(score).values())


def begin(score: Score, tokenizer: Any, prompt: Any, tokens: Sequence[int]) -> None:
    """Tell the parts of a score that apply to a prompt of one whole response to it."""
    text = tokenizer.batch_decode([list(tokens)], skip_special_tokens=True)[0]
    messages = prompt.messages
    columns = {name: [x] for name, x in prompt.columns.items()}
    given = {
        **columns,
        "prompts": [prompt.text if messages is None else list(messages)],
        "completions": [text if messages is None else as_messages(text, "assistant")],
    }
    for name, (reward, weight) in components_of(score).items():
        if reward.begin is None:
            continue
        # what is wrong with a row or a reward is raised, with its name, where the rollout is judged
        with suppress(Exception):
            if not weights_of(name, weight, columns, 1).isnan().any():
                reward.begin(**taken(reward.begin, given))
