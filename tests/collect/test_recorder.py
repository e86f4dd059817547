"""The recorder: which requests go on with a row, which begin one, and what tokens a row has."""

import json

import chats
import pytest

from rft_fn.collect.calls import Answer
from rft_fn.collect.recorder import Limits, Session, TooLong
from rft_fn.environment import Renderer
from rft_fn.environment.tool_calls import call_parser
from rft_fn.tools.serving.model_wire import Asked, chat_answer, read_chat, told
from rft_fn.types import Sampling

ASKED = {"role": "user", "content": "first"}
NEXT = {"role": "user", "content": "and?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Talk:
    """A program that speaks to a session, and a policy that says what it is given."""

    def __init__(self, template="CHATML", *, tokens=4000, turns=8, tools=()):
        self.tok = chats.tokenizer(getattr(chats, template), end="<|im_end|>")
        self.renderer = Renderer(self.tok)
        self.tools = list(tools)
        self.session = Session(0, 0, 7, Limits(tokens, turns), Sampling())

    def ids(self, text):
        return [*self.tok.encode(text, add_special_tokens=False), self.tok.eos_token_id]

    def ask(self, *turns):
        return self.session.ask(self.renderer, list(turns), self.tools)

    def say(self, ask, tokens):
        """What the program is told, after the policy has said these tokens."""
        calls = call_parser(self.tok)(self.renderer.said(tokens)) if self.tools else ()
        reply = told(self.renderer.said(tokens), calls, f"{ask.key[0]}_{ask.key[1]}")
        answer = Answer(tokens, [-0.5] * len(tokens), version=3, cut=False)
        self.session.answered(ask, self.tools, reply, answer)
        return reply

    def rows(self):
        return [row.said for row in self.session.rows]

    def sampled(self, row):
        return [t for t, m in zip(row.tokens, row.mask) if m]


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled():
    """Two ends of a line are one token where the text is encoded: what was sampled stays two."""
    talk = Talk()
    newline = talk.tok.encode("\n", add_special_tokens=False)
    said = [*newline, *newline, *talk.ids("yes")]
    assert talk.tok.encode(talk.tok.decode(said), add_special_tokens=False) != said
    first = talk.ask(ASKED)
    reply = talk.say(first, said)
    second = talk.ask(ASKED, reply, NEXT)
    talk.say(second, talk.ids("no"))
    (row,) = talk.rows()
    assert first.ids == talk.renderer.opening([ASKED]) and second.ids[: len(first.ids)] == first.ids
    assert row.tokens[len(first.ids) :][: len(said)] == said
    assert talk.sampled(row) == [*said, *talk.ids("no")] and row.turns == 2 and row.version == 3
    assert second.ids[len(first.ids) + len(said) :] == talk.renderer.reply(said, [NEXT])
    assert (first.key, second.key) == ((0, 0), (0, 1))


def test_special_tokens_within_an_answer_stay():
    talk = Talk()
    mark = talk.tok.convert_tokens_to_ids("<|head|>")
    said = [mark, *talk.ids("x")]
    reply = talk.say(talk.ask(ASKED), said)
    assert reply["content"] == "<|head|>x"
    talk.say(talk.ask(ASKED, reply, NEXT), talk.ids("y"))
    assert [talk.sampled(row) for row in talk.rows()] == [[*said, *talk.ids("y")]]


def cleared_calls(reply):
    return {"role": "assistant", "content": "done"}


def dropped_thought(reply):
    return {**reply, "content": reply["content"].split("</think>")[-1]}


def shortened(reply):
    return {**reply, "content": reply["content"][:1]}


@pytest.mark.parametrize(
    ("said", "rewrite"),
    [('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', cleared_calls),
     ("<think>hm</think>four", dropped_thought), ("four", shortened)],
)  # fmt: skip
def test_a_context_that_was_rewritten_is_a_new_row(said, rewrite):
    """Calls that were cleared, a thought that was dropped, a text that was cut: none is taken as said."""
    talk = Talk(tools=[TOOL])
    reply = talk.say(talk.ask(ASKED), talk.ids(said))
    changed = rewrite(reply)
    assert changed != reply
    ask = talk.ask(ASKED, changed, NEXT)
    assert ask.row == -1 and ask.stem is None
    talk.say(ask, talk.ids("y"))
    first, second = talk.rows()
    assert talk.sampled(first) == talk.ids(said) and talk.sampled(second) == talk.ids("y")
    assert second.tokens[: len(ask.ids)] == talk.renderer.opening([ASKED, changed, NEXT], [TOOL])
    assert ask.key == (1, 0)


def test_calls_come_back_as_json_text_with_the_id_that_they_had():
    talk = Talk(tools=[TOOL])
    said = talk.ids('[add({"a": 1})]')
    ask = talk.ask(ASKED)
    reply = talk.say(ask, said)
    assert reply["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    asked = Asked(Sampling(), 1, None, False, False, False)
    body = chat_answer("x", "m", asked, ask.ids, [(reply, Answer(said, [-1.0] * len(said), 3, False), [])])
    message = body["choices"][0]["message"]
    assert message["content"] is None and body["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    sent = json.dumps({"messages": [ASKED, message, result], "tools": [TOOL], "model": "m"}).encode()
    turns, tools, _ = read_chat(sent, Sampling(), 8, fixed=True)
    again = talk.session.ask(talk.renderer, turns, tools)
    assert again.row == 0, "the program has changed nothing"


def test_a_branch_begins_with_the_tokens_of_the_row_that_it_leaves():
    """Its stem was sampled in the other row, and is learned there alone."""
    talk = Talk()
    first = talk.say(talk.ask(ASKED), talk.ids("four"))
    talk.say(talk.ask(ASKED, first, NEXT), talk.ids("a"))
    other = talk.ask(ASKED, first, {"role": "user", "content": "or?"})
    talk.say(other, talk.ids("b"))
    trunk, branch = talk.rows()
    assert other.stem == (0, len(talk.renderer.opening([ASKED])) + len(talk.ids("four")))
    assert branch.tokens[: other.stem[1]] == trunk.tokens[: other.stem[1]]
    assert talk.sampled(trunk) == [*talk.ids("four"), *talk.ids("a")] and talk.sampled(branch) == talk.ids(
        "b"
    )


def test_two_requests_at_once_have_rows_of_their_own():
    talk = Talk()
    reply = talk.say(talk.ask(ASKED), talk.ids("four"))
    one, two = talk.ask(ASKED, reply, NEXT), talk.ask(ASKED, reply, NEXT)
    assert one.row == 0 and two.row == -1 and two.stem is not None and one.ids == two.ids
    talk.say(two, talk.ids("b"))
    talk.say(one, talk.ids("a"))
    assert [talk.sampled(row) for row in talk.rows()] == [[*talk.ids("four"), *talk.ids("a")], talk.ids("b")]


def test_an_answer_that_nobody_has_got_is_no_part_of_a_row():
    """The request that comes again has the same draw, and its answer is the only one."""
    talk = Talk()
    lost = talk.ask(ASKED)
    talk.session.forgotten(lost)
    again = talk.ask(ASKED)
    assert again.key == lost.key and again.ids == lost.ids
    reply = talk.say(again, talk.ids("four"))
    lost = talk.ask(ASKED, reply, NEXT)
    talk.session.forgotten(lost)
    again = talk.ask(ASKED, reply, NEXT)
    assert again == lost
    talk.say(again, talk.ids("five"))
    assert [row.turns for row in talk.rows()] == [2]


def test_other_tools_are_another_prompt():
    talk = Talk(tools=[TOOL])
    reply = talk.say(talk.ask(ASKED), talk.ids("four"))
    talk.tools = []
    assert talk.ask(ASKED, reply, NEXT).row == -1


def test_a_limit_ends_an_episode_by_a_refusal():
    talk = Talk(tokens=40)
    with pytest.raises(TooLong, match="expected fewer than 40 tokens"):
        talk.ask({"role": "user", "content": "x" * 40})
    assert talk.session.cut == "tokens" and not talk.session.rows
    talk = Talk(turns=1)
    reply = talk.say(talk.ask(ASKED), talk.ids("four"))
    with pytest.raises(TooLong, match="expected at most 1 answers"):
        talk.ask(ASKED, reply, NEXT)
    assert talk.session.cut == "turns"


def test_a_template_that_does_not_continue_begins_a_new_row():
    """Turns that alternate: two of the user cannot follow an answer in one go, but a whole prompt can."""
    talk = Talk("GEMMA2")
    reply = talk.say(talk.ask(ASKED), talk.ids("four"))
    with pytest.raises(ValueError, match="turns alternate"):
        talk.ask(ASKED, reply, NEXT, NEXT)
    assert talk.ask(ASKED, reply, NEXT).ids
