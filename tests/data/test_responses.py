"""Rows into ranked lists, points and steps; the labels of pairs; and what is wrong with a row."""

import dataclasses
import json

import chats
import datasets
import pytest
import tiny
from each_case import each

from rft_fn import data
from rft_fn.data import wrong_answers

LIST = {"prompt": "sort:312=", "completions": ["132", "123", "a"], "ranks": [2, 1, 2]}
POINT = {"prompt": "sort:312=", "completion": "123", "score": 0.5, "format": True}
STEPS = {"prompt": "3+4=", "completions": ["3+4", "7"], "labels": [True, 0.25]}
PAIR = {"prompt": "sort:312=", "chosen": "123", "rejected": "132"}
MAKE = {
    "list": (data.ranked.lists_from_rows, LIST),
    "point": (data.points.points_from_rows, POINT),
    "steps": (data.reasoning_steps.steps_from_rows, {**STEPS}),
    "pair": (data.pairs_from_rows, PAIR),
}


def of(kind, rows, tokenizer=None, **options):
    """The items of rows, all of them."""
    if kind == "steps":
        options = {"separator": "", **options}
    found = MAKE[kind][0](rows, tokenizer or tiny.tokenizer(), **options)
    return [found.prompt(i) for i in range(found.size)]


def turn(role, content):
    return {"role": role, "content": content}


def test_a_list_by_hand():
    """Every response with the prompt and the end of sequence; the lowest rank is the best, ties are equal."""
    (found,) = of("list", [LIST])
    ids = tiny.tokenizer().encode
    assert [x.ids for x in found.responses] == [[*ids("sort:312=" + text), 1] for text in ("132", "123", "a")]
    assert found.ranks == (1, 0, 1) and found.columns == LIST and found.index == 0


def test_scores_rank_a_list_from_the_highest_down():
    scored = {"prompt": "a=", "completions": ["1", "2", "3", "4"], "scores": [0.5, -1, 7, 0.5]}
    assert of("list", [scored])[0].ranks == (1, 2, 0, 1)
    assert of("list", [{**scored, "ranks": [4, 3, 2, 1]}])[0].ranks == (3, 2, 1, 0)  # ranks come first
    other = {"prompt": "a=", "said": ["1", "2"], "votes": [3, 9]}
    assert of("list", [other], completions="said", scores="votes")[0].ranks == (1, 0)


def test_a_point_has_a_label_for_each_head():
    (found,) = of("point", [POINT], labels=("format", "score"))
    assert found.labels == (1.0, 0.5)
    assert found.response.ids == [*tiny.tokenizer().encode("sort:312=123"), 1]
    (found,) = of("point", [{"q": "1+1=", "a": "2", "label": 3}], template="{q}", completion="({a})",
                  labels=("label",))  # fmt: skip
    assert tiny.tokenizer().decode(found.response.ids) == "1+1=(2)<end>" and found.labels == (3.0,)


def test_steps_by_hand():
    """A step ends at the last token of its separator, the last one at the end of sequence."""
    tokenizer = tiny.tokenizer()
    (found,) = of("steps", [STEPS], separator=",")
    assert tokenizer.decode(found.response.ids) == "3+4=3+4,7<end>"
    assert [tokenizer.decode([found.response.ids[e]]) for e in found.ends] == [",", "<end>"]
    assert found.labels == (1.0, 0.25) and found.ends == (7, 9)
    assert found.response.mask == [False] * 4 + [True] * 6
    assert of("steps", [STEPS])[0].ends == (6, 8)  # nothing between them


def test_a_pair_has_a_margin_and_a_preference_of_each_head():
    assert of("pair", [PAIR])[0].margin == 0 and of("pair", [PAIR])[0].preferences == (1.0,)
    rows = [{**PAIR, "margin": 0.5, "a": 1, "b": -2}, {**PAIR, "a": 0, "b": 1}]
    found = of("pair", rows, margin="margin", preferences=("a", "b"))
    assert [x.margin for x in found] == [0.5, 0.0]
    assert [x.preferences for x in found] == [(1.0, -2.0), (0.0, 1.0)]
    assert of("pair", rows)[0].margin == 0  # a column that nobody asked for


ASKED = [turn("user", "sort:312=")]


def test_conversations_are_what_text_is():
    """The same tokens from messages as from text, for lists and points; a point may be one conversation."""
    chat = chats.tokenizer(chats.CHATML)
    said = [[turn("assistant", text)] for text in LIST["completions"]]
    (of_text,) = of("list", [LIST], chat)
    row = {**LIST, "prompt": ASKED, "completions": said}
    (of_turns,) = of("list", [row], chat, messages=("prompt", "completions"))
    ends = {"<|im_end|>", "<eos>"}
    for a, b in zip(of_text.responses, of_turns.responses):
        assert a.ids[:-1] == b.ids[:-1] and {chat.decode([x.ids[-1]]) for x in (a, b)} <= ends
    two = of("point", [{**POINT, "prompt": ASKED, "completion": said[1]}], chat,
             messages=("prompt", "completion"))  # fmt: skip
    one = of("point", [{"messages": [*ASKED, *said[1]], "score": 0.5}], chat, messages=("messages",))
    assert one[0].response == two[0].response == of_turns.responses[1]


SCORED = {"prompt": "a=", "completions": ["1", "2"], "scores": [0.5, 1.5]}
SHARES = {**STEPS, "labels": [1.0, 0.25]}  # a column of a table has one type
OF_FILES = {
    "list": (data.LISTS, [LIST | {"scores": None}, SCORED], {}),
    "point": (data.POINTS, [POINT, {**POINT, "prompt": "sort:21="}], {"labels": ("format", "score")}),
    "steps": (data.STEPS, [SHARES, {**SHARES, "completions": ["7"], "labels": [0.0]}], {"separator": ","}),
    "pair": (data.PAIRS, [{**PAIR, "margin": 0.5}, {**PAIR, "rejected": "1"}], {"margin": "margin"}),
}
MESSAGES = {
    "list": (LIST, ("prompt", "completions")),
    "point": (POINT, ("prompt", "completion")),
    "pair": (PAIR, ("prompt", "chosen", "rejected")),
}


def in_turns(row, columns):
    """A row of text as a row of messages."""
    prompt, *answers = columns
    found = {**row, prompt: [turn("user", row[prompt])]}
    for name in answers:
        if isinstance(row[name], list):
            found[name] = [[turn("assistant", x)] for x in row[name]]
        else:
            found[name] = [turn("assistant", row[name])]
    return found


CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"


def saved(form, folder, rows):
    """The name of rows in a file, or in a folder as the hub has it: a card, and shards of parquet."""
    if form == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / "rows.jsonl")
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    (folder / "README.md").write_text(CARD)
    (folder / "main").mkdir()
    table = datasets.Dataset.from_list(rows)
    for i in range(2):
        shard = table.shard(2, i, contiguous=True)
        shard.to_parquet(folder / "main" / f"train-0000{i}-of-00002.parquet")
    return f"{folder}:main"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hub"])
@pytest.mark.parametrize("kind", [*OF_FILES, *(f"{kind} in turns" for kind in MESSAGES)])
def test_the_rows_of_every_file_make_the_items_of_rows(kind, form, tmp_path):
    """Also where some rows lack a column, which a table fills with nothing."""
    kind, *turns = kind.split(maxsplit=1)
    loaded, rows, options = OF_FILES[kind]
    tokenizer = tiny.tokenizer()
    if turns:
        row, columns = MESSAGES[kind]
        rows = [in_turns(row, columns), in_turns({**row, "prompt": "a="}, columns)]
        tokenizer, options = chats.tokenizer(chats.CHATML), {"messages": columns}
    want = of(kind, rows, tokenizer, **options)
    dataset = data.load(saved(form, tmp_path, rows), tokenizer, kind=loaded, **options)
    found = [dataset.prompt(i) for i in range(dataset.size)]
    plain = [[dataclasses.replace(x, columns={}) for x in items] for items in (want, found)]
    assert plain[0] == plain[1] and len(found) == 2
    columns = [
        [{name: x for name, x in item.columns.items() if x is not None} for item in items]
        for items in (want, found)
    ]
    assert columns[0] == columns[1]


BAD = [
    ("list", {"completions": ["1"], "ranks": [1]}, {}, "expected two responses or more with a rank for each"),
    ("list", {"ranks": [1, 2]}, {}, "got 3 responses and 2 ranks"),
    ("list", {"ranks": [1, 1, 1]}, {}, "all responses have the same rank"),
    ("list", {"completions": ["1", "1", "2"]}, {}, "two responses are the same"),
    ("list", {"completions": ["1", " ", "2"]}, {}, "a response is empty"),
    ("list", {"completions": "123"}, {}, "column 'completions': expected a list, got str"),
    ("list", {"completions": []}, {}, "column 'completions' has no entries"),
    ("list", {"ranks": ["best", "x", "y"]}, {}, "column 'ranks': expected a number, got 'best'"),
    ("list", {"ranks": [1, None, 2]}, {}, "column 'ranks': expected a number, got None"),
    ("list", {}, {"ranks": "r"}, "neither column 'r' nor 'scores'; it has 'prompt', 'completions', 'ranks'"),
    ("list", {}, {"completions": "x"}, "the row has no column 'x'; it has"),
    ("list", {"prompt": " "}, {}, "the prompt is empty"),
    ("list", {"completions": [[turn("assistant", "1")]] * 3}, {}, "got list; --messages prompt completions"),
    ("list", {}, {"max_tokens": 36}, "the list has 37 tokens, above 36: a pack holds all"),
    ("list", {}, {"window": 12}, "the row has 13 tokens.* above the model's window of 12; .*max_length"),
    ("point", {"score": float("nan")}, {}, "column 'score': expected a number, got nan"),
    ("point", {"score": "0.5"}, {}, "column 'score': expected a number, got '0.5'"),
    ("point", {"score": 1.5}, {"shares": True}, r"expected a number in \[0, 1\], got 1.5"),
    ("point", {}, {"labels": ("help",)}, "the row has no column 'help'; it has"),
    ("point", {"completion": ""}, {}, "a response is empty"),
    ("steps", {"labels": [True]}, {}, "expected a label for each step, got 1 labels of 2 steps"),
    ("steps", {"labels": [1, 2]}, {"shares": True}, r"column 'labels': expected a number in \[0, 1\], got 2"),
    ("steps", {"completions": ["1", ""]}, {}, "step 2: expected text, got ''"),
    ("steps", {}, {"max_tokens": 8}, "the response has 9 tokens, above 8"),
    ("pair", {"margin": "much"}, {"margin": "margin"}, "column 'margin': expected a number, got 'much'"),
    ("pair", {"a": 0}, {"preferences": ("a",)}, "columns a: neither response is preferred in any"),
    ("pair", {}, {"preferences": ("a",)}, "the row has no column 'a'"),
    ("pair", {}, {"window": 12}, "the row has 13 tokens.* above the model's window of 12; .*max_length"),
]  # fmt: skip


@each(("kind", "change", "options", "message"), BAD)
def test_a_row_that_cannot_be_used_is_named_and_counted(kind, change, options, message):
    with pytest.raises(ValueError, match=rf"^data: rows, row 1: .*{message}.*1 of 1 rows cannot be used"):
        of(kind, [{**MAKE[kind][1], **change}], **options)


def test_items_that_are_too_long_are_left_out_with_their_count():
    long = {"list": {"completions": ["1", "2", "3" * 9]}, "point": {"completion": "3" * 9},
            "steps": {"completions": ["3" * 9, "3" * 9]}}  # fmt: skip
    for kind, change in long.items():
        row = MAKE[kind][1]
        with pytest.warns(UserWarning, match=r"1 of 3 .* are longer than max_length, 13 tokens.*row 2 with"):
            assert [x.index for x in of(kind, [row, {**row, **change}, row], max_length=13)] == [0, 2]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("list", {"messages": ("prompt",)}, "messages: expected the columns of the prompt and of the compl"),
        ("point", {"messages": ("a", "b", "c")}, "messages: expected the columns of prompt and completion"),
        ("point", {"labels": ()}, "labels: expected at least one column, got none"),
        ("steps", {"messages": ("prompt",)}, "messages: expected none for steps, .*got prompt"),
        ("steps", {"separator": "\n"}, r"separator: expected text that the tokenizer knows, got '\\n'"),
    ],
)
def test_options_that_no_row_could_be_used_with(kind, options, message):
    with pytest.raises(ValueError, match=message):
        of(kind, [MAKE[kind][1]], **options)


def test_lists_points_and_steps_of_a_task():
    """The verifier's own scores; a function of seed and index alone; one loader for all kinds."""
    task, tokenizer = data.get_task("sort_digits"), tiny.tokenizer()
    lists = data.load("sort_digits:2", tokenizer, kind=data.LISTS, seed=3)
    points = data.load("sort_digits:2", tokenizer, kind=data.POINTS, seed=3)
    steps = data.load("sort_digits:2", tokenizer, kind=data.STEPS, seed=3)
    sizes, right = set(), 0
    for i in range(40):
        found = lists.prompt(i)
        sizes.add(len(found.ranks))
        row = found.columns
        scores = [task.verify(text, row) for text in row["completions"]]
        best = row["completions"][found.ranks.index(0)]
        assert row["scores"] == scores and best == row["answer"] and found.ranks.count(0) == 1

        point = points.prompt(i)
        assert point.labels == (task.verify(point.columns["completion"], point.columns),)
        right += point.labels == (1.0,)

        step = steps.prompt(i)
        text = "".join(step.columns["completions"])
        wanted = [step.columns["answer"].startswith(text[: k + 1]) for k in range(len(text))]
        wanted[-1] = text == step.columns["answer"]
        assert step.labels == tuple(map(float, wanted))
        assert len(step.ends) == len(text) and step.ends[-1] == len(step.response.ids) - 1
    assert sizes == {2, 3, 4, 5} and 10 < right < 30
    assert data.ranked.lists_from_task("sort_digits", tokenizer, level=2, seed=3).prompt(7) == lists.prompt(7)


def test_what_covers_a_policy_has_letters_sorted_digits_and_other_lengths():
    """Each kind of wrong answer is drawn by its share, and only those that are named."""
    found = data.pairs_from_task("sort_digits", tiny.tokenizer(), negatives=wrong_answers.COVERING)
    rows = [found.prompt(i).columns for i in range(300)]
    wrong = [row["rejected"] for row in rows]
    assert sum(x.isdigit() and len(x) == 3 and sorted(x) == list(x) for x in wrong) > 40
    assert sum(x.isalpha() for x in wrong) > 5 and sum(len(set(x)) == 1 < len(x) for x in wrong) > 5
    assert {len(x) for x in wrong} >= {1, 2, 3, 4, 5, 6}
    only = data.pairs_from_task("sort_digits", tiny.tokenizer(), negatives=("ordered",))
    some = [only.prompt(i).columns["rejected"] for i in range(50)]
    assert all(sorted(x) == list(x) for x in some)


def test_a_response_that_was_cut_off_has_no_end():
    """The rejected one of a row that says so, by the column that is named, or of a task's kind `cut`."""
    rows = [{**PAIR, "stopped": False}, {**PAIR, "stopped": True}]
    ended, cut = of("pair", rows, unfinished="stopped")
    assert ended.rejected.ids[-1] == 1 and cut.rejected.ids == ended.rejected.ids[:-1]
    assert cut.rejected.mask == ended.rejected.mask[:-1] and cut.chosen == ended.chosen
    assert of("pair", rows)[1].rejected == ended.rejected
    found = data.pairs_from_task("sort_digits", tiny.tokenizer(), negatives=("cut", "noise"))
    ends = [found.prompt(i).rejected.ids[-1] == 1 for i in range(60)]
    assert ends == [not found.prompt(i).columns["unfinished"] for i in range(60)] and 15 < sum(ends) < 45


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["gess"], "negatives: expected names of guess, mistake, ordered, length, noise, cut, got 'gess'"),
        (["guess", "guess=2"], "negatives: expected each name once, got 'guess' twice"),
        (["guess=0"], "negatives: expected a share above 0, as guess=0.5, got 'guess=0'"),
        (["guess="], "negatives: expected a share above 0"),
        (["guess=x"], "negatives: expected a share above 0"),
        (["guess=nan"], "negatives: expected a share above 0"),
        ([], "negatives: expected at least one of guess"),
    ],
)
def test_a_mixture_of_wrong_answers_that_is_none(texts, message):
    with pytest.raises(ValueError, match=message):
        wrong_answers.mixture_of(texts)
    assert wrong_answers.mixture_of(["guess=2", "noise"]) == {"guess": 2.0, "noise": 1.0}


def test_several_sources_of_a_kind_are_mixed(tmp_path):
    path = tmp_path / "lists.jsonl"
    path.write_text("\n".join(json.dumps({**LIST, "prompt": f"{i}="}) for i in range(4)))
    sources = [f"{path}=0.25", "sort_digits:1=0.75"]
    found = data.load(sources, tiny.tokenizer(), kind=data.LISTS)
    drawn, _ = data.draw(found, 8, 0, 0)
    names = [x.columns["source"] for x in drawn]
    assert names.count(str(path)) == 2 and len(names) == 8
