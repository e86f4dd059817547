"""Calls of tools in a response, found in the form that the model's own chat template writes them in.

The form is found by rendering calls of a stand-in: an object with the name and the arguments, a name with an
object of arguments after it, a name with one piece of text per argument, or a name with arguments in
brackets, as Python or Gemma writes them; `call_forms` reads each. Where the template writes no calls, they
are JSON objects in <tool_call> tags, with a warning.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn.data import template_probe
from rft_fn.environment.call_forms import Call, Form, Objects, found_form

__all__ = ["Call", "ParseCalls", "call_parser", "tagged_calls"]


_ASKED = "rftfnquestion"

ParseCalls = Callable[[str], list[Call]]
"""A response -> the calls in it, in order; none for a response that calls nothing."""


class _Parser(NamedTuple):
    """Reads calls of one form, from left to right, and nothing within a thought."""

    form: Form
    thoughts: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    begins_in_thought: bool = False  # as the prompt ends inside of one

    def __call__(self, text: str, /) -> list[Call]:
        closings = dict(self.thoughts)
        at = 0
        if self.begins_in_thought:
            ends = [text.find(mark) + len(mark) for mark in closings.values() if mark in text]
            if not ends:
                return []
            at = min(ends)

        # a mark inside of a call belongs to the call, and one inside of a thought to the thought
        marks = re.compile("|".join(re.escape(mark) for pair in self.thoughts for mark in pair))
        mark = marks.search(text, at)
        call = self.form.find(text, at)
        calls: list[Call] = []
        while mark is not None or call is not None:
            if mark is not None and (call is None or mark.start() <= call.start()):
                closing = closings.get(mark[0])
                if closing is None:  # of a thought that began before the response
                    calls.clear()
                    at = mark.end()
                else:
                    end = text.find(closing, mark.end())
                    if end < 0:
                        break
                    at = end + len(closing)
            else:
                assert call is not None
                found, at = self.form.read(text, call)
                calls += found
            if mark is not None and mark.start() < at:
                mark = marks.search(text, at)
            if call is None or call.start() < at:
                call = self.form.find(text, at)
        return calls


tagged_calls: ParseCalls = _Parser(Objects("<tool_call>", "name", "arguments"))
"""Calls as {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>."""


def call_parser(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> ParseCalls:
    """Return the parser of a tokenizer's chat template; `tagged_calls`, with a warning, if it has none.

    A thought is no place for calls: its marks are the template's too, and with `chat_template_kwargs` it may
    begin in the prompt.
    """
    form = found_form(lambda calls: _rendered(tokenizer, calls))
    if form is None:
        warnings.warn(
            "chat template: no form of a call of tools was found in it, so calls are read as JSON in "
            "<tool_call> tags; give with_tools a parse of your own for another form",
            stacklevel=2,
        )
    starts = template_probe.thought_starts(tokenizer, chat_template_kwargs)
    marks = tuple(template_probe.thought_marks(tokenizer))
    if form is None and marks == (("<think>", "</think>"),) and not starts:
        return tagged_calls
    return _Parser(form or Objects("<tool_call>", "name", "arguments"), marks, starts)


def _rendered(tokenizer: Any, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, str]:
    """Return (the text of a turn with these calls, the id of the first); ("", "") if it has none.

    What the template writes before and after any response is cut off.
    """
    asked: dict[str, Any] = {"role": "user", "content": _ASKED}
    if template_probe.content_form(tokenizer, "user") == "parts":
        asked["content"] = [{"type": "text", "text": _ASKED}]
    name = calls[0][0]
    plain = template_probe.rendered(tokenizer, [asked, {"role": "assistant", "content": name}]) or ""
    before, _, after = plain.partition(name)

    as_text = template_probe.arguments_form(tokenizer) == "text"
    made = [(x, template_probe.as_json(arguments) if as_text else arguments) for x, arguments in calls]
    ids = [template_probe.id_of_call(tokenizer, x, i) for i, (x, _) in enumerate(calls, 1)]
    calling = template_probe.call_turn(made, ids=ids)
    text = template_probe.rendered(tokenizer, [asked, calling]) or ""
    start = _shared(text, before)
    if name not in text:  # some write calls only beside tools, which stand before the question
        text = template_probe.rendered(tokenizer, [asked, calling], [template_probe.TOOL]) or ""
        start = text.rfind(_ASKED) + len(_ASKED)
    if name not in text[start:]:
        return "", ""
    return text[start : len(text) - _shared(text[::-1], after[::-1])], ids[0]


def _shared(a: str, b: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    size = 0
    while size < min(len(a), len(b)) and a[size] == b[size]:
        size += 1
    return size
