"""Conversations: from the columns of a row to turns, and from turns to the tokens of prompts and lessons."""

import json
import warnings
from datetime import date, datetime

import chats
import pytest
import schemas
from each_case import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft_fn import data
from rft_fn.data import chat as chat_module
from rft_fn.data import template_variables
from rft_fn.data.chat import Chat
from rft_fn.data.messages import conversation
from rft_fn.data.points import points_from_rows
from rft_fn.data.ranked import lists_from_rows
from rft_fn.data.reasoning_steps import steps_from_rows

TEMPLATES = ("CHATML", "LLAMA3", "GEMMA2", "QWEN3", "MARKED", "BARE")


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def user(text):
    return turn("user", text)


def says(text, **more):
    return turn("assistant", text, **more)


def chat_of(name, **kwargs):
    return Chat(chats.tokenizer(getattr(chats, name)), kwargs)


def talk(*turns, start=0, tools=None):
    return data.Conversation(list(turns), start, tools)


def learned(name, *turns, loss_on="all", start=0, tools=None, **kwargs):
    chat = chat_of(name, **kwargs)
    return [
        chats.shown(chat.tokenizer, x) for x in chat.lessons(talk(*turns, start=start, tools=tools), loss_on)
    ]


# ---------- from a row to turns

CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = {"type": "function", "function": CALL}


@each(
    ("cell", "turns"),
    [
        ([user("a"), says("b")], [user("a"), says("b")]),
        (json.dumps([user("a")]), [user("a")]),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], [user("a"), says("b")]),
        (
            [{"from": "system", "value": "s"}, {"from": "observation", "value": "3"}],
            [turn("system", "s"), turn("tool", "3")],
        ),
        ([{"from": "function_call", "value": json.dumps(CALL)}], [says("", tool_calls=[CALLED])]),
        ([turn("user", ["a", {"type": "text", "text": "b", "image": None}])], [user("ab")]),
        ([turn("assistant", None, tool_calls=[CALLED])], [says("", tool_calls=[CALLED])]),
        ([says("b", tool_calls=None, name=None)], [says("b")]),
        ([says("b", tool_calls=[])], [says("b")]),
        ([says("b", tool_calls=json.dumps([CALL]))], [says("b", tool_calls=[CALLED])]),
        (
            [says("", tool_calls=[{"id": "1", "function": {"name": "add", "arguments": '{"a": null}'}}])],
            [
                says(
                    "",
                    tool_calls=[
                        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": None}}}
                    ],
                )
            ],
        ),
        (
            [says("", tool_calls=[{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}])],
            [says("", tool_calls=[CALLED])],
        ),
        ([turn("tool", "3", tool_call_id="x")], [turn("tool", "3", tool_call_id="x")]),
    ],
)
def test_messages_of_every_form_become_turns(cell, turns):
    assert conversation({"m": cell}, ["m"]).turns == turns


def test_columns_follow_one_another_below_a_system_prompt():
    row = {"prompt": [user("a")], "completion": [says("b")], "tools": json.dumps([{"name": "f", "x": None}])}
    found = conversation(row, ["prompt", "completion"], "s")
    assert found == ([turn("system", "s"), user("a"), says("b")], 2, [{"name": "f"}])
    own = {"prompt": [turn("system", "mine"), user("a")], "tools": []}
    assert conversation(own, ["prompt"], "s") == (own["prompt"], 0, None)


def test_a_column_holds_the_system_prompt_of_a_conversation():
    """As ToolACE and LLaMA-Factory have it; it goes before the option, and may not contradict the turns."""
    row = {"system": "call: add", "c": [user("2+3"), says("5")], "e": "", "good": [says("5")]}
    row |= {"bad": [says("6")], "q": [user("2+3")], "answers": [[says("5")], [says("6")]], "scores": [1, 0]}
    assert conversation(row, ["c"], "Be kind.").turns == [turn("system", "call: add"), *row["c"]]
    assert conversation(row | {"system": " "}, ["c"]).turns[0] == turn("system", " ")
    for none in ({"system": None}, {"system": ""}):
        assert conversation(row | none, ["c"], "S").turns[0] == turn("system", "S")
        assert conversation(row | none, ["c"]).turns == row["c"]
    same = row | {"c": [turn("system", "call: add"), user("2")]}
    assert conversation(same, ["c"]).turns == same["c"]
    spoken = row | {"system": [turn("system", "S")]}
    assert conversation(spoken, ["system", "c"]).turns == [turn("system", "S"), *row["c"]]
    with pytest.raises(ValueError, match=r"^column 'system' holds messages: name it in --messages, before"):
        conversation(spoken, ["c"])
    for bad, message in (({"system": 3}, "column 'system': expected text, got int"), (
        {"c": [turn("system", "no"), user("2")]}, "got 'call: add' in column 'system' and 'no' in turn 1",
    )):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            conversation(row | bad, ["c"])

    # prompts and whatever is learned have it
    tok = chats.tokenizer(chats.CHATML)
    given = "<|im_start|>system\ncall: add<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n"
    given += "<|im_start|>assistant\n"
    prompt = data.from_rows([row], tok, messages=["c"], loss_on="all").prompt(0)
    assert tok.decode(prompt.ids) == given
    (lesson,) = data.lessons(prompt, tok, messages=["c"])
    kept = given + "«5<|im_end|>»"
    found = [
        lesson,
        data.pairs_from_rows([row], tok, messages=["q", "good", "bad"]).prompt(0).chosen,
        data.pairs_from_rows([row | {"bad": [user("2+3"), says("6")]}], tok, messages=["c", "bad"])
        .prompt(0)
        .chosen,
        lists_from_rows([row], tok, messages=["q", "answers"], completions="answers").prompt(0).responses[0],
        points_from_rows([row | {"score": 1}], tok, messages=["c"]).prompt(0).response,
    ]
    assert [chats.shown(tok, x) for x in found] == [kept] * 5


@pytest.mark.parametrize(
    ("row", "options", "columns"),
    [
        ({"system": "S"}, {}, ["system"]),
        ({"system": "S"}, {"template": "{system} {question}"}, []),
        ({"functions": [{"name": "f"}], "tools": "[]", "history": []}, {}, ["tools", "functions"]),
        ({"history": [["a", "b"]], "system_prompt": "S"}, {}, ["history", "system_prompt"]),
        ({"chat_template_kwargs": {"x": None}}, {}, []),
        ({"instruction": "i", "input": "x", "context": ""}, {}, ["input"]),
        ({"input": "x"}, {}, []),
        ({"tools": [{"name": "f"}]}, {"columns": ["tools"]}, []),
        ({"tools": [{"name": "f"}], "system": "S"}, {"messages": ["m"]}, []),
        ({"functions": [{"name": "f"}]}, {"messages": ["m"]}, ["functions"]),
    ],
)
def test_columns_of_a_known_schema_that_are_not_read_are_announced_once(row, options, columns):
    rows = [{"question": "1", "m": [user("1")], **more} for more in (row, row)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.from_rows(rows, chats.tokenizer(chats.CHATML), name="f", **options)
    expected = [
        f"data: column {name!r} of 2 rows is not read, the first is f, row 1; a template may name it"
        for name in columns
    ]
    assert sorted(str(w.message) for w in caught) == sorted(expected)


@pytest.mark.parametrize("kind", ["PAIRS", "LISTS", "POINTS", "STEPS"])
def test_media_that_a_model_of_text_does_not_read_are_announced(kind):
    """A reward model of text may judge the answers about images; that it does not see them is said."""
    row = {"prompt": "a", "chosen": "1", "rejected": "2", "completions": ["1", "2"], "scores": [1, 0]}
    row |= {"completion": "1", "score": 1, "labels": [1, 0], "image": "a.png"}
    tok = chats.tokenizer(chats.CHATML)
    with pytest.warns(UserWarning, match="column 'image' of 1 rows is not read, the first is rows, row 1"):
        getattr(data, kind).from_rows([row], tok)


@each(
    ("row", "message"),
    [
        ({"q": "a"}, "^the row has no column 'm'; it has 'q'$"),
        ({"q": [user("a")]}, "no column 'm'; it has 'q'; 'q' holds messages: --messages q, without --temp"),
        ({"m": "text"}, "^column 'm': expected a list of messages, got str; text is for --template '{m}'"),
        ({"m": None}, "column 'm': expected a list of messages, got NoneType"),
        ({"m": []}, "^column 'm' has no messages$"),
        ({"m": ["a"]}, "^column 'm', turn 1: expected a message with role and content, got str$"),
        ({"m": [user("a"), {"content": "b"}]}, "^column 'm', turn 2: expected a role, got a message with 'c"),
        ({"m": [turn("boss", "a")]}, "turn 1: role: expected one of system, .*, got 'boss'$"),
        ({"m": [turn("user", None)]}, "turn 1: user: expected content, got none"),
        ({"m": [says(None, tool_calls=[])]}, "turn 1: assistant: expected content"),
        ({"m": [turn("user", 5)]}, "turn 1: content: expected text, or a list of parts of text, got int"),
        ({"m": [turn("user", [{"type": "image"}])]}, "content: expected parts of text, got one of type 'im"),
        ({"m": [turn("user", [3])]}, "content: expected parts of text, got one of type 'int'"),
        ({"m": [says("", tool_calls="add")]}, "turn 1: tool_calls: expected calls with name .*, got 'add'"),
        ({"m": [says("", tool_calls=[{"arguments": {}}])]}, "tool_calls: expected a call with a name, got"),
        ({"m": [says("", tool_calls=["add"])]}, "tool_calls: expected a call with name and .*, got 'add'"),
        ({"m": [{"from": "function_call", "value": "add(1)"}]}, "turn 1: tool_calls: .*, got 'add\\(1\\)'"),
        ({"m": [user("a")], "tools": "f"}, "^column 'tools': expected a list of JSON schemas, got 'f'"),
        ({"m": [user("a")], "tools": [3]}, "^column 'tools', tool 1: expected a JSON schema, got 3"),
    ],
)
def test_what_is_no_message_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        conversation(row, ["m"])


# ---------- prompts

FEW = [turn("system", "S"), user("1+1"), says("2"), user("2+2")]
WEATHER = {"type": "function", "function": {"name": "weather"}}


SHORT = {  # in the texts below
    "[S]": "<|im_start|>system\n",
    "[U]": "<|im_start|>user\n",
    "[A]": "<|im_start|>assistant\n",
    "[E]": "<|im_end|>",
    "[user]": "<|head|>user<|/head|>\n\n",
    "[tool]": "<|head|>ipython<|/head|>\n\n",
    "[assistant]": "<|head|>assistant<|/head|>\n\n",
    "[0]": "<|eot|>",
}


def spelled(text):
    for short, long in SHORT.items():
        text = text.replace(short, long)
    return text


@each(
    ("name", "turns", "kwargs", "text"),
    [
        ("CHATML", FEW[3:], {}, "[S]Be kind.[E]\n[U]2+2[E]\n[A]"),
        ("CHATML", FEW[:2], {}, "[S]S[E]\n[U]1+1[E]\n[A]"),
        ("CHATML", [turn("system", ""), user("a")], {}, "[S][E]\n[U]a[E]\n[A]"),
        ("LLAMA3", FEW[1:], {}, "<bos>[user]1+1[0][assistant]2[0][user]2+2[0][assistant]"),
        ("LLAMA3", FEW[3:], {"style": "dated"}, "<bos>[user]26 Jul\n2+2[0][assistant]"),
        ("GEMMA2", FEW[3:], {}, "<bos><turn>user\n2+2</turn>\n<turn>model\n"),
        ("QWEN3", FEW[3:], {}, "[U]2+2[E]\n[A]"),
        ("QWEN3", FEW[3:], {"enable_thinking": False}, "[U]2+2[E]\n[A]<think>\n\n</think>\n\n"),
    ],
)
def test_a_prompt_is_what_the_template_makes_of_it(name, turns, kwargs, text):
    chat = chat_of(name, **kwargs)
    chat.check()
    assert chat.tokenizer.decode(chat.prompt(talk(*turns))) == spelled(text)


def test_tools_and_their_answers_are_in_the_prompt():
    turns = [user("rain?"), says("", tool_calls=[CALLED]), turn("tool", "3")]
    chat = chat_of("LLAMA3")
    assert chat.tokenizer.decode(chat.prompt(talk(*turns, tools=[WEATHER]))) == spelled(
        '<bos>[user][{"type": "function", "function": {"name": "weather"}}]rain?[0]'
        '[assistant][add({"a": 1})][0][tool]3[0][assistant]'
    )


def test_a_system_prompt_that_a_template_refuses_is_put_before_the_first_question():
    chat_module._warn_of_system.cache_clear()
    chat = chat_of("GEMMA2")
    with pytest.warns(UserWarning, match="refuses a system turn; its text is put before"):
        ids = chat.prompt(talk(*FEW))
    assert chat.tokenizer.decode(ids).startswith("<bos><turn>user\nS\n\n1+1</turn>\n<turn>model\n2</turn>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert chat.prompt(talk(*FEW)) == ids
        assert chat.prompt(talk(turn("system", ""), user("a"))) == chat.prompt(talk(user("a")))
        assert data.render(chat.tokenizer, "a", system="S") == chat.prompt(talk(user("S\n\na")))


@pytest.mark.parametrize(("name", "turns", "message"), [
    ("GEMMA2", [user("a"), user("b")], "chat template: .* render user, user, got .*: turns alternate"),
    ("GEMMA2", [*FEW[:2], user("b")], "chat template: .* render user, user, got .*: turns alternate"),
    ("GEMMA2", [turn("system", "s")], "turn 1: expected the last turn of a prompt from user or"),
    ("BARE", [turn("tool", "b")], "chat template: .* render tool, got"),
    ("CHATML", FEW[:3], "^turn 3: expected the last turn of a prompt from user or tool, got assistant$"),
    ("CHATML", [turn("system", ""), user(" \n")], "^the prompt is empty$"),
    ("GEMMA2", [user("a"), says("b", tool_calls=[CALLED]), user("c")], "turn 2 has tool_calls, and"),
])  # fmt: skip
def test_a_prompt_that_cannot_be_asked_is_refused(name, turns, message):
    with pytest.raises(ValueError, match=message):
        chat_of(name).prompt(talk(*turns))


def test_tools_that_a_template_does_not_read_are_refused():
    with pytest.raises(ValueError, match=r"^the row has tools, and the chat template reads none"):
        chat_of("GEMMA2").prompt(talk(user("a"), tools=[WEATHER]))


# ---------- keywords of a template


def test_literals():
    assert data.literals(["a=False", "b='x=y'", "c=3"]) == {"a": False, "b": "x=y", "c": 3}
    for pair in ("a", "a=", "a=low", "=3", "a b=3", "a=f(1)"):
        with pytest.raises(ValueError, match="chat_template_kwargs: expected NAME=LITERAL as enable_think"):
            data.literals([pair])


@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        (chats.LLAMA3, {"enable_thinking": False}, r"reads \(style\), got 'enable_thinking'"),
        (chats.QWEN3, {"thinking": False}, r"reads \(enable_thinking\), got 'thinking'"),
        (chats.GEMMA2, {"enable_thinking": False}, r"reads \(it reads none\), got"),
        (chats.MARKED, {"messages": []}, "got 'messages'"),
        (chats.LLAMA3, {"bos_token": "x"}, "got 'bos_token'"),
        (None, {"a": 1}, "expected none, as the tokenizer has no chat template, got a"),
    ],
)
def test_a_keyword_that_a_template_does_not_read_is_refused(template, kwargs, message):
    with pytest.raises(ValueError, match=f"^chat_template_kwargs: .*{message}"):
        data.from_rows([{"q": "a"}], chats.tokenizer(template), template="{q}", chat_template_kwargs=kwargs)


def test_a_keyword_reaches_text_too():
    tokenizer, rows = chats.tokenizer(chats.QWEN3), [{"q": "a"}]
    plain = data.from_rows(rows, tokenizer, template="{q}").prompt(0).ids
    off = data.from_rows(rows, tokenizer, template="{q}", chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(off.prompt(0).ids[len(plain) :]) == "<think>\n\n</think>\n\n"


# ---------- what is learned


@pytest.mark.parametrize(
    ("name", "loss_on", "want"),
    [
        ("CHATML", "all", "[S]Be kind.[E]\n[U]a[E]\n[A]«b[E]»\n[U]c[E]\n[A]«d[E]»"),
        ("CHATML", "last", "[S]Be kind.[E]\n[U]a[E]\n[A]b[E]\n[U]c[E]\n[A]«d[E]»"),
        ("MARKED", "all", "[U]a[E]\n[A]«b[E]»\n[U]c[E]\n[A]«d[E]»"),
        ("MARKED", "last", "[U]a[E]\n[A]b[E]\n[U]c[E]\n[A]«d[E]»"),
        ("LLAMA3", "all", "<bos>[user]a[0][assistant]«b[0]»[user]c[0][assistant]«d[0]»"),
    ],
)
def test_turns_are_learned_with_their_ends(name, loss_on, want):
    turns = [user("a"), says("b"), user("c"), says("d")]
    assert learned(name, *turns, loss_on=loss_on) == [spelled(want)]


def test_only_the_last_column_is_learned_and_what_follows_the_last_answer_is_left_out():
    turns = [user("a"), says("b"), user("c"), says("d"), user("e")]
    (text,) = learned("GEMMA2", *turns, start=3)
    assert text == (
        "<bos><turn>user\na</turn>\n<turn>model\nb</turn>\n<turn>user\nc</turn>\n<turn>model\n«d</turn>»"
    )


def test_a_turn_that_changes_when_others_follow_has_a_sequence_of_its_own():
    """Earlier thoughts are dropped: the first turn is learned as it was said, with its thought."""
    first, second = "<think>\nx\n</think>\n\nb", "<think>\ny\n</think>\n\nd"
    turns = [user("a"), says(first), user("c"), says(second)]
    whole, alone = learned("QWEN3", *turns)
    assert alone == spelled(f"[U]a[E]\n[A]«{first}[E]»")
    assert whole == spelled(f"[U]a[E]\n[A]b[E]\n[U]c[E]\n[A]«{second}[E]»")
    assert learned("QWEN3", *turns, loss_on="last") == [whole]
    off = learned("QWEN3", user("a"), says("b"), loss_on="last", enable_thinking=False)
    assert off == [spelled("[U]a[E]\n[A]<think>\n\n</think>\n\n«b[E]»")]


def test_thoughts_and_calls_are_learned():
    turns = [user("a"), says("", reasoning_content="x", tool_calls=[CALLED]), turn("tool", "3"), says("b")]
    (text,) = learned("QWEN3", *turns)
    assert text.count("«") == 2 and '«<think>\nx\n</think>\n\n[add({"a": 1})]<|im_end|>»' in text


def test_a_turn_without_an_end_of_its_own_is_ended():
    first, second = learned("BARE", user("a"), says("b"), user("c"), says("d \n"))
    assert (first, second) == ("Q: a\nA: «b<eos>»", "Q: a\nA: b\nQ: c\nA: «d<eos>»")


def test_a_header_that_is_written_unasked_is_not_learned():
    """Llama 3's first template has it behind every conversation."""
    asked = "{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
    always = chats.LLAMA3.replace(asked, "{{ '<|head|>assistant<|/head|>\n\n' }}")
    turns = talk(user("a"), says("b"), user("c"), says("d"))
    texts = []
    for template in (chats.LLAMA3, always):
        chat = Chat(chats.tokenizer(template), {})
        texts.append([chats.shown(chat.tokenizer, x) for x in chat.lessons(turns, "all")])
    assert always != chats.LLAMA3 and texts[0] == texts[1]


def test_marks_that_are_not_one_a_turn_are_not_followed():
    """Two of the four turns have none: both turns are learned by what comes after their prompts."""
    tokenizer = chats.tokenizer(chats.MARKED.replace("m.role == 'assistant'", "m.content == 'b'"))
    found = Chat(tokenizer, {}).lessons(talk(user("a"), says("b"), user("c"), says("d")), "all")
    (lesson,) = found
    text = tokenizer.decode([t for t, m in zip(lesson.ids, lesson.mask) if m])
    assert text == "b<|im_end|>d<|im_end|>"


@pytest.mark.parametrize("name", ["CHATML", "MARKED"])
def test_an_answer_that_melts_into_its_header_is_cut_where_the_prompt_ends(name):
    """Two ends of a line are one token, but the prompt ends between them."""
    chat = chat_of(name)
    (lesson,) = chat.lessons(talk(user("a"), says("\nb")), "all")
    start = lesson.mask.index(True)
    assert lesson.ids[:start] == chat.prompt(talk(user("a")))
    assert chats.shown(chat.tokenizer, lesson).endswith(spelled("[A]«\nb[E]»"))
    assert lesson.ids != chat.ids([user("a"), says("\nb")], ask=False)[: len(lesson.ids)]


@pytest.mark.parametrize(
    ("name", "turns", "message"),
    [
        ("CHATML", [user("a")], "^expected a turn of the assistant to learn, got none$"),
        ("CHATML", [user("a"), says(" ")], "^turn 2: the response is empty$"),
        ("CHATML", [says("a"), user("b"), says("c")], "^turn 1: the assistant speaks first"),
        ("MARKED", [says("a"), user("b"), says("c")], "^turn 1: the assistant speaks first"),
        (
            "ASKED",
            [user("a"), says("<think>\nx</think>b")],
            r"^turn 2: the prompt that asks for it continues with '<think>\\n', but the chat template "
            r"renders it with 'b<\|eot\|>'",
        ),
        ("GEMMA2", [user("a"), says("b"), says("c")], "chat template: .* turns alternate"),
        ("GEMMA2", [user("a"), says("", tool_calls=[CALLED])], "turn 2 has tool_calls"),
    ],
)
def test_what_cannot_be_learned_is_refused(name, turns, message):
    with pytest.raises(ValueError, match=message):
        chat_of(name).lessons(talk(*turns), "all")


WORD = st.text("ab\n <", min_size=1, max_size=6).filter(str.strip)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(TEMPLATES),
    words=st.lists(WORD, min_size=2, max_size=8),
    system=st.booleans(),
    loss_on=st.sampled_from(data.LOSS_ON),
)
def test_every_learned_turn_follows_the_prompt_that_asks_for_it(name, words, system, loss_on):
    """The definition: before a learned turn stands what a model would be asked with, token for token, and
    the turn is what it says there, up to and with the token that ends it. Each is learned once."""
    chat = chat_of(name)
    turns = [(user, says)[i % 2](w) for i, w in enumerate(words[: len(words) // 2 * 2])]
    turns = [turn("system", "s")] * (system and name not in ("BARE", "GEMMA2")) + turns
    spoken = [i for i, t in enumerate(turns) if t["role"] == "assistant"]
    spoken = spoken[-1:] if loss_on == "last" else spoken
    found = []
    for lesson in chat.lessons(talk(*turns), loss_on):
        starts = [i for i, m in enumerate(lesson.mask) if m and not lesson.mask[i - 1]]
        ends = [i + 1 for i, m in enumerate(lesson.mask) if m and not [*lesson.mask, False][i + 1]]
        assert ends[-1] == len(lesson.ids)
        for start, end in zip(starts, ends, strict=True):
            asked, said = lesson.ids[:start], chat.tokenizer.decode(lesson.ids[start:end])
            found += [
                i
                for i in spoken
                if chat.ids(turns[:i], ask=True) == asked and turns[i]["content"].strip() in said
            ]
            assert said.endswith(("<|im_end|>", "<|eot|>", "</turn>", "<eos>")) and said.count("<|") <= 1
    assert sorted(found) == spoken


# ---------- rows as people have them


def test_the_table_of_schemas_is_what_the_options_make_of_the_rows():
    """docs/data.md is what tests/data/schemas.py writes, and every way to give data is in it."""
    text = schemas.PAGE.read_text()
    assert schemas.page(text) == text
    assert len(schemas.SCHEMAS) >= 14 and {s.script for s in schemas.SCHEMAS} == {"grpo", "sft"}


PLAIN = "(user)2+2?<end>(assistant)"


def test_one_question_in_many_forms_is_one_prompt_and_one_lesson(tmp_path):
    """Text or messages, of TRL, verl or OpenRLHF, in jsonl, parquet or csv."""
    found = {s.name: schemas.made(s, tmp_path) for s in schemas.SCHEMAS if "2+2?" in json.dumps(s.row)}
    asked = [name for name, (prompt, learned) in found.items() if (prompt, learned) == (PLAIN, [])]
    taught = [name for name, (_, learned) in found.items() if learned == [PLAIN + "«4<end>»"]]
    assert len(asked) == 7 and len(taught) == 5
    assert all(PLAIN in prompt for prompt, _ in found.values())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "S"])
def test_text_is_learned_with_the_ids_of_a_conversation(name, system):
    """The same end of a turn, prompt and mask, of examples, pairs, lists and points alike."""
    tok = chats.tokenizer(getattr(chats, name))
    row = {"question": "2+2", "answer": " 4", "bad": "5", "messages": [user("2+2"), says(" 4")]}
    row |= {"asked": [user("2+2")], "good": [says(" 4")], "wrong": [says("5")]}
    row |= {"completions": [" 4", "5"], "answers": [[says(" 4")], [says("5")]], "scores": [1, 0], "score": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a template without a system prompt merges it

        text = data.from_rows([row], tok, system=system, response="{answer}").prompt(0)
        given = {"messages": ["messages"], "loss_on": "all"}
        chat = data.from_rows([row], tok, system=system, **given).prompt(0)
        (lesson,) = data.lessons(text, tok, response="{answer}")
        assert [lesson] == data.lessons(chat, tok, **given) and text.ids == chat.ids

        both = {"template": "{question}", "system": system}
        pair = data.pairs_from_rows([row], tok, chosen="{answer}", rejected="{bad}", **both).prompt(0)
        columns = {"messages": ["asked", "good", "wrong"], "system": system}
        other = data.pairs_from_rows([row], tok, **columns).prompt(0)
        assert (pair.chosen, pair.rejected) == (other.chosen, other.rejected) and pair.chosen == lesson

        ranked = lists_from_rows([row], tok, **both).prompt(0)
        columns = {"messages": ["asked", "answers"], "system": system}
        other = lists_from_rows([row], tok, completions="answers", **columns).prompt(0)
        assert ranked.responses == other.responses == (pair.chosen, pair.rejected)
        point = points_from_rows([row], tok, completion="{answer}", **both).prompt(0)
        assert point.response == lesson

        steps = {**row, "completions": ["2", "4"], "labels": [1, 1]}
        found = steps_from_rows([steps], tok, **both).prompt(0).response
        size = len(Chat(tok, {}).turn_end())
        assert found.ids[-size:] == lesson.ids[-size:]


def test_a_response_that_a_template_would_not_show_stays_as_it_is():
    """It asks for a thought, and shows none: the text begins with it, and has the end of a turn."""
    tok = chats.tokenizer(chats.ASKED)
    prompt = data.from_rows(
        [{"question": "2+2", "answer": "hm</think>4"}], tok, response="{answer}", max_tokens=99
    ).prompt(0)
    (lesson,) = data.lessons(prompt, tok)
    shown = "<|head|>user<|/head|>2+2<|eot|><|head|>assistant<|/head|><think>\n«hm</think>4<|eot|>»"
    assert chats.shown(tok, lesson) == shown


def test_where_a_template_ends_no_turn_the_end_of_sequence_does():
    assert Chat(chats.tokenizer(chats.BARE), {}).turn_end() == [1]
    assert Chat(chats.tokenizer("{{ raise_exception('no') }}"), {}).turn_end() == [1]
    assert Chat(chats.tokenizer(None), {}).turn_end() == [1]


# ---------- the date

DATED = (
    '  {%- if strftime_now is defined %}{% set day = strftime_now("%d %b %Y") %}{% endif -%}\n'
    "{{ day }}{% macro at(code) %}{{ strftime_now(code) }}{% endmacro %} {{ at('%H:%M %-d%%') }}"
    "{% for m in messages %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
)


@pytest.fixture(name="day")
def fixed_day():
    """A day that chat templates take for today."""
    template_variables.fix_day(date(2024, 7, 26))
    yield
    template_variables.fix_day(None)


@pytest.mark.usefixtures("day")
def test_a_template_takes_the_fixed_day_for_today():
    chat = Chat(chats.tokenizer(DATED), {})
    text = chat.tokenizer.decode(chat.ids([user("a")], ask=True))
    assert text == f"26 Jul 2024 00:00 26% a{chat.tokenizer.eos_token}"
    (lesson,) = chat.lessons(talk(user("q"), says("b")), "all")
    assert chats.shown(chat.tokenizer, lesson).startswith("26 Jul 2024")

    # every rendering goes the same way, whoever asks, and no template without a date is touched
    assert chat.tokenizer.decode(data.render(chat.tokenizer, "a")) == text
    plain = chats.tokenizer(chats.CHATML)
    assert template_variables.dated(plain) is None
    template_variables.fix_day(None)
    today = datetime.now().strftime("%d %b %Y")
    assert chat.tokenizer.decode(chat.ids([user("a")], ask=True)).startswith(today)
