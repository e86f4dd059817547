"""What a chat template reads and writes, found by rendering it with and without a marker.

A template is a program: its source does not tell what it does with a tool, a keyword, a thought or a part of
text. So it is asked. All questions go through `rendered`.
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rft_fn.data.rendering import TooSlow, render
from rft_fn.data.template_variables import MARK

__all__ = [
    "CALL_ID", "THOUGHTS", "TOOL", "arguments_form", "as_json", "call_turn", "content_form", "id_of_call",
    "keywords", "lacks_ids", "own_names", "reads_key", "reads_keyword", "rendered", "thought_key",
    "thought_marks", "thought_starts", "with_ids", "with_names", "with_thought", "wrapped_tools",
]  # fmt: skip

Turn = Mapping[str, Any]

_ASKED = "rftfnquestion"
_SAID = "rftfnanswer"
_FOUND = "rftfnmarker"
CALL_ID = "call{:05}"  # the form that Mistral's templates ask for: nine letters and digits
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which templates read a thought."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "rftfntool",
        "description": "rftfndescription",
        "parameters": {
            "type": "object",
            "properties": {"rftfnkey": {"type": "string", "description": "rftfnabout"}},
            "required": ["rftfnkey"],
        },
    },
}


def rendered(
    tokenizer: Any,
    turns: Sequence[Turn],
    tools: Sequence[Any] | None = None,
    *,
    ask: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the text that a tokenizer's chat template makes of turns, None where it fails."""
    if not tokenizer.chat_template:
        return None
    given = [dict(turn) for turn in turns]
    tools = None if tools is None else list(tools)
    try:
        return render(
            tokenizer, given, tools=tools, tokenize=False, add_generation_prompt=ask, **(kwargs or {})
        )
    except TooSlow:
        raise
    except Exception:  # whatever a template raises
        return None


def _user(content: Any = _ASKED) -> Turn:
    return {"role": "user", "content": content}


def _assistant(content: Any = _SAID, **more: Any) -> Turn:
    return {"role": "assistant", "content": content, **more}


def call_turn(calls: Sequence[tuple[str, Any]], *, ids: Sequence[str] = (), content: str = "") -> Turn:
    """Return a turn that calls tools, of (name, arguments) of each call."""
    made = []
    for i, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        made.append({
            "id": ids[i] if ids else CALL_ID.format(i + 1), "type": "function", "function": function,
        })  # fmt: skip
    return _assistant(content, tool_calls=made)


def as_json(arguments: Any) -> str:
    """Return the arguments of a call as JSON text; a text is one already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _key_of(tokenizer: Any) -> str:
    return json.dumps(tokenizer.chat_template)  # a template may be replaced


def content_form(tokenizer: Any, role: str) -> str:
    """Return how the template reads the content of a role: "text", "parts", "none", or "" if it fails.

    "text" is a string, "parts" a list of {"type": "text"}. Without a chat template it is text.
    """
    return _content_form(tokenizer, role, _key_of(tokenizer))


@lru_cache(256)
def _content_form(tokenizer: Any, role: str, template: str) -> str:
    if not tokenizer.chat_template:
        return "text"
    forms = {"text": _FOUND, "parts": [{"type": "text", "text": _FOUND}]}
    found = ""
    for form, content in forms.items():
        for turns in _with_role(role, content, form):
            text = rendered(tokenizer, turns)
            if text is not None and _FOUND in text:
                return form
            if text is not None:
                found = "none"
    return found


def _with_role(role: str, content: Any, form: str) -> list[list[Turn]]:
    """Return conversations with a turn of a role, in the order in which they are tried."""

    def as_form(text: str) -> Any:
        return text if form == "text" else [{"type": "text", "text": text}]

    asked = _user(as_form(_ASKED))
    if role == "user":
        return [[_user(content)]]
    if role == "assistant":
        return [[asked, _assistant(content)]]
    if role == "tool":
        result = {"role": "tool", "content": content, "name": "rftfntool", "tool_call_id": CALL_ID.format(1)}
        calls = [call_turn([("rftfntool", x)]) for x in ({"rftfnkey": "x"}, '{"rftfnkey": "x"}')]
        return [[asked, call, result] for call in calls] + [[asked, _assistant(as_form(_SAID)), result]]
    return [[{"role": role, "content": content}, asked]]


def arguments_form(tokenizer: Any) -> str:
    """Return how the template reads the arguments of a call: "object", "text" of JSON, "" for not."""
    return _arguments_form(tokenizer, _key_of(tokenizer))


@lru_cache(64)
def _arguments_form(tokenizer: Any, template: str) -> str:
    arguments = {"rftfnkey": _FOUND}
    asked = _user() if content_form(tokenizer, "user") != "parts" else _user([{"type": "text", "text": "x"}])
    for tools in (None, [TOOL]):
        texts = {
            form: rendered(tokenizer, [asked, call_turn([("rftfntool", given)])], tools) or ""
            for form, given in (("object", arguments), ("text", json.dumps(arguments)))
        }
        # an object that is printed as Python writes it is meant to be text
        if _FOUND in texts["object"] and f"{arguments}" not in texts["object"]:
            return "object"
        if json.dumps(arguments) in texts["text"]:
            return "text"
        if _FOUND in texts["object"]:
            return "object"
    return ""


def id_of_call(tokenizer: Any, name: str, number: int) -> str:
    """Return the id of the call of a name, the `number`-th from 1, in the form that the template asks for.

    Nine letters and digits, as Mistral's want; Kimi's writes an id in place of the name, in its own form.
    """
    if _names_by_id(tokenizer, _key_of(tokenizer)):
        return f"functions.{name}:{number - 1}"
    return CALL_ID.format(number)


@lru_cache(64)
def _names_by_id(tokenizer: Any, template: str) -> bool:
    text = rendered(tokenizer, [_user(), call_turn([("rftfntool", {"rftfnkey": _FOUND})])]) or ""
    return "rftfntool" not in text and CALL_ID.format(1) in text


def with_ids(tokenizer: Any, turns: Sequence[Turn]) -> list[Turn] | None:
    """Return turns with ids for calls and results, in the template's form; None without any of these."""
    numbered: list[Turn] = []
    made = 0
    left: list[str] = []  # ids of calls without a result
    for turn in turns:
        if turn.get("tool_calls"):
            left = []
            calls = []
            for call in turn["tool_calls"]:
                made += 1
                left.append(id_of_call(tokenizer, call["function"]["name"], made))
                calls.append({**call, "id": left[-1]})
            turn = {**turn, "tool_calls": calls}
        elif turn["role"] == "tool":
            made += not left
            own = id_of_call(tokenizer, str(turn.get("name") or "rftfntool"), made)
            turn = {**turn, "tool_call_id": left.pop(0) if left else own}
        numbered.append(turn)
    return numbered if made else None


def with_names(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which the results of calls have the names of these, by their ids, else in order."""
    named: list[Turn] = []
    left: list[Any] = []  # calls without a result
    for turn in turns:
        if turn.get("tool_calls"):
            left = [*turn["tool_calls"]]
        elif turn["role"] == "tool" and left:
            own = next((call for call in left if call.get("id") == turn.get("tool_call_id")), left[0])
            left.remove(own)
            turn = {**turn, "name": turn.get("name") or own["function"]["name"]}
        named.append(turn)
    return named


def lacks_ids(tokenizer: Any, turns: Sequence[Turn]) -> bool:
    """Return whether turns have no ids, or no names in them, where the template writes these."""
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    results = [turn for turn in turns if turn["role"] == "tool"]
    if not calls and not results:
        return False
    if _names_by_id(tokenizer, _key_of(tokenizer)):
        return any(call["function"]["name"] not in str(call.get("id")) for call in calls) or any(
            "tool_call_id" not in turn for turn in results
        )
    missing = any("tool_call_id" not in turn for turn in results)
    return missing and reads_key(tokenizer, "tool", "tool_call_id")


def wrapped_tools(tokenizer: Any, tools: Sequence[Any] | None) -> list[Any] | None:
    """Return the schemas of tools as the template reads them: bare ones, or in OpenAI's form."""
    if tools is None:
        return None
    bare, wrapped = _forms_of_tools(tokenizer, _key_of(tokenizer))
    if wrapped and not bare:
        return [
            x if "function" in x or "name" not in x else {"type": "function", "function": x} for x in tools
        ]
    if bare and not wrapped:
        return [x["function"] if isinstance(x.get("function"), Mapping) else x for x in tools]
    return list(tools)


@lru_cache(64)
def _forms_of_tools(tokenizer: Any, template: str) -> tuple[bool, bool]:
    """Return whether the template writes the name of a bare tool, and of one in OpenAI's form."""
    texts = [rendered(tokenizer, [_user()], [tool]) or "" for tool in (TOOL["function"], TOOL)]
    return "rftfntool" in texts[0], "rftfntool" in texts[1]


def thought_key(tokenizer: Any) -> str:
    """Return the key of a turn that the template reads a thought from, "" where it reads none.

    "content" stands for a part of the content, as Mistral's templates have it.
    """
    return _thought_key(tokenizer, _key_of(tokenizer))


@lru_cache(64)
def _thought_key(tokenizer: Any, template: str) -> str:
    for key in THOUGHTS:
        if reads_key(tokenizer, "assistant", key):
            return key
    text = rendered(tokenizer, [_user(), with_thought(_assistant(), "content", _FOUND)]) or ""
    printed = re.search(f"['\"]{_FOUND}", text)  # as Python or JSON
    return "content" if _FOUND in text and _SAID in text and not printed else ""


def with_thought(turn: Turn, key: str, thought: str) -> Turn:
    """Return a turn of text with a thought, by a key of `thought_key`."""
    if key != "content":
        return {**turn, key: thought}
    text = turn["content"]
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
    return {**turn, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def thought_marks(tokenizer: Any) -> list[tuple[str, str]]:
    """Return the texts around a thought: what the template writes, and the usual <think> and </think>."""
    marks = [("<think>", "</think>")]
    key = thought_key(tokenizer)
    if key:
        text = rendered(tokenizer, [_user(), with_thought(_assistant(), key, _FOUND)]) or ""
        plain = rendered(tokenizer, [_user(), _assistant()]) or ""
        before, _, after = text.partition(_FOUND)
        plain = plain.partition(_SAID)[0]
        size = next(
            (i for i, (a, b) in enumerate(zip(before, plain)) if a != b), min(len(before), len(plain))
        )
        opening = before[size:].strip() or (before.split() or [""])[-1]
        closing = re.match(r"\s*(<[^<>]*>|\[[^\[\]]*\])", after)
        if opening and closing and _FOUND in text:
            marks.append((opening, closing[1]))
    return list(dict.fromkeys(marks))


def thought_starts(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether the prompt ends inside a thought, so that a response begins within it."""
    text = (rendered(tokenizer, [_user()], ask=True, kwargs=kwargs) or "").rstrip()
    return any(text.endswith(opening) for opening, _ in thought_marks(tokenizer))


def reads_key(tokenizer: Any, role: str, key: str) -> bool:
    """Return whether the template writes anything else for a turn of a role that has this key."""
    return _reads_key(tokenizer, role, key, _key_of(tokenizer))


@lru_cache(1024)
def _reads_key(tokenizer: Any, role: str, key: str, template: str) -> bool:
    form = content_form(tokenizer, role)
    content: Any = _SAID if form != "parts" else [{"type": "text", "text": _SAID}]
    for turns in _with_role(role, content, form or "text"):
        place = next(i for i, turn in enumerate(turns) if turn["role"] == role)
        for ask in (False, True):
            plain = rendered(tokenizer, turns, ask=ask)
            for value in (_FOUND, True, [{"type": "text", "text": _FOUND}]):
                more = [*turns]
                more[place] = {**more[place], key: value}
                text = rendered(tokenizer, more, ask=ask)
                if text is not None and text != plain:
                    return True
    return False


def _talks() -> list[tuple[list[Turn], list[Any] | None]]:
    """Return conversations in which a template may read whatever it reads, each with tools or None."""
    thought = dict.fromkeys(THOUGHTS, _FOUND)
    talk = [_user(), _assistant(**thought), _user(), _assistant(f"<think>\n{_FOUND}\n</think>\n\n{_SAID}")]
    result = {"role": "tool", "content": _SAID, "name": "rftfntool", "tool_call_id": CALL_ID.format(1)}
    parts = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": _ASKED}]
    talks: list[list[Turn]] = [
        [_user()],
        [{"role": "system", "content": _SAID}, _user()],
        [_user(), _assistant()],
        [*talk, _user()],
        [_user(parts)],
    ]
    for arguments in ({"rftfnkey": "x"}, '{"rftfnkey": "x"}'):
        talks.append([_user(), {**call_turn([("rftfntool", arguments)]), **thought}, result])
    return [(turns, tools) for turns in talks for tools in (None, [TOOL])]


_COMPARED = re.compile(r"""[=!]=\s*(?:"([^"\n]{1,32})"|'([^'\n]{1,32})')""")
"""A text that a template compares something with."""


def reads_keyword(tokenizer: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a keyword changes what the template writes, by its value in `kwargs` or by another.

    The others are true, false, a marker, and the texts that the template compares anything with.
    """
    rest = {other: x for other, x in kwargs.items() if other != name}
    compared = {"".join(match) for match in _COMPARED.findall(str(tokenizer.get_chat_template()))}
    values = [*([kwargs[name]] if name in kwargs else []), True, False, _FOUND, *sorted(compared)]
    for turns, tools in _talks():
        for ask in (True, False):
            plain = rendered(tokenizer, turns, tools, ask=ask, kwargs=rest)
            for value in values:
                if rendered(tokenizer, turns, tools, ask=ask, kwargs={**rest, name: value}) != plain:
                    return True
    return False


def own_names(tokenizer: Any) -> set[str]:
    """Return the names that the template gets anyway, and options of the function that renders it."""
    from jinja2.defaults import DEFAULT_NAMESPACE

    options = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents"}
    given = {"messages", "tools", "raise_exception", "strftime_now", *tokenizer.special_tokens_map}
    return options | given | set(DEFAULT_NAMESPACE)


def keywords(tokenizer: Any) -> list[str]:
    """Return the keywords that the template reads, for an error: of the names in its source those that do."""
    from jinja2 import Environment, TemplateError, meta

    env = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = env.parse(MARK.sub("", tokenizer.get_chat_template()))
    except TemplateError:
        return []
    names = meta.find_undeclared_variables(tree) - own_names(tokenizer)
    return sorted(name for name in names if reads_keyword(tokenizer, name, {}))
