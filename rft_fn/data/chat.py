"""Renders turns as tokens, by a tokenizer's own chat template.

Prompts are to be answered; lessons are sequences with turns to be learned.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from rft_fn.data import template_probe
from rft_fn.data.lesson import Lesson, cut, runs, shared_prefix, span, special_tokens
from rft_fn.data.medium import for_template, media_of_turns, placed
from rft_fn.data.messages import Conversation, Turn, extra_keys, is_learned, text_of
from rft_fn.data.processing import Encoded, Processing
from rft_fn.data.rendering import TooSlow, render
from rft_fn.data.table import Place, Row
from rft_fn.data.template_variables import MARK, dated

__all__ = ["EXCHANGE", "LOSS_ON", "MARKED", "Chat", "learned_turns"]

LOSS_ON = ("all", "last")
MARKED = "rftfnresponse"
"""Stands for a response while the chat template is asked what follows one."""
EXCHANGE: list[Turn] = [
    {"role": "user", "content": "rftfnquestion"},
    {"role": "assistant", "content": MARKED},
]


@dataclass(frozen=True)
class Chat:
    """A tokenizer with the values for its chat template's variables, and the processor of media if any."""

    tokenizer: Any
    kwargs: Mapping[str, Any]
    processing: Processing | None = None

    def check(self, *, messages: Sequence[str] = ()) -> None:
        """Raise ValueError for options that do not fit the chat template.

        Messages need a chat template, and a value must be one that it reads. `messages` are the columns
        that the template shall render. The names that it gets anyway, such as "messages" and "tools", are
        refused too.
        """
        if messages and not self.tokenizer.chat_template:
            raise ValueError(
                "messages: expected a tokenizer with a chat template, got one without; take a model that has "
                "one, or text by --template"
            )
        if not self.kwargs:
            return

        # names that the template gets anyway would be given twice
        if not self.tokenizer.chat_template:
            raise ValueError(
                "chat_template_kwargs: expected none, as the tokenizer has no chat template, got "
                f"{', '.join(self.kwargs)}"
            )
        own = template_probe.own_names(self.tokenizer)
        for name in self.kwargs:
            if name in own or not template_probe.reads_keyword(self.tokenizer, name, self.kwargs):
                known = ", ".join(template_probe.keywords(self.tokenizer))
                raise ValueError(
                    f"chat_template_kwargs: expected a name that the chat template reads "
                    f"({known or 'it reads none'}), got {name!r}"
                )

    def reads(self, messages: Sequence[str]) -> set[str]:
        """Return the columns that conversations in these columns are made of; of text without any."""
        read = set(messages)
        if messages:
            read |= {"system", "tools"}
        if self.processing is not None:
            read |= {*self.processing.kinds, *(f"{kind}s" for kind in self.processing.kinds)}
        return read

    def unread_keys(self, row: Row, columns: Collection[str]) -> list[str]:
        """Return the keys of messages in these columns of a row that nobody reads, as "KEY of ROLE"."""
        found = set()
        for name in columns:
            found |= extra_keys(row.get(name))
        return sorted({f"{key} of {role}" for role, key in found if not self._reads_key(role, key)})

    def _reads_key(self, role: str, key: str) -> bool:
        if key in template_probe.THOUGHTS:
            return role == "assistant" and bool(template_probe.thought_key(self.tokenizer))
        return template_probe.reads_key(self.tokenizer, role, key)

    def check_text(self, text: str) -> None:
        """Raise ValueError for text of a row that has the place of a medium by itself."""
        if self.processing is not None:
            self.processing.check_places(text, ())

    def placed(self, turns: list[Turn], row: Row, place: str) -> list[Turn]:
        """Put the media of the row into their places in turns. ValueError for media that do not fit."""
        kinds = self.processing.kinds if self.processing is not None else frozenset()
        return placed(turns, row, kinds, place.folder if isinstance(place, Place) else None)

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()))

    def prompt(self, talk: Conversation) -> list[int]:
        """Return the ids of a conversation, ready for the assistant to speak.

        ValueError for a last turn that is neither a user's nor a tool's: a turn that the assistant has begun
        is not continued. The same for a conversation that the template refuses, or would silently shorten.
        """
        role = talk.turns[-1]["role"]
        if role not in ("user", "tool"):
            raise ValueError(
                f"turn {len(talk.turns)}: expected the last turn of a prompt from user or tool, got {role}"
            )
        if not any(text_of(turn).strip() for turn in talk.turns):
            raise ValueError("the prompt is empty")
        self._check_read(talk)
        return self.ids(talk.turns, talk.tools, ask=True)

    def lessons(self, talk: Conversation, loss_on: str) -> list[Lesson]:
        """Return the sequences in which turns of the assistant are learned.

        Each turn is learned with the token that ends it. "all" learns the turns of the last column, "last"
        the last one, and neither a turn with "weight" 0. They share a sequence as long as the template
        renders a turn alike whatever follows it.
        A turn that it changes later (earlier thoughts are dropped), or that it ends with no special token,
        has a sequence up to its end.

        The marks {% generation %} tell which tokens are a turn's, where the template has them around whole
        turns; else they are the tokens after the prompt that asks for the turn.

        ValueError names a turn that is not rendered with that prompt before it.
        """
        spoken = learned_turns(talk, loss_on)
        if spoken[0] == 0:
            raise ValueError("turn 1: the assistant speaks first, so that no prompt asks for it")
        for i in spoken:
            turn = talk.turns[i]
            thought = turn.get("reasoning_content") and template_probe.thought_key(self.tokenizer)
            if not (text_of(turn).strip() or turn.get("tool_calls") or thought):
                raise ValueError(f"turn {i + 1}: the response is empty")

        # nothing after the last learned turn is read
        talk = talk._replace(turns=talk.turns[: spoken[-1] + 1])
        self._check_read(talk)
        if self.processing is not None and media_of_turns(talk.turns):
            return self._by_prefixes(talk, spoken)
        return self._by_marks(talk, spoken) or self._by_prefixes(talk, spoken)

    def answered(
        self, turns: Sequence[Turn], ids: Sequence[int], text: str, media: Mapping[str, Any] | None = None
    ) -> Lesson:
        """Return the lesson of a response of text to a prompt with these turns, ids and media.

        A chat template makes the same ids of it as of a conversation. Where it would show the response after
        another prompt than the one that asks for it (some ask for a thought, and show none), the response
        is not rendered: see `verbatim`.
        """
        if self.tokenizer.chat_template:
            talk = Conversation([*turns, {"role": "assistant", "content": text}], len(turns), None)
            try:
                return self.lessons(talk, "last")[0]
            except ValueError:
                pass
        return self.verbatim(ids, text, media)

    def verbatim(
        self,
        ids: Sequence[int],
        text: str,
        media: Mapping[str, Any] | None = None,
        *,
        end: Sequence[int] | None = None,
    ) -> Lesson:
        """Return the lesson of a prompt's ids with a response, unchanged, and its end.

        The end is that of an assistant's turn, unless another one is given.
        """
        if end is None:
            end = self.turn_end()
        answer = [*self.tokenizer.encode(text, add_special_tokens=False), *end]
        return Lesson([*ids, *answer], [False] * len(ids) + [True] * len(answer), media)

    def turn_end(self) -> list[int]:
        """Return the ids that the template writes after an assistant's text, up to a special token.

        The end of sequence where there is no such token, or no template.
        """
        usual = [self.tokenizer.eos_token_id]
        if not self.tokenizer.chat_template:
            return usual
        try:
            text = self.behind_response([], ask=False)
        except ValueError:  # no template of a question and an answer
            return usual
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        special = special_tokens(self.tokenizer)
        for i, token in enumerate(ids):
            if token in special:
                return list(ids[: i + 1])
        return usual

    @cached_property
    def _unasked(self) -> list[int]:
        """The ids of the header of an answer, where the template writes it behind any turn, asked or not."""
        try:
            text, asked = (self.behind_response([], ask=ask) for ask in (False, True))
        except ValueError:
            return []
        end, ids = self.turn_end(), self.tokenizer.encode(text, add_special_tokens=False)
        return list(ids[len(end) :]) if text == asked and ids[: len(end)] == end else []

    def behind_response(
        self, turns: Sequence[Turn], *, ask: bool, exchange: Sequence[Turn] = EXCHANGE
    ) -> str:
        """Return the template's text after a response that these turns follow. ValueError if it fails.

        `exchange` are the turns up to the response, in which `MARKED` stands for it, or for its end.
        """
        text = self._rendered([*exchange, *turns], None, ask, tokenize=False)
        count = text.count(MARKED)
        if count != 1:
            raise ValueError(
                f"chat template: expected a response once in the conversation, got it {count} times"
            )
        return text.partition(MARKED)[2]

    def ids(self, turns: Sequence[Mapping[str, Any]], tools: Any = None, *, ask: bool) -> list[int]:
        """Return the ids of turns; with `ask` the assistant's header follows.

        A system turn that the template refuses is put before the user's first text, with a warning.
        ValueError for a template that fails.
        """
        if self.processing is not None and media_of_turns(turns):
            return self.encoded(turns, tools, ask=ask).ids
        self._check_places(turns, tools, ask)
        return list(self._rendered(turns, tools, ask, return_dict=False))

    def encoded(self, turns: Sequence[Mapping[str, Any]], tools: Any = None, *, ask: bool) -> Encoded:
        """Return the ids of turns with media, and the processor's tensors; errors as `ids`."""
        assert self.processing is not None
        text = self._rendered(turns, tools, ask, tokenize=False)
        return self.processing.encode(text, media_of_turns(turns))

    def _check_places(self, turns: Sequence[Mapping[str, Any]], tools: Any, ask: bool) -> None:
        """Raise ValueError for turns without media that have the place of a medium in their text."""
        if self.processing is not None:
            self.processing.check_places(self._rendered(turns, tools, ask, tokenize=False), ())

    def _rendered(self, turns: Any, tools: Any, ask: bool, **options: Any) -> Any:
        """Return the output of `apply_chat_template` with these options."""
        if template := dated(self.tokenizer, tools):
            options["chat_template"] = template
        tools = template_probe.wrapped_tools(self.tokenizer, tools)
        turns = template_probe.with_names(turns)

        def rendered(turns: Sequence[Turn]) -> Any:
            return render(
                self.tokenizer,
                [self._as_read(turn) for turn in turns],
                tools=tools,
                add_generation_prompt=ask,
                **options,
                **self.kwargs,
            )

        # what a template refuses may be that calls have no ids of its form, or that there is a system turn
        merged = _without_system(turns)
        ways: list[Sequence[Turn] | None] = []
        for way in (turns, merged):
            both = [way, template_probe.with_ids(self.tokenizer, way) if way is not None else None]
            if way is not None and template_probe.lacks_ids(self.tokenizer, way):
                both.reverse()
            ways += both
        refused: ValueError | None = None
        for number, way in enumerate(ways):
            if way is None:
                continue
            try:
                out = rendered(way)
            except TooSlow:
                raise
            except Exception as error:  # a template is a program: it may raise anything
                if refused is None or number == 2:
                    refused = _refusal(way, error)
                    refused.__cause__ = error
                continue
            if number >= 2:
                what = "refuses a system turn; its text is put before the user's first text"
                _warn_of_system(self.tokenizer.chat_template, what)
            return out
        assert refused is not None
        raise refused

    def _as_read(self, turn: Mapping[str, Any]) -> Turn:
        """Return a turn in the form that the chat template reads."""
        turn = {name: x for name, x in turn.items() if name != "weight"}
        thought = turn.pop("reasoning_content", None)
        if thought is not None and (key := template_probe.thought_key(self.tokenizer)):
            turn = dict(template_probe.with_thought(turn, key, thought))
        if turn.get("tool_calls") and template_probe.arguments_form(self.tokenizer) == "text":
            turn["tool_calls"] = [_with_text_arguments(call) for call in turn["tool_calls"]]
        as_parts = template_probe.content_form(self.tokenizer, turn["role"]) == "parts"
        return for_template(turn, as_parts=as_parts)

    def _check_read(self, talk: Conversation) -> None:
        """Raise ValueError for parts of a row that the template would drop silently."""
        if talk.tools and self._is_same(talk, talk._replace(tools=None)):
            raise ValueError(
                "the row has tools, and the chat template reads none: take a model whose template does, or "
                "rows without the column"
            )
        for i, turn in enumerate(talk.turns):
            role = turn["role"]
            is_hidden = text_of(turn).strip() and template_probe.content_form(self.tokenizer, role) == "none"
            if is_hidden and role == "system":  # many small models know no instructions
                _warn_of_system(self.tokenizer.chat_template, "shows no system turn; its text is left out")
            elif is_hidden:
                raise ValueError(f"turn {i + 1}: the chat template shows no text of a turn of {role}")
            calls = turn.get("tool_calls") or []
            if calls and not template_probe.arguments_form(self.tokenizer) and self._drops(talk, i, calls):
                raise ValueError(f"turn {i + 1} has tool_calls, and the chat template does not read them")
            if len(calls) > 1 and self._drops(talk, i, calls[1:]):
                raise ValueError(
                    f"turn {i + 1} has {len(calls)} tool_calls, and the chat template shows only the first"
                )

    def _drops(self, talk: Conversation, i: int, calls: Sequence[Any]) -> bool:
        """Return whether the template writes turn i alike without these calls."""
        left = [call for call in talk.turns[i]["tool_calls"] if call not in calls]
        less = {name: x for name, x in talk.turns[i].items() if name != "tool_calls"}
        turns = [*talk.turns]
        turns[i] = less | ({"tool_calls": left} if left else {})
        return self._is_same(talk, talk._replace(turns=turns))

    def _is_same(self, talk: Conversation, other: Conversation) -> bool:
        """Return whether the template writes the same for two conversations; it may refuse the other."""
        text = self._rendered(talk.turns, talk.tools, False, tokenize=False)
        try:
            return text == self._rendered(other.turns, other.tools, False, tokenize=False)
        except ValueError:
            return False

    def _by_marks(self, talk: Conversation, spoken: Sequence[int]) -> list[Lesson]:
        """Return the sequence by the marks {% generation %}, [] unless each turn has one pair of marks."""
        template = self.tokenizer.get_chat_template(tools=talk.tools)
        if not self.tokenizer.is_fast or not MARK.search(template):
            return []
        self._check_places(talk.turns, talk.tools, False)
        out = self._rendered(
            talk.turns, talk.tools, False, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = list(out["input_ids"])
        spans = list(runs(out["assistant_masks"]))
        speakers = _assistant_turns(talk.turns)
        if len(spans) != len(speakers):
            return []

        # every turn must end with a special token and begin where its prompt ends
        mask = [False] * len(ids)
        for i, (start, end) in zip(speakers, spans):
            end = self._end(ids, start, end)
            if end is None or not start:
                return []
            if i not in spoken:
                continue
            asked = self.ids(talk.turns[:i], talk.tools, ask=True)
            if start < len(asked) < end and ids[: len(asked)] == asked:
                start = len(asked)  # marks around the header too, which the prompt gives
            if start < len(asked) or self._begins_in_prompt(asked, ids, start):
                return []
            mask[start:end] = [True] * (end - start)
        return [cut(ids, mask)]

    def _begins_in_prompt(self, asked: list[int], ids: list[int], start: int) -> bool:
        """Return whether a turn's first token begins with the last characters of the prompt before it."""
        if asked[:start] != ids[:start]:
            return False
        over = self._text(asked[start:])
        return bool(over) and self._text([ids[start]]).startswith(over)

    def _by_prefixes(self, talk: Conversation, spoken: Sequence[int]) -> list[Lesson]:
        """Return the sequences by the prompt before each turn."""
        whole = self.ids(talk.turns, talk.tools, ask=False)
        mask = [False] * len(whole)  # of the turns that share the sequence of the whole conversation
        alone: list[Lesson] = []
        shared = 0  # the last turn in the sequence that turns share
        for i in spoken:
            # the conversation up to the end of this turn, and where the turn begins in it
            through = self.ids(talk.turns[: i + 1], talk.tools, ask=False) if i < spoken[-1] else whole
            start, through = self._asked(talk, i, through)
            if self._unasked and through[-len(self._unasked) :] == self._unasked:
                through = through[: -len(self._unasked)]

            # it shares a sequence if it ends with a special token and later turns do not change it
            end = self._end(through, start, len(through))
            if end is None:
                # spaces after the turn become the end of sequence
                ids = [*through[: self._filled(through, start, len(through))], self.tokenizer.eos_token_id]
                alone.append(self._with_media(Lesson(ids, span(len(ids), start, len(ids))), talk, i))
            elif through[:end] == whole[:end]:
                mask[start:end] = [True] * (end - start)
                shared = i
            else:
                alone.append(self._with_media(cut(through, span(len(through), start, end)), talk, i))
        return [self._with_media(cut(whole, mask), talk, shared), *alone] if any(mask) else alone

    def _with_media(self, lesson: Lesson, talk: Conversation, i: int) -> Lesson:
        """Return a lesson that ends with turn i, with the media up to there."""
        turns = talk.turns[: i + 1]
        if self.processing is None or not media_of_turns(turns):
            return lesson
        return lesson._replace(media=self.encoded(turns, talk.tools, ask=False).media)

    def _asked(self, talk: Conversation, i: int, through: list[int]) -> tuple[int, list[int]]:
        """Return (the start of turn i, the ids up to its end).

        The turn starts after the prompt that asks for it. A token of `through` that crosses that border is
        cut there, as it was when the turn was sampled. ValueError for a turn whose rendering does not begin
        with the prompt.
        """
        asked = self.ids(talk.turns[:i], talk.tools, ask=True)
        if not asked:
            raise ValueError(f"turn {i + 1}: nothing stands before it")
        if through[: len(asked)] == asked:
            return len(asked), through

        # tokens differ: compare the texts, and tokenise the turn by itself if the prompt's text is its start
        before = self._rendered(talk.turns[:i], talk.tools, True, tokenize=False)
        after = self._rendered(talk.turns[: i + 1], talk.tools, False, tokenize=False)
        same = shared_prefix(before, after)
        parted = [*asked, *self.tokenizer.encode(after[len(before) :], add_special_tokens=False)]
        if same < len(before) or self._text(parted) != self._text(through):
            raise ValueError(
                f"turn {i + 1}: the prompt that asks for it continues with {before[same:]!r:.60}, but the "
                f"chat template renders it with {after[same:]!r:.60}: the learned turn would never be asked "
                "for; other --chat-template-kwargs may make the two alike"
            )
        return len(asked), parted

    def _end(self, ids: Sequence[int], start: int, end: int) -> int | None:
        """Return the end of turn [start, end) with the special token that ends it; None without one."""
        special = special_tokens(self.tokenizer)
        last = self._filled(ids, start, end)
        if last > start and ids[last - 1] in special:
            return last
        return end + 1 if end < len(ids) and ids[end] in special else None

    def _filled(self, ids: Sequence[int], start: int, end: int) -> int:
        """Return `end` without the tokens of spaces before it."""
        special = special_tokens(self.tokenizer)
        while end > start:
            last = ids[end - 1]
            if last in special or self._text([last]).strip():
                break
            end -= 1
        return end

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _assistant_turns(turns: Sequence[Turn]) -> list[int]:
    """Return the numbers of the assistant's turns, from 0."""
    return [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]


def learned_turns(talk: Conversation, loss_on: str | None) -> list[int]:
    """Return the numbers of the turns that are learned. ValueError for none."""
    spoken = [i for i in _assistant_turns(talk.turns) if i >= talk.start]
    if not spoken:
        raise ValueError("expected a turn of the assistant to learn, got none")
    spoken = [i for i in spoken if is_learned(talk.turns[i])]
    if not spoken:
        raise ValueError(
            "expected a turn of the assistant to learn, got none: the row leaves all of them out"
        )
    if loss_on == "last":
        spoken = spoken[-1:]
    return spoken


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": template_probe.as_json(function["arguments"])}}


def _without_system(turns: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Put the system's text before the user's first; None unless turns begin with both."""
    roles = [turn["role"] for turn in turns[:2]]
    if roles != ["system", "user"]:
        return None
    text = text_of(turns[0])
    content = turns[1]["content"]
    if not isinstance(content, str):
        content = [{"type": "text", "text": f"{text}\n\n"}, *content]
    else:
        content = "\n\n".join(filter(None, (text, content)))
    return [{**turns[1], "content": content}, *turns[2:]]


@cache
def _warn_of_system(template: Any, what: str) -> None:
    """Warn once for each template what becomes of system turns."""
    warnings.warn(f"chat template: it {what}", stacklevel=2)


def _refusal(turns: Sequence[Mapping[str, Any]], error: Exception) -> ValueError:
    roles = [turn["role"] for turn in turns]
    if len(roles) > 6:
        roles = [*roles[:5], "..."]
    kind = type(error).__name__
    return ValueError(f"chat template: expected it to render {', '.join(roles)}, got {kind}: {error}")
