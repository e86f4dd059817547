"""What a text names: files, patterns, folders, data sets of the hub; their splits, and held-out rows."""

import gzip
import json
import os

import datasets
import pytest
import tiny

from rft_fn import data
from rft_fn.data import sources, training_data

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "day": "2024-01-01T00:00:00Z"} for i in range(20)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Names are looked up in the working folder, and nothing outside of this machine is asked."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions(name, **options):
    rows = data.read_rows(name, **options)
    return [rows[i]["question"] for i in range(len(rows))]


def asked(rows):
    return [row["question"] for row in rows]


@pytest.mark.parametrize(
    ("text", "name", "part", "split", "share"),
    [
        ("addition", "addition", None, None, "1"),
        ("addition:2", "addition", "2", None, "1"),
        ("addition:2=0.25", "addition", "2", None, "1/4"),
        ("openai/gsm8k:main", "openai/gsm8k", "main", None, "1"),
        ("gsm8k:main@train=3", "gsm8k", "main", "train", "3"),
        ("a/b@train_sft", "a/b", None, "train_sft", "1"),
        ("data/*.jsonl=1/3", "data/*.jsonl", None, None, "1/3"),
        ("a.json:rows", "a.json", "rows", None, "1"),
        ("a=b.jsonl", "a=b.jsonl", None, None, "1"),
        ("http://x/y", "http://x/y", None, None, "1"),
        ("here=2", "here=2", None, None, "1"),  # a file of that whole name
        ("odd:x@y", "odd:x@y", None, None, "1"),
        ("odd:x@y=2", "odd:x@y", None, None, "2"),
    ],
)
def test_a_text_is_name_part_split_and_share(text, name, part, split, share, here):
    for file in ("here=2", "odd:x@y"):
        (here / file).touch()
    found = sources.parse(text)
    assert (found.name, found.part, found.split, str(found.share)) == (name, part, split, share)


@pytest.mark.parametrize("share", ["0", "-1"])
def test_a_share_is_above_0(share):
    with pytest.raises(ValueError, match=rf"^data: expected a share above 0.*, got a.jsonl={share}"):
        data.load(["b.jsonl", f"a.jsonl={share}"], tiny.tokenizer())


@pytest.mark.parametrize("text", ["", " ", ":1", "@train", "=0.5"])
def test_a_text_names_something(text):
    with pytest.raises(ValueError, match="data: expected the name of a task, a file, a folder or a data set"):
        sources.parse(text)


def test_a_task_is_a_task_and_a_folder_of_its_name_has_a_path(here):
    jsonl(here / "addition" / "train.jsonl")
    assert data.load("addition", tiny.tokenizer(), template="{short}").size is None
    assert data.load("./addition", tiny.tokenizer()).size == 20


def test_files_of_a_pattern_in_order(here):
    for name in ("b", "a", "c"):
        jsonl(here / f"{name}.jsonl", [{"question": f"{name}{i}"} for i in range(2)])
    assert questions("*.jsonl") == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert questions("./[bc].jsonl") == ["b0", "b1", "c0", "c1"]
    jsonl(here / "deep" / "er" / "d.jsonl", [{"question": "d0"}])
    assert questions("**/*.jsonl")[-1] == "d0"


def test_a_row_of_a_pattern_is_named_by_its_own_file(here):
    jsonl(here / "a.jsonl", [{"question": "1"}] * 3)
    jsonl(here / "b.jsonl", [{"question": "1"}, {"answer": "1"}])
    with pytest.raises(ValueError, match=r"^data: b.jsonl, line 2: the row has no column 'question'"):
        data.load("*.jsonl", tiny.tokenizer())
    (here / "b.jsonl").write_text('{"question": "1"}\n\n{"question": \n')
    with pytest.raises(ValueError, match=r"^data: b.jsonl, line 3: .*broken JSON.* 1 of 5 rows"):
        data.load("*.jsonl", tiny.tokenizer())


def test_a_pattern_has_files_of_one_kind(here):
    jsonl(here / "a.jsonl")
    (here / "b.csv").write_text("question\n1\n")
    with pytest.raises(ValueError, match=r"'\*': expected files of one kind, got .csv, .jsonl"):
        data.read_rows("*")
    with pytest.raises(ValueError, match=r"could not read 'x\*': no file has such a name"):
        data.read_rows("x*")


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_packed_files(here, kind):
    text = {
        "jsonl": '{"question": "1", "day": "2024-01-01"}\n\n{"question": "ü"}\n',
        "json": '[{"question": "1", "day": "2024-01-01"}, {"question": "ü"}]',
        "csv": "question,day\r\n1,2024-01-01\r\nü\r\n",
    }[kind]
    with gzip.open(here / f"a.{kind}.gz", "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    (here / f"a.{kind}").write_text(text, encoding="utf-8", newline="")
    packed, plain = data.read_rows(f"a.{kind}.gz"), data.read_rows(f"a.{kind}")
    assert [packed[i] for i in range(2)] == [plain[i] for i in range(2)]
    assert packed.place(1) == plain.place(1).replace(kind, f"{kind}.gz")
    assert questions(f"a.{kind}*") == ["1", "ü"] * 2


def test_a_packed_file_that_is_cut_is_one_line(here):
    with gzip.open(here / "a.jsonl.gz", "wt") as file:
        file.write('{"question": "1"}\n' * 1000)
    whole = (here / "a.jsonl.gz").read_bytes()
    (here / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"^data: could not read 'a.jsonl.gz': Compressed") as error:
        data.read_rows("a.jsonl.gz")
    assert "\n" not in str(error.value)


WRAPPED = [
    ({"data": ROWS[:2]}, "a.json", "a.json, data, row 2"),
    ({"version": 1, "tags": ["x"], "rows": ROWS[:2], "none": []}, "a.json", "a.json, rows, row 2"),
    ({"train": ROWS[:2], "test": ROWS[2:]}, "a.json:train", "a.json, train, row 2"),
    # a row with a conversation is a row
    ({"question": "0+0=", "prompt": [{"role": "user", "content": "x"}]}, "a.json", "a.json, row 1"),
]


@pytest.mark.parametrize(("whole", "name", "place"), WRAPPED)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_object_that_wraps_its_rows(here, whole, name, place, indent):
    (here / "a.json").write_text(json.dumps(whole, indent=indent))
    rows = data.read_rows(name)
    assert rows.place(len(rows) - 1) == place and rows[0]["question"] == "0+0="


@pytest.mark.parametrize(
    ("whole", "name", "message"),
    [
        ({"a": ROWS, "b": ROWS}, "a.json", "expected one list of rows, got a, b; name one, as a.json:a"),
        ({"a": ROWS, "b": 3}, "a.json:b", "expected a list 'b', got an object with 'a', 'b'"),
        ({"a": [*ROWS, 7]}, "a.json:a", r"data: a.json, a, row 21: expected an object of columns, got int"),
        (ROWS, "a.json:a", "expected an object with a list 'a', got a list; leave out :a"),
    ],
)
def test_lists_of_a_json_object_that_cannot_be_meant(here, whole, name, message):
    (here / "a.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=message):
        data.read_rows(name)


README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/*.jsonl
---
"""


@pytest.fixture
def hub_layout(here):
    """A folder as a data set of the hub has it: YAML, two configs, shards of parquet."""
    folder = here / "gsm8k"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for i in range(2):
        shard = datasets.Dataset.from_list(ROWS[5 * i : 5 * i + 5])
        shard.to_parquet(folder / "main" / f"train-0000{i}-of-00002.parquet")
    datasets.Dataset.from_list(ROWS[10:13]).to_parquet(folder / "main" / "test-00000-of-00001.parquet")
    jsonl(folder / "socratic" / "b.jsonl", ROWS[4:6])
    jsonl(folder / "socratic" / "a.jsonl", ROWS[:4])
    return folder


def test_configs_of_a_folder_that_is_laid_out_as_on_the_hub(hub_layout):
    assert questions("gsm8k:main") == asked(ROWS[:10])
    assert questions("gsm8k:main", split="test") == questions("gsm8k:main@test") == asked(ROWS[10:13])
    assert questions(f"{hub_layout}:socratic") == asked(ROWS[:6])
    trained, unseen = data.load_for_training("gsm8k:main", tiny.tokenizer())
    assert (trained.size, unseen.size, unseen.note) == (10, 3, "split test of gsm8k:main")


@pytest.mark.parametrize(("text", "got"), [("gsm8k", "none"), ("gsm8k:nope", "'nope'")])
def test_several_configs_are_named(hub_layout, text, got):
    with pytest.raises(ValueError) as error:
        data.read_rows(text)
    assert str(error.value) == (
        f"data: could not read {text!r}: expected one of its configs main, socratic, as gsm8k:main, got {got}"
    )


def test_files_in_a_folder_are_read_as_they_are_alone(hub_layout, here):
    """Nothing is taken for a date, and a broken line has its number; without YAML files go by their names."""
    assert data.read_rows("gsm8k:socratic")[0] == ROWS[0]
    jsonl(here / "plain" / "train.jsonl", ROWS[:3])
    jsonl(here / "plain" / "test.jsonl", ROWS[3:5])
    assert data.read_rows("plain")[2] == ROWS[2] and questions("plain", split="test") == asked(ROWS[3:5])
    with (here / "plain" / "train.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"^data: /.*/plain/train.jsonl, line 4: .*broken JSON"):
        data.load("plain", tiny.tokenizer())


def test_options_of_a_config_are_the_librarys(here):
    """A csv of semicolons is what the README says, not what our reader of commas would make of it."""
    (here / "semi").mkdir()
    (here / "semi" / "a.csv").write_text("question;answer\n1+1=;2\n")
    (here / "semi" / "README.md").write_text(
        '---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ";"\n---\n'
    )
    assert dict(data.read_rows("semi")[0]) == {"question": "1+1=", "answer": 2}


def saved(here, **splits):
    tables = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(tables).save_to_disk(here / "saved")


@pytest.mark.parametrize(
    ("splits", "text", "want"),
    [
        ({"train": 12, "test": 8}, "saved", (12, 8, "split test of saved")),
        ({"train": 12, "validation": 8}, "saved", (12, 8, "split validation of saved")),
        (
            {"train": 12, "validation": 4, "test": 4},
            "saved@validation",
            (4, 4, "split test of saved@validation"),
        ),
    ],
)
def test_a_split_to_evaluate_on(here, splits, text, want):
    starts = [sum(list(splits.values())[:i]) for i in range(len(splits))]
    saved(here, **{name: ROWS[i : i + n] for i, (name, n) in zip(starts, splits.items())})
    trained, unseen = data.load_for_training(text, tiny.tokenizer())
    assert (trained.size, unseen.size, unseen.note) == want
    assert not texts(trained) & texts(unseen)


def texts(dataset):
    return {dataset.prompt(i).text for i in range(dataset.size)}


@pytest.mark.parametrize(
    ("splits", "text", "message"),
    [
        (["a", "b"], "saved", "data: saved: expected a split train, got a, b; name one, as saved@a"),
        (["train"], "saved@x", "data: saved@x: expected one of its splits, got x; it has train"),
    ],
)
def test_splits_that_cannot_be_meant(here, splits, text, message):
    saved(here, **dict.fromkeys(splits, ROWS))
    with pytest.raises(ValueError, match=message):
        data.load_for_training(text, tiny.tokenizer())


def test_an_evaluation_alone_wants_a_test_split(here):
    saved(here, train=ROWS)
    message = "^data: saved: expected a split test, got train; name one, as saved@train$"
    with pytest.raises(ValueError, match=message):
        data.load("saved", tiny.tokenizer(), split="test")
    assert data.load("saved@train", tiny.tokenizer(), split="test").size == 20


def make(here, kind):
    if kind == "file":
        jsonl(here / "rows.jsonl")
        return "rows.jsonl"
    if kind == "pattern":
        jsonl(here / "rows1.jsonl", ROWS[:12])
        jsonl(here / "rows2.jsonl", ROWS[12:])
        return "rows?.jsonl"
    tables = datasets.Dataset.from_list(ROWS)
    if kind == "dict":
        tables = datasets.DatasetDict({"train": tables})
    elif kind == "only a test split":
        tables = datasets.DatasetDict({"test": tables})
    tables.save_to_disk(here / "saved")
    return "saved"


@pytest.mark.parametrize("kind", ["file", "pattern", "dataset", "dict", "only a test split"])
def test_rows_are_held_out_where_there_is_no_test_split(here, kind):
    name = make(here, kind)
    trained, unseen = data.load_for_training(name, tiny.tokenizer(), eval_share=0.3)
    assert not texts(trained) & texts(unseen) and texts(trained) | texts(unseen) == set(asked(ROWS))
    assert unseen.note == (
        f"{unseen.size} of the 20 rows of {name}, which are not trained on (eval_share 0.3)"
    )
    again = data.load_for_training(name, tiny.tokenizer(), eval_share=0.3, seed=5)
    assert [texts(x) for x in again] == [texts(trained), texts(unseen)]


def test_held_out_rows_are_spread_and_stay():
    kept, held = training_data.held_out(10_000, 0.1)
    assert sorted([*kept, *held]) == list(range(10_000)) and len(held) == 1000
    assert all(80 < sum(i // 1000 == k for i in held) < 120 for k in range(10))
    # a larger share only adds, and a file that grows moves few rows
    assert set(held) < set(training_data.held_out(10_000, 0.2)[1])
    assert len(set(held) - set(training_data.held_out(11_000, 0.1)[1])) < 50


@pytest.mark.parametrize(
    ("count", "share", "want"),
    [(2, 0.1, 1), (2, 1.0, 1), (3, 1e-9, 1), (5, 1.0, 4), (40, 0.1, 4), (37, 0.25, 9)],
)
def test_so_many_rows_are_held_out_and_at_least_one_is_left(count, share, want):
    kept, held = training_data.held_out(count, share)
    assert (len(kept), len(held)) == (count - want, want)


def test_an_error_in_held_out_rows_names_their_lines(here):
    rows = [{"question": str(i), "answer": ""} for i in range(20)]
    jsonl(here / "rows.jsonl", rows)
    lines = [f"rows.jsonl, lines {', '.join(str(i + 1) for i in training_data.held_out(20, 0.1)[0][:3])}"]
    with pytest.raises(ValueError, match=lines[0]):
        data.load_for_training("rows.jsonl", tiny.tokenizer(), columns=["answer"])


def test_an_evaluation_on_training_rows_is_said(here):
    jsonl(here / "a.jsonl")
    jsonl(here / "b.jsonl")
    trained, unseen = data.load_for_training("a.jsonl", tiny.tokenizer(), eval_share=0.0)
    assert texts(trained) == texts(unseen)
    assert unseen.note == "a.jsonl, which is trained on too (eval_share is 0)"
    trained, unseen = data.load_for_training("a.jsonl", tiny.tokenizer(), eval_data=["./a.jsonl", "b.jsonl"])
    assert trained.size == 20 and unseen.size == 40
    assert unseen.note == "./a.jsonl, which is trained on too; b.jsonl"


def test_one_row_cannot_be_held_out(here):
    jsonl(here / "a.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match=r"^eval_share: expected at least 2 rows .* got 1; give --eval-data"):
        data.load_for_training("a.jsonl", tiny.tokenizer())
    assert data.load_for_training("a.jsonl", tiny.tokenizer(), eval_share=0.0)[0].size == 1


def test_each_source_is_evaluated_on_its_own(here):
    """As the sources are drawn in training: a task by unseen rows, a file by held-out ones."""
    jsonl(here / "a.jsonl")
    names = ["addition:2=3", "a.jsonl=1"]
    trained, unseen = data.load_for_training(names, tiny.tokenizer(), seed=4, template="{question}")
    assert trained.mixture.weights == unseen.mixture.weights == (3, 1)
    assert trained.name == "addition:2 + a.jsonl"
    assert unseen.note.startswith("addition:2 with seed 5; ") and "of the 20 rows of a.jsonl" in unseen.note
    alone = data.load("addition:2", tiny.tokenizer(), seed=5)
    assert unseen.prompt(0).text == alone.prompt(0).text


def test_a_source_that_lacks_a_column_is_named(here):
    jsonl(here / "a.jsonl")
    jsonl(here / "b.jsonl", [{"question": "1", "note": "x"}] * 3)
    message = r"^data: b.jsonl, lines 1, 2, 3: the row has no column 'answer'; it has 'question', 'note'"
    with pytest.raises(ValueError, match=message):
        data.load(["a.jsonl", "b.jsonl"], tiny.tokenizer(), columns=["answer"])
    both = data.load(["a.jsonl", "b.jsonl"], tiny.tokenizer())  # columns may differ where nothing reads them
    assert {"day", "note"} <= {name for p in data.take(both, 4, 0)[0] for name in p.columns}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.json", "'train.json': no such file; did you mean train.jsonl?"),
        ("dota/train.jsonl", "'dota/train.jsonl': no such file; did you mean data?"),
        ("./trian.jsonl", "'./trian.jsonl': no such file; did you mean train.jsonl?"),
        ("a/b/c", "'a/b/c': no such file"),
        ("pipe.jsonl", "'pipe.jsonl': expected a file or a folder, got a pipe or a device; write its rows"),
        ("mydta", "cannot be reached: .*; did you mean mydata?"),
        ("adition", "cannot be reached: .*; did you mean addition?"),
        ("gsm9k", "'gsm9k': it is neither a file nor in the hub's cache, and http://127.0.0.1:9 cannot be"),
    ],
)
def test_what_is_like_a_missing_name_is_said(here, name, message):
    for file in ("train.jsonl", "data/x.jsonl", "mydata/train.jsonl"):
        jsonl(here / file)
    os.mkfifo(here / "pipe.jsonl")
    with pytest.raises(ValueError, match=message) as error:
        data.read_rows(name)
    assert "\n" not in str(error.value)
    assert ("did you mean" in str(error.value)) == ("did you mean" in message)


def test_a_folder_without_a_slash_is_a_folder(here):
    jsonl(here / "mydata" / "train.jsonl")
    assert questions("mydata") == asked(ROWS)


def test_a_hub_name_is_asked_of_the_library(monkeypatch):
    """What is loaded, and how: the hub itself is not here."""
    from rft_fn import hub

    seen = []

    def load_dataset(*args):
        seen.append(args)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(hub, "unreachable", lambda: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("openai/gsm8k:main", "squad", "a/b@train"):
        assert questions(name) == asked(ROWS)
    assert seen == [("openai/gsm8k", "main"), ("squad", None), ("a/b", None)]


def test_a_model_of_the_hub_may_have_no_owner(here):
    from rft_fn.model import model_names

    with pytest.raises(ValueError, match=r"^model: gpt2 is neither a folder nor in the hub's cache"):
        model_names.resolve("gpt2")
    (here / "my-model").mkdir()
    assert model_names.resolve("my-model") == "my-model"
    with pytest.raises(ValueError, match=r"did you mean my-model\?$"):
        model_names.resolve("my-modle")
    with pytest.raises(ValueError, match=r"got './mymodel'; did you mean my-model\?$"):
        model_names.resolve("./mymodel")
