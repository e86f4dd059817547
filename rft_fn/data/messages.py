"""The message schemas: conversations in the columns of a row.

The schemas of OpenAI, TRL and sharegpt are read. All of them become turns {"role", "content", ...} with text
as content, calls of tools as `{"type": "function", "function": {"name", "arguments"}}`, and no key that holds
None. Content with images, audio or videos is a list of parts. A new schema is read by `_turn`; its names of
roles are rows of `_ROLES`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rft_fn import check
from rft_fn.data.medium import KINDS, part_of
from rft_fn.data.table import Row

__all__ = [
    "Conversation", "Turn", "advice", "are_messages", "conversation", "opened", "system_of", "text_of",
    "tools_of", "turns_of", "unread",
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
    if cell is None or cell == "" or are_messages(cell):  # messages are read where they are named
        return system
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
        cell = _solid(row.get(name))
        if name not in read and cell is not None and not (isinstance(cell, _SIZED) and not len(cell)):
            names.append(name)
    return names


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

    The column is a list or JSON text of one. Holes that a table puts into them are left out. ValueError for
    text that is not JSON.
    """
    cell = row.get("tools")
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    given = _listed(cell)
    if given is None:
        raise ValueError(f"column 'tools': expected a list of JSON schemas, got {cell!r:.60}")
    schemas = []
    for i, schema in enumerate(given, 1):
        if isinstance(schema, str):
            schema = _json(schema)
        if not isinstance(schema, Mapping):
            raise ValueError(f"column 'tools', tool {i}: expected a JSON schema, got {given[i - 1]!r:.60}")
        schemas.append(_solid(schema))
    return schemas or None


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
        cell = _json(cell)
    if hasattr(cell, "tolist"):  # an array of a table
        cell = cell.tolist()
    return list(cell) if isinstance(cell, (list, tuple)) else None


def _json(text: str) -> Any:
    """Return the value of JSON text; None for other text."""
    try:
        return check.parse_json(text)
    except ValueError:
        return None


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
    if named == "function_call":
        return {"role": role, "content": "", "tool_calls": _calls(given.get("content"))}

    # a turn that calls tools needs no text
    calls = _calls(given.pop("tool_calls", []))
    content = given.pop("content", None)
    if content is None and not calls:
        raise ValueError(f"{role}: expected content, got none")
    turn = {"role": role, "content": _content(content, media), **given}
    if calls:
        turn["tool_calls"] = calls
    return turn


def _content(content: Any, media: bool) -> str | list[Turn]:
    """Return content as text, its parts joined; with media a list of parts. ValueError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"content: expected text, or a list of parts of text, got {type(content).__name__}")

    parts = [_part(part, media) for part in content]
    if any(part["type"] in KINDS for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any, media: bool) -> Turn:
    """Return a part of content. ValueError for one that the model would silently not be shown."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind: Any = type(part).__name__
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        medium = part_of(part)
        if medium is not None and media:
            return medium
        kind = part.get("type")
    expected = f"text, {', '.join(KINDS)}" if media else "text"
    raise ValueError(f"content: expected parts of {expected}, got one of type {kind!r}")


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


def _call(call: Any) -> Turn:
    """One call in OpenAI's form. Arguments that are JSON text of an object become that object."""
    if not isinstance(call, Mapping):
        raise ValueError(f"tool_calls: expected a call with name and arguments, got {call!r:.60}")

    # OpenAI's {"function": {...}}, or only name and arguments
    function = call.get("function")
    if not function:
        function = {"name": call.get("name"), "arguments": call.get("arguments")}
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ValueError(f"tool_calls: expected a call with a name, got {call!r:.60}")
    arguments = _solid(function.get("arguments") or {})
    if isinstance(arguments, str):
        read = _json(arguments)
        if isinstance(read, dict):
            arguments = read

    turn = {name: x for name, x in call.items() if name not in ("name", "arguments") and x is not None}
    return {**turn, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _solid(x: Any) -> Any:
    """x without the keys that hold None. A table gives every object the keys of all."""
    if isinstance(x, Mapping):
        return {name: _solid(y) for name, y in x.items() if y is not None}
    if isinstance(x, (list, tuple)):
        return [_solid(y) for y in x]
    return x
