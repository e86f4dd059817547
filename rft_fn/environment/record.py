"""The record of an environment, the signatures of its functions, and its observations as tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rft_fn.data import template_probe
from rft_fn.data.chat import EXCHANGE, MARKED, Chat
from rft_fn.data.lesson import shared_prefix, special_tokens
from rft_fn.data.messages import Turn, opened
from rft_fn.data.responses import prompt_ids
from rft_fn.text import writable

__all__ = ["Environment", "Observation", "Renderer", "Reset", "Row", "Step", "Stepped", "as_messages"]


# ---------- the record of an environment, and the signatures of its functions


Row = Mapping[str, Any]
"""The columns of one row of data, which an episode is made of."""

Observation = str | Sequence[Turn] | None
"""A text that the policy reads, or messages {"role", "content"}; None or "" for nothing."""


class Stepped(NamedTuple):
    """The result of one step; a plain tuple of these four will do."""

    state: Any
    observation: Any  # an Observation; with several seats one for each
    reward: Any  # a number; with several seats one for each
    done: bool


class Reset(Protocol):
    """Begins an episode."""

    def __call__(self, row: Row, key: int, /) -> Any:
        """Return (state, observation) at the beginning, or an awaitable of these.

        The observation is the prompt; None leaves it to the data set: its prompt of this row is then the
        first thing that the policy reads. With several seats there is one for each. Everything random is
        drawn from `key`, which all samples of a prompt share.
        """
        ...


class Step(Protocol):
    """Moves an episode on by one response of the policy."""

    def __call__(self, state: Any, response: str, /) -> Any:
        """Return a `Stepped`, or an awaitable of one; steps that can be awaited run at the same time.

        `response` is the sampled text without special tokens. The given state does not change.
        """
        ...


class Environment(NamedTuple):
    """Something that a policy acts in by text, as functions of an explicit state.

    With `seats` > 1 the policy plays all of them, each with its own tokens: observations and rewards are
    sequences with one entry per seat.
    """

    name: str
    reset: Reset
    step: Step
    seats: int = 1
    seat: Callable[[Any], int] = lambda state: 0  # who responds next
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas, for the chat template
    close: Callable[[Any], None] = lambda state: None  # frees what the state of an episode holds
    rows: Callable[[int, int], dict[str, str]] | None = None  # (seed, index) -> a row, where it needs no data
    teacher: Callable[[Any, int], str] | None = None
    """(state, key) -> a response in the right form, to show a new model; its content need not be right."""
    tokens: tuple[str, ...] = ()  # texts that are one token each in a built-in model made for it
    warm_up: int = 20  # steps that such a model learns from the teacher, before reinforcement learning


def as_messages(observation: Observation) -> list[Turn]:
    """Return the messages of an observation; a text is a user's. Halves of surrogate pairs become U+FFFD.

    ValueError for anything that is neither text nor messages.
    """
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": writable(observation)}]
    if not isinstance(observation, Sequence):
        raise ValueError(f"expected a text or messages to observe, got {observation!r:.80}")
    for message in observation:
        known = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not known or not isinstance(message.get("content"), str):
            raise ValueError(f"expected messages with role and content to observe, got {message!r:.80}")
    return [{k: writable(x) if isinstance(x, str) else x for k, x in turn.items()} for turn in observation]


# ---------- observations as tokens, after sampled tokens that do not change


_TOLD = "rftfntold"  # stands for the content of a message


class _Behind(NamedTuple):
    """What a chat template writes after a response."""

    ended: str  # where nothing follows
    text: str  # where messages follow, which it asks to answer
    head: str  # the text up to the content of the first of them
    of_calls: bool  # whether the response called tools, so that the text begins inside of a call


def _exchanges(
    tokenizer: Any, messages: Sequence[Turn]
) -> list[tuple[Sequence[Turn], Callable[[Sequence[Turn]], Sequence[Turn]]]]:
    """Return what is tried before messages: (the turns up to the response, the messages that follow)."""
    results = [message for message in messages if message["role"] == "tool"]
    if not results:
        return [(EXCHANGE, list)]
    names = [str(x.get("name") or "rftfntool") for x in results]
    own = [template_probe.id_of_call(tokenizer, name, i) for i, name in enumerate(names, 1)]
    ids = [x.get("tool_call_id") or number for x, number in zip(results, own)]

    def with_ids(turns: Sequence[Turn]) -> list[Turn]:
        left = iter(ids)
        return [{**x, "tool_call_id": next(left)} if x["role"] == "tool" else x for x in turns]

    # the last call ends with the mark of the response; some templates take one call a turn
    calls = [(name, {"x": ""}) for name in names]
    calls[-1] = (names[-1], {"x": MARKED})
    asked = EXCHANGE[0]
    calling = dict(template_probe.call_turn(calls, ids=ids))
    one = dict(template_probe.call_turn(calls[-1:], ids=ids[-1:]))
    plain = [(EXCHANGE, list), (EXCHANGE, with_ids)]
    if template_probe.lacks_ids(tokenizer, messages):
        plain.reverse()
    return [*plain, ([asked, calling], with_ids), ([asked, one], with_ids)]


class Renderer(NamedTuple):
    """A tokenizer, and how its chat template is used."""

    tokenizer: Any
    system: str | None = None
    chat_template_kwargs: Mapping[str, Any] = {}

    def opening(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation's first messages, up to where the policy's turn starts.

        By the chat template, which gets `tools`; else the contents, one after the other.
        """
        turns = opened([dict(message) for message in messages], self.system)
        if not self.tokenizer.chat_template:
            return prompt_ids(self.tokenizer, "".join(turn["content"] for turn in turns))
        schemas = [dict(tool) for tool in tools] if tools else None
        return Chat(self.tokenizer, self.chat_template_kwargs).ids(turns, schemas, ask=True)

    def reply(self, response: Sequence[int], messages: Sequence[Turn]) -> list[int]:
        """Return the ids of `messages` after a sampled response, ready for the policy to speak again.

        The chat template renders two conversations around a stand-in for the response, without and with the
        messages. The second must continue the first: the rest is what follows, with the end of the response's
        turn, but without the token that was sampled already. So whatever the template would
        do to the response itself does not matter. Results of tools may need ids, or a response that calls
        tools before them: then the stand-in is one. Without a template, the contents.

        ValueError for a template that refuses the messages, leaves them out, or changes what stood before.
        """
        if not self.tokenizer.chat_template:
            return self._encoded("".join(message["content"] for message in messages))
        last = self.tokenizer.decode(list(response[-1:]), skip_special_tokens=False)
        was_ended = bool(response) and response[-1] in self._special()
        behind = self._behind([dict(message) for message in messages])
        text = behind.text
        if was_ended and last in behind.head:
            # the token that ended the response is there already
            text = text[text.index(last) + len(last) :]
        elif was_ended and self._first_special(behind.ended) == last:
            # it would end a last turn, and stands in place of the end that the template writes here
            end = self._first_special(text)
            text = text[text.index(end) + len(end) :]
        elif behind.of_calls:
            # what closes a call is the response's, and so is the end of its turn if it has one of any kind
            ends = [token for token in self._encoded(behind.ended) if token in self._special()]
            end = self.tokenizer.decode(ends[-1:], skip_special_tokens=False)
            if end and end in behind.head:
                text = text[text.index(end) + (len(end) if was_ended else 0) :]
            else:
                text = text[shared_prefix(behind.ended, text) :]
        return self._encoded(text)

    def _behind(self, messages: list[Turn]) -> "_Behind":
        """Return the template's text after a response, without and with messages. ValueError as `reply`."""
        chat = Chat(self.tokenizer, self.chat_template_kwargs)
        told = [{**message, "content": f"{_TOLD}{i:03}"} for i, message in enumerate(messages)]
        refused: ValueError | None = None
        for exchange, follow in _exchanges(self.tokenizer, messages):
            try:
                # contents may be written in another form, and are found by marks in their places
                text = chat.behind_response(follow(told), ask=True, exchange=exchange)
                lost = [x["role"] for x, sent in zip(messages, told) if sent["content"] not in text]
                if lost:
                    raise ValueError(
                        f"chat template: it leaves out a message of role {lost[0]!r} behind a response; "
                        "observe with another role"
                    )
                head = text.partition(_TOLD)[0]
                ended = chat.behind_response([], ask=False, exchange=exchange)
                text = chat.behind_response(follow(messages), ask=True, exchange=exchange)
                if not self._continues(text, ended):
                    raise ValueError(
                        "chat template: expected what follows a response to begin with "
                        f"{ended!r:.40}, whatever is said next, got {text!r:.60}"
                    )
                return _Behind(ended, text, head, exchange is not EXCHANGE)
            except ValueError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _continues(self, text: str, ended: str) -> bool:
        """Return whether a text begins with the end of a turn that is the last one, or with an end like it.

        A whole conversation may have one more token at its end, and a last turn another one than the others.
        """
        if text.startswith(ended) or (self._first_special(ended) and self._first_special(text)):
            return True
        tokens = self._encoded(ended)
        while tokens and (tokens[-1] in self._special() or not self.tokenizer.decode(tokens[-1:]).strip()):
            tokens.pop()
        end = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return bool(end.strip()) and text.startswith(end)

    def _first_special(self, text: str) -> str:
        """Return the first special token of a text, "" for none."""
        for token in self._encoded(text):
            if token in self._special():
                return self.tokenizer.decode([token], skip_special_tokens=False)
        return ""

    def said(self, response: Sequence[int]) -> str:
        """Return a sampled response as text, without the special token that ends it; others stay."""
        end = len(response)
        if end and response[-1] in self._special():
            end -= 1
        return self.tokenizer.decode(list(response[:end]), skip_special_tokens=False)

    def _special(self) -> frozenset[int]:
        return special_tokens(self.tokenizer)

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
