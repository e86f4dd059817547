"""Observations as tokens, put behind tokens that were sampled and stay as they are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn.data.chat import Chat
from rft_fn.data.masks import special_tokens
from rft_fn.data.messages import Turn, opened
from rft_fn.data.text_template import prompt_ids

__all__ = ["Renderer"]


class Renderer(NamedTuple):
    """A tokenizer, and how its chat template is used."""

    tokenizer: Any
    system: str | None = None
    chat_template_kwargs: Mapping[str, Any] = {}

    def opening(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of the messages that begin a conversation, ready for the policy to speak.

        By the chat template, which gets `tools`; else the contents, one after the other.
        """
        turns = opened([dict(message) for message in messages], self.system)
        if not self.tokenizer.chat_template:
            return prompt_ids(self.tokenizer, "".join(turn["content"] for turn in turns))
        schemas = None
        if tools:
            schemas = [dict(tool) for tool in tools]
        return Chat(self.tokenizer, self.chat_template_kwargs).ids(turns, schemas, ask=True)

    def reply(self, response: Sequence[int], messages: Sequence[Turn]) -> list[int]:
        """The ids of `messages` behind a sampled response, ready for the policy to speak again.

        The chat template renders two conversations around a stand-in for the response, without and with the
        messages. The second has to continue the first: the rest is what follows, the end of the response's
        turn included, of which the token that was sampled already is left out. So whatever the template would
        do to the response itself does not matter. Without a template, the contents.

        ValueError for a template that refuses the messages, leaves them out, or changes what stood before.
        """
        if not self.tokenizer.chat_template:
            return self._encoded("".join(message["content"] for message in messages))
        chat = Chat(self.tokenizer, self.chat_template_kwargs)
        ended = chat.behind_response([], ask=False)
        text = chat.behind_response([dict(message) for message in messages], ask=True)
        if not text.startswith(ended):
            raise ValueError(
                f"chat template: expected what follows a response to begin with {ended!r:.40}, whatever is "
                f"said next, got {text!r:.60}"
            )
        for message in messages:
            if message["content"].strip() not in text:
                raise ValueError(
                    f"chat template: it leaves out a message of role {message['role']!r} behind a response; "
                    "observe with another role"
                )

        # the token that ended the response is there already
        last = self.tokenizer.decode(list(response[-1:]), skip_special_tokens=False)
        if response and response[-1] in self._special():
            text = text.removeprefix(last)
        return self._encoded(text)

    def said(self, response: Sequence[int]) -> str:
        """The text of a sampled response, without the special tokens that end it.

        Others stay: some models write calls of tools in them.
        """
        end = len(response)
        special = self._special()
        while end and response[end - 1] in special:
            end -= 1
        return self.tokenizer.decode(list(response[:end]), skip_special_tokens=False)

    def _special(self) -> frozenset[int]:
        return special_tokens(self.tokenizer)

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
