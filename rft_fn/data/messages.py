"""The message schemas: conversations in the columns of a row.

The schemas of OpenAI, TRL and sharegpt are read. All of them become turns {"role", "content", ...} with text
as content, calls of tools as `{"type": "function", "function": {"name", "arguments"}}`, and no key that holds
None. Content with images, audio or videos is a list of parts. A new schema is read by `_turn`; its names of
roles are rows of `_ROLES`. Every key of a message is one of `_READ`, `_THOUGHTS`, `_LEARNED` or `_REFUSED`,
or is passed on to the chat template and named by `extra_keys`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn import border
from rft_fn.data.medium import KINDS, part_of
from rft_fn.data.table import Row
from rft_fn.foreign_json import parse_json
from rft_fn.text import check_text

__all__ = [
    "Conversation", "Turn", "advice", "are_messages", "conversation", "extra_keys", "is_learned", "opened",
    "system_of", "text_of", "tools_of", "turns_of", "unread",
]  # fmt: skip

Turn = dict[str, Any]

_SIZED = (str, list, tuple, Mapping)

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
_READ = ("role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id")
"""The keys that make a turn."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
"""The keys of a thought; a turn has it in the first."""

_LEARNED = (
    "weight", "train", "training", "trainable", "is_train", "loss", "loss_mask", "loss_weight", "loss_scale",
    "calculate_loss",
)  # fmt: skip
"""The keys that say by 0 or 1 whether a turn is learned; a turn that is not has "weight": 0."""

_REFUSED = {
    **{name: "put it into the content, or into a column" for kind in KINDS for name in (kind, f"{kind}s")},
    "tools": "give them in the column 'tools'",
    "functions": "give them in the column 'tools'",
    "train_detail": "only whole turns are learned or left out, by 'train'",
    **{name: "say by 'train' whether it is learned" for name in ("mask", "masked", "exclude", "ignore")},
    "prefix": "a turn that the assistant has begun is not continued",
    "partial": "a turn that the assistant has begun is not continued",
}
"""The keys without which a turn would mean something else."""

_ASKED = ("system", "system_prompt", "tools", "functions", "chat_template_kwargs", "history")
"""Columns of known schemas that belong to what is asked, next to a conversation or a question."""

_USUAL = ("prompt", "messages", "conversations", "completion")  # the order in which they are suggested


class Conversation(NamedTuple):
    """The turns and the tools of a row."""

    turns: list[Turn]
    start: int  # the first turn of the last column; an example of prompt and completion learns from there on
    tools: list[Any] | None


def conversation(
    row: Row, columns: Sequence[str], system: str | None = None, *, media: bool = False
) -> Conversation:
    """Return the conversation of a row.

    Its turns are the messages of `columns`, one column after the other; its tools are in the column `tools`,
    and its system turn may be in the column `system`. `system` is the content of a system turn that is added
    where there is none.

    ValueError names the column and the turn, counted from 1, of anything that is no message: no role or an
    unknown one, no content in a turn that calls no tool, a part of the content that is not text. With `media`
    parts may be images, audio or videos; the content is then a list of parts.
    """
    turns: list[Turn] = []
    start = 0
    for name in columns:
        start = len(turns)
        turns += turns_of(row, name, media=media)
    more = opened(turns, system_of(row, turns, system))
    return Conversation(more, start + len(more) - len(turns), tools_of(row))


def opened(turns: list[Turn], system: str | None) -> list[Turn]:
    """Turns with `system` as their system turn, unless they have one. Unchanged where `system` is None."""
    if system is None or turns[0]["role"] in ("system", "developer"):
        return turns
    return [{"role": "system", "content": system}, *turns]


def system_of(row: Row, turns: Sequence[Turn], system: str | None) -> str | None:
    """Return the system prompt of a row of messages: that of its column `system`, else `system`.

    ValueError for a column that holds no text, and for turns with another system prompt.
    """
    cell = row.get("system")
    if cell is None or cell == "":
        return system
    if are_messages(cell):  # they are read where they are named
        if any(turn in turns for turn in turns_of(row, "system")):
            return system
        raise ValueError("column 'system' holds messages: name it in --messages, before the others")
    if not isinstance(cell, str):
        raise ValueError(f"column 'system': expected text, got {type(cell).__name__}")
    if turns[0]["role"] in ("system", "developer") and text_of(turns[0]) != cell:
        raise ValueError(
            f"expected one system prompt, got {cell!r:.40} in column 'system' and {text_of(turns[0])!r:.40} "
            "in turn 1; remove one of them"
        )
    return cell


def unread(row: Row, read: Collection[str]) -> list[str]:
    """Return the columns of a row that its schema means to be asked, and that are not among those `read`."""
    known = [*_ASKED, *KINDS, *(f"{kind}s" for kind in KINDS)]
    if "instruction" in row:  # alpaca and dolly
        known += ["input", "context"]
    names = []
    for name in known:
        if name not in row or name in read:
            continue
        cell = _solid(row[name])
        if cell is not None and not (isinstance(cell, _SIZED) and not len(cell)):
            names.append(name)
    return names


def extra_keys(cell: Any) -> set[tuple[str, str]]:
    """Return (role, key) of the keys that are passed on with a turn, in messages or in lists of messages.

    They belong to no schema that is read here: whoever renders the turns tells whether they are read.
    """
    found: set[tuple[str, str]] = set()
    for message in _listed(cell) or ():
        if isinstance(message, (list, tuple)):
            found |= extra_keys(message)
        if not isinstance(message, Mapping) or not ("role" in message or "from" in message):
            continue
        role = _ROLES.get(str(message.get("role", message.get("from"))), "")
        parts = _listed(message.get("content")) if not isinstance(message.get("content"), str) else None
        found |= {
            (role, x["type"]) for x in parts or () if isinstance(x, Mapping) and x.get("type") in _OF_THOUGHT
        }
        for key, x in message.items():
            of_result = key == "name" and role == "tool"
            if key in _READ or of_result or key in _REFUSED or _is_nothing(x):
                continue
            if key in _LEARNED and (role == "assistant" or not _flag(key, x)):
                continue
            found.add((role, key))
    return found


def _is_nothing(x: Any) -> bool:
    return x is None or (isinstance(x, _SIZED) and not len(x))


def is_learned(turn: Turn) -> bool:
    """Return whether a turn of the assistant is learned; the row may leave it out."""
    return turn.get("weight", 1) != 0


def turns_of(row: Row, name: str, *, media: bool = False) -> list[Turn]:
    """Return the messages of one column, a list or JSON text of one. ValueError as `conversation`."""
    if name not in row:
        has = ", ".join(map(repr, row))
        raise ValueError(f"the row has no column {name!r}; it has {has}{advice(row)}")
    messages = _listed(row[name])
    if messages is None:
        kind = type(row[name]).__name__
        raise ValueError(
            f"column {name!r}: expected a list of messages, got {kind}; "
            f"text is for --template '{{{name}}}', without --messages"
        )
    if not messages:
        raise ValueError(f"column {name!r} has no messages")

    # an error of a message names its turn
    turns = []
    for i, message in enumerate(messages, 1):
        try:
            turns.append(_turn(message, media))
        except ValueError as error:
            raise ValueError(f"column {name!r}, turn {i}: {error}") from None
    return turns


def tools_of(row: Row) -> list[Any] | None:
    """Return the JSON schemas in the column `tools` of a row; None without any.

    The column is a list or JSON text of one. JSON text has no holes. Those that a table puts into a list are
    left out, and told from the null of a schema by where they are: one in "default" or "const" is meant,
    unless the list has holes elsewhere too. ValueError for text that is not JSON.
    """
    cell = row.get("tools")
    if cell is None or (isinstance(cell, str) and cell.strip() in ("", "null")):
        return None
    given = _listed(cell)
    if given is None:
        raise ValueError(f"column 'tools': expected a list of JSON schemas, got {cell!r:.60}")
    values = () if not isinstance(cell, str) and _has_holes(given) else _VALUES
    schemas = []
    for i, schema in enumerate(given, 1):
        from_text = isinstance(schema, str)
        if from_text:
            schema = _json(schema)
        if not isinstance(schema, Mapping):
            raise ValueError(f"column 'tools', tool {i}: expected a JSON schema, got {given[i - 1]!r:.60}")
        border.finite(f"column 'tools', tool {i}", schema)
        schemas.append(_solid(schema, _VALUES if from_text else values))
    return schemas or None


_VALUES = ("default", "const", "enum", "examples")
"""The keys of a JSON schema that hold values, which may be null."""


def _has_holes(x: Any) -> bool:
    """Return whether a schema holds None where JSON Schema has no null."""
    if isinstance(x, Mapping):
        return any(y is None or _has_holes(y) for key, y in x.items() if key not in _VALUES)
    return isinstance(x, (list, tuple)) and any(_has_holes(y) for y in x)


def advice(row: Row) -> str:
    """Return the options to use where columns of a row hold messages, else ""."""
    names = [name for name in row if are_messages(row[name])]
    if not names:
        return ""
    usual = [name for name in _USUAL if name in names]
    names = usual + [name for name in names if name not in _USUAL]
    if {"prompt", "completion"} <= set(names):
        return (
            "; 'prompt' and 'completion' hold messages: --messages prompt completion to learn the second, "
            "--messages prompt to answer the first"
        )
    return f"; {names[0]!r} holds messages: --messages {names[0]}, without --template"


def are_messages(cell: Any) -> bool:
    """Return whether a cell is a list that begins with a message."""
    first = (_listed(cell) or [None])[0]
    return isinstance(first, Mapping) and ("role" in first or "from" in first)


def _listed(cell: Any) -> list[Any] | None:
    """Return a cell as a list, parsed if it is JSON text, else None."""
    if isinstance(cell, str):
        cell = _json(cell) if cell.lstrip().startswith("[") else None
    if hasattr(cell, "tolist"):  # an array of a table
        cell = cell.tolist()
    return list(cell) if isinstance(cell, (list, tuple)) else None


def _json(text: str) -> Any:
    """Return the value of JSON text; None for other text. ValueError for half of a surrogate pair in it."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    check_text(value)
    return value


def _turn(message: Any, media: bool) -> Turn:
    """Read one message as a turn. ValueError for anything else."""
    if not isinstance(message, Mapping):
        raise ValueError(f"expected a message with role and content, got {type(message).__name__}")

    # sharegpt has other names for role and content
    given = {name: x for name, x in message.items() if x is not None}
    if "role" not in given and "from" in given:
        given["role"] = given.pop("from")
        given["content"] = given.pop("value", None)
    if "role" not in given:
        raise ValueError(f"expected a role, got a message with {', '.join(map(repr, message)) or 'nothing'}")
    named = given.pop("role")
    role = _ROLES.get(str(named))
    if role is None:
        raise ValueError(f"role: expected one of {', '.join(_ROLES)}, got {named!r}")
    for name, remedy in _REFUSED.items():
        if not _is_nothing(given.get(name)) and given[name] is not False:
            raise ValueError(f"{role}: expected no {name!r} in a message, got {given[name]!r:.40}; {remedy}")
        given.pop(name, None)
    learned = _weight(given)
    thought = _thought(given)

    # a turn that calls tools needs no text
    calls = _calls(given.pop("tool_calls", None) or [])
    if not _is_nothing(given.get("function_call")):
        calls += _calls(given["function_call"])
    given.pop("function_call", None)
    content = given.pop("content", None)
    if named == "function_call":
        calls, content = _calls(content), None
    elif content is None and not calls:
        raise ValueError(f"{role}: expected content, got none")
    content, inner = _content(content, media)
    turn = {"role": role, "content": content, **given}
    if thought or inner:
        turn["reasoning_content"] = thought or inner
    if calls:
        turn["tool_calls"] = calls
    if learned is False:
        turn["weight"] = 0
    return turn


def _weight(given: dict[str, Any]) -> bool | None:
    """Take the keys that say whether a turn is learned; None without any. ValueError for another value."""
    flags = {name: _flag(name, given.pop(name)) for name in _LEARNED if name in given}
    if len(set(flags.values())) > 1:
        raise ValueError(f"{' and '.join(flags)}: expected the same for a turn, got {flags}")
    return next(iter(flags.values()), None)


def _flag(name: str, x: Any) -> bool:
    """Return whether a value says that a turn is learned. ValueError for one that is neither 0 nor 1."""
    if hasattr(x, "item"):  # a number of a table
        x = x.item()
    if not isinstance(x, (bool, int, float)) or x not in (0, 1):
        raise ValueError(f"{name}: expected 0 or 1, whether the turn is learned, got {x!r:.40}")
    return bool(x)


def _thought(given: dict[str, Any]) -> str:
    """Take the thought of a message, "" for none. ValueError for two that differ, and for no text."""
    found = {name: given.pop(name) for name in _THOUGHTS if name in given}
    texts = {x for x in found.values() if isinstance(x, str) and x}
    wrong = [name for name, x in found.items() if not isinstance(x, str) and not _is_nothing(x)]
    if wrong or len(texts) > 1:
        name = wrong[0] if wrong else " and ".join(found)
        raise ValueError(f"{name}: expected the text of one thought, got {next(iter(found.values()))!r:.40}")
    return next(iter(texts), "")


_OF_TEXT = ("text", "input_text", "output_text", None)  # types of parts
_OF_THOUGHT = ("thinking", "reasoning")


def _content(content: Any, media: bool) -> tuple[str | list[Turn], str]:
    """Return (content, the thoughts among its parts); with media the content is a list of parts.

    Parts of text are joined. ValueError for other parts.
    """
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if hasattr(content, "tolist"):  # an array of a table
        content = content.tolist()
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"content: expected text, or a list of parts of text, got {type(content).__name__}")

    parts = [_part(part, media) for part in content]
    thoughts = "".join(part["text"] for part in parts if part["type"] == "thought")
    parts = [part for part in parts if part["type"] != "thought"]
    if any(part["type"] in KINDS for part in parts):
        return parts, thoughts
    return "".join(part["text"] for part in parts), thoughts


def _part(part: Any, media: bool) -> Turn:
    """Return a part of content. ValueError for one that the model would silently not be shown."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind: Any = type(part).__name__
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind in _OF_TEXT and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind in _OF_THOUGHT:
            return {"type": "thought", "text": _text_of_thought(part)}
        medium = part_of(part)
        if medium is not None and media:
            return medium
    expected = f"text, {', '.join(KINDS)}" if media else "text"
    raise ValueError(f"content: expected parts of {expected}, got one of type {kind!r}")


def _text_of_thought(part: Mapping[str, Any]) -> str:
    """Return the text of a part that is a thought, in which it may be a list of parts."""
    inner = next((part[name] for name in (*_OF_THOUGHT, "text") if part.get(name) is not None), "")
    if isinstance(inner, str):
        return inner
    text, _ = _content(inner, False)
    return str(text)


def text_of(turn: Mapping[str, Any]) -> str:
    """Return the text of a turn, with the mark "<image>" or the like for each medium."""
    content = turn["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"<{part['type']}>") for part in content)


def _calls(cell: Any) -> list[Turn]:
    """Read one call of tools, a list, or JSON text of either. ValueError for a call without a name."""
    calls = _json(cell) if isinstance(cell, str) else cell
    if isinstance(calls, Mapping):
        calls = [calls]
    calls = _listed(calls)
    if calls is None:
        raise ValueError(f"tool_calls: expected calls with name and arguments, got {cell!r:.60}")
    return [_call(call) for call in calls]


_OTHER_ARGUMENTS = ("input", "args", "kwargs", "params", "tool_input", "action_input")
"""Names that other schemas have for the arguments of a call."""


def _call(call: Any) -> Turn:
    """One call in OpenAI's form. Arguments that are JSON text of an object become that object."""
    if not isinstance(call, Mapping):
        raise ValueError(f"tool_calls: expected a call with name and arguments, got {call!r:.60}")

    # OpenAI's {"function": {...}}, or only name and arguments, which Llama calls parameters
    function = call.get("function") or call
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ValueError(f"tool_calls: expected a call with a name, got {call!r:.60}")
    given = [function[name] for name in ("arguments", "parameters") if function.get(name) is not None]
    if others := [name for name in _OTHER_ARGUMENTS if not given and not _is_nothing(function.get(name))]:
        raise ValueError(f"tool_calls: expected a call with arguments, got {others[0]!r} in their place")
    arguments = _solid(given[0]) if given else {}
    if isinstance(arguments, str):
        read = _json(arguments) if arguments.strip() not in ("", "null") else {}
        read = _json(read) if isinstance(read, str) else read  # written as JSON twice
        if isinstance(read, dict):
            arguments = read

    border.finite(f"tool_calls: {function['name']}", arguments)
    of_call = ("name", "arguments", "parameters", "function")
    turn = {name: x for name, x in call.items() if name not in of_call and x is not None}
    return {**turn, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _solid(x: Any, values: Collection[str] = ()) -> Any:
    """Return x without the keys that hold None. A table gives every object the keys of all.

    What the keys `values` hold stays as it is.
    """
    if isinstance(x, Mapping):
        kept = {name: y for name, y in x.items() if y is not None or name in values}
        return {name: y if name in values else _solid(y, values) for name, y in kept.items()}
    if isinstance(x, (list, tuple)):
        return [_solid(y, values) for y in x]
    return x
