"""Prompts as a function of the step; templates; clear lines for what is wrong with them."""

import json
import warnings
from fractions import Fraction

import chats
import pytest
import tiny
import torch
from each_case import each

from rft_fn import data, model, rng

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10)]


def rows_set(**options):
    return data.from_rows(ROWS, tiny.tokenizer(), **options)


def test_every_pass_is_a_permutation_and_a_function_of_the_seed():
    ds = rows_set()
    drawn = [p.index for step in range(5) for p in data.draw(ds, 4, step, seed=3)[0]]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]  # each pass has an order of its own
    assert drawn == [p.index for step in range(5) for p in data.draw(ds, 4, step, seed=3)[0]]
    assert drawn != [p.index for step in range(5) for p in data.draw(ds, 4, step, seed=4)[0]]


def test_a_step_needs_no_history():
    """Any step can be drawn alone: there is no cursor that a resumed run could lose."""
    ds = rows_set()
    all_steps = [data.draw(ds, 3, step, seed=0) for step in range(7)]
    assert data.draw(ds, 3, 6, seed=0) == all_steps[6]


def test_keys_name_step_and_row():
    prompts, keys = data.draw(rows_set(), 4, 2, seed=5)
    assert keys == [rng.fold_in(5, 2, p.index) for p in prompts]
    _, later = data.draw(rows_set(), 4, 2 + 5, seed=5)
    assert not set(keys) & set(later)


def test_a_task_is_endless_and_never_repeats():
    ds = data.from_task("addition", tiny.tokenizer(), level=3, template="{short}")
    index = [p.index for step in range(4) for p in data.draw(ds, 5, step, 0)[0]]
    assert index == list(range(20))
    other = data.from_task("addition", tiny.tokenizer(), level=3, template="{short}", seed=1)
    assert [p.text for p in data.take(ds, 20, 0)[0]] != [p.text for p in data.take(other, 20, 0)[0]]


def test_a_seed_of_its_own_draws_other_rows_of_a_task():
    """From the first row on with the seed that it was loaded with, else from another row, in every round."""
    drawn = {}
    for seed in (0, 1, 2):
        ds = data.from_task("addition", tiny.tokenizer(), template="{short}", seed=2)
        for round in (0, 1):
            prompts, _ = data.draw(ds, 9, 3, seed, round=round)
            drawn[seed, round] = [p.index for p in prompts]
        taken, _ = data.take(ds, 40, seed)
        assert [p.index for p in taken[27:36]] == drawn[seed, 0]
    assert drawn[2, 0] == list(range(27, 36))
    rows = [i for index in drawn.values() for i in index]
    assert len(set(rows)) == len(rows) == 54 and all(index == sorted(index) for index in drawn.values())

    # the parts of a mixture alike
    both = data.mix([rows_set(), ds], [Fraction(1), Fraction(3)])
    for seed in (0, 1, 2):
        found, _ = data.draw(both, 40, 0, seed)
        mine = [p.index for p in found if p.columns["source"] != "rows"]
        begin = drawn[seed, 0][0] - 27
        assert mine == [both.mixture.place(1, begin + i) for i in range(30)]
        taken, _ = data.take(both, 8, seed)
        assert [p.index for p in taken if p.columns["source"] != "rows"] == mine[:6]
        assert [p.columns["question"] for p in taken if p.columns["source"] == "rows"] == ["0+0=", "1+1="]


@pytest.mark.parametrize("eval_data", [(), ("addition:2",)])
def test_a_run_evaluates_on_the_first_rows_of_another_seed(eval_data):
    trained, unseen = data.load_for_training(
        "addition", tiny.tokenizer(), seed=5, template="{short}", eval_data=eval_data
    )
    other = data.load(eval_data or "addition", tiny.tokenizer(), seed=6, template="{short}")
    shown = [p.text for p in data.take(unseen, 9, 5)[0]]
    assert shown == [other.prompt(i).text for i in range(9)]
    assert [p.index for p in data.draw(trained, 9, 0, 5)[0]] == list(range(9))


def task_set():
    return data.from_task("addition", tiny.tokenizer(), level=3, template="{short}", seed=3)


@pytest.mark.parametrize("make", [rows_set, task_set])
def test_round_0_is_what_a_step_draws(make):
    """As it was before there were rounds: prompts and keys by their definition."""
    ds = make()
    for step in range(6):
        at = range(5 * step, 5 * step + 5)
        prompts, keys = data.draw(ds, 5, step, seed=3)
        assert (prompts, keys) == data.draw(ds, 5, step, seed=3, round=0)
        assert keys == [rng.fold_in(3, step, p.index) for p in prompts]
        if ds.size is None:
            assert [p.index for p in prompts] == list(at)
            continue
        order = {n: torch.randperm(10, generator=rng.generator(rng.fold_in(3, "order", n))) for n in range(3)}
        assert [p.index for p in prompts] == [int(order[i // 10][i % 10]) for i in at]


@pytest.mark.parametrize("make", [rows_set, task_set])
def test_rounds_give_other_prompts_and_other_keys(make):
    ds, seen = make(), set()
    drawn = [[data.draw(ds, 5, step, 3, round=r) for r in range(4)] for step in range(5)]
    keys = [k for step in drawn for _, keys in step for k in keys]
    assert len(set(keys)) == len(keys) == 100  # also where a prompt comes again
    for step in drawn:
        seen |= {tuple(p.index for p in prompts) for prompts, _ in step}
    assert len(seen) == 20
    assert drawn[2][3] == data.draw(ds, 5, 2, 3, round=3)  # without history


def test_every_round_passes_over_the_rows_of_a_file():
    """One round of all steps is a permutation for each pass, as round 0 is, and of another order."""
    ds = rows_set()
    orders = []
    for r in range(3):
        drawn = [p.index for step in range(5) for p in data.draw(ds, 4, step, 3, round=r)[0]]
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
        orders.append(drawn[:10])
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("make", [rows_set, task_set])
def test_a_cursor_draws_each_row_once_whatever_n_is(make):
    """6, 4, 4, 9, 7 prompts: with the number drawn before, every pass is whole; without, rows come twice."""
    ds, counts, drawn = make(), [6, 4, 4, 9, 7], []
    for step, n in enumerate(counts, 4):
        prompts, keys = data.draw(ds, n, step, 3, start=len(drawn))
        assert len(prompts) == len(set(keys)) == n and keys[0] == rng.fold_in(3, step, prompts[0].index)
        drawn += [p.index for p in prompts]
    if ds.size is None:
        assert drawn == list(range(30))
    else:
        assert all(sorted(drawn[i : i + 10]) == list(range(10)) for i in (0, 10, 20))
        assert drawn == [p.index for step in range(10) for p in data.draw(ds, 3, step, 3)[0]]
    plain = [p.index for step, n in enumerate(counts, 4) for p in data.draw(ds, n, step, 3)[0]]
    assert plain != drawn


@pytest.mark.parametrize("round", [0, 2])
def test_a_cursor_of_the_same_n_is_the_default(round):
    ds = task_set()
    for step in range(4):
        want = data.draw(ds, 5, step, 1, round=round)
        assert data.draw(ds, 5, step, 1, round=round, start=5 * step) == want


def test_a_task_never_draws_a_row_twice_in_any_round():
    ds = task_set()
    drawn = [p.index for step in range(50) for r in range(4) for p in data.draw(ds, 5, step, 0, round=r)[0]]
    assert len(set(drawn)) == len(drawn) == 50 * 4 * 5
    assert len({ds.prompt(i).text for i in drawn}) > 900  # and rows far out are other rows


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_files(tmp_path, suffix):
    import datasets

    path = str(tmp_path / f"rows.{suffix}")
    ds = datasets.Dataset.from_list(ROWS)
    if suffix in ("jsonl", "json"):
        ds.to_json(path)
    else:
        getattr(ds, f"to_{suffix}")(path)
    found = data.load(path, tiny.tokenizer())
    assert [found.prompt(i).text for i in range(found.size)] == [r["question"] for r in ROWS]
    assert str(found.prompt(3).columns["answer"]) == "6"


def test_a_saved_data_set(tmp_path):
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert len(data.read_rows(str(tmp_path / "saved"), split="test")) == 10


def test_templates_and_chat():
    tok = tiny.tokenizer()
    assert data.from_rows(ROWS, tok, template="({question}){answer}").prompt(2).text == "(2+2=)4"
    chat = model.load_tokenizer("tiny")
    turns = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }},{% endfor %}"
    chat.chat_template = turns + "{% if add_generation_prompt %}a:{% endif %}"
    assert chat.decode(data.render(chat, "1+1=")) == "u:1+1=,a:"
    assert chat.decode(data.render(chat, "1+1=", system="x")) == "s:x,u:1+1=,a:"
    assert chat.decode(data.render(chat, "1+1=", system="")) == "s:,u:1+1=,a:"
    chat.chat_template = None
    assert chat.decode(data.render(chat, "1+1=")) == "1+1="


def test_no_prompt_ends_with_the_end_that_a_tokenizer_adds():
    """What begins a text stays; a text that is an end alone is not emptied."""
    tok = chats.ending()
    assert tok.decode(tok.encode("1+1=")) == "<bos>1+1=<eos>"
    rows = [{"question": "1+1=", "prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    assert tok.decode(data.from_rows(rows, tok).prompt(0).ids) == "<bos>1+1="
    assert tok.decode(data.render(tok, "1+1=", system="S")) == "<bos>S\n1+1="
    for options in ({}, {"template": "", "chosen": "1+1= {chosen}", "rejected": "1+1= {rejected}"}):
        pair = data.pairs_from_rows(rows, tok, **options).prompt(0)
        assert chats.shown(tok, pair.chosen).replace(" ", "") == "<bos>1+1=«2<eos>»"
    assert data.responses.prompt_ids(chats.tokenizer(None), "<eos>") == [tok.eos_token_id]
    for ends in ("<eos> <eos>", "<pad>"):
        tok = chats.ending(ends)
        assert tok.decode(tok.encode("1+1=")) == f"<bos>1+1={ends.replace(' ', '')}"
        assert tok.decode(data.responses.prompt_ids(tok, "1+1=")) == "<bos>1+1="


def test_a_template_without_a_column_is_announced():
    """Its prompts are all the same; not so where responses differ, or columns are named."""
    tok, rows = tiny.tokenizer(), [{"question": "1+1=", "answer": "2"}, {"question": "2+1=", "answer": "3"}]
    with pytest.warns(UserWarning, match=r"the template '12=' names no column, so that all prompts of f are"):
        data.from_rows(rows, tok, template="12=", name="f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.from_rows(rows, tok, template="12={question}")
        data.from_rows(rows, tok, template="12=", response="{answer}")


def test_the_share_of_unknown_text_is_announced_once():
    """Of prompts, and of pairs with their responses; a task says so of its first prompt."""
    tok = tiny.tokenizer()
    rows = [{"question": "1+1="}, {"question": "So 1+1?"}, {"question": "Now?"}]
    with pytest.warns(UserWarning) as caught:
        data.from_rows(rows, tok, name="f")
    found = [str(w.message) for w in caught]
    ids = [i for row in rows for i in tok.encode(row["question"])]
    unknown = ids.count(tok.unk_token_id)
    assert unknown == 5 and len(ids) == 15
    assert found == [
        "data: 0.33 of the tokens (5 of 15) are <unk>, for text that the tokenizer does not know; the first "
        "row is f, row 2"
    ]
    with pytest.warns(UserWarning, match=r"0.14 of the tokens \(1 of 7\)"):
        data.pairs_from_rows([{"prompt": "1=", "chosen": "A", "rejected": "2"}], tok)
    with pytest.warns(UserWarning, match="the first row is addition, prompt 0"):
        data.from_task("addition", tok)

    # where it has another meaning too, it says nothing
    same = model.load_tokenizer("tiny")
    same.unk_token = same.eos_token
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.from_rows(rows[:1], tok)
        data.from_rows([{"question": f"1{same.eos_token}1"}], same)


def test_long_prompts_of_a_file_are_left_out():
    rows = [*ROWS, {"question": "1" * 50, "answer": "1"}]
    with pytest.warns(UserWarning, match=r"1 of 11 prompts .* max_prompt, 10 t.* row 11 with 50 t"):
        assert data.from_rows(rows, tiny.tokenizer(), max_prompt=10).size == 10


@each(
    ("call", "message"),
    [
        (lambda: data.load("no.jsonl", tiny.tokenizer()), "could not read 'no.jsonl': no such file"),
        (lambda: data.from_rows([], tiny.tokenizer()), "expected at least one row, got none"),
        (lambda: rows_set(template="{nope}"), "has no column 'nope'; it has 'question', 'answer'"),
        (lambda: rows_set(template="{question} \\boxed{}"), "write {{ and }} for braces"),
        (lambda: rows_set(max_prompt=1), "every prompt of 'rows' is longer than 1 tokens"),
        (lambda: data.from_task("nope", tiny.tokenizer()), "addition, reverse"),
        (lambda: data.load("addition:x", tiny.tokenizer()), "expected addition:LEVEL with a number"),
        (lambda: data.load("addition:\u00b2", tiny.tokenizer()), "expected addition:LEVEL with a number"),
        (lambda: data.from_task("addition", tiny.tokenizer(), level=0), "level"),
        (lambda: data.from_task("addition", tiny.tokenizer(), template="{q}"), "has no column 'q'"),
        (
            lambda: data.from_task("addition", tiny.tokenizer(), max_prompt=2),
            "max_prompt: addition, prompt 0",
        ),
        (lambda: data.from_task("addition", tiny.tokenizer(), columns=["tests"]), "has no column 'tests'"),
        (lambda: data.from_task("addition", tiny.tokenizer(), response="{gold}"), "has no column 'gold'"),
        (lambda: data.take(rows_set(), 0, 0), r"prompts: expected to take at least 1, got 0"),
        (lambda: data.take(task_set(), -1, 0), r"prompts: expected to take at least 1, got -1"),
        (lambda: data.draw(rows_set(), 0, 0, 0), r"prompts: expected to take at least 1, got 0"),
        (lambda: data.draw(rows_set(), 2, -1, 0), "step: expected >= 0, got -1"),
        (lambda: data.draw(rows_set(), 2, 0, 0, start=-2), "start: expected >= 0, got -2"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each(
    ("template", "row", "message"),
    [
        ("{a}", {"a": None}, "^data: f, line 3: column 'a' is empty$"),
        ("{a}", {"a": float("nan")}, "^data: f, line 3: column 'a' is empty$"),
        ("{a[x]}", {"a": {"x": None}}, r"^data: f, line 3: column 'a\[x\]' is empty$"),
        (
            "{b}",
            {"a": 1},
            r"^data: f, line 3: the row has no column 'b'; it has 'a' \(template '{b}': name col",
        ),
        ("{}", {"a": 1}, "has no column '0'"),
        (
            "{a",
            {"a": 1},
            "the template '{a' cannot be filled: expected '}' before end of string; name columns",
        ),
        ("{a} }", {"a": 1}, "cannot be filled: Single '}' encountered in format string; name columns"),
        ("{a:d}", {"a": "x"}, "cannot be filled: Unknown format code 'd'"),
        ("{a[x]}", {"a": "y"}, "cannot be filled: string indices must be integers"),
        ("{a.x}", {"a": "y"}, "cannot be filled: 'str' object has no attribute 'x'"),
        (
            "{a}",
            {"a": [1, 2]},
            "^data: f, line 3: column 'a' holds a list, which no template prints: name an entry of it, or "
            "write {a!s} to have it as Python writes it$",
        ),
        (
            "{a[x]}",
            {"a": {"x": {"y": 1}}},
            r"column 'a\[x\]' holds an object, which no template prints: name",
        ),
        (
            "{a}",
            {"a": [{"role": "user", "content": "b"}]},
            "column 'a' holds a list, which no template prints; 'a' holds messages: --messages a, without",
        ),
        (
            "{short}",
            {"id": 1, "prompt": [{"role": "user", "content": "b"}]},
            "the row has no column 'short'; it has 'id', 'prompt'; 'prompt' holds messages: --messages pro",
        ),
        (
            "{short}",
            {"completion": '[{"role": "user"}]', "prompt": [{"role": "user"}]},
            "--messages prompt completion to learn the second, --messages prompt to answer the first$",
        ),
        (
            "{short}",
            {"chosen": [{"role": "a"}], "conversations": [{"from": "human"}]},
            "; 'conversations' holds messages: --messages conversations, without --template$",
        ),
    ],
)
def test_a_template_is_filled_or_refused(template, row, message):
    with pytest.raises(ValueError, match=message):
        data.fill(template, row, "f, line 3")


def test_a_filled_template_is_what_format_makes_of_it():
    row = {"a": 1.5, "b": {"x": ["y"]}, "c": "", "d": 0}
    template = "{a:6.2f}|{b[x][0]!r}|{c}|{d}|{{e}}|{b!s}"
    assert data.fill(template, row, "f") == template.format_map(row) == "  1.50|'y'||0|{e}|{'x': ['y']}"


def test_a_chat_template_that_fails_is_a_line():
    chat = model.load_tokenizer("tiny")
    chat.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"^chat template: .* render user, got .*: System role not"):
        data.render(chat, "1+1=", system="x")
    chat.chat_template = "{% for m in %}"
    with pytest.raises(ValueError, match=r"^chat template: .* render user, got TemplateSyntaxError"):
        data.render(chat, "1+1=")


GOOD = {"question": "1+1=", "answer": "2", "tests": ["a"]}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"question": None}, {}, "column 'question' is empty"),
        ({"question": " "}, {}, "the prompt is empty"),
        ({"answer": None}, {"columns": ["answer"]}, "column 'answer' is empty"),
        ({"answer": " \n"}, {"columns": ["tests", "answer"]}, "column 'answer' is empty"),
        ({"tests": float("nan")}, {"columns": ["tests"]}, "column 'tests' is empty"),
        ({"answer": None}, {"response": "{answer}"}, "column 'answer' is empty"),
        ({"answer": ""}, {"response": "{answer}"}, "the response is empty"),
        (
            {"answer": "2345678"},
            {"response": "{answer}", "max_tokens": 11},
            "prompt and response have 12 token",
        ),
        ({"question": "1+1+1+1+1+1="}, {"max_tokens": 11}, "the prompt has 12 tokens, above 11"),
        (
            {"answer": "2" * 300},
            {"response": "{answer}", "max_tokens": 11},
            "the response has 300 characters",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_found_before_training(change, options, message):
    rows = [GOOD, GOOD, GOOD | change]
    line = f"^data: rows, row 3: {message}.*. 1 of 3 rows cannot be used: mend or remove them$"
    with pytest.raises(ValueError, match=line):
        data.from_rows(rows, tiny.tokenizer(), **options)
    assert data.from_rows([GOOD], tiny.tokenizer(), **options).prompt(0).ids


def test_all_rows_that_cannot_be_used_are_counted_and_the_first_are_named():
    rows = [GOOD] * 10
    for i in (2, 4, 5, 9):
        rows[i] = {"question": "1+1="}
    rows[4] = GOOD | {"answer": ""}
    with pytest.raises(ValueError) as error:
        data.from_rows(rows, tiny.tokenizer(), columns=["answer"], name="f")
    assert str(error.value) == (
        "data: f, rows 3, 6: the row has no column 'answer'; it has 'question'; "
        "f, row 5: column 'answer' is empty; and 1 more. 4 of 10 rows cannot be used: mend or remove them"
    )


def test_a_response_ends_with_a_token_of_its_own():
    """Four of the prompt, one of the answer, and the end: six fit into six."""
    rows = [{"question": "1+1=", "answer": "2"}]
    assert data.from_rows(rows, tiny.tokenizer(), response="{answer}", max_tokens=6).size == 1
    with pytest.raises(ValueError, match="prompt and response have 6 tokens, above 5"):
        data.from_rows(rows, tiny.tokenizer(), response="{answer}", max_tokens=5)


def test_an_enormous_row_is_not_tokenised(monkeypatch):
    """Its characters alone say that it cannot fit."""
    rows, longest = [*ROWS, {"question": "1" * 100_000, "answer": "1"}], []
    tokenizer = model.load_tokenizer("tiny")
    encode = tokenizer.encode

    def spy(text, *args, **options):
        longest.append(len(text))
        return encode(text, *args, **options)

    monkeypatch.setattr(tokenizer, "encode", spy)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.warns(UserWarning, match="rows, row 11 with 100000 characters"):
        assert data.from_rows(rows, tokenizer).size == 10
    assert 0 < max(longest) < 100


def test_left_out_rows_keep_the_numbers_of_the_others():
    rows = [{"question": "1" * 50}, *ROWS]
    with pytest.warns(UserWarning, match="left out"):
        ds = data.from_rows(rows, tiny.tokenizer(), max_prompt=10)
    assert [p.index for p in data.take(ds, 20, 0)[0]] == list(range(1, 11))
    assert data.take(ds, 1, 0)[0][0].text == ROWS[0]["question"]


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text("{not json")
    with pytest.raises(ValueError, match=r"expected at least one row, got none in .*empty.jsonl"):
        data.load(str(tmp_path / "empty.jsonl"), tiny.tokenizer())
    with pytest.raises(ValueError, match=r"broken.jsonl, line 1: expected an object in one line, got broken"):
        data.load(str(tmp_path / "broken.jsonl"), tiny.tokenizer())
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert data.load(str(tmp_path / "rows.jsonl"), tiny.tokenizer()).size == 10


def test_a_prompt_that_comes_twice_in_a_step_is_sampled_anew():
    """A step that is larger than the data set: every key is another one, and the first ones are as always."""
    dataset = data.from_rows([{"question": str(i)} for i in range(3)], tiny.tokenizer(), name="three")
    prompts, keys = data.draw(dataset, 8, 2, 5)
    assert len({p.index for p in prompts}) == 3 and len(set(keys)) == 8
    for i, (p, key) in enumerate(zip(prompts, keys)):
        if p.index not in [q.index for q in prompts[:i]]:
            assert key == rng.fold_in(5, 2, p.index)


# ---------- rows of messages


def asked(*texts, **more):
    """A row whose prompt is a conversation that takes turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"prompt": turns, "answer": "2", **more}


def chat_set(rows, **options):
    options = {"messages": ["prompt"]} | options
    return data.from_rows(rows, chats.tokenizer(options.pop("chat", chats.CHATML)), **options)


def test_a_prompt_of_messages_keeps_them():
    (prompt,) = data.take(chat_set([asked("1+1", "2", "2+2")], system="S"), 1, 0)[0]
    assert prompt.messages == [{"role": "system", "content": "S"}, *asked("1+1", "2", "2+2")["prompt"]]
    assert prompt.text == "2+2" and prompt.columns["answer"] == "2"
    ids = chats.tokenizer(chats.CHATML).apply_chat_template(
        prompt.messages, add_generation_prompt=True, return_dict=False
    )
    assert prompt.ids == ids
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    tools = {"prompt": [*asked("1+1")["prompt"], called, {"role": "tool", "content": "3"}]}
    assert chat_set([tools]).prompt(0).text == "1+1"
    alone = {"prompt": [{"role": "tool", "content": "3"}]}
    assert chat_set([alone]).prompt(0).text == "3"
    assert data.from_rows(ROWS, tiny.tokenizer()).prompt(0).messages is None


def test_rows_of_messages_that_cannot_be_used_are_counted_and_named():
    rows = [asked("1+1")] * 6
    rows[1] = {"prompt": [{"role": "boss", "content": "1+1"}]}
    rows[3] = asked("1+1", "2")
    rows[4] = asked(" ")
    rows[5] = asked("1+1", tools="f(")
    with pytest.raises(ValueError) as error:
        chat_set(rows, name="f")
    text = str(error.value)
    assert text.startswith("data: f, row 2: column 'prompt', turn 1: role: expected one of system, ")
    assert "; f, row 4: turn 2: expected the last turn of a prompt from user or tool, got assistant; " in text
    assert text.endswith(
        "f, row 5: the prompt is empty; and 1 more. 4 of 6 rows cannot be used: mend or remove them"
    )
    with pytest.raises(ValueError, match=r"^data: f, row 1: column 'answer' is empty"):
        chat_set([asked("1+1", answer="")], columns=["answer"], name="f")


def test_a_refusal_of_the_chat_template_is_a_row_that_cannot_be_used():
    rows = [asked("1+1"), {"prompt": asked("1")["prompt"] * 2}]
    with pytest.raises(ValueError, match=r"^data: rows, row 2: .*turns alternate.* 1 of 2 rows"):
        chat_set(rows, chat=chats.GEMMA2)


def test_conversations_above_the_limits():
    rows = [asked("1+1"), asked("1" * 600)]
    with pytest.warns(UserWarning, match=r"1 of 2 prompts .* max_prompt, 60 t.* row 2 with 6\d\d "):
        assert chat_set(rows, max_prompt=60, system="").size == 1
    widest = max(map(len, chats.tokenizer(None).get_vocab()))
    rows = [asked("1+1"), asked("1" * (60 * widest + 1))]
    with pytest.warns(UserWarning, match=f"row 2 with {60 * widest + 1} characters"):
        chat_set(rows, max_prompt=60, system="")
    learn = {"loss_on": "all", "max_tokens": 60, "system": ""}
    with pytest.raises(ValueError, match=r"row 2: the conversation has 73 tokens, above 60"):
        chat_set([asked("1+1", "2"), asked("1+1", "2" * 40)], **learn)
    with pytest.raises(ValueError, match=f"row 1: .* has {60 * widest + 1} characters, above 60"):
        chat_set([asked("1" * (60 * widest + 1), "2")], **learn)
    with pytest.warns(UserWarning, match="1 of 2 prompts"):  # only what stands before the first answer
        rows = [asked("1+1", "2", "1" * 60, "3"), asked("1" * 60, "2")]
        assert chat_set(rows, loss_on="all", max_prompt=60, system="").size == 1


def test_the_digest_is_of_messages_too():
    base = chat_set([asked("1+1", "2")], loss_on="all").digest
    assert base == chat_set([asked("1+1", "2")], loss_on="all").digest
    assert base != chat_set([asked("1+1", "3")], loss_on="all").digest  # what is learned
    assert base != chat_set([asked("1+1", "2")], loss_on="all", system="S").digest
    thinks = [
        chat_set([asked("1")], chat=chats.QWEN3, chat_template_kwargs=x).digest
        for x in ({}, {"enable_thinking": False})
    ]
    assert thinks[0] != thinks[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat": None}, "^messages: expected a tokenizer with a chat template, got one without"),
        ({"loss_on": "first"}, "^loss_on: expected one of all, last, or None, got 'first'"),
        (
            {"messages": ["chat"]},
            "the row has no column 'chat'; .*; 'prompt' holds messages: --messages prompt",
        ),
        ({"loss_on": "all"}, "rows, row 1: expected a turn of the assistant to learn, got none"),
        (
            {"chat_template_kwargs": {"think": 1}},
            "^chat_template_kwargs: expected a name that the chat templ",
        ),
    ],
)
def test_bad_options_of_messages(options, message):
    with pytest.raises(ValueError, match=message):
        chat_set([asked("1+1")], **options)


def test_lessons_of_text_and_of_messages():
    tokenizer = chats.tokenizer(chats.CHATML)
    text = data.from_rows(ROWS, tokenizer, response="{answer}").prompt(3)
    (lesson,) = data.lessons(text, tokenizer)
    assert lesson.ids == [*text.ids, *tokenizer.encode("6<|im_end|>")]
    assert lesson.mask == [False] * len(text.ids) + [True, True]
    row = asked("1+1", "2") | {
        "completion": [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    }
    options = {"messages": ["prompt", "completion"], "loss_on": "all"}
    prompt = chat_set([row], system="S", **options).prompt(0)
    (lesson,) = data.lessons(prompt, tokenizer, **options)
    assert lesson.ids[: lesson.mask.index(True)] == prompt.ids
    assert tokenizer.decode([t for t, m in zip(lesson.ids, lesson.mask) if m]) == "4<|im_end|>"
    assert prompt.text == "3" and len(prompt.messages) == 5
