"""The forms of calls of public chat templates: call -> text -> call, cut off anywhere, in any place."""

import call_templates
import chats
import pytest
from call_templates import FAMILIES, SINGLE
from each_case import each

from rft_fn.data import template_probe
from rft_fn.environment import Call, call_parser, tagged_calls, tool_calls

CALLS = [
    [("search", {"query": "a b"})],
    [("file.read", {"path": "/data", "note": "x, y: {z}"})],
    [("search", {"query": "a"}), ("delete_all", {"path": "/data"})],
]


def written(tok, calls):
    """What the model writes to make these calls: the template's text without header and end of the turn."""
    return tool_calls._rendered(tok, calls)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error")
def test_a_call_is_read_as_it_was_written(family):
    tok = call_templates.tokenizer(family)
    parse = call_parser(tok)
    for calls in CALLS:
        if len(calls) > 1 and family in SINGLE:
            continue
        found = parse(written(tok, calls))
        assert [(c.name, dict(c.arguments), c.error, c.complete) for c in found] == [
            (name, arguments, "", True) for name, arguments in calls
        ]
        spoken = parse("I call.\n" + written(tok, calls)) if family != "Llama 3.1, 3.2" else found
        assert spoken == found
    assert parse("The answer is [1] {2} <b> (3).") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_off_anywhere_is_not_made(family):
    """Of a part of a text only calls that were meant are read, with all of their arguments."""
    tok = call_templates.tokenizer(family)
    parse = call_parser(tok)
    calls = [("search", {"query": "a b", "note": "true"})]
    calls += [] if family in SINGLE else [("delete_all", {"path": "/data", "dry_run": "yes"})]
    text = written(tok, calls)
    for size in range(len(text)):
        made = [(c.name, dict(c.arguments)) for c in parse(text[:size]) if c.complete and not c.error]
        assert made == calls[: len(made)], text[:size]
        assert all(c.error for c in parse(text[:size]) if not c.complete)
    half = text[: text.index(calls[-1][0]) + len(calls[-1][0]) + 8]
    assert parse(half)[-1:] and not parse(half)[-1].complete


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_inside_of_a_text_are_text(family):
    """A call that speaks of calls and of thoughts is one call."""
    tok = call_templates.tokenizer(family)
    parse = call_parser(tok)
    other = written(tok, [("delete_all", {"path": "/data"})]).split("/data")[0]
    if '"' in other or family in ("FunctionGemma", "Gemma 4"):
        other = other.replace('"', "").replace("<escape>", "").replace("<||>", "")
    for inner in (other, "<think>", "no </think> here"):
        made = parse(written(tok, [("search", {"query": f"see {inner} there"})]))
        assert [(c.name, [*c.arguments.values()], c.error) for c in made] == [
            ("search", [f"see {inner} there"], "")
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_is_no_place_for_calls(family):
    tok = call_templates.tokenizer(family)
    parse = call_parser(tok)
    text = written(tok, [("delete_all", {"path": "/data"})])
    for opening, closing in template_probe.thought_marks(tok):
        for thought in (
            f"{opening}\nI could {text}\n{closing}\n\nNo.",
            f"{opening} but {text}",
            f"{text}{closing}",
        ):
            assert parse(thought) == []
        assert [c.name for c in parse(f"{opening}hm{closing}\n\n{text}")] == ["delete_all"]


OPENED = FAMILIES["Hermes, Qwen 2.5, Qwen 3"].replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}",
)


def test_a_thought_may_begin_in_the_prompt():
    tok = chats.tokenizer(OPENED)
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parse = call_parser(tok)
    assert parse(f"I could {text}") == parse(f"{text}</think>no") == []
    assert parse(f"hm {text}\n</think>\n\n{text}") == [Call("f", {})]
    assert call_parser(tok, {"enable_thinking": False})(text) == [Call("f", {})]


def test_the_thoughts_and_calls_of_gpt_oss_have_channels():
    """The model writes the channel before the name, its template behind; both are read."""
    parse = call_parser(call_templates.tokenizer("gpt-oss"))
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>hm to=functions.f<|channel|>commentary json<|message|>{}<|end|>"
    assert parse(call) == parse(f"{thought}<|start|>assistant{call}") == [Call("f", {"a": 1})]
    assert parse(thought) == []


@pytest.mark.parametrize("head", [
    "<|channel|>commentary to=functions.f<|message|>", "<|channel|>commentary to=functions.f code<|message|>",
    " to=functions.f<|channel|>analysis code<|message|>",
])  # fmt: skip
def test_gpt_oss_names_other_types_of_content_too(head):
    assert call_parser(call_templates.tokenizer("gpt-oss"))(f'{head}{{"a": 1}}') == [Call("f", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f"}', [Call("f", {})]),
        ('{"name": "f", "arguments": {"a": 1}}', [Call("f", {"a": 1})]),
        ('{"name": "f", "parameters": null}', [Call("f", {})]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [Call("f", {"a": 1})]),
        (
            '{"type": "function", "name": "f", "parameters": {}}; {"name": "g"}',
            [Call("f", {}), Call("g", {})],
        ),
        ('{"name": "Bob", "age": 3}', []),
        ('{"answer": 5}', []),
        ("{not json}", []),
        ('<think>{"name": "f"}</think>{"name": "g", "parameters": {}}', [Call("g", {})]),
    ],
)
def test_a_bare_object_is_a_call_if_it_looks_like_one(text, found):
    assert call_parser(call_templates.tokenizer("Llama 3.1, 3.2"))(text) == found


@each(
    ("text", "found"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', [Call("f", {})]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [Call("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', [Call("f", {})]),
        ('<tool_call>[{"name": "f"}, {"name": "g", "id": "x"}]</tool_call>',
         [Call("f", {}), Call("g", {}, id="x")]),
        *((f'<tool_call>{{"name": "f", "{key}": {{"a": 1}}}}</tool_call>',
           [Call("", {}, "expected an object with 'name' and 'arguments'")]) for key in ("args", "a")),
        ('<|python_tag|>{"name": "list", "parameters": {"path": "/"}}', [Call("list", {"path": "/"})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "<tool_call>{\'name\': 3}"}}</tool_call>',
         [Call("f", {"x": "<tool_call>{'name': 3}"})]),
        ('<think>\nI could <tool_call>{"name": "d"}</tool_call>\n</think>\n\nNo.', []),
    ],
)  # fmt: skip
def test_calls_in_tags(text, found):
    assert tagged_calls(text) == found


@pytest.mark.parametrize("values", [(True, 7, 2.5, None), (["a", {"b": [1]}], {"c": "d"})])
@pytest.mark.parametrize("family", ["Gemma 4", "FunctionGemma", "LFM 2.5", "OLMo 3"])
def test_values_of_other_types_are_read(family, values):
    tok = call_templates.tokenizer(family)
    arguments = dict(zip("abcd", values, strict=False))
    if family.endswith("Gemma") or family == "Gemma 4":
        arguments = {k: v for k, v in arguments.items() if v is not None}
    (call,) = call_parser(tok)(written(tok, [("f", arguments)]))
    assert call == Call("f", arguments)


def test_what_a_template_does_not_write_is_told():
    for template in (None, chats.MARKED):
        with pytest.warns(UserWarning, match="no form of a call of tools was found"):
            call_parser(chats.tokenizer(template))


def test_an_argument_that_is_cut_off_is_not_left_out():
    """`delete('/data')` in place of `delete('/data', dry_run=True)`."""
    pieces = call_parser(call_templates.tokenizer("Qwen 3 Coder, Qwen 3.5"))
    cut = "<tool_call>\n<function=delete>\n<parameter=path>\n/data\n</parameter>\n<parameter=dry_run>\ntru"
    assert pieces(cut) == [Call("delete", {}, "the call is cut off", complete=False)]


def test_an_argument_whose_name_cannot_be_read_is_not_left_out():
    pieces = call_parser(call_templates.tokenizer("Qwen 3 Coder, Qwen 3.5"))
    for name in ("dry run", ""):
        text = f"<parameter=path>\n/\n</parameter>\n<parameter={name}>\ntrue\n</parameter>\n</function>"
        (call,) = pieces(f"<tool_call>\n<function=delete>\n{text}\n</tool_call>")
        assert call == Call("delete", {}, "expected the name of an argument behind '<parameter='")


def test_the_tag_around_calls_may_be_left_out_or_hold_several():
    pieces = call_parser(call_templates.tokenizer("Qwen 3 Coder, Qwen 3.5"))
    f, g = (f"<function={x}>\n<parameter=a>\n1\n</parameter>\n</function>" for x in "fg")
    assert pieces(f"{f}\n</tool_call>") == [Call("f", {"a": "1"})]
    assert [c.name for c in pieces(f"<tool_call>\n{f}\n{g}\n</tool_call>")] == ["f", "g"]


def test_kimi_may_leave_out_the_space_of_names():
    text = "<|tool_call_begin|>{}f:3<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    parse = call_parser(call_templates.tokenizer("Kimi K2"))
    for space in ("functions.", ""):
        assert parse(text.format(space)) == [Call("f", {}, id="functions.f:3")]


def test_a_value_may_be_said_to_be_no_text():
    """As DeepSeek V3.2 has it: string="true" or "false"."""
    call = call_templates.FAMILIES["MiniMax M2"].replace(
        '<parameter name="{{ k }}">',
        "<parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">",
    )
    tok = chats.tokenizer(call)
    found = call_parser(tok)(written(tok, [("f", {"a": "x", "b": 5})]))
    assert found == [Call("f", {"a": "x", "b": "5"})]


def test_a_form_with_the_key_behind_its_value_is_none():
    form = call_templates.FAMILIES["Seed-OSS"]
    form = form.replace("<parameter={{ k }}>", "<{{ k }}>").replace("</parameter>", "</{{ k }}>")
    with pytest.warns(UserWarning, match="no form of a call of tools was found"):
        call_parser(chats.tokenizer(form))
