"""Rows into preference pairs: text, whole texts, messages, built-in tasks; and what is wrong with a row."""

import json
import random

import chats
import pytest
import tiny

from rft_fn import data
from rft_fn.data import pairs as pairs_lib
from rft_fn.data import tasks, wrong_answers

ROW = {"prompt": "sort:312=", "chosen": "123", "rejected": "132"}


def of(rows, tokenizer=None, **options):
    """The pairs of rows, all of them."""
    found = data.pairs_from_rows(rows, tokenizer or tiny.tokenizer(), **options)
    return [found.prompt(i) for i in range(found.size)]


def both(pair, tokenizer):
    """[(what is given, what is learned)] of the two sides, as text."""
    out = []
    for side in (pair.chosen, pair.rejected):
        learned = [t for t, m in zip(side.ids, side.mask) if m]
        given = [t for t, m in zip(side.ids, side.mask) if not m]
        assert side.ids == given + learned
        out.append((tokenizer.decode(given), tokenizer.decode(learned)))
    return out


def test_a_row_of_text_by_hand():
    """The prompt twice, each response ended by the end of sequence, and only the responses learned."""
    (pair,) = of([ROW])
    ids = tiny.tokenizer().encode
    assert pair.chosen.ids == [*ids("sort:312="), *ids("123"), 1]
    assert pair.rejected.ids == [*ids("sort:312="), *ids("132"), 1]
    assert pair.chosen.mask == pair.rejected.mask == [False] * 9 + [True] * 4
    assert pair.index == 0 and pair.columns == ROW


def test_templates_say_what_the_three_texts_are():
    row = {"q": "1+1", "good": "2", "bad": "3"}
    (pair,) = of([row], template="{q}=", chosen="({good})", rejected="({bad})")
    assert both(pair, tiny.tokenizer()) == [("1+1=", "(2)<end>"), ("1+1=", "(3)<end>")]


def test_a_prompt_of_text_is_a_turn_where_the_model_speaks_in_turns():
    """With the system prompt, and with what the chat template is given."""
    chat = chats.tokenizer(chats.CHATML)
    (pair,) = of([ROW], chat, system="Sort.")
    given = (
        "<|im_start|>system\nSort.<|im_end|>\n<|im_start|>user\nsort:312=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert both(pair, chat) == [(given, "123<|im_end|>"), (given, "132<|im_end|>")]
    llama = chats.tokenizer(chats.LLAMA3)
    (pair,) = of([ROW], llama, chat_template_kwargs={"style": "dated"})
    assert "26 Jul" in both(pair, llama)[0][0]


WHOLE = [
    ("Q: hi A: hello", "Q: hi A: bye", ("Q: hi A:", " hello", " bye")),
    ("Q: hi A: then", "Q: hi A: that is", ("Q: hi A:", " then", " that is")),  # no word is cut
    ("Q: hi A: yes", "Q: hi A: yes sir", ("Q: hi A:", " yes", " yes sir")),
    ("Q\n\nA: x", "Q\n\nA:  y", ("Q\n\nA:", " x", "  y")),
    ("one", "two", ("", "one", "two")),
]


@pytest.mark.parametrize(("chosen", "rejected", "want"), WHOLE)
def test_whole_texts_share_their_prompt(chosen, rejected, want):
    assert pairs_lib.shared_start(chosen, rejected) == want
    assert want[0] + want[1] == chosen and want[0] + want[2] == rejected


def test_whole_texts_are_taken_as_they_are():
    """No chat template around texts that hold their own turns."""
    chat = chats.tokenizer(chats.CHATML)
    (pair,) = of([{"chosen": "Human: hi AI: hello", "rejected": "Human: hi AI: no"}], chat, template="")
    assert both(pair, chat) == [("Human: hi AI:", " hello<eos>"), ("Human: hi AI:", " no<eos>")]


def turn(role, content):
    return {"role": role, "content": content}


ASKED = [turn("user", "3 or 4?")]
SIDES = {"chosen": [turn("assistant", "3")], "rejected": [turn("assistant", "both")]}
EXPLICIT = {"prompt": ASKED, **SIDES}
IMPLICIT = {name: ASKED + side for name, side in SIDES.items()}


def test_the_forms_of_messages_are_one():
    """Prompt in a column of its own or at the head of both; a list or JSON text of one; sharegpt's names."""
    chat = chats.tokenizer(chats.CHATML)
    (want,) = of([EXPLICIT], chat, messages=("prompt", "chosen", "rejected"))
    head = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n3 or 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert both(want, chat) == [(head, "3<|im_end|>"), (head, "both<|im_end|>")]
    share = {
        name: [{"from": "human", "value": "3 or 4?"}, {"from": "gpt", "value": side[0]["content"]}]
        for name, side in SIDES.items()
    }
    text = {name: json.dumps(side) for name, side in IMPLICIT.items()}
    with_text = IMPLICIT | {"prompt": "3 or 4?"}
    for row in (IMPLICIT, share, text, with_text):
        (pair,) = of([row], chat, messages=("chosen", "rejected"))
        assert (pair.chosen, pair.rejected) == (want.chosen, want.rejected)


def test_what_the_prompt_may_hold():
    """A system turn of its own or by the option, turns before the last, tools of the row."""
    chat = chats.tokenizer(chats.CHATML)
    long = [turn("system", "S"), turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    row = {"prompt": long, **SIDES, "tools": [{"name": "f"}]}
    (pair,) = of([row], chat, messages=("prompt", "chosen", "rejected"), system="not this")
    assert both(pair, chat)[0][1] == "3<|im_end|>"  # what the assistant says in the prompt is not learned
    assert chat.decode(pair.chosen.ids).startswith(
        '<|im_start|>system\nS[{"name": "f"}]<|im_end|>\n<|im_start|>user\na'
    )
    (pair,) = of([IMPLICIT], chat, messages=("chosen", "rejected"), system="this")
    assert chat.decode(pair.rejected.ids).startswith("<|im_start|>system\nthis<|im_end|>")


def test_a_response_of_several_turns_is_learned_without_the_user():
    chat = chats.tokenizer(chats.CHATML)
    more = [turn("assistant", "3"), turn("user", "sure?"), turn("assistant", "yes")]
    (pair,) = of([{**EXPLICIT, "chosen": more}], chat, messages=("prompt", "chosen", "rejected"))
    learned = [t for t, m in zip(pair.chosen.ids, pair.chosen.mask) if m]
    assert chat.decode(learned) == "3<|im_end|>yes<|im_end|>"


THREE = {"messages": ("prompt", "chosen", "rejected")}
TWO = {"messages": ("chosen", "rejected")}
BAD = [
    ({**ROW, "chosen": " "}, {}, "the chosen response is empty"),
    ({**ROW, "rejected": ""}, {}, "the rejected response is empty"),
    ({**ROW, "prompt": ""}, {}, "the prompt is empty"),
    ({**ROW, "prompt": None}, {}, "column 'prompt' is empty"),
    ({**ROW, "rejected": "123"}, {}, "the chosen and the rejected response are the same"),
    ({"chosen": "1", "rejected": "2"}, {}, "has no column 'prompt'; .*; --template '' where both responses"),
    ({"prompt": "1", "rejected": "2"}, {}, "the row has no column 'chosen'; it has 'prompt', 'rejected'"),
    ({"chosen": "one", "rejected": "two"}, {"template": ""}, "both responses begin with no word in common"),
    (ROW, {"max_tokens": 23}, "the pair has 24 tokens, above 23: a pack holds both sides"),
    (EXPLICIT, {}, "'rejected' holds messages: --messages prompt chosen rejected"),
    ({**IMPLICIT, "prompt": "x"}, {}, "'rejected' holds messages: --messages chosen rejected"),
    ({**EXPLICIT, "chosen": []}, THREE, "column 'chosen' has no messages"),
    ({**EXPLICIT, "chosen": "3"}, THREE, "column 'chosen': expected a list of messages, got str"),
    ({**EXPLICIT, "rejected": SIDES["chosen"]}, THREE, "the chosen and the rejected response are the same"),
    ({**EXPLICIT, "chosen": ASKED}, THREE, "response: expected it to begin with the assistant, got user"),
    ({**EXPLICIT, "rejected": [turn("assistant", "")]}, THREE, "turn 2: the response is empty"),
    ({**IMPLICIT, "rejected": IMPLICIT["chosen"]}, TWO, "the chosen and the rejected response are the same"),
    (SIDES, TWO, "columns 'chosen' and 'rejected' begin with different turns: expected the prompt in both"),
    ({**IMPLICIT, "rejected": ASKED}, TWO, "the rejected response is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "message"), BAD)
def test_a_row_that_cannot_be_used_is_named_by_its_place(row, options, message, tmp_path):
    good = EXPLICIT if options.get("messages") == THREE["messages"] else ROW
    good = IMPLICIT if options.get("messages") == TWO["messages"] else good
    good = {"chosen": "a b", "rejected": "a c"} if "template" in options else good
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in (good, row, good)))
    tokenizer = chats.tokenizer(chats.CHATML) if "messages" in options else tiny.tokenizer()
    if "max_tokens" in options:
        path.write_text("\n" + json.dumps(row))
    with pytest.raises(ValueError, match=rf"^data: .*pairs.jsonl, line 2: .*{message}.*1 of \d rows"):
        data.load(str(path), tokenizer, kind=data.PAIRS, **options)


def test_a_pair_fits_exactly():
    """Each side has 13 tokens, of which the last is only a target."""
    assert len(of([ROW], max_tokens=24, max_length=13)) == 1


def test_pairs_that_are_too_long_are_left_out_with_their_count():
    long = {**ROW, "rejected": "1" * 9}
    with pytest.warns(UserWarning, match=r"1 of 3 pairs are .* max_length, 13 t.*row 2 with 19 t"):
        assert [p.index for p in of([ROW, long, ROW], max_length=13)] == [0, 2]
    with pytest.warns(UserWarning, match="row 1 with 5000009 characters"):
        of([{**ROW, "chosen": "1" * 5_000_000}, ROW], max_length=13)
    with pytest.raises(ValueError, match="max_length: every pair of 'rows' is longer than 5 tokens"):
        of([ROW], max_length=5)


@pytest.mark.parametrize(("tokenizer", "options", "message"), [
    (chats.CHATML, {"messages": ("prompt",)}, "messages: expected the columns of prompt, chosen"),
    (None, THREE, "messages: expected a tokenizer with a chat template, got one without"),
    (chats.CHATML, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: expected a name that"),
])  # fmt: skip
def test_options_that_no_row_could_be_used_with(tokenizer, options, message):
    for make in (
        lambda t: data.pairs_from_rows([EXPLICIT], t, **options),
        lambda t: data.pairs_from_task("reverse", t, **options),
    ):
        with pytest.raises(ValueError, match=message):
            make(chats.tokenizer(tokenizer))


def test_a_template_that_renders_a_response_in_pieces_is_refused():
    """Thoughts of the first turn are dropped once a second one follows: no one sequence has both."""
    more = [turn("assistant", "<think>a</think>3"), turn("user", "?"), turn("assistant", "<think>b</think>4")]
    row = {**EXPLICIT, "chosen": more}
    with pytest.raises(ValueError, match=r"row 1: the chosen response: expected one sequence, .* got 2"):
        of([row], chats.tokenizer(chats.QWEN3), **THREE)


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("level", [1, 3])
def test_the_pairs_of_a_task(name, level):
    """Chosen is right, rejected is not, and both are what seed and index alone say."""
    task = tasks.get_task(name)
    found = data.load(f"{name}:{level}", tiny.tokenizer(), kind=data.PAIRS, seed=3)
    again = data.pairs_from_task(name, tiny.tokenizer(), level=level, seed=3)
    other = data.pairs_from_task(name, tiny.tokenizer(), level=level, seed=4)
    for i in (7, 0, 30):
        row = found.prompt(i).columns
        assert task.verify(row["chosen"], row) == 1 > task.verify(row["rejected"], row)
        assert row["prompt"] == row["short"] and row["rejected"]
        assert again.prompt(i) == found.prompt(i) != other.prompt(i)


def test_mistakes_are_of_every_kind():
    """Guesses of the right form; characters that are no digits; one too few, one too many; neighbours
    swapped."""
    task, wrong = tasks.get_task("sort_digits"), []
    for i in range(400):
        row = task.generate(0, i, 1)
        wrong.append((row["answer"], wrong_answers.wrong_answer(task, row, random.Random(i))))
    sizes = [len(b) - len(a) for a, b in wrong]
    assert set(sizes) == {-1, 0, 1} and sizes.count(-1) > 20 < sizes.count(1)
    assert sum(not b.isdigit() for _, b in wrong) > 20
    assert sum(sorted(a) == sorted(b) for a, b in wrong) > 20  # the right digits in a wrong order
    sorted_but_wrong = [b for a, b in wrong if len(b) == 3 and b.isdigit() and sorted(b) == list(b)]
    assert len(sorted_but_wrong) > 20


def test_pairs_are_drawn_as_prompts_are():
    """Each once a pass, in an order drawn from the seed; of a task in order."""
    rows = [{**ROW, "rejected": str(i)} for i in range(5)]
    found = data.pairs_from_rows(rows, tiny.tokenizer())
    first = [p.index for p in data.draw(found, 5, 0, 1)[0]]
    assert sorted(first) == list(range(5)) and first != [p.index for p in data.draw(found, 5, 0, 2)[0]]
    task = data.load("reverse:1", tiny.tokenizer(), kind=data.PAIRS)
    assert [p.index for p in data.draw(task, 3, 2, 0)[0]] == [6, 7, 8]


@pytest.mark.parametrize(("source", "options", "message"), [
    ("reverse:x", {}, "data: expected reverse:LEVEL with a number, got 'reverse:x'"),
    ("reverse:1", {"max_length": 3}, "max_length: reverse, pair 0 has 16 tokens, above 3 tokens"),
    ("reverse:1", {"max_tokens": 9}, "reverse, pair 0: the pair has "),
    ("reverse:1", {"chosen": "{gold}"}, "reverse, pair 0: the row has no column 'gold'"),
    ("nowhere.jsonl", {}, "could not read 'nowhere.jsonl': no such file"),
])  # fmt: skip
def test_a_source_that_cannot_be_drawn_from(source, options, message):
    with pytest.raises(ValueError, match=message):
        data.load(source, tiny.tokenizer(), kind=data.PAIRS, **options)
