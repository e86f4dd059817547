"""Calls of tools in a response, found in the form that the model's own chat template writes them in.

The form is found by rendering one call of a stand-in: an object with the name and the arguments, a name with
an object of arguments after it, or a name with one piece of text per argument. Where the template writes no
calls, they are JSON objects in <tool_call> tags.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rft_fn import check
from rft_fn.data.templates import shared_prefix

__all__ = ["Call", "ParseCalls", "call_parser", "tagged_calls"]

_ASKED = "rftfnquestion"
_NAME = "rftfnname"
_KEYS = ("rftfnkeya", "rftfnkeyb")
_VALUES = ("rftfnvaluea", "rftfnvalueb")


class Call(NamedTuple):
    """A call as the model wrote it; `error` says why it cannot be made, "" if it can."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


ParseCalls = Callable[[str], list[Call]]
"""A response -> the calls in it, in order; none for a response that calls nothing."""


def call_parser(tokenizer: Any) -> ParseCalls:
    """Return the parser of a tokenizer's chat template; `tagged_calls` where that writes no calls."""
    one = _rendered(tokenizer, 1)
    if _NAME not in one:
        return tagged_calls
    parser = _as_object(one) or _as_name_and_object(one) or _as_pieces(one, _rendered(tokenizer, 2))
    return parser or tagged_calls


def _rendered(tokenizer: Any, count: int) -> str:
    """Render a call with that many arguments, without the text before any response; "" on failure."""
    if not tokenizer.chat_template:
        return ""
    arguments = dict(zip(_KEYS[:count], _VALUES))
    call = {"type": "function", "id": "call00001", "function": {"name": _NAME, "arguments": arguments}}
    asked = {"role": "user", "content": _ASKED}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    speaking = {"role": "assistant", "content": _NAME}
    try:
        text = tokenizer.apply_chat_template([asked, calling], tokenize=False)
        plain = tokenizer.apply_chat_template([asked, speaking], tokenize=False)
    except Exception:  # whatever a template raises: it writes no calls
        return ""
    return text[shared_prefix(text, plain.partition(_NAME)[0]) :]


# ---------- an object with name and arguments


class _Objects(NamedTuple):
    """Calls as JSON objects after an opening text."""

    opening: str
    name: str  # the key of the name
    arguments: str  # the key of the arguments

    def __call__(self, text: str, /) -> list[Call]:
        if not self.opening:
            # nothing marks a call but that it is the whole response
            if not text.strip().startswith("{"):
                return []
            return self._objects(text.strip())
        calls = []
        for part in text.split(self.opening)[1:]:
            calls += self._objects(part)
        return calls

    def _objects(self, text: str) -> list[Call]:
        """Return the objects that a text begins with; at least one, which may be an error."""
        calls: list[Call] = []
        text = text.lstrip()
        at = 0
        while text.startswith("{", at) or not calls:
            try:
                value, at = check.json_at(text, at)
            except ValueError as error:
                calls.append(Call("", {}, f"the call is no JSON object: {error}"))
                break
            calls.append(self._call(value))
            while at < len(text) and text[at] in " \t\r\n,;":
                at += 1
        return calls

    def _call(self, value: Any) -> Call:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
            return Call("", {}, f"expected an object with {self.name!r} and {self.arguments!r}")
        return _checked(value[self.name], value.get(self.arguments, {}))


def _checked(name: str, arguments: Any) -> Call:
    """Return the call with arguments that are an object, or JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = check.parse_json(arguments)
        except ValueError:
            return Call(name, {}, "the arguments are no JSON object")
    if not isinstance(arguments, dict):
        return Call(name, {}, "the arguments are no JSON object")
    return Call(name, arguments)


tagged_calls: ParseCalls = _Objects("<tool_call>", "name", "arguments")
"""Calls as {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>."""


def _as_object(text: str) -> ParseCalls | None:
    """Return the form of an object that holds name and arguments."""
    for match in re.finditer(r"\{", text[: text.index(_NAME)]):
        try:
            value, _ = check.json_at(text, match.start())
        except ValueError:
            continue
        if isinstance(value.get("function"), dict):
            value = value["function"]
        names = [key for key, x in value.items() if x == _NAME]
        others = [key for key, x in value.items() if _VALUES[0] in json.dumps(x)]
        if names and others:
            return _Objects(text[: match.start()].strip(), names[0], others[0])
    return None


# ---------- a name, and an object of arguments after it


class _NameAndObject(NamedTuple):
    """Calls as a name between two texts, followed by a JSON object."""

    opening: str
    between: str

    def __call__(self, text: str, /) -> list[Call]:
        calls = []
        pattern = re.escape(self.opening) + r"\s*([\w.\-]+)\s*" + re.escape(self.between) + r"\s*(?=\{)"
        for match in re.finditer(pattern, text):
            try:
                value, _ = check.json_at(text, match.end())
            except ValueError as error:
                calls.append(Call(match[1], {}, f"the arguments are no JSON object: {error}"))
                continue
            calls.append(_checked(match[1], value))
        return calls


def _as_name_and_object(text: str) -> ParseCalls | None:
    """Return the form of a name followed by an object of arguments."""
    before, _, after = text.partition(_NAME)
    at = after.find("{")
    if at < 0 or not before.strip():
        return None
    try:
        value, _ = check.json_at(after, at)
    except ValueError:
        return None
    if value != {_KEYS[0]: _VALUES[0]}:
        return None
    return _NameAndObject(before.strip(), after[:at].strip())


# ---------- a name, and a piece of text for each argument


class _Pieces(NamedTuple):
    """Calls as a name after an opening text, and each argument as a key and a value between texts."""

    opening: str
    head: str  # before a key
    middle: str  # between a key and its value
    tail: str  # after a value

    def __call__(self, text: str, /) -> list[Call]:
        key = re.compile(re.escape(self.head) + r"\s*([^\s<>=\"']+?)\s*" + re.escape(self.middle) + r"\n?")
        calls = []
        for part in text.split(self.opening)[1:]:
            name = re.match(r"\s*([\w.\-]+)", part)
            if name is None:
                calls.append(Call("", {}, f"expected a name behind {self.opening!r}"))
                continue
            calls.append(Call(name[1], self._arguments(part, key)))
        return calls

    def _arguments(self, text: str, key: re.Pattern[str]) -> dict[str, str]:
        """Return the arguments that have an end, each part of the text read once."""
        arguments: dict[str, str] = {}
        begin = key.search(text)
        while begin is not None:
            end = text.find(self.tail, begin.end())
            if end < 0:  # so has no later argument
                break
            arguments[begin[1]] = text[begin.end() : end].removesuffix("\n")
            begin = key.search(text, end + len(self.tail))
        return arguments


def _as_pieces(one: str, two: str) -> ParseCalls | None:
    """Return the form of a key and a value per argument, told by how a second argument is written."""
    if not all(x in two for x in (*_KEYS, *_VALUES)):
        return None
    opening, _, after = one.partition(_NAME)
    first = after.partition(_KEYS[0])[0]
    middle = two[two.index(_KEYS[0]) + len(_KEYS[0]) : two.index(_VALUES[0])]
    between = two[two.index(_VALUES[0]) + len(_VALUES[0]) : two.index(_KEYS[1])]

    # the end of one argument and the head of the next; the head comes before the first one too
    size = 0
    while size < min(len(first), len(between)) and first[-1 - size] == between[-1 - size]:
        size += 1
    head = between[len(between) - size :].strip()
    tail = between[: len(between) - size].strip()
    if not (opening.strip() and head and tail):
        return None
    return _Pieces(opening.strip(), head, middle.strip(), tail)
