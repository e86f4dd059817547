"""Tools: plain Python functions with type hints that a policy calls in an environment."""

import asyncio
import ctypes
import inspect
import json
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from rft_fn.data.messages import Turn
from rft_fn.data.template_probe import CALL_ID
from rft_fn.environment.record import Environment, Row, Stepped
from rft_fn.environment.tool_calls import Call, ParseCalls, tagged_calls
from rft_fn.foreign_json import parse_json
from rft_fn.reward.event_loop import EventLoop
from rft_fn.text import error_text

__all__ = ["Tooled", "run_tool", "tool_schema", "with_tools"]


_AT_A_TIME = 16  # plain functions that run at once: more would eat each other's time
_LOOP = EventLoop()  # of all async tools, apart from the environments, which a tool that blocks would stop
_KINDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_KINDS |= {list: "array", tuple: "array", dict: "object"}


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool in OpenAI's form, by its signature and its docstring's first line.

    ValueError for an argument without a type hint, or with a hint that JSON has no type for.
    """
    name = getattr(tool, "__name__", type(tool).__name__)
    hints = get_type_hints(tool)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name}: expected a type hint for {parameter.name!r}, and no * arguments")
        properties[parameter.name] = _schema(hints[parameter.name], f"tool {name}: {parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    about = (inspect.getdoc(tool) or name).splitlines()[0]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint."""
    origin = get_origin(hint)
    if origin is Literal:
        return {"type": _KINDS[type(get_args(hint)[0])], "enum": list(get_args(hint))}
    if origin in (Union, types.UnionType):
        some = [x for x in get_args(hint) if x is not type(None)]
        if len(some) == 1:
            return _schema(some[0], where) | {"nullable": True}
        return {"anyOf": [_schema(x, where) for x in some]}
    kind = _KINDS.get(origin or hint)
    if kind is None:
        known = ", ".join(x.__name__ for x in _KINDS)
        raise ValueError(f"{where}: expected a type hint of {known}, Literal or a union, got {hint}")
    schema: dict[str, Any] = {"type": kind}
    if kind == "array" and get_args(hint):
        schema["items"] = _schema(get_args(hint)[0], where)
    return schema


def _fitted(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the signature wants them. ValueError, for the model, if they do not fit."""
    schema = tool_schema(tool)["function"]["parameters"]
    known = schema["properties"]
    unknown = sorted(set(arguments) - set(known))
    missing = [name for name in schema["required"] if name not in arguments]
    if unknown or missing:
        given = ", ".join(arguments) or "none"
        raise ValueError(f"expected the arguments {', '.join(known) or 'none'}, got {given}")
    return {name: _value(name, x, known[name]) for name, x in arguments.items()}


def _value(name: str, x: Any, schema: Mapping[str, Any]) -> Any:
    """Return one argument; text is read as JSON where another type is wanted."""
    kind = schema.get("type")
    if isinstance(x, str) and kind not in ("string", None):
        try:
            x = parse_json(x)
        except ValueError:
            raise ValueError(f"{name}: expected {kind}, got {x!r:.80}") from None
    if x is None and schema.get("nullable"):
        return None
    types_of_kind = [python for python, known in _KINDS.items() if known == kind]
    if kind == "number":
        types_of_kind.append(int)
    right = isinstance(x, tuple(types_of_kind)) and (kind == "boolean" or not isinstance(x, bool))
    if kind is not None and not right:
        raise ValueError(f"{name}: expected {kind}, got {x!r:.80}")
    if "enum" in schema and x not in schema["enum"]:
        raise ValueError(f"{name}: expected one of {schema['enum']}, got {x!r:.80}")
    return x


async def run_tool(
    tools: Mapping[str, Callable[..., Any]], call: Call, *, timeout: float, max_output: int
) -> str:
    """Return the output of a call as text of at most `max_output` characters and a note of what was cut.

    Never raises for what a tool does: unknown names, arguments that do not fit, exceptions, and more than
    `timeout` seconds are texts that begin with "error: ", for the model to read. A plain function runs in a
    thread of their own, async ones share an event loop in another. At the limit a thread that runs Python
    code is interrupted, and one that waits is abandoned.
    """
    try:
        if call.error or not call.complete:
            raise ValueError(call.error or "the call is cut off")
        if call.name not in tools:
            raise ValueError(f"no tool {call.name!r}; there are {', '.join(tools)}")
        tool = tools[call.name]
        text = await _within(tool, _fitted(tool, call.arguments), timeout)
    except _TimeUp:
        text = f"error: {call.name} took longer than {timeout:g} s"
    except Exception as error:  # the model is to read it
        text = f"error: {error_text(error)}"
    if len(text) > max_output:
        text = f"{text[:max_output]}... ({len(text) - max_output} more characters)"
    return text


class _TimeUp(Exception):
    """A tool ran into its limit; not what a tool itself may raise."""


def _as_text(result: Any) -> str:
    """Return a result as the model reads it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


_GATES: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def _within(tool: Callable[..., Any], arguments: Mapping[str, Any], seconds: float) -> str:
    """Return the result of a tool as text, or _TimeUp."""
    loop = asyncio.get_running_loop()
    if inspect.iscoroutinefunction(tool):
        future = asyncio.wrap_future(_LOOP.start(_awaited(tool, arguments)))
        done, _ = await asyncio.wait([future], timeout=seconds)
        if future.cancelled():
            raise RuntimeError("the tool was cancelled")
        if done:
            return future.result()
        future.cancel()
        blocked = await asyncio.to_thread(_LOOP.leave_if_blocked)
        if blocked is not None:
            _interrupt(blocked)
        raise _TimeUp

    # a thread for each call, since one that hangs is never given back; the clock starts with the thread
    async with _GATES.setdefault(loop, asyncio.Semaphore(_AT_A_TIME)):
        future, thread = _in_thread(loop, tool, arguments)
        done, _ = await asyncio.wait([future], timeout=seconds)
        if not done:
            future.cancel()
            _interrupt(thread)
            raise _TimeUp
        return future.result()


async def _awaited(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return the result of an async tool as text."""
    try:
        return _as_text(await tool(**arguments))
    except (asyncio.CancelledError, GeneratorExit):  # of the loop, or what `_within` tells the model of
        raise
    except Exception as error:
        raise RuntimeError(error_text(error)) from None
    except BaseException as error:  # SystemExit too: a tool does not end the run
        raise RuntimeError(f"{type(error).__name__}: {error_text(error)}") from None


class _Interrupted(BaseException):
    """Raised inside a tool at its limit. No `Exception`: tools catch those."""


def _interrupt(thread: threading.Thread) -> None:
    """Raise `_Interrupted` in a thread at its next line of Python, so that it takes no more time."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted)
        )


def _in_thread(
    loop: asyncio.AbstractEventLoop, tool: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[asyncio.Future[str], threading.Thread]:
    """Call a plain tool in a thread. Return (a future of its result as text, the thread)."""
    future: asyncio.Future[str] = loop.create_future()

    def settle(result: str, error: str) -> None:
        if future.done():  # nobody waits any more
            return
        if error:
            future.set_exception(RuntimeError(error))
        else:
            future.set_result(result)

    def tell(result: str, error: str) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            tell(_as_text(tool(**arguments)), "")
        except _Interrupted:
            return
        except BaseException as error:  # SystemExit too: a tool does not end the run
            tell("", f"{type(error).__name__}: {error_text(error)}")

    thread = threading.Thread(target=run, daemon=True, name="rft_fn tool")
    thread.start()
    return future, thread


class Tooled(NamedTuple):
    """The state of an environment with tools."""

    inner: Any
    outputs: tuple[str, ...]  # of all calls so far


def with_tools(
    env: Environment,
    tools: Sequence[Callable[..., Any]],
    *,
    parse: ParseCalls = tagged_calls,
    timeout: float = 5.0,
    max_output: int = 2000,
    max_calls: int = 8,
    role: str = "tool",
    reward: Callable[[Tooled, Sequence[Call]], float] = lambda state, calls: 0.0,
) -> Environment:
    """Return the environment, in which a response that calls tools is answered with their outputs.

    Any other response goes to `env`. Calls of a response run together, each within `timeout` [s]; those above
    `max_calls` in one response are errors. `parse` finds them: `call_parser(tokenizer)` in the form of the
    model's chat template. Each output is a message of `role`, for templates without tools "user". The turn
    earns `reward(state, calls)`, of the state before them. ValueError for tools without type hints, or two of
    one name.
    """
    schemas = [tool_schema(tool) for tool in tools]
    named = dict(zip([schema["function"]["name"] for schema in schemas], tools))
    if len(named) < len(tools) or not tools:
        raise ValueError(f"tools: expected one or more with different names, got {', '.join(named)}")
    if env.seats > 1:
        raise ValueError(f"environment {env.name!r}: expected one seat for tools, got {env.seats}")

    async def reset(row: Row, key: int) -> tuple[Tooled, Any]:
        begun = env.reset(row, key)
        if inspect.isawaitable(begun):
            begun = await begun
        state, observation = begun
        return Tooled(state, ()), observation

    async def step(state: Tooled, response: str) -> Stepped:
        calls = parse(response)
        if not calls:
            stepped = env.step(state.inner, response)
            if inspect.isawaitable(stepped):
                stepped = await stepped
            after, *rest = stepped
            return Stepped(state._replace(inner=after), *rest)
        calls = [*calls[:max_calls], *(x._replace(error="too many calls at once") for x in calls[max_calls:])]
        outputs = await asyncio.gather(
            *(run_tool(named, call, timeout=timeout, max_output=max_output) for call in calls)
        )
        messages: list[Turn] = [{"role": role, "content": text} for text in outputs]
        for i, (message, call) in enumerate(zip(messages, calls), 1):
            if role == "tool":
                message["name"] = call.name
                message["tool_call_id"] = call.id or CALL_ID.format(i)
        return Stepped(
            state._replace(outputs=(*state.outputs, *outputs)), messages, reward(state, calls), False
        )

    def close(state: Tooled) -> None:
        env.close(state.inner)

    return env._replace(reset=reset, step=step, close=close, tools=tuple(schemas), teacher=None)
