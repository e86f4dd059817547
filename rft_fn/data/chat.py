"""From turns to tokens, by a tokenizer's own chat template: prompts to answer, and answers to learn."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from rft_fn.data.keywords import MARK, reads
from rft_fn.data.messages import Conversation

__all__ = ["LOSS_ON", "Chat", "Lesson"]

LOSS_ON = ("all", "last")


class Lesson(NamedTuple):
    """One sequence to learn from: its tokens, and which of them are learned."""

    ids: list[int]
    mask: list[bool]


class Chat(NamedTuple):
    """A tokenizer with a chat template, and what that is given beside the messages."""

    tokenizer: Any
    kwargs: Mapping[str, Any]

    def check(self) -> None:
        """ValueError for keywords that the template does not read, or that it gets anyway."""
        if not self.kwargs:
            return
        if not self.tokenizer.chat_template:
            raise ValueError("chat_template_kwargs: expected none, as the tokenizer has no chat template")
        own = {"add_generation_prompt", "messages", "tools", *self.tokenizer.special_tokens_map}
        read = reads(self.tokenizer.get_chat_template()) - own
        for name in self.kwargs:
            if name not in read:
                known = ", ".join(sorted(read))
                raise ValueError(
                    f"chat_template_kwargs: expected a name that the chat template reads "
                    f"({known or 'it reads none'}), got {name!r}"
                )

    def prompt(self, talk: Conversation) -> list[int]:
        """The ids of a conversation, ready for the assistant to speak.

        ValueError for a last turn that is neither a user's nor a tool's: a turn that the assistant has begun
        is not continued. The same for what the template refuses, or would leave out without a word.
        """
        role = talk.turns[-1]["role"]
        if role not in ("user", "tool"):
            raise ValueError(
                f"turn {len(talk.turns)}: expected the last turn of a prompt from user or tool, got {role}"
            )
        if not any(turn["content"].strip() for turn in talk.turns):
            raise ValueError("the prompt is empty")
        self._check_read(talk)
        return self.ids(talk.turns, talk.tools, ask=True)

    def lessons(self, talk: Conversation, loss_on: str) -> list[Lesson]:
        """The sequences in which turns of the assistant are learned, each with the token that ends it.

        "all" learns those of the last column, "last" the last one. They share a sequence as far as the
        template renders a turn alike whatever follows it; a turn that it changes later (earlier thoughts
        are dropped), or that it gives no token of its own to end with, has a sequence up to its end. Which
        tokens are the turn's is said by the marks {% generation %} where the template has them around whole
        turns, else by what comes after the prompt that asks for the turn.

        ValueError names the turn for one whose rendering does not begin with that prompt.
        """
        spoken = [i for i, turn in enumerate(talk.turns) if turn["role"] == "assistant" and i >= talk.start]
        if not spoken:
            raise ValueError("expected a turn of the assistant to learn, got none")
        if loss_on == "last":
            spoken = spoken[-1:]
        if spoken[0] == 0:
            raise ValueError("turn 1: the assistant speaks first, so that no prompt asks for it")
        for i in spoken:
            turn = talk.turns[i]
            if not (turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content")):
                raise ValueError(f"turn {i + 1}: the response is empty")
        talk = talk._replace(turns=talk.turns[: spoken[-1] + 1])
        self._check_read(talk)
        return self._by_marks(talk, spoken) or self._by_prefixes(talk, spoken)

    def ids(self, turns: Sequence[Mapping[str, Any]], tools: Any = None, *, ask: bool) -> list[int]:
        """The ids of turns; with `ask` the assistant is asked to speak.

        A system turn that the template refuses is put before the text of the user's first, with a warning.
        ValueError for a template that fails.
        """
        return list(self._rendered(turns, tools, ask, return_dict=False))

    def _rendered(self, turns: Any, tools: Any, ask: bool, **how: Any) -> Any:
        how = {"tools": tools, "add_generation_prompt": ask, **how, **self.kwargs}
        apply = self.tokenizer.apply_chat_template
        try:
            return apply(list(turns), **how)
        except Exception as error:  # a template is a program: it may raise anything
            merged = _without_system(turns)
            if merged is None:
                raise _refusal(turns, error) from error
        try:
            out = apply(merged, **how)
        except Exception as error:
            raise _refusal(merged, error) from error
        _say_merged(self.tokenizer.chat_template)
        return out

    def _check_read(self, talk: Conversation) -> None:
        """ValueError for what a row has and the template would leave out without a word."""
        template = self.tokenizer.get_chat_template(tools=talk.tools)
        if talk.tools and "tools" not in reads(template):
            raise ValueError(
                "the row has tools, and the chat template reads none: take a model whose template does, or "
                "rows without the column"
            )
        for i, turn in enumerate(talk.turns, 1):
            for key in ("tool_calls", "reasoning_content"):
                if turn.get(key) and key not in template:
                    raise ValueError(f"turn {i} has {key}, and the chat template does not read them")

    def _by_marks(self, talk: Conversation, spoken: Sequence[int]) -> list[Lesson]:
        """As the template's marks have it; nothing where they are not one a turn, between whole tokens."""
        template = self.tokenizer.get_chat_template(tools=talk.tools)
        if not self.tokenizer.is_fast or not MARK.search(template):
            return []
        out = self._rendered(
            talk.turns, talk.tools, False, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = list(out["input_ids"])
        spans = list(_runs(out["assistant_masks"]))
        speakers = [i for i, turn in enumerate(talk.turns) if turn["role"] == "assistant"]
        if len(spans) != len(speakers):
            return []
        mask = [False] * len(ids)
        for i, (start, end) in zip(speakers, spans):
            end = self._end(ids, start, end)
            if end is None or not start:
                return []
            if i in spoken:
                if self._melts(talk, i, ids, start):
                    return []
                mask[start:end] = [True] * (end - start)
        return [_cut(ids, mask)]

    def _melts(self, talk: Conversation, i: int, ids: list[int], start: int) -> bool:
        """Whether the first token of a turn begins before it, in what the prompt ends with."""
        asked = self.ids(talk.turns[:i], talk.tools, ask=True)
        over = self._text(asked[start:])
        return bool(over) and asked[:start] == ids[:start] and self._text([ids[start]]).startswith(over)

    def _by_prefixes(self, talk: Conversation, spoken: Sequence[int]) -> list[Lesson]:
        """By the prompt before each turn, and the conversation up to its end."""
        whole = self.ids(talk.turns, talk.tools, ask=False)
        mask = [False] * len(whole)
        alone: list[Lesson] = []
        for i in spoken:
            through = whole
            if i < spoken[-1]:
                through = self.ids(talk.turns[: i + 1], talk.tools, ask=False)
            start, through = self._asked(talk, i, through)
            end = self._end(through, start, len(through))
            if end is None:
                alone.append(self._ended(through, start))
            elif through[:end] == whole[:end]:
                mask[start:end] = [True] * (end - start)
            else:
                alone.append(_cut(through, _span(len(through), start, end)))
        shared = [_cut(whole, mask)] if any(mask) else []
        return shared + alone

    def _asked(self, talk: Conversation, i: int, through: list[int]) -> tuple[int, list[int]]:
        """(where turn i begins, the ids up to its end): behind the prompt that asks for it.

        Where a token of `through` reaches over that border it is cut there, as when the turn was sampled.
        ValueError where the turn is not rendered as it was asked for.
        """
        asked = self.ids(talk.turns[:i], talk.tools, ask=True)
        if not asked:
            raise ValueError(f"turn {i + 1}: nothing stands before it")
        if through[: len(asked)] == asked:
            return len(asked), through

        before = self._rendered(talk.turns[:i], talk.tools, True, tokenize=False)
        after = self._rendered(talk.turns[: i + 1], talk.tools, False, tokenize=False)
        differ = (k for k, (a, b) in enumerate(zip(before, after)) if a != b)
        same = next(differ, min(len(before), len(after)))
        cut = [*asked, *self.tokenizer.encode(after[len(before) :], add_special_tokens=False)]
        if same < len(before) or self._text(cut) != self._text(through):
            raise ValueError(
                f"turn {i + 1}: the prompt that asks for it goes on with {before[same:]!r:.60}, but the chat "
                f"template renders it with {after[same:]!r:.60}: what is learned would never be asked; other "
                "--chat-template-kwargs may make the two alike"
            )
        return len(asked), cut

    def _end(self, ids: Sequence[int], start: int, end: int) -> int | None:
        """Behind the special token that ends the turn [start, end) or follows it; None without one."""
        special = _special(self.tokenizer)
        last = self._filled(ids, start, end)
        if last > start and ids[last - 1] in special:
            return last
        if end < len(ids) and ids[end] in special:
            return end + 1
        return None

    def _ended(self, ids: list[int], start: int) -> Lesson:
        """A turn that is ended by the end of sequence, in place of the spaces behind it."""
        last = self._filled(ids, start, len(ids))
        ids = [*ids[:last], self.tokenizer.eos_token_id]
        return Lesson(ids, _span(len(ids), start, len(ids)))

    def _filled(self, ids: Sequence[int], start: int, end: int) -> int:
        """`end` less the tokens of spaces before it."""
        special = _special(self.tokenizer)
        while end > start and ids[end - 1] not in special and not self._text(ids[end - 1 : end]).strip():
            end -= 1
        return end

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _without_system(turns: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """The turns, what the system says put before the user's first text; None where that is not how they
    begin."""
    roles = [turn["role"] for turn in turns[:2]]
    if roles != ["system", "user"]:
        return None
    said = [turn["content"] for turn in turns[:2] if turn["content"]]
    return [{**turns[1], "content": "\n\n".join(said)}, *turns[2:]]


@cache
def _say_merged(template: Any) -> None:
    """The warning, once for each template."""
    warnings.warn(
        "chat template: it refuses a system turn; what that says is put before the user's first text",
        stacklevel=2,
    )


def _refusal(turns: Sequence[Mapping[str, Any]], error: Exception) -> ValueError:
    roles = [turn["role"] for turn in turns]
    if len(roles) > 6:
        roles = [*roles[:5], "..."]
    kind = type(error).__name__
    return ValueError(f"chat template: expected it to render {', '.join(roles)}, got {kind}: {error}")


@lru_cache(8)
def _special(tokenizer: Any) -> frozenset[int]:
    """The tokens that are no text."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of ones."""
    at = 0
    for one, group in groupby(mask):
        size = len(list(group))
        if one:
            yield at, at + size
        at += size


def _span(size: int, start: int, end: int) -> list[bool]:
    """[size] True in [start, end)."""
    return [start <= i < end for i in range(size)]


def _cut(ids: Sequence[int], mask: Sequence[bool]) -> Lesson:
    """A lesson without the tokens behind the last that is learned."""
    size = max(i for i, learned in enumerate(mask) if learned) + 1
    return Lesson(list(ids[:size]), list(mask[:size]))
