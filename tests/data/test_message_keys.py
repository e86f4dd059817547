"""Every key of a message is used, named once, or refused; a turn that the row leaves out is not learned."""

import json
import warnings

import call_templates
import chats
import pytest
from each_case import each

from rft_fn import data
from rft_fn.data import template_probe
from rft_fn.data.chat import Chat
from rft_fn.data.messages import _LEARNED, conversation


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text, **more):
    return turn("user", text, **more)


def says(text, **more):
    return turn("assistant", text, **more)


def learned(tok, turns, loss_on="all", column="messages"):
    """The sequences of a row, «what is learned» in quotes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = data.from_rows([{column: turns}], tok, messages=[column], loss_on=loss_on, name="f")
        lessons = data.lessons(dataset.prompt(0), tok, messages=[column], loss_on=loss_on)
    return [chats.shown(tok, x) for x in lessons], [str(w.message) for w in caught]


# ---------- turns that the row leaves out

A, B = "<|im_start|>assistant\n", "<|im_end|>"


@pytest.mark.parametrize("name", _LEARNED)
@pytest.mark.parametrize("no", [0, False, 0.0])
@pytest.mark.parametrize("template", ["CHATML", "MARKED", "LLAMA3"])
def test_a_turn_that_the_row_leaves_out_is_not_learned(name, no, template):
    tok = chats.tokenizer(getattr(chats, template))
    turns = [user("a"), says("3", **{name: no}), user("c"), says("2", **{name: 1})]
    (text,), told = learned(tok, turns)
    assert "«3" not in text and "3" in text and "«2" in text and told == []
    (last,), _ = learned(tok, [*turns[:1], says("3"), user("c"), says("2", **{name: no})], loss_on="last")
    assert "«3" in last and last.endswith("»")
    ((both, *_), _) = learned(tok, [user("a"), says("3", **{name: None}), user("c"), says("2")])
    assert "«3" in both and "«2" in both


def test_sharegpt_has_weights_too():
    tok = chats.tokenizer(chats.CHATML)
    row = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "3", "weight": 0}]
    row += [{"from": "human", "value": "b"}, {"from": "gpt", "value": "2", "weight": 1}]
    (text,), told = learned(tok, row)
    assert text.endswith(f"{A}3{B}\n<|im_start|>user\nb{B}\n{A}«2{B}»") and told == []


def test_a_response_that_is_left_out_makes_no_pair():
    tok = chats.tokenizer(chats.CHATML)
    row = {"prompt": [user("a")], "chosen": [says("1", weight=0)], "rejected": [says("2")]}
    with pytest.raises(ValueError, match="to learn, got none: the row leaves all of them out"):
        data.pairs_from_rows([row], tok, messages=["prompt", "chosen", "rejected"])


def test_templates_and_prompts_see_no_weight():
    tok = chats.tokenizer("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    turns = [user("a"), says("b", weight=0), user("c")]
    ids = data.from_rows([{"m": turns}], tok, messages=["m"]).prompt(0).ids
    assert "weight" not in tok.decode(ids)


@each(
    ("more", "line"),
    [
        ({"weight": 0.5}, "weight: expected 0 or 1, whether the turn is learned, got 0.5"),
        ({"loss_mask": [0, 1]}, r"loss_mask: expected 0 or 1, whether the turn is learned, got \[0, 1\]"),
        ({"train": "no"}, "train: expected 0 or 1, whether the turn is learned, got 'no'"),
        ({"weight": 0, "train": True}, "weight and train: expected the same for a turn"),
        (
            {"images": ["a.png"]},
            r"expected no 'images' in a message, got \['a.png'\]; put it into the content",
        ),
        ({"tools": [{"name": "f"}]}, "expected no 'tools' in a message, .*; give them in the column 'tools'"),
        (
            {"prefix": True},
            "expected no 'prefix' in a message, got True; a turn that the assistant has begun",
        ),
        ({"train_detail": [{"train": False}]}, "expected no 'train_detail' in a message"),
        ({"mask": 0}, "expected no 'mask' in a message, got 0; say by 'train' whether it is learned"),
        ({"reasoning": ["x"]}, r"reasoning: expected the text of one thought, got \['x'\]"),
        ({"reasoning": "x", "thinking": "y"}, "reasoning and thinking: expected the text of one thought"),
    ],
)
def test_what_would_mean_something_else_is_refused(more, line):
    with pytest.raises(ValueError, match=f"^column 'm', turn 2: .*{line}"):
        conversation({"m": [user("a"), says("b", **more)]}, ["m"])


# ---------- thoughts


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_three_names(name):
    turns = [user("1+1?"), says("2", **{name: "one and one"})]
    assert conversation({"m": turns}, ["m"]).turns[1] == says("2", reasoning_content="one and one")
    (text,), told = learned(chats.tokenizer(chats.QWEN3), turns)
    assert text.endswith(f"{A}«<think>\none and one\n</think>\n\n2{B}»") and told == []
    (text,), told = learned(call_templates.tokenizer("gpt-oss"), turns)
    assert "«<|channel|>analysis<|message|>one and one<|end|>" in text and told == []

    # where the template has none it is told
    (text,), told = learned(chats.tokenizer(chats.CHATML), turns)
    assert text.endswith(f"{A}«2{B}»")
    assert told == [f"data: {name!r} in messages of assistant is not read, in 1 rows; the first is f, row 1"]


def test_a_thought_may_be_a_part_of_the_content():
    for part in ({"type": "thinking", "thinking": "x"}, {"type": "reasoning", "text": "x"}):
        found = conversation({"m": [user("a"), says([part, {"type": "text", "text": "b"}])]}, ["m"])
        assert found.turns[1] == says("b", reasoning_content="x")


def test_a_thought_of_the_content_is_shown_or_announced():
    """Mistral's templates read it where rows have it; others by a key, or not."""
    shown = "{% if p.type == 'thinking' %}[T]{{ p.thinking }}[/T]{% else %}{{ p.text }}{% endif %}"
    parts = "{% for p in m.content %}" + shown + "{% endfor %}"
    template = chats.CHATML.replace(
        "{{ m['content'] }}", "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    )
    part = {"type": "thinking", "thinking": "x"}
    for said in (says([part, {"type": "text", "text": "b"}]), says("b", reasoning="x")):
        (text,), told = learned(chats.tokenizer(template), [user("a"), said])
        assert text.endswith(f"{A}«[T]x[/T]b{B}»") and told == []
    assert ("[T]", "[/T]") in template_probe.thought_marks(chats.tokenizer(template))
    (text,), told = learned(
        chats.tokenizer(chats.CHATML), [user("a"), says([part, {"type": "text", "text": "b"}])]
    )
    assert text.endswith(f"{A}«b{B}»") and told[0].startswith(
        "data: 'thinking' in messages of assistant is not"
    )


def test_a_turn_of_nothing_but_a_thought_that_is_not_shown_is_empty():
    with pytest.raises(ValueError, match="turn 2: the response is empty"):
        learned(chats.tokenizer(chats.CHATML), [user("a"), says("", reasoning="x")])


# ---------- other keys


def test_keys_that_nobody_reads_are_named_once():
    rows = [{"m": [user("a", id=str(i), name="Ann"), says("b", timestamp=i, refusal=None)]} for i in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.from_rows(rows, chats.tokenizer(chats.CHATML), messages=["m"], loss_on="all", name="f")
    assert [str(w.message) for w in caught] == [
        f"data: {key!r} in messages of {role} is not read, in 3 rows; the first is f, row 1"
        for key, role in (("id", "user"), ("name", "user"), ("timestamp", "assistant"))
    ]


def test_a_key_that_the_template_reads_is_used():
    template = chats.CHATML.replace("{{ m['content'] }}", "{{ m.mood or '' }}{{ m['content'] }}")
    (text,), told = learned(chats.tokenizer(template), [user("a", mood="glad:"), says("b")])
    assert "user\nglad:a" in text and told == []


def test_the_call_of_an_older_schema_is_a_call():
    turns = [user("a"), says(None, function_call={"name": "f", "arguments": "{}"})]
    assert conversation({"m": turns}, ["m"]).turns[1]["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": {},
    }
    for call in (
        {"name": "f"},
        {"name": "f", "parameters": {}},
        {"function": {"name": "f", "arguments": ""}},
    ):
        found = conversation({"m": [user("a"), says("", tool_calls=[call])]}, ["m"]).turns[1]
        assert found["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_arguments_are_read_or_refused():
    def calls(given):
        return conversation({"m": [user("a"), says("x", tool_calls=given)]}, ["m"]).turns[1].get("tool_calls")

    assert calls("") is calls([]) is calls("[]") is None
    twice = {"name": "f", "arguments": json.dumps(json.dumps({"a": 1}))}
    assert calls([twice])[0]["function"]["arguments"] == {"a": 1}
    for name in ("input", "args", "kwargs"):
        with pytest.raises(ValueError, match=f"expected a call with arguments, got '{name}' in their place"):
            calls([{"name": "f", name: {"a": 1}}])
        assert calls([{"name": "f", name: None}])[0]["function"]["arguments"] == {}
    with pytest.raises(
        ValueError, match=r"^column 'm', turn 2: expected Unicode text, got half of .*\['a'\]"
    ):
        calls([{"name": "f", "arguments": json.dumps({"a": "\ud83d"})}])


# ---------- tools


def test_null_is_a_value_of_a_schema():
    """In a list of a table a hole looks the same, and is told by the others."""
    kept = {"type": "string", "default": None, "enum": ["a", None]}
    tool = {"name": "f", "parameters": {"properties": {"a": kept, "b": {"const": None}}}}
    for cell in (json.dumps([tool]), [tool], [json.dumps(tool)]):
        assert conversation({"m": [user("a")], "tools": cell}, ["m"]).tools == [tool]
    holed = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "default": None}, "b": None}}}
    assert conversation({"m": [user("a")], "tools": [holed]}, ["m"]).tools == [
        {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    ]


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
BY_ANOTHER_NAME = """{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"""


def test_tools_are_shown_or_refused():
    """Whatever the template calls them, and in OpenAI's form where it reads no other."""
    tok = chats.tokenizer(BY_ANOTHER_NAME)
    talk = data.Conversation([user("a")], 0, [TOOL])
    assert '"name": "f"' in tok.decode(Chat(tok, {}).prompt(talk))
    oss = call_templates.tokenizer("gpt-oss")
    for tool in (TOOL, TOOL["function"]):
        assert "type f" in oss.decode(Chat(oss, {}).prompt(talk._replace(tools=[tool])))
    with pytest.raises(ValueError, match=r"^the row has tools, and the chat template reads none"):
        Chat(chats.tokenizer(chats.BARE), {}).prompt(talk)
    listed = "{% for t in tools %}{{ t.name }}: {{ t.description }}{% endfor %}" + chats.MARKED
    for tool in (TOOL, TOOL["function"]):  # it fails without tools, and reads bare ones
        text = chats.tokenizer(listed).decode(
            Chat(chats.tokenizer(listed), {}).prompt(talk._replace(tools=[tool]))
        )
        assert text.startswith("f: d<|im_start|>")
    assert conversation({"m": [user("a")], "tools": "null"}, ["m"]).tools is None


def test_results_have_the_names_of_their_calls():
    """Some templates write them, and rows of OpenAI's form have none."""
    tok = chats.tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' %}<{{ m.name }}>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}<end>"
        "{% endfor %}"
    )
    calls = [{"id": x, "function": {"name": f"of_{x}", "arguments": "{}"}} for x in "ab"]
    results = [turn("tool", x, tool_call_id=x) for x in "ba"]
    (text,), _ = learned(tok, [user("q"), says("", tool_calls=calls), *results, says("x")])
    assert "<of_b>b<end><of_a>a<end>" in text
    unnamed = [{"function": call["function"]} for call in calls]
    (text,), _ = learned(tok, [user("q"), says("", tool_calls=unnamed), turn("tool", "1"), says("x")])
    assert "<of_a>1<end>" in text


def test_a_keyword_is_valid_if_the_template_looks_at_it():
    tok = chats.tokenizer(BY_ANOTHER_NAME)
    Chat(tok, {"custom_tools": [TOOL]}).check()
    for name in ("tools", "range", "tokenize", "costum_tools"):
        with pytest.raises(ValueError, match=rf"reads \(custom_tools\), got '{name}'"):
            Chat(tok, {name: 1}).check()
    compared = chats.tokenizer("{% if effort == 'high' %}!{% endif %}{{ messages[0].content }}")
    Chat(compared, {"effort": "low"}).check()


# ---------- parts, text of arguments, ids, marks

PARTS = """{% for m in messages %}{{ m.role | capitalize }}: {% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""


def test_a_template_of_parts_gets_parts():
    tok = chats.tokenizer(PARTS)
    (text,), _ = learned(tok, [user("hello"), says("yes")])
    assert text == f"User: hello{B}\nAssistant:« yes{B}»"
    assert tok.decode(data.from_rows([{"question": "x"}], tok).prompt(0).ids) == f"User: x{B}\nAssistant:"


def test_a_text_that_is_not_shown_is_refused():
    tok = chats.tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = Chat(tok, {})
    talk = [user("a"), turn("assistant", "s"), user("b")]
    with pytest.raises(ValueError, match=r"^turn 2: the chat template shows no text of a turn of assistant"):
        chat.prompt(data.Conversation(talk, 0, None))
    with pytest.warns(
        UserWarning, match="shows no system turn; its text is left out"
    ):  # many models know none
        chat.prompt(data.Conversation([turn("system", "s"), user("a")], 0, None))


@pytest.mark.parametrize("family", call_templates.FAMILIES)
def test_rows_with_calls_are_learned_in_every_family(family):
    """Arguments as objects or as text, results with ids, of another form, or without."""
    tok = call_templates.tokenizer(family)
    end = chats.shown(
        tok, Chat(tok, {}).lessons(data.Conversation([user("a"), says("done")], 0, None), "all")[0]
    )
    for arguments in ({"a": "b"}, '{"a": "b"}'):
        for ids in ({}, {"id": "call_1234567890"}):
            call = {"function": {"name": "lookup", "arguments": arguments}} | ids
            result = turn("tool", "4", name="lookup") | ({"tool_call_id": ids["id"]} if ids else {})
            turns = [user("a"), says("", tool_calls=[call]), result, says("done")]
            found, told = learned(tok, turns)
            assert told == [] and "«" in found[0]
            text = "".join(found)
            assert "lookup" in text and "done" in text.partition("«")[2] and "{'a'" not in text
            assert end[-8:] in text


def test_calls_that_a_template_leaves_out_are_refused():
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    turns = [user("a"), says("", tool_calls=calls)]
    with pytest.raises(ValueError, match=r"turn 2 has 2 tool_calls, .* shows only the first"):
        learned(call_templates.tokenizer("gpt-oss"), turns)
    (text,), _ = learned(call_templates.tokenizer("DeepSeek V3.1"), turns)
    assert "f" in text and "g<|call_sep|>" in text


HEADED = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant
{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_marks_around_a_header_do_not_teach_it():
    for template in (HEADED, HEADED.replace("assistant\n{", "assistant\n\n{")):
        (text,), _ = learned(chats.tokenizer(template), [user("a"), says("b"), user("c"), says("d")])
        assert text.count("«") == 2 and f"«b{B}»" in text and text.endswith(f"«d{B}»")
