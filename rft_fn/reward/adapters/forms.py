"""Adapters to the form of the texts.

Some functions read only messages, or only texts, whatever the data has.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rft_fn.reward.adapters.calling import like
from rft_fn.reward.convention import Messages, RewardFn, as_messages, columns_of, reads, taken, text

__all__ = ["messages", "texts"]


def messages(fn: RewardFn) -> RewardFn:
    """`fn`, given prompts and completions as lists of messages, whatever the data has."""
    return _formed(fn, as_messages)


def texts(fn: RewardFn) -> RewardFn:
    """`fn`, given prompts and completions as texts, whatever the data has."""
    return _formed(fn, _as_text)


class _Form(Protocol):
    """Gives a prompt or a completion one form."""

    def __call__(self, x: str | Messages, role: str, /) -> Any:
        """`x`, of either form, in the one form; `role` is who speaks it."""
        ...


def _as_text(x: str | Messages, role: str) -> str:
    return text(x)


def _formed(fn: RewardFn, form: _Form) -> RewardFn:
    @reads(*columns_of(fn))
    @like(fn)
    def reward(*, prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> Any:
        given["prompts"] = [form(x, "user") for x in prompts]
        given["completions"] = [form(x, "assistant") for x in completions]
        return fn(**taken(fn, given))

    return reward
