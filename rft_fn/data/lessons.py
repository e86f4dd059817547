"""The sequences of a row to learn from.

They hold its response, or the assistant's turns of its conversation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rft_fn.data.chat import Chat
from rft_fn.data.messages import Conversation, tools_of, turns_of
from rft_fn.data.prompts import Prompt
from rft_fn.data.spans import Lesson
from rft_fn.data.text_template import fill

__all__ = ["lessons"]


def lessons(
    prompt: Prompt,
    tokenizer: Any,
    *,
    response: str = "{answer}",
    messages: Sequence[str] = (),
    loss_on: str = "all",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Lesson]:
    """The sequences of a prompt's row to learn from.

    The data set has to be loaded with the same options. Of text it is the prompt, then the filled-in
    `response` and its end, which are learned: a chat template makes the same ids of it as of a conversation,
    without one the end of sequence ends it. Of a conversation it is turns of the assistant: see
    `Chat.lessons`. Each has the media that stand before its end. ValueError for a row that cannot be used.
    """
    if prompt.learned:
        return list(prompt.learned)
    chat = Chat(tokenizer, chat_template_kwargs or {})
    if prompt.messages is None:
        text = fill(response, prompt.columns, f"row {prompt.index + 1}")
        return [chat.verbatim(prompt.ids, text, prompt.media)]

    # the learned turns are those of the last column; the ones before it are context
    turns = [dict(turn) for turn in prompt.messages]
    last = turns_of(prompt.columns, messages[-1])
    talk = Conversation(turns, len(turns) - len(last), tools_of(prompt.columns))
    return chat.lessons(talk, loss_on)
