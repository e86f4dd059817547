"""Observations as tokens, behind responses as they were sampled, by chat templates of many manners."""

from datetime import date

import call_templates
import chats
import pytest
import tiny

from rft_fn import environment
from rft_fn.data import template_variables
from rft_fn.data.chat import Chat
from rft_fn.environment import Renderer
from rft_fn.environment.record import as_messages

TEMPLATES = ("CHATML", "LLAMA3", "QWEN3", "MARKED")
USER = [{"role": "user", "content": "next?"}]


def tokenizer(name, end="<|im_end|>"):
    return chats.tokenizer(getattr(chats, name), end=end)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_reply_is_what_the_template_writes_behind_the_response(name, role):
    """Prompt, response and reply together are the whole conversation as the template renders it."""
    end = "<|eot|>" if name == "LLAMA3" else "<|im_end|>"
    tok = tokenizer(name, end)
    renderer = Renderer(tok)
    asked = [{"role": "user", "content": "first"}]
    observed = [{"role": role, "content": "42"}]
    said = [*tok.encode("sure", add_special_tokens=False), tok.eos_token_id]
    prompt = renderer.opening(asked)
    ids = [*prompt, *said, *renderer.reply([*prompt, *said], observed)]
    talk = [*asked, {"role": "assistant", "content": "sure"}, *observed]
    whole = tok.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    text = tok.decode(ids)
    # a template that drops thoughts of earlier turns would write this prompt without them
    assert text.replace("<think>\n\n</think>\n\n", "") == whole.replace("<think>\n\n</think>\n\n", "")
    assert ids[len(prompt) : len(prompt) + len(said)] == said


def test_the_end_of_a_turn_is_written_once_and_added_where_it_is_missing():
    tok = tokenizer("CHATML")
    renderer = Renderer(tok)
    letters = tok.encode("sure", add_special_tokens=False)
    ended = tok.decode(renderer.reply([*letters, tok.eos_token_id], USER))
    cut = tok.decode(renderer.reply(letters, USER))
    assert ended == "\n<|im_start|>user\nnext?<|im_end|>\n<|im_start|>assistant\n"
    assert cut == "<|im_end|>" + ended


def test_a_response_that_the_template_would_change_does_not_matter():
    """Thoughts, spaces and the template's own marks in a response leave the reply as it is."""
    tok = tokenizer("QWEN3")
    renderer = Renderer(tok)
    plain = renderer.reply([*tok.encode("x"), tok.eos_token_id], USER)
    for text in ("<think>\nhm\n</think>\n\nx ", "  x\n", "[f({})]"):
        assert renderer.reply([*tok.encode(text), tok.eos_token_id], USER) == plain


def test_half_of_a_surrogate_pair_is_replaced_in_what_is_observed():
    renderer = Renderer(chats.tokenizer(None))
    for observed in ("a\ud83d", [{"role": "tool", "content": "a\ud83d", "name": "f"}]):
        messages = as_messages(observed)
        assert [m["content"] for m in messages] == ["a\ufffd"]
        assert renderer.tokenizer.decode(renderer.reply([5], messages)) == "a\ufffd"


def test_an_episode_has_no_end_that_the_tokenizer_adds():
    """Neither behind its first messages nor inside what a teacher says."""
    tok = chats.ending()
    renderer = Renderer(tok)
    assert tok.decode(renderer.opening(USER)) == "<bos>next?"
    assert tok.decode(renderer.reply([5, tok.eos_token_id], USER)) == "next?"
    for before, said in environment.lessons(environment.get_environment("calculator"), renderer, 0, 0):
        assert tok.eos_token_id not in said[:-1] and tok.bos_token_id not in said
        assert tok.decode(before).startswith("<bos>")


def test_without_a_template_observations_are_bare_text():
    tok = chats.tokenizer(None)
    renderer = Renderer(tok)
    assert tok.decode(renderer.reply([5, tok.eos_token_id], USER)) == "next?"
    assert (
        tok.decode(renderer.opening([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]))
        == "ab"
    )


def test_the_tiny_model_reads_text_and_what_tools_say():
    renderer = Renderer(tiny.tokenizer())
    said = [*tiny.tokenizer().encode("12"), tiny.tokenizer().eos_token_id]
    assert tiny.tokenizer().decode(renderer.reply(said, [{"role": "user", "content": "lower="}])) == "lower="
    assert tiny.tokenizer().decode(renderer.reply(said, [{"role": "tool", "content": "7"}])) == "7="


FORGETFUL = "{% for m in messages %}{{ m.content if m.role != 'tool' else '' }};{% endfor %}"
LOOKS_BACK = "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% else %};{% endif %}{% endfor %}"
TWICE = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template, role, line",
    [
        (
            chats.GEMMA2,
            "tool",
            "expected it to render user, assistant, tool, got TemplateError: turns alternate",
        ),
        (FORGETFUL, "tool", "it leaves out a message of role 'tool' behind a response"),
        (
            LOOKS_BACK,
            "user",
            "expected what follows a response to begin with '!', whatever is said next, got ';",
        ),
        (TWICE, "user", "expected a response once in the conversation, got it 2 times"),
    ],
)
def test_a_template_that_cannot_continue_a_conversation_is_refused(template, role, line):
    renderer = Renderer(chats.tokenizer(template))
    with pytest.raises(ValueError, match="chat template: ") as found:
        renderer.reply([5], [{"role": role, "content": "next?"}])
    assert line in str(found.value)


def test_tools_and_the_system_prompt_are_in_the_opening():
    tok = tokenizer("CHATML")
    schema = {"type": "function", "function": {"name": "add"}}
    text = tok.decode(Renderer(tok, "Be brief.").opening(USER, [schema]))
    assert "Be brief." in text and "next?" in text
    assert '"name": "add"' in tok.decode(Renderer(tok).opening(USER, [schema]))


def test_a_response_is_read_without_the_token_that_ends_it():
    tok = tokenizer("CHATML")
    ids = tok.encode("<|head|>sure", add_special_tokens=False)
    assert Renderer(tok).said([*ids, tok.eos_token_id]) == "<|head|>sure"
    assert Renderer(tok).said([tok.eos_token_id]) == ""


def test_what_follows_a_response_has_the_fixed_day_too():
    tok = tokenizer("CHATML")
    tok.chat_template = tok.chat_template.replace("m['role'] }}", "strftime_now('%Y ') + m['role'] }}")
    template_variables.fix_day(date(2024, 7, 26))
    try:
        said = tok.decode(Renderer(tok).reply([tok.eos_token_id], USER))
    finally:
        template_variables.fix_day(None)
    assert "<|im_start|>2024 user\nnext?" in said


RESULT = {"role": "tool", "content": '4 "of" 5\n6', "name": "f"}


@pytest.mark.parametrize("family", call_templates.FAMILIES)
@pytest.mark.parametrize("given", [False, True])
def test_a_result_follows_a_call_in_every_family(family, given):
    """The call that was sampled and the reply are the conversation as the template renders it."""
    tok = call_templates.tokenizer(family)
    marker = {"role": "user", "content": "Q"}
    kimi = family == "Kimi K2"
    call_id = "functions.f:0" if kimi else "abcdefghi"
    arguments = {"a": "b"}
    made = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    calls = {"role": "assistant", "content": "", "tool_calls": [made]}
    result = RESULT | ({"tool_call_id": call_id} if given else {})
    chat = Chat(tok, {})
    whole = tok.decode(chat.ids([marker, calls, result | {"tool_call_id": call_id}], ask=True))
    asked = tok.decode(Renderer(tok).opening([marker]))
    end = end_of_calls(family)
    ended = whole[: whole.index(end, len(asked)) + len(end)]
    response = tok.encode(ended[len(asked) :], add_special_tokens=False)
    reply = tok.decode(Renderer(tok).reply(response, [result]))
    expected = whole[len(ended) :]
    assert ended.startswith(asked) and reply == expected
    other = [*response[:-1], tok.encode("<pad>", add_special_tokens=False)[0]]
    if family == "gpt-oss":  # its results follow calls only, which end in one way
        assert tok.decode(Renderer(tok).reply(other, [result])) == expected
    cut = tok.decode(Renderer(tok).reply(response[:-1], [result]))
    assert cut == end + expected


def end_of_calls(family):
    """The token that ends a turn with calls."""
    return {"Llama 3.1, 3.2": "<|eot|>", "gpt-oss": "<|call|>"}.get(
        family, "</turn>" if "Gemma" in family else "<|im_end|>"
    )


ENDS_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def test_an_end_that_only_the_last_turn_has_is_no_part_of_what_follows():
    """Phi-3's whole conversations end with one more token, gpt-oss's last turns with another one."""
    phi = chats.tokenizer(ENDS_LAST, more=("<|end|>", "<|user|>", "<|assistant|>"))
    (end,) = phi.encode("<|end|>", add_special_tokens=False)
    follows = "\n<|user|>\nnext?<|end|>\n<|assistant|>\n"
    assert phi.decode(Renderer(phi).reply([5, end], USER)) == follows
    assert phi.decode(Renderer(phi).reply([5], USER)) == f"<|end|>{follows}"

    oss = call_templates.tokenizer("gpt-oss")
    (end,) = oss.encode("<|return|>", add_special_tokens=False)
    follows = "<|start|>user<|message|>next?<|end|><|start|>assistant"
    assert oss.decode(Renderer(oss).reply([5, end], USER)) == follows
    assert oss.decode(Renderer(oss).reply([5], USER)) == f"<|end|>{follows}"
