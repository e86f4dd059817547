"""Rows of files: values as they stand there, places as an editor counts them, and broken files by line."""

import csv
import json
import time

import pyarrow.parquet
import pytest
import tiny
from each_case import each

from rft_fn import data


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return str(path)


def rows_of(path, text, encoding="utf-8"):
    rows = data.read_rows(write(path, text, encoding))
    return [dict(rows[i]) for i in range(len(rows))]


def test_jsonl_keeps_the_types_of_json(tmp_path):
    rows = [
        {"question": "2024-01-01", "answer": "007", "n": 7, "x": 1.0, "ok": True, "none": None},
        {"question": "2024-01-01T00:00:00Z", "answer": 7, "list": [1, "a"], "of": {"a": None}, "ü": "\u2028"},
    ]
    for ascii_ in (True, False):
        text = "".join(json.dumps(r, ensure_ascii=ascii_) + "\n" for r in rows)
        found = rows_of(tmp_path / "rows.jsonl", text)
        assert found == rows and [list(r) for r in found] == [list(r) for r in rows]
        assert [type(v) for r in found for v in r.values()] == [type(v) for r in rows for v in r.values()]


def test_csv_is_text(tmp_path):
    text = 'question,answer,date\r\n007,1.0,2024-01-01\r\n"a, ""b""\nc",,true\r\n'
    assert rows_of(tmp_path / "rows.csv", text) == [
        {"question": "007", "answer": "1.0", "date": "2024-01-01"},
        {"question": 'a, "b"\nc', "answer": "", "date": "true"},
    ]


def test_a_list_in_a_json_file(tmp_path):
    rows = [{"question": "2024-01-01", "answer": "007"}, {"question": "1", "answer": 7}]
    assert rows_of(tmp_path / "a.json", json.dumps(rows, indent=2)) == rows
    assert rows_of(tmp_path / "b.json", "".join(json.dumps(r) + "\n" for r in rows)) == rows


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_mark_of_byte_order_is_no_part_of_a_name(tmp_path, suffix):
    text = {"jsonl": '{"question": "1"}', "csv": "question,answer\n1,2\n"}[suffix]
    assert rows_of(tmp_path / f"rows.{suffix}", text, "utf-8-sig")[0]["question"] == "1"


def test_long_and_many_lined_cells_of_csv(tmp_path):
    cells = ["x" * 300_000, "a\n\nb\r\nc", 'say "hi"', "\u2028\x0b", "ü", " 1 "]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["q", "n"], *[[c, i] for i, c in enumerate(cells)]])
    rows = data.read_rows(str(path))
    assert [rows[i]["q"] for i in range(len(rows))] == cells
    assert rows[-1] == {"q": " 1 ", "n": "5"} and csv.field_size_limit() == 131072


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.jsonl", '\n{"q": "1"}\n\n  \n{"q": "2"}\n{"q": "3"}', [2, 5, 6]),
        ("a.jsonl", '{"q": "1"}\r\n\r\n{"q": "2"}\r\n', [1, 3]),
        ("a.csv", 'q,a\n1,2\n\n"1\n1",2\n\n\n3,4\n', [2, 4, 8]),
        ("a.csv", "\n\nq,a\n1,2\n", [4]),
    ],
)
def test_places_are_lines_as_an_editor_counts_them(tmp_path, name, text, lines):
    rows = data.read_rows(write(tmp_path / name, text))
    assert [rows.place(i) for i in range(len(rows))] == [f"{tmp_path / name}, line {n}" for n in lines]


@each(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"question": "1"}\n\n{"question": 1\n',
            "line 3: .* broken JSON: Expecting ',' .* column 15",
        ),
        ("a.jsonl", '{"question": "1"}\n[1]\n', "line 2: expected an object of columns, got list"),
        (
            "a.jsonl",
            "[" * 100_000,
            "line 1: expected an object in one line, got broken JSON: brackets nest deep",
        ),
        ("a.json", "[" * 1_200 + "]" * 1_200, r"could not read .*a.json': brackets nest deeper than 100"),
        (
            "a.json",
            '"x"',
            r"could not read .*a.json': expected a list of rows, or an object with one, got str",
        ),
        ("a.json", '[{"question": "1"}, 2]', "row 2: expected an object of columns, got int"),
        ("a.json", '[{"question": "1"},\n x]', r"could not read .*a.json': Expecting value: line 2 column 2"),
        ("a.csv", "question,answer\n1,2\n1,2,3\n", "line 3: expected 2 cells as the first line has, got 3"),
        (
            "a.csv",
            'question,answer\n1,2\n\n"1,2\n3,4\n',
            "line 4: expected comma-separated values, got unexpec",
        ),
        ("a.csv", "question,question\n1,2\n", "line 1: expected distinct column names"),
        ("a.csv", "question,answer\n", "expected at least one row, got none in"),
        ("a.csv", "\n\n", "expected at least one row, got none in"),
        ("a.jsonl", "\n\n", "expected at least one row, got none in"),
        ("a.csv", "answer\n1\n", "line 2: the row has no column 'question'; it has 'answer'"),
        ("a.csv", "answer,question\n1,2\n\n3\n", "line 4: the row has no column 'question'; it has 'answer'"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message) as error:
        data.load(write(tmp_path / name, text), tiny.tokenizer())
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.jsonl", '{"question": "1"}\n{"question": "caf\xe9"}\n', 2),
        ("a.csv", "question,answer\n1,2\n1,caf\xe9\n", 3),
        ("a.csv", "question,caf\xe9\n1,2\n1,2\n", 1),
        ("a.json", '[{"question": "caf\xe9"}]', 1),
    ],
)
def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path, name, text, line):
    path = tmp_path / name
    message = f"{path}, line {line}: byte {text.index(chr(0xE9))} of the file, 0xe9, is not UTF-8; convert it"
    with pytest.raises(ValueError, match=message):
        data.load(write(path, text, "latin-1"), tiny.tokenizer())


def test_all_broken_lines_are_counted_with_the_rows_that_lack_something(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['{"question": "1", "answer": "1"}'] * 8
    lines[1], lines[3], lines[4], lines[6] = "{", '{"question": "1"}', "", '{"question": "1", "answer": null}'
    with pytest.raises(ValueError) as error:
        data.load(write(path, "\n".join(lines)), tiny.tokenizer(), columns=["answer"])
    text = str(error.value)
    assert text.startswith(f"data: {path}, line 2: expected an object in one line, got broken JSON")
    assert f"{path}, line 4: the row has no column 'answer'; it has 'question'" in text
    assert f"{path}, line 7: column 'answer' is empty. 3 of 7 rows cannot be used" in text


HALF = "\\ud83d"  # of a surrogate pair, as JSON may hold it alone


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ('{"question": "hi ' + HALF + ' there"}', "['question']"),
        ('{"question": "hi", "answer": "1 ' + HALF + '"}', "['answer']"),
        ('{"question": "1", "m": [{"role": "user", "content": "x' + HALF + '"}]}', "['m'][0]['content']"),
        ('{"question": "1", "' + HALF + '": 1}', ""),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_text_that_is_no_unicode_is_named_with_its_line(tmp_path, row, place, name):
    """Half of a surrogate pair is in no vocabulary, and no file can be written with it."""
    rows = ['{"question": "1\\ud83d\\ude00"}', row]
    text = "\n".join(rows) if name == "rows.jsonl" else f"[{', '.join(rows)}]"
    path = write(tmp_path / name, text)
    at = {"rows.jsonl": "line 2", "rows.json": "row 2"}[name]
    place = place and f" at {place}"
    with pytest.raises(ValueError) as error:
        data.load(path, tiny.tokenizer())
    half = f"expected Unicode text, got half of a surrogate pair{place}; write U+FFFD instead"
    assert str(error.value).startswith(f"data: {path}, {at}: {half}")
    assert data.from_rows([json.loads(rows[0])], tiny.tokenizer()).size == 1
    with pytest.raises(ValueError, match="mine, row 1: expected Unicode text"):
        data.from_rows([json.loads(row)], tiny.tokenizer(), name="mine")


@pytest.mark.parametrize("option", ["template", "response"])
def test_an_option_that_is_no_unicode_is_one_line(option):
    """A shell hands over bytes that are no UTF-8, and Python makes halves of surrogate pairs of them."""
    with pytest.raises(ValueError, match="rows, row 1: expected Unicode text, got half of a surrogate pair"):
        data.from_rows([{"question": "1"}], tiny.tokenizer(), **{option: "{question}\udcff"})


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    """Rows are read when they are drawn: what stands there then must be what was looked at."""
    path = tmp_path / "a.jsonl"
    dataset = data.load(write(path, '{"question": "1"}\n{"question": "2"}\n'), tiny.tokenizer())
    assert dataset.prompt(1).text == "2"
    with path.open("a") as file:
        file.write('{"question": "3"}\n')
    with pytest.raises(ValueError, match="was changed while it was read; start again"):
        dataset.prompt(1)


def test_a_file_that_is_replaced_is_read_on(tmp_path):
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    dataset = data.load(write(path, '{"question": "1"}\n'), tiny.tokenizer())
    write(other, '{"question": "9"}\n')
    other.replace(path)
    assert dataset.prompt(0).text == "1"


def test_rows_of_a_file_are_not_kept_in_memory(tmp_path):
    """Ten megabytes of rows; what stays is where each begins."""
    import tracemalloc

    row = json.dumps({"question": "1+1=", "note": "x" * 10_000})
    path = write(tmp_path / "a.jsonl", (row + "\n") * 1000)
    tokenizer = tiny.tokenizer()
    tracemalloc.start()
    dataset = data.load(path, tokenizer)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dataset.size == 1000 and kept < 1e6


def test_a_hub_data_set_without_a_hub_is_one_line_within_seconds(monkeypatch, capfd):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"nobody/none.*neither a file nor in the hub's cache, and "):
        data.read_rows("nobody/none")
    assert time.monotonic() - start < 12 and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.txt", "expected a name that ends in .jsonl, .json, .parquet, .csv"), ("a.parquet", "magic bytes")],
)
def test_a_file_that_is_none_of_these_is_one_line(name, message, tmp_path, capfd):
    with pytest.raises(ValueError, match=message):
        data.read_rows(write(tmp_path / name, "1234567890123"))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "number"),
    [(pyarrow.duration("ms"), 2**62), (pyarrow.date32(), 2**31 - 1), (pyarrow.timestamp("us"), 2**62)],
)
def test_a_date_beyond_python_is_a_row_that_cannot_be_used(kind, number, workers, tmp_path):
    width = pyarrow.int32() if kind == pyarrow.date32() else pyarrow.int64()
    x = pyarrow.array([1, number], width).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", "b"], "x": x}), tmp_path / "a.parquet")
    message = "a.parquet, row 2: a date or duration is out of Python's range: .* 1 of 2 rows cannot be used"
    with pytest.raises(ValueError, match=message) as error:
        data.load(str(tmp_path / "a.parquet"), tiny.tokenizer(), workers=workers)
    assert "\n" not in str(error.value)


def test_a_part_of_a_file_is_said_to_be_one(tmp_path):
    """Rows that are held out are a part; a file of one broken row is told as that, not as too few."""
    tokenizer = tiny.tokenizer()
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1", "answer": "1"}\n{"question": "2", "answer": \n')
    with pytest.raises(ValueError, match=r"line 2: .*1 of 1 rows cannot be used \(a part of 2 rows\)"):
        data.load_for_training(str(path), tokenizer, template="{question}")
    path.write_text('{"question": \n')
    with pytest.raises(ValueError, match=r"line 1: expected an object in one line, got broken JSON"):
        data.load_for_training(str(path), tokenizer, template="{question}")
