"""A look at all rows: alike by processes, from the cache and row by row; a cache that is never stale."""

import json
import os
import random
import subprocess
import sys
import threading
import warnings
from datetime import date
from pathlib import Path

import chats
import pytest

from rft_fn import data, model, reward
from rft_fn.data import file_formats, recipe, row_cache, row_workers, template_variables
from rft_fn.reward import references
from rft_fn.reward.references import Survey

WORDS = ["2+2", "é", "<|im_end|>", "<eos>", "🙂", "a\n\nb", " x ", "名", "{", "</think>", "<bos>", "  ", "7."]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of its own, that keeps a look at any number of rows."""
    monkeypatch.setenv("RFT_FN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_cache, "_LEAST", 1)
    return tmp_path / "cache" / "rows"


def said(draw, least=1):
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(least, 9))) + "."


def rows_of(kind, draw, count=24):
    """Rows of text, of messages with tools, or of pairs; some are longer than others."""
    for i in range(count):
        if kind == "text":
            yield {"question": said(draw), "answer": said(draw), "level": i}
            continue
        turns = [{"role": "user", "content": said(draw)}, {"role": "assistant", "content": said(draw)}]
        if draw.random() < 0.3:
            turns = [{"role": "system", "content": said(draw)}, *turns]
        if draw.random() < 0.3:
            turns += [{"role": "user", "content": said(draw)}, {"role": "assistant", "content": said(draw)}]
        row = {"messages": turns, "other": i}
        yield row | ({"tools": [TOOL]} if kind == "tools" and draw.random() < 0.5 else {})


def written(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def whole(load):
    """All that a data set shows: its rows and items, their digests and places, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load()
    lines = [str(x.message) for x in caught if str(x.message).startswith("data: ")]
    items = [found.prompt(i) for i in range(found.size)]
    places = [found.place(i) for i in range(found.size)]
    return found.size, found.digest, found.marks, items, places, lines


CASES = [
    ("text", {"template": "{question}", "max_prompt": 40, "columns": ("answer",)}),
    ("text", {"template": "{question} ", "response": "{answer}", "max_prompt": 60, "system": "Be kind."}),
    ("messages", {"messages": ("messages",), "loss_on": "all", "max_prompt": 60, "max_tokens": 4000}),
    ("tools", {"messages": ("messages",), "loss_on": "last", "max_prompt": 90}),
]
TEMPLATES = {name: getattr(chats, name) for name in ("CHATML", "LLAMA3", "QWEN3", "MARKED")} | {"none": None}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_are_the_same_by_processes_from_the_cache_and_one_by_one(name, tmp_path, monkeypatch, folder):
    tokenizer = chats.tokenizer(TEMPLATES[name])
    for number, (kind, options) in enumerate(CASES):
        if kind == "tools" and name not in ("CHATML", "LLAMA3"):
            continue
        if kind == "messages" and not TEMPLATES[name]:
            continue
        file = written(tmp_path / f"{number}.jsonl", rows_of(kind, random.Random(f"{name} {number}")))

        def load(**more):
            return data.load(file, tokenizer, **options, **more)  # noqa: B023, called at once

        with monkeypatch.context() as patch:
            patch.setattr(row_cache, "_LEAST", 10**9)
            one_by_one = whole(load)
            assert not folder.exists() or not list(folder.glob("*.safetensors"))
            if number == 0:
                assert whole(lambda: load(workers=2)) == one_by_one
        assert whole(load) == one_by_one
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "_looked", None)  # nothing is looked at
            assert whole(load) == one_by_one
        assert one_by_one[0] and (number or name == "none" or one_by_one[0] < 24)
        for path in folder.iterdir():
            path.unlink()


def test_many_rows_are_looked_at_by_processes(tmp_path, monkeypatch):
    file = written(tmp_path / "a.jsonl", rows_of("text", random.Random(0), count=600))
    tokenizer = chats.tokenizer(chats.CHATML)
    monkeypatch.setattr(row_cache, "_LEAST", 10**9)
    one_by_one = data.load(file, tokenizer)
    asked = []
    monkeypatch.setattr(recipe, "_MANY", 500)
    monkeypatch.setattr(recipe.cores, "usable", lambda: 2)
    monkeypatch.setattr(
        recipe, "map_rows", lambda *args, **more: asked.append(more) or row_workers.map_rows(*args, **more)
    )
    assert data.load(file, tokenizer).digest == one_by_one.digest
    assert [x["workers"] for x in asked] == [2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # without a cache each rank has its share, which is one
    assert data.load(file, tokenizer).digest == one_by_one.digest and len(asked) == 1


def test_a_cache_is_never_stale(tmp_path, folder):
    """Another byte, name, template, special token, option or day is another look."""
    file = tmp_path / "a.jsonl"
    written(file, rows_of("text", random.Random(0)))
    options = {"template": "{question}", "max_prompt": 500}

    def kept(tokenizer=None, file=file, **more):
        data.load(str(file), tokenizer or chats.tokenizer(chats.CHATML), **(options | more))
        return len(list(folder.glob("*.safetensors")))

    assert kept() == 1 and kept() == 1
    content = file.read_bytes()
    stamp = file.stat()
    file.write_bytes(content.replace(b"2+2", b"2+3", 1))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # it does not tell that it was written
    assert kept() == 2
    other = tmp_path / "b.jsonl"
    other.write_bytes(file.read_bytes())
    assert kept(file=other) == 3  # places name the file
    assert kept(chats.tokenizer(chats.LLAMA3)) == 4
    assert kept(chats.tokenizer(chats.CHATML, end="<end>")) == 5
    assert kept(chats.tokenizer(chats.CHATML, more=("<more>",))) == 6
    for number, more in enumerate((
        {"max_prompt": 400}, {"template": "{question}!"}, {"columns": ("answer",)}, {"system": "x"},
        {"response": "{answer}"}, {"window": 9999}, {"window": 9999, "max_new": 4}, 
        {"values": {"level": [*map(str, range(99))]}},
    )):  # fmt: skip
        assert kept(**more) == 7 + number, more
    assert kept(survey=lambda row, place: None) == 14  # a stranger's function wants to see the rows itself
    dated = chats.tokenizer("{{ strftime_now('%d') }}" + chats.CHATML)
    assert kept(dated) == 15 and kept(dated) == 15
    template_variables.fix_day(date(2020, 1, 1))
    try:
        assert kept(dated) == 16
    finally:
        template_variables.fix_day(None)


def test_rows_in_memory_and_strangers_are_looked_at_each_time(tmp_path, folder):
    rows = list(rows_of("text", random.Random(0)))

    class Strange(type(chats.tokenizer(None))):
        """Anything may be in here."""

    strange = chats.tokenizer(chats.CHATML)
    strange.__class__ = Strange
    data.from_rows(rows, chats.tokenizer(chats.CHATML))
    data.load(written(tmp_path / "a.jsonl", rows), strange)
    assert not folder.exists()


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet", "jsonl.gz"])
def test_every_format_is_kept_by_its_content(suffix, tmp_path, folder, monkeypatch):
    import gzip

    import datasets

    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(30)]
    file = tmp_path / f"a.{suffix}"
    if suffix == "json":
        file.write_text(json.dumps(rows))
    elif suffix == "jsonl.gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{suffix}")(str(file))
    tokenizer = chats.tokenizer(chats.CHATML)
    first = data.load_for_training(str(file), tokenizer)
    monkeypatch.setattr(recipe, "_looked", None)
    again = data.load_for_training(str(file), tokenizer)
    for one, other in zip(first, again):
        assert whole(lambda one=one: one) == whole(lambda other=other: other)
    assert sorted(x.index for part in again for x in data.take(part, 30, 0)[0]) != []


def test_a_damaged_or_foreign_file_is_made_again(tmp_path, folder):
    file = written(tmp_path / "a.jsonl", rows_of("text", random.Random(0)))
    tokenizer = chats.tokenizer(chats.CHATML)
    made = data.load(file, tokenizer)
    (kept,) = folder.glob("*.safetensors")
    good = kept.read_bytes()
    other = written(tmp_path / "b.jsonl", rows_of("text", random.Random(1)))
    data.load(other, tokenizer)
    (foreign,) = (path.read_bytes() for path in folder.glob("*.safetensors") if path != kept)
    bad = bytearray(good)
    bad[-3] ^= 1
    for content in (b"", b"x" * 99, good[:-8], bytes(bad), foreign, good.replace(b"key", b"kei", 1)):
        kept.write_bytes(content)
        assert data.load(file, tokenizer).digest == made.digest
        assert row_cache.read(kept.stem, 24) is not None


def test_no_folder_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RFT_FN_CACHE", str(tmp_path / "file"))
    file = written(tmp_path / "a.jsonl", rows_of("text", random.Random(0)))
    tokenizer = chats.tokenizer(chats.CHATML)
    assert data.load(file, tokenizer).digest == data.load(file, tokenizer).digest


def test_who_comes_second_waits_for_the_first(tmp_path, monkeypatch):
    """The ranks of a node, and runs at one time: one of them looks at the rows."""
    file = written(tmp_path / "a.jsonl", rows_of("text", random.Random(0)))
    looks = []
    look = recipe._looked
    monkeypatch.setattr(recipe, "_looked", lambda *args: looks.append(1) or look(*args))
    found = []

    def load():
        found.append(data.load(file, chats.tokenizer(chats.CHATML)).digest)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4 and len(looks) == 1


def test_refused_rows_are_named_alike_in_every_start(tmp_path, folder):
    rows = list(rows_of("text", random.Random(0)))
    rows[3]["answer"] = rows[9]["answer"] = ""
    file = written(tmp_path / "a.jsonl", rows)
    lines = []
    for workers in (0, 2, 0):
        with pytest.raises(ValueError, match=r"lines 4, 10: column 'answer' is empty. 2 of 24") as caught:
            data.load(file, chats.tokenizer(chats.CHATML), columns=("answer",), workers=workers)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and not list(folder.glob("*.safetensors"))


def test_a_survey_is_given_what_it_saw(tmp_path, monkeypatch):
    answers = ["7", r"\frac{1}{", "seven apples", "8 km", [1, 2], "x^2", {"a": 1}]
    rows = [{"question": "a", "answer": answer} for answer in answers]
    file = written(tmp_path / "a.jsonl", rows)
    tokenizer = model.load_tokenizer("tiny")

    def seen():
        found = Survey(reward.parse(["math", "numeric", "exact"]))
        data.load(file, tokenizer, template="{question}", survey=found)
        return found.refused(), found.unreadable(), found.shares()

    first = seen()
    assert all(first)
    monkeypatch.setattr(recipe, "_looked", None)
    assert seen() == first
    found = Survey(reward.parse(["math"]))
    assert found.key()
    found._parts["own"] = references._Part("answer", lambda reference: "anything", 1.0)
    assert found.key() is None  # a stranger's, which may read anything


def test_a_worker_that_fails_or_is_killed_is_one_line():
    with pytest.raises(ValueError, match="invalid literal"):
        list(row_workers.map_rows(int, ["1", "2", "x"], workers=2, chunk=1))
    assert list(row_workers.map_rows(int, map(str, range(50)), workers=3, chunk=4)) == [*range(50)]
    with pytest.raises(RuntimeError, match="a worker process ended with status 7"):
        list(row_workers.map_rows(os._exit, [7], workers=1, chunk=1))


def test_a_script_without_a_guard_runs_once(tmp_path):
    """Workers import nothing of the script: multiprocessing's would run it again."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from rft_fn.data.row_workers import map_rows\n"
        "print('ran')\nprint(list(map_rows(abs, [-1, -2], workers=2, chunk=1)))\n"
    )
    root = Path(data.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "ran\n[1, 2]\n"


def test_lines_are_found_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "_BLOCK", 7)
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(
            draw.choice(["{}", " ", "\n", "\n", "\r", "{ }", "é", "\t", "\x0b"])
            for _ in range(draw.randint(0, 25))
        )
        path = tmp_path / "a.jsonl"
        path.write_bytes(text.encode())
        expected, at = [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    expected.append((at, number))
                at += len(line)
            rows = file_formats._json_lines(path, file)
            assert [*zip(rows._starts, rows._lines)] == expected
            assert rows._starts[-1] == at and len(rows._starts) == len(expected) + 1


@pytest.mark.parametrize(("rank", "lines"), [("0", 4), ("1", 0)])
def test_one_process_of_a_node_tells_how_far_it_is(rank, lines, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(recipe, "_QUIET", 0)
    monkeypatch.setattr(recipe, "_BETWEEN", (0, 0))
    assert list(recipe._tracked(range(5), 5, "some.jsonl")) == list(range(5))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert not lines or told[0].startswith("data: 2 of 5 rows of some.jsonl, ")
