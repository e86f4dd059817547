"""Tools: schemas from signatures, calls in the form of chat templates, limits, and errors as text."""

import asyncio
import contextlib
import gc
import json
import threading
import time
from typing import Any, Literal

import chats
import pytest
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as hs

from rft_fn.environment import Call, Environment, Stepped, call_parser, tagged_calls, tool_schema, with_tools
from rft_fn.environment.arithmetic import calculate
from rft_fn.environment.tool_use import run_tool
from rft_fn.reward.event_loop import EventLoop

SETTINGS = settings(deadline=None, derandomize=True, max_examples=50)


def search(
    query: str, top: int = 3, kind: Literal["web", "news"] = "web", tags: list[str] | None = None
) -> str:
    """Search for a text.

    More that a model need not read.
    """
    return f"{query}/{top}/{kind}/{tags}"


def test_the_schema_of_a_tool_is_its_signature():
    assert tool_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for a text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "top": {"type": "integer"},
                    "kind": {"type": "string", "enum": ["web", "news"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    "tool, line",
    [
        (lambda x: x, "expected a type hint for 'x'"),
        (eval("lambda *args: 0"), "expected a type hint for 'args', and no"),
    ],
)
def test_a_tool_without_type_hints_is_refused(tool, line):
    with pytest.raises(ValueError, match=line):
        tool_schema(tool)


def test_a_hint_that_json_cannot_say_is_refused():
    def tool(x: complex) -> str:
        return ""

    with pytest.raises(ValueError, match=r"tool tool: x: expected a type hint of str, int, float, bool"):
        tool_schema(tool)


PIECES = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LISTED = """{% for m in messages %}{% if m.role == 'user' %}[Q]{{ m.content }}[/Q]{% elif m.tool_calls %}
[TOOLS] [{% for c in m.tool_calls %}{% set f = c.function %}
{{- {'name': f.name, 'parameters': f.arguments} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
BARE_JSON = """{% for m in messages %}<|head|>{{ m.role }}
{% if m.tool_calls %}{{ {'name': m.tool_calls[0].function.name, 'parameters':
m.tool_calls[0].function.arguments} | tojson }}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"""
FORMS = {
    "hermes": HERMES, "listed": LISTED, "pieces": PIECES, "name and object": chats.CHATML,
    "thinking": chats.QWEN3,
}  # fmt: skip
PLAIN = hs.text(alphabet="abcXYZ 0123456789,.!?", min_size=1, max_size=12).map(str.strip).filter(bool)


def rendered(tok, calls):
    """What the template writes for these calls, as a response of the model would be."""
    made = [{"type": "function", "id": "x" * 9, "function": {"name": n, "arguments": a}} for n, a in calls]
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": made}]
    return tok.apply_chat_template(talk, tokenize=False)


@each("form", FORMS)
@given(
    hs.lists(
        hs.tuples(
            hs.sampled_from(["search", "add_up", "file.read"]),
            hs.dictionaries(hs.sampled_from(["query", "top", "path"]), PLAIN, min_size=1, max_size=3),
        ),
        min_size=1, max_size=3,
    )
)  # fmt: skip
@SETTINGS
def test_calls_are_found_in_the_form_that_the_template_writes(form, calls):
    tok = chats.tokenizer(FORMS[form])
    found = call_parser(tok)(rendered(tok, calls))
    assert [(c.name, dict(c.arguments), c.error) for c in found] == [(n, a, "") for n, a in calls]


def test_a_template_whose_calls_are_bare_objects():
    parse = call_parser(chats.tokenizer(BARE_JSON))
    assert parse('{"name": "add", "parameters": {"a": 1}}') == [Call("add", {"a": 1})]
    assert parse("the object {} is empty") == []


@pytest.mark.parametrize("template", [None, chats.BARE, chats.MARKED, chats.GEMMA2])
def test_without_calls_in_the_template_they_are_json_in_tags(template):
    with pytest.warns(UserWarning, match="chat template: no form of a call of tools was found in it"):
        parse = call_parser(chats.tokenizer(template))
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert parse is tagged_calls and parse(text) == [Call("add", {"a": 1})]
    assert parse('<tool_call>{"name": "a", "arguments": "{\\"x\\": 2}"}</tool_call>') == [Call("a", {"x": 2})]


@each(
    "text, line",
    [
        ("<tool_call>{not json</tool_call>", "the call is no JSON object"),
        ("<tool_call>", "the call is no JSON object"),
        ('<tool_call>{"nom": "x"}</tool_call>', "expected an object with 'name' and 'arguments'"),
        ("<tool_call>{}</tool_call>", "expected an object with 'name' and 'arguments'"),
        ('<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "the arguments are no JSON object"),
    ],
)
def test_a_broken_call_is_an_error_for_the_model(text, line):
    (call,) = tagged_calls(text)
    assert line in call.error


NESTED = {"of lists": "[" * 1_200 + "]" * 1_200, "of objects": '{"a":' * 1_200 + "1" + "}" * 1_200}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("form", [*FORMS, "bare"])
def test_brackets_without_end_are_an_error_for_the_model(form, kind):
    parse = _parser(FORMS.get(form, BARE_JSON))
    plain = f'<tool_call>[TOOLS] [{{"name": "f", "arguments": {NESTED[kind]}, "parameters": {NESTED[kind]}}}]'
    for text in (plain, NESTED[kind], rendered_with(form, NESTED[kind])):
        for call in parse(text):
            assert isinstance(call, Call)
    (call,) = tagged_calls(f'<tool_call>{{"name": "f", "arguments": {NESTED[kind]}}}')
    assert "brackets nest deeper than 100" in call.error
    text = json.dumps({"name": "f", "arguments": NESTED[kind]})
    (call,) = tagged_calls(f"<tool_call>{text}")
    assert call.error == "the arguments are no JSON object"


def rendered_with(form, value):
    """What a template writes for a call, with a value in place of its arguments."""
    text = rendered(chats.tokenizer(FORMS.get(form, BARE_JSON)), [("f", {"q": "VALUE"})])
    return text.replace('{"q": "VALUE"}', value).replace("VALUE", value)


def test_a_call_without_an_end_is_cut_off_and_takes_no_time():
    parse = _parser(PIECES)
    begin = time.process_time()
    cut = Call("f", {}, "the call is cut off", complete=False)
    assert parse("<tool_call>\n<function=f" + ">\n<parameter=a>\nb" * 20_000) == [cut]
    assert time.process_time() - begin < 2  # minutes, were each read to the end
    whole = "<parameter=a>\n<parameter=b>\n\n</parameter>\n<parameter=c>x\n\n</parameter>\n"
    assert parse(f"<tool_call>\n<function=f>\n{whole}<parameter=d>\n1") == [cut]
    assert parse(f"<tool_call>\n<function=f>\n{whole}") == [cut]
    closed = f"<tool_call>\n<function=f>\n{whole}</function>"
    assert parse(closed) == [Call("f", {"a": "<parameter=b>\n", "c": "x\n"})]


@given(hs.text(max_size=60))
@SETTINGS
def test_a_parser_takes_any_text(text):
    for form in (*FORMS.values(), BARE_JSON):
        parse = _parser(form)
        for call in (*parse(text), *parse(f"<tool_call>{text}"), *parse(f"[search({text}")):
            assert isinstance(call, Call)


_PARSERS: dict[str, Any] = {}


def _parser(form):
    if form not in _PARSERS:
        _PARSERS[form] = call_parser(chats.tokenizer(form))
    return _PARSERS[form]


def hang() -> str:
    """Sleep."""
    time.sleep(60)
    return ""


def spin() -> str:
    """Never end."""
    while True:
        with contextlib.suppress(Exception):
            sum(range(100))


async def hang_later() -> str:
    """Sleep, to be awaited."""
    await asyncio.sleep(60)
    return ""


def leave() -> str:
    """End the process."""
    raise SystemExit(3)


def long() -> str:
    """Say much."""
    return "x" * 5000


def table() -> dict:
    """A dict."""
    return {"a": [1, 2.5, None], "é": True}


async def leave_later() -> str:
    """End the process, to be awaited."""
    raise SystemExit(3)


async def leave_behind() -> str:
    """End the process, by something that goes on."""

    async def leave() -> None:
        raise SystemExit(3)

    task = asyncio.ensure_future(leave())
    await asyncio.sleep(60)
    return str(task)


async def cancelled() -> str:
    """Be cancelled."""
    raise asyncio.CancelledError


async def block() -> str:
    """Sleep without awaiting."""
    time.sleep(3)
    return ""


async def spin_later() -> str:
    """Never end, without awaiting."""
    while True:
        with contextlib.suppress(Exception):
            sum(range(100))


class Untold(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise SystemExit(4)


def untold() -> str:
    """Fail."""
    raise Untold


async def untold_later() -> str:
    """Fail, to be awaited."""
    raise Untold


def shapeless() -> object:
    """An object whose text cannot be had."""

    class Shapeless:
        def __str__(self) -> str:
            raise SystemExit(5)

    return Shapeless()


async def later(x: float) -> str:
    """Wait a little."""
    await asyncio.sleep(0.001)
    return str(x)


TOOLS = {
    f.__name__: f
    for f in (
        search, hang, spin, hang_later, leave, long, table, later, calculate, leave_later, leave_behind,
        cancelled, block, spin_later, untold, untold_later, shapeless,
    )
}  # fmt: skip


def output(name, arguments=None, error="", timeout=0.2, max_output=100):
    call = Call(name, arguments or {}, error)
    return asyncio.run(run_tool(TOOLS, call, timeout=timeout, max_output=max_output))


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("search", {"query": "a", "top": 5}, "a/5/web/None"),
        ("search", {"query": "a", "top": "5", "tags": '["x"]'}, "a/5/web/['x']"),
        ("later", {"x": 2}, "2"),
        ("table", {}, '{"a": [1, 2.5, null], "é": true}'),
        ("search", {"quer": "a"}, "error: expected the arguments query, top, kind, tags, got quer"),
        ("search", {}, "error: expected the arguments query, top, kind, tags, got none"),
        ("search", {"query": 3}, "error: query: expected string, got 3"),
        ("search", {"query": "a", "top": "many"}, "error: top: expected integer, got 'many'"),
        ("search", {"query": "a", "top": True}, "error: top: expected integer, got True"),
        ("search", {"query": "a", "tags": "[" * 9999}, "error: tags: expected array, got '[[["),
        ("calculate", {"expression": "(" * 199 + "1"}, "error: ValueError: expected an expression, got '((("),
        ("calculate", {"expression": "-" * 199 + "1"}, "-1"),
        ("search", {"query": "a", "kind": "old"}, "error: kind: expected one of ['web', 'news'], got 'old'"),
        ("nothing", {}, "error: no tool 'nothing'; there are search, hang"),
        ("leave", {}, "error: SystemExit: 3"),
        ("leave_later", {}, "error: SystemExit: 3"),
        ("leave_behind", {}, "error: "),
        ("cancelled", {}, "error: the tool was cancelled"),
        ("block", {}, "error: block took longer than 0.2 s"),
        ("spin_later", {}, "error: spin_later took longer than 0.2 s"),
        ("untold", {}, "error: Untold: Untold"),
        ("untold_later", {}, "error: Untold"),
        ("shapeless", {}, "error: SystemExit: 5"),
        ("hang", {}, "error: hang took longer than 0.2 s"),
        ("spin", {}, "error: spin took longer than 0.2 s"),
        ("hang_later", {}, "error: hang_later took longer than 0.2 s"),
        ("calculate", {"expression": "1/0"}, "error: ZeroDivisionError: "),
        ("long", {}, "x" * 100 + "... (4900 more characters)"),
    ],
)
def test_whatever_a_tool_does_is_text_for_the_model(name, arguments, text):
    begin = time.monotonic()
    assert output(name, arguments).startswith(text)
    assert time.monotonic() - begin < 5
    assert output("later", {"x": 2}, timeout=5) == "2"  # and the next one is none the worse


def test_a_call_while_a_loop_ends_runs_in_the_next_one():
    """A loop that a task has stopped takes time to close; what comes then must not wait in it."""
    loop, closing = EventLoop(), threading.Event()
    loop.run(later(1))
    close = loop._thread.loop.close

    def close_slowly():
        closing.set()
        time.sleep(0.5)
        close()

    loop._thread.loop.close = close_slowly
    loop.start(leave_behind())
    assert closing.wait(5)
    assert loop.start(later(2)).result(5) == "2"
    loop.close()


def test_a_broken_call_is_told_and_not_made():
    assert (
        output("search", {"query": "a"}, error="the call is no JSON object")
        == "error: the call is no JSON object"
    )


@pytest.mark.parametrize("name", ["spin", "spin_later"])
def test_a_tool_that_never_ends_takes_no_more_time(name):
    assert "took longer" in output(name)
    end = time.monotonic() + 5
    gc.disable()  # a collection within sys._current_frames can wait for ever, for a thread that waits for it
    try:
        while any(_spins(thread) for thread in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        gc.enable()


def _spins(thread):
    import sys

    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if frame.f_code.co_name in ("spin", "spin_later"):
            return True
        frame = frame.f_back
    return False


def asks(row, key):
    return 0, "go"


def answer(state, text):
    return Stepped(state + 1, "", float(text == "7"), True)


PLAIN_ENV = Environment("asks", asks, answer)


def calls(*some):
    return "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in some)


def step(env, state, text):
    return asyncio.run(env.step(state, text))


def test_calls_are_answered_and_other_responses_go_to_the_environment():
    env = with_tools(PLAIN_ENV, [calculate, search], max_calls=2)
    assert [t["function"]["name"] for t in env.tools] == ["calculate", "search"]
    state, first = asyncio.run(env.reset({}, 1))
    text = calls(("calculate", {"expression": "3+4"}), ("search", {"query": "x"}), ("search", {"query": "y"}))
    after = step(env, state, text)
    assert [m["content"] for m in after.observation] == ["7", "x/3/web/None", "error: too many calls at once"]
    assert [m["name"] for m in after.observation] == ["calculate", "search", "search"]
    assert first == "go" and not after.done and after.reward == 0.0 and state.outputs == ()
    done = step(env, after.state, "7")
    assert done.done and done.reward == 1.0 and done.state.inner == 1


def test_the_reward_of_calls_and_the_role_of_outputs():
    env = with_tools(PLAIN_ENV, [calculate], role="user", reward=lambda state, made: 0.25 * len(made))
    state, _ = asyncio.run(env.reset({}, 1))
    after = step(env, state, calls(("calculate", {"expression": "3+4"}), ("no", {})))
    assert after.reward == 0.5 and after.observation[0] == {"role": "user", "content": "7"}


def test_slow_tools_of_many_episodes_run_at_the_same_time():
    def slow(x: str) -> str:
        """Wait."""
        time.sleep(0.2)
        return x

    env = with_tools(PLAIN_ENV, [slow])
    state, _ = asyncio.run(env.reset({}, 1))

    async def all_at_once():
        return await asyncio.gather(*(env.step(state, calls(("slow", {"x": str(i)}))) for i in range(30)))

    begin = time.monotonic()
    found = asyncio.run(all_at_once())
    assert time.monotonic() - begin < 3  # one after the other they take 6 s
    assert [s.observation[0]["content"] for s in found] == [str(i) for i in range(30)]


@pytest.mark.parametrize("tools", [[], [calculate, calculate]])
def test_tools_need_names_of_their_own(tools):
    with pytest.raises(ValueError, match="tools: expected one or more with different names"):
        with_tools(PLAIN_ENV, tools)
