"""Rows of messages as prompts: what of a conversation is asked, held to the limits of a data set."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn.data.chat import Chat
from rft_fn.data.messages import Conversation, Turn, conversation
from rft_fn.data.report import TooLong

__all__ = ["Talk"]


class Talk(NamedTuple):
    """How a conversation is read from a row, and what it must keep to."""

    chat: Chat
    columns: Sequence[str]
    system: str | None
    loss_on: str | None  # None: to be answered
    max_prompt: int
    max_tokens: int | None

    def read(self, row: Mapping[str, Any], widest: int) -> tuple[list[int], list[Turn]]:
        """(ids, turns): of a conversation to be learned the ids before the first learned token.

        ValueError for one that cannot be used, TooLong for ids above max_prompt.
        """
        talk = conversation(row, self.columns, self.system)
        self._check_size(talk, widest)
        ids = self._ids(talk)
        if len(ids) > self.max_prompt:
            raise TooLong(f"{len(ids)} tokens")
        return ids, talk.turns

    def _check_size(self, talk: Conversation, widest: int) -> None:
        """What could not fit is not tokenised, as with text; a template may drop what the assistant said."""
        size = sum(len(turn["content"]) for turn in talk.turns if turn["role"] != "assistant")
        if self.loss_on is None and size > self.max_prompt * widest:
            raise TooLong(f"{size} characters")
        if self.loss_on is not None and self.max_tokens is not None and size > self.max_tokens * widest:
            raise ValueError(f"the conversation has {size} characters, above {self.max_tokens} tokens")

    def _ids(self, talk: Conversation) -> list[int]:
        if self.loss_on is None:
            return self.chat.prompt(talk)
        found = self.chat.lessons(talk, self.loss_on)
        for lesson in found:
            if self.max_tokens is not None and len(lesson.ids) > self.max_tokens:
                raise ValueError(f"the conversation has {len(lesson.ids)} tokens, above {self.max_tokens}")
        return found[0].ids[: found[0].mask.index(True)]
