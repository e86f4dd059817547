"""The forms in which chat templates write calls of tools: how each is recognised, and read.

A form finds the next place of a call in a text, and reads the calls that begin there. What is cut off, or
cannot be read, is a call with an error.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rft_fn.foreign_json import json_at, parse_json

__all__ = ["Call", "Form", "Objects", "found_form"]


class Call(NamedTuple):
    """A call as the model wrote it; `error` says why it cannot be made, "" if it can."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    complete: bool = True  # False for one that the end of the response cut off
    id: str = ""  # that the model gave it


_CUT = "the call is cut off"
_NAMED = r"[\w.\-]+"


class Form(Protocol):
    """How calls are written."""

    def find(self, text: str, at: int, /) -> re.Match[str] | None:
        """Return the next position, from `at` on, where calls start."""
        ...

    def read(self, text: str, place: re.Match[str], /) -> tuple[list[Call], int]:
        """Return (the calls that start here, where they end): at least one, which may be an error."""
        ...


Render = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], tuple[str, str]]
"""(name, arguments) of calls -> (the template's text of them, the id of the first)."""

_NAME = "rftfnname"
_KEYS = ("rftfnkeya", "rftfnkeyb")
_VALUES = ("rftfnvaluea", "rftfnvalueb")


def found_form(render: Render) -> Form | None:
    """Return the form of the calls that `render` writes, None for one that is not known."""
    one, call_id = render([(_NAME, {_KEYS[0]: _VALUES[0]})])
    if _NAME not in one or _VALUES[0] not in one:
        return None
    two, _ = render([(_NAME, dict(zip(_KEYS, _VALUES)))])
    both, _ = render([(_NAME, {_KEYS[0]: _VALUES[0]}), (_NAME, {_KEYS[1]: _VALUES[1]})])
    opening = _opening(one, both)
    return (
        _as_objects(one)
        or _as_name_and_object(one, opening, call_id)
        or _as_pieces(opening, one, two)
        or _as_python(one, opening)
        or _as_braces(one, opening)
    )


def _opening(one: str, both: str) -> str:
    """Return the text before the name of each call, which the first and the second have in common."""
    first = one.partition(_NAME)[0]
    between = both.partition(_VALUES[0])[2].partition(_NAME)[0]
    size = 0
    while size < min(len(first), len(between)) and first[-1 - size] == between[-1 - size]:
        size += 1
    size -= max(first[len(first) - size :].find("<"), 0) if size else 0  # a tag is whole
    return (first[len(first) - size :].strip() if size else "") or first.strip()


def _flexible(text: str) -> str:
    """Return the pattern of a text, in which spaces may differ."""
    return r"\s*".join(re.escape(part) for part in text.split())


def _is_weak(opening: str) -> bool:
    """Return whether an opening has only brackets, which other texts have too."""
    return not re.search(r"\w", opening)


_QUOTED_OR_BRACKET = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\"'\[\](){}]", re.DOTALL)


def _end_of(text: str, start: int, quotes: str = "\"'") -> int | None:
    """Return the place behind the bracket that closes the one at `start`, None if the text ends before it."""
    level = 0
    for match in _QUOTED_OR_BRACKET.finditer(text, start):
        if match[0] in "([{":
            level += 1
        elif match[0] in ")]}":
            level -= 1
            if level <= 0:
                return match.end()
        elif match[0] in quotes:  # a text without an end
            return None
    return None


def _nameless(opening: str, cut: bool) -> Call:
    """Return a call without a name: it was cut off behind its opening, or something else came."""
    return Call("", {}, _CUT if cut else f"expected a name behind {opening!r}", not cut)


_DEEPEST = 100  # brackets around a place, as in JSON


def _depth(text: str) -> int:
    """Return the most brackets around a place of a text."""
    level = most = 0
    for match in _QUOTED_OR_BRACKET.finditer(text):
        level += (match[0] in "([{") - (match[0] in ")]}")
        most = max(most, level)
    return most


def _arguments(name: str, arguments: Any, call_id: str = "") -> Call:
    """Return the call with arguments that are an object, or JSON text of one; null and "" are none."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return Call(name, {}, "the arguments are no JSON object", id=call_id)
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        return Call(name, {}, "the arguments are no JSON object", id=call_id)
    return Call(name, arguments, id=call_id)


_PYTHON_TAG = r"<\|python_tag\|>"  # Llama's, before calls of either form


class Objects(NamedTuple):
    """Calls as JSON objects after an opening text; "" where a call is the whole response."""

    opening: str
    name: str  # the key of the name; "" where the name is the key of the arguments
    arguments: str  # the key of the arguments

    @property
    def is_bare(self) -> bool:
        """Whether nothing marks a call but that it is the whole response."""
        return _is_weak(self.opening)

    def find(self, text: str, at: int, /) -> re.Match[str] | None:
        if self.is_bare:
            return re.compile(rf"\s*(?:{_PYTHON_TAG}|(?=[\[{{]))\s*").match(text, at)
        return re.compile(f"{_flexible(self.opening)}|{_PYTHON_TAG}").search(text, at)

    def read(self, text: str, place: re.Match[str], /) -> tuple[list[Call], int]:
        calls: list[Call] = []
        marked = not self.is_bare or "python_tag" in place[0]
        at = _behind(text, place.end(), " \t\r\n[")
        while text.startswith("{", at) or (not calls and marked):
            try:
                value, end = json_at(text, at)
            except ValueError as error:
                end = _end_of(text, at, '"') if text.startswith("{", at) else at
                cut = end is None or not text[at:].strip()
                reason = "it is cut off" if cut else str(error)
                broken = Call("", {}, f"the call is no JSON object: {reason}", not cut)
                if marked or '"name"' in text[at : at + 200]:
                    calls.append(broken)
                return calls, len(text) if end is None else max(end, place.end())
            call = self._call(value)
            if call.name or marked:
                calls.append(call)
            elif not calls:  # an answer that is an object
                return [], len(text)
            at = _behind(text, end, " \t\r\n,;")
        return calls, max(at, place.end())

    def _call(self, value: Any) -> Call:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = {**value, **value["function"]}
        keys_of_call = (self.name or "name", self.arguments or "arguments")
        wrong = Call("", {}, "expected an object with {!r} and {!r}".format(*keys_of_call))
        if not isinstance(value, dict):
            return wrong
        if not self.name and len(value) == 1:
            name, arguments = next(iter(value.items()), ("", None))
            return _arguments(name, arguments)
        name = next((value[key] for key in (self.name, "name") if isinstance(value.get(key), str)), "")
        keys = [key for key in (self.arguments, "arguments", "parameters") if key in value]
        if not name or not (
            keys or {*value} <= {self.name, "name", "type", "id", "tool_call_id", "function"}
        ):
            return wrong
        named = next((value[key] for key in ("id", "tool_call_id") if isinstance(value.get(key), str)), "")
        return _arguments(name, value[keys[0]] if keys else {}, named)


def _behind(text: str, at: int, skipped: str) -> int:
    """Return the first place from `at` on with none of some characters."""
    while at < len(text) and text[at] in skipped:
        at += 1
    return at


def _as_objects(one: str) -> Form | None:
    """Return the form of an object that holds name and arguments."""
    for match in re.finditer(r"\{", one[: one.index(_NAME)]):
        try:
            value, _ = json_at(one, match.start())
        except ValueError:
            continue
        before = one[: match.start()].strip()
        if [*value] == [_NAME]:
            return Objects(before, "", "")
        if isinstance(value.get("function"), dict):
            value = value["function"]
        names = [key for key, x in value.items() if x == _NAME]
        others = [key for key, x in value.items() if _VALUES[0] in json.dumps(x)]
        if names and others:
            return Objects(before, names[0], others[0])
    return None


class _NameAndObject(NamedTuple):
    """Calls as a name between two texts, followed by a JSON object."""

    opening: str
    between: str  # a pattern, which may have a group "id", or "number" of a call
    whole: bool  # whether the opening alone marks no call

    def find(self, text: str, at: int, /) -> re.Match[str] | None:
        opening = _flexible(self.opening)
        if self.whole:
            opening += rf"(?=\s*{_NAMED}\s*{self.between}\s*\{{)"
        return re.compile(opening).search(text, at)

    def read(self, text: str, place: re.Match[str], /) -> tuple[list[Call], int]:
        at = place.end()
        name = re.compile(rf"\s*(?:functions\.)?({_NAMED})").match(text, at)
        if name is None:
            cut = not text[at:].strip()
            return [_nameless(self.opening, cut)], at
        between = re.compile(rf"\s*{self.between}\s*").match(text, name.end())
        start = name.end() if between is None else between.end()
        if between is None or not text.startswith("{", start):
            # the text in between has not arrived, or is another one
            cut = text.find("{", name.end()) < 0
            error = _CUT if cut else "expected a JSON object of arguments behind the name"
            return [Call(name[1], {}, error, not cut)], name.end()
        groups = between.groupdict()
        call_id = groups.get("id") or ""
        if groups.get("number"):
            call_id = f"functions.{name[1]}{groups['number']}"
        try:
            value, end = json_at(text, start)
        except ValueError as error:
            end = _end_of(text, start, '"')
            cut = end is None
            what = _CUT if cut else f"the arguments are no JSON object: {error}"
            return [Call(name[1], {}, what, not cut, call_id)], len(text) if end is None else end
        return [_arguments(name[1], value, call_id)], end


_HARMONY = (
    r"(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?\s*(?:json|code)?\s*<\|message\|>"
)
"""What gpt-oss writes before arguments: its template, or the model, with the channel before the name."""


def _as_name_and_object(one: str, opening: str, call_id: str) -> Form | None:
    """Return the form of a name followed by an object of arguments."""
    after = one.partition(_NAME)[2]
    at = after.find("{")
    if at < 0 or not opening:
        return None
    try:
        value, _ = json_at(after, at)
    except ValueError:
        return None
    if value != {_KEYS[0]: _VALUES[0]}:
        return None
    between = after[:at].strip()
    pattern = _flexible(between)
    before_id, found, after_id = between.partition(call_id)
    if found:
        pattern = rf"(?:{_flexible(before_id)}\s*(?P<id>[\w.\-]*)\s*)?{_flexible(after_id)}"
    elif call_id.endswith(":0") and between.startswith(":0"):
        opening = opening.removesuffix("functions.")  # Kimi leaves it out at times
        pattern = rf"(?P<number>:\d+)\s*{_flexible(between[2:])}"
    elif between.startswith("<|channel|>commentary"):
        pattern = _HARMONY
    return _NameAndObject(opening, pattern, _is_weak(opening))


class _Pieces(NamedTuple):
    """Calls as a name after an opening text, and each argument as a key and a value between texts."""

    opening: str
    head: str  # before a key
    middle: str  # between a key and its value
    tail: str  # after a value
    closing: str  # after the last argument; "" where nothing but the end of the turn is

    def find(self, text: str, at: int, /) -> re.Match[str] | None:
        return re.compile(_flexible(self.opening)).search(text, at)

    def read(self, text: str, place: re.Match[str], /) -> tuple[list[Call], int]:
        at = place.end()
        name = re.compile(rf"\s*({_NAMED})").match(text, at)
        if name is None:
            cut = not text[at:].strip()
            return [_nameless(self.opening, cut)], at

        # an argument, a broken one, the end of the call, or another call, whatever is next
        middle = re.escape(self.middle).replace('"true"', '"(?:true|false)"')  # whether the value is a text
        head = rf"{re.escape(self.head)}\s*(?P<key>[^\s<>=\"']+?)\s*{middle}\n?"
        end = _flexible(self.closing) if self.closing else r"\Z"
        step = re.compile(
            rf"(?P<arg>{head})|(?P<broken>{re.escape(self.head)})|(?P<end>{end})"
            rf"|(?P<next>{_flexible(self.opening)})"
        )
        arguments: dict[str, str] = {}
        at = name.end()
        while (found := step.search(text, at)) is not None:
            if found["end"] is not None:
                return [Call(name[1], arguments)], found.end()
            if found["broken"] is not None and self.tail in text[found.end() :]:
                error = f"expected the name of an argument behind {self.head!r}"
                return [Call(name[1], {}, error)], found.end()
            if found["broken"] is not None:
                break
            if found["arg"] is None:
                return [Call(name[1], {}, "the call has no end")], found.start()
            value = text.find(self.tail, found.end())
            if value < 0:
                break
            arguments[found["key"]] = text[found.end() : value].removesuffix("\n")
            at = value + len(self.tail)
        return [Call(name[1], {}, _CUT, False)], len(text)


def _as_pieces(opening: str, one: str, two: str) -> Form | None:
    """Return the form of a key and a value per argument, told by how a second argument is written."""
    if not all(x in two for x in (*_KEYS, *_VALUES)) or two.index(_VALUES[0]) > two.index(_KEYS[1]):
        return None
    first = one.partition(_NAME)[2].partition(_KEYS[0])[0]
    middle = two[two.index(_KEYS[0]) + len(_KEYS[0]) : two.index(_VALUES[0])]
    between = two[two.index(_VALUES[0]) + len(_VALUES[0]) : two.index(_KEYS[1])]

    # the end of one argument and the head of the next; the head comes before the first one too
    size = 0
    while size < min(len(first), len(between)) and first[-1 - size] == between[-1 - size]:
        size += 1
    size -= max(between[len(between) - size :].find("<"), 0)  # a tag is whole
    head = between[len(between) - size :].strip()
    tail = between[: len(between) - size].strip()
    if not (opening and head and tail) or any(key in head + tail for key in _KEYS):
        return None
    opening = opening[max(opening.rfind("<"), 0) :]  # models leave out the tag around calls
    rest = one.partition(_VALUES[0])[2].strip().removeprefix(tail).strip()
    closing = re.match(r"[^\s>]*>?", rest)
    return _Pieces(opening, head, middle.strip(), tail, closing[0] if closing else "")


class _Python(NamedTuple):
    """Calls as name(key=value, ...) after an opening text, one after the other."""

    opening: str

    def find(self, text: str, at: int, /) -> re.Match[str] | None:
        opening = _flexible(self.opening)
        if _is_weak(self.opening):
            return re.compile(rf"\s*{opening}(?=\s*{_NAMED}\()").match(text, at)
        return re.compile(opening).search(text, at)

    def read(self, text: str, place: re.Match[str], /) -> tuple[list[Call], int]:
        calls: list[Call] = []
        at = place.end()
        named = re.compile(rf"[\s,;\[]*({_NAMED})\s*\(")
        while (name := named.match(text, at)) is not None:
            end = _end_of(text, name.end() - 1)
            if end is None:
                return [*calls, Call(name[1], {}, _CUT, False)], len(text)
            calls.append(_python_call(name[1], text[name.end() - 1 : end]))
            at = end
        if not calls:
            cut = "(" not in text[at:]
            calls = [Call("", {}, _CUT if cut else f"expected a call behind {self.opening!r}", not cut)]
        return calls, at


_CONSTANTS = {"true": True, "false": False, "null": None}


def _python_call(name: str, arguments: str) -> Call:
    """Return the call of a name with arguments in parentheses."""
    wrong = Call(name, {}, "expected arguments as (key=value, ...)")
    try:
        if _depth(arguments) > _DEEPEST:
            return wrong
        node = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(node, ast.Call) or node.args or any(x.arg is None for x in node.keywords):
            return wrong
        return Call(name, {str(x.arg): _literal(x.value) for x in node.keywords})
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return wrong


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal of Python, in which JSON's names of constants are known too."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(x) for x in node.elts]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(k or node): _literal(x) for k, x in zip(node.keys, node.values)}
    return ast.literal_eval(node)


def _as_python(one: str, opening: str) -> Form | None:
    """Return the form of a call of Python."""
    after = one.partition(_NAME)[2]
    if not re.match(rf"\s*\(\s*{_KEYS[0]}\s*=\s*(['\"]){_VALUES[0]}\1\s*\)", after):
        return None
    return _Python(opening)


class _Braces(NamedTuple):
    """Calls as name{key:value,...} after an opening text, with a mark on both sides of a text."""

    opening: str
    quote: str

    def find(self, text: str, at: int, /) -> re.Match[str] | None:
        return re.compile(_flexible(self.opening)).search(text, at)

    def read(self, text: str, place: re.Match[str], /) -> tuple[list[Call], int]:
        at = place.end()
        name = re.compile(rf"\s*({_NAMED})\s*(?=\{{)").match(text, at)
        if name is None:
            cut = "{" not in text[at:]
            return [_nameless(self.opening, cut)], at
        try:
            arguments, end = self._value(text, name.end(), 0)
        except EOFError:
            return [Call(name[1], {}, _CUT, False)], len(text)
        except ValueError as error:
            return [Call(name[1], {}, f"the arguments cannot be read: {error}")], name.end()
        return [Call(name[1], arguments)], end

    def _value(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """Return (the value at a place, where it ends). EOFError if the text ends before."""
        if depth > _DEEPEST:
            raise ValueError(f"brackets nest deeper than {_DEEPEST}")
        at = _behind(text, at, " \t\r\n")
        if text.startswith(self.quote, at):
            start = at + len(self.quote)
            end = text.find(self.quote, start)
            if end < 0:
                raise EOFError
            return text[start:end], end + len(self.quote)
        if text.startswith(("{", "["), at):
            return self._several(text, at, depth)
        end = re.compile(r"[,\]}]").search(text, at)
        if end is None:
            raise EOFError
        word = text[at : end.start()].strip()
        try:
            return parse_json(word), end.start()
        except ValueError:
            return word, end.start()

    def _several(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """Return (the object or list that begins at a place, where it ends)."""
        is_object = text[at] == "{"
        closing = "}" if is_object else "]"
        found: dict[str, Any] = {}
        items: list[Any] = []
        at = _behind(text, at + 1, " \t\r\n,")
        while not text.startswith(closing, at):
            if at >= len(text):
                raise EOFError
            if is_object:
                colon = text.find(":", at)
                if colon < 0:
                    raise EOFError
                key = text[at:colon].strip().removeprefix(self.quote).removesuffix(self.quote)
                found[key], at = self._value(text, colon + 1, depth + 1)
            else:
                item, at = self._value(text, at, depth + 1)
                items.append(item)
            at = _behind(text, at, " \t\r\n,")
        return (found if is_object else items), at + 1


def _as_braces(one: str, opening: str) -> Form | None:
    """Return the form of arguments in braces with marks around texts."""
    after = one.partition(_NAME)[2]
    match = re.match(rf"\s*\{{\s*{_KEYS[0]}\s*:\s*(\S+?){_VALUES[0]}(\S+?)\s*\}}", after)
    if match is None or match[1] != match[2] or not opening:
        return None
    return _Braces(opening, match[1])
