"""Requests and answers of remote rewards: what is written is what is read, and nothing else is."""

import datetime
import decimal
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st

import rft_fn as rft
from rft_fn import patience
from rft_fn.border import read_json as load
from rft_fn.reward import Scored, connection, wire, wire_openrlhf
from rft_fn.reward.remote import cuts, joined
from rft_fn.reward.wire import Batch
from rft_fn.reward.wire_values import plain

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)
turns = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": texts}), min_size=1, max_size=2)


@st.composite
def batches(draw):
    size = draw(st.integers(1, 5))
    rows = st.lists(draw(st.sampled_from([texts, turns])), min_size=size, max_size=size)
    cells = st.lists(st.one_of(st.none(), texts, st.integers(), finite), min_size=size, max_size=size)
    columns = draw(st.dictionaries(st.sampled_from(["answer", "a b", "ä"]), cells))
    lists = {"completion_ids": st.lists(st.integers(0, 9), max_size=3), "truncated": st.booleans()}
    lists |= {"keys": st.integers(0, 2**63 - 1), "prompt_texts": texts}
    given = {
        k: draw(st.lists(x, min_size=size, max_size=size)) for k, x in lists.items() if draw(st.booleans())
    }
    state = draw(st.none() | st.builds(rft.reward.trainer_state, st.integers(0, 5), st.integers(5, 9)))
    return Batch(draw(rows), draw(rows), columns, given, state)


@settings(deadline=None)
@given(batches())
def test_a_request_is_read_as_it_was_written(batch):
    assert wire.read_request(wire.request(batch)) == batch


@settings(deadline=None)
@given(st.lists(st.none() | finite, min_size=1, max_size=6), st.booleans())
def test_numbers_come_back_to_the_bit(numbers, more):
    total = torch.tensor([math.nan if x is None else x for x in numbers])
    extra = {"a/why": ["x"] * len(numbers)} if more else {}
    scored = Scored(total, {"a": total, "b": total * 0}, {"a/n": total}, extra)
    found = wire.read_answer(wire.answer(scored), len(numbers))
    logs = {"a": numbers, "a/n": numbers} | extra
    back = torch.tensor([math.nan if x is None else x for x in found["rewards"]])
    assert torch.equal(back.view(torch.int32), total.view(torch.int32))
    assert {k: v for k, v in found["extra_logs"].items() if k != "b"} == logs and "b" in found["extra_logs"]


def test_the_request_and_the_answer_of_the_page_are_read():
    page = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
    asked, answered = re.findall(r"```json\n(.*?)```", page, re.S)[:2]
    batch = wire.read_request(asked.encode())
    assert batch.completions == ["13", "31"] and not batch.columns and not batch.given
    found = wire.read_answer(answered.encode(), len(batch.completions))
    assert found == {"rewards": [1.0, None], "extra_logs": {}}


def test_the_only_part_is_not_told_twice():
    one = torch.tensor([1.0, 2.0])
    assert b"parts" not in wire.answer(Scored(one, {"a": one}))
    assert b'"parts":{"a":[2.0,4.0]}' in wire.answer(Scored(one, {"a": 2 * one}))


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 10))
def test_cuts_keep_groups_whole_and_lose_nothing(sizes, most):
    prompts = [str(i) for i, size in enumerate(sizes) for _ in range(size)]
    found = cuts(prompts, most)
    assert [p for part in found for p in prompts[part]] == prompts
    parts = [prompts[part] for part in found]
    assert all(a[-1] != b[0] for a, b in pairwise(parts))
    assert all(len(part) <= most or len(set(part)) == 1 for part in parts)
    assert all(len(a) + b.count(b[0]) > most for a, b in pairwise(parts))  # no smaller than needed


def test_answers_are_joined_and_what_a_part_lacks_is_null():
    found = joined(
        [
            {"rewards": [1.0], "extra_logs": {"x": [2.0]}},
            {"rewards": [None, 3.0], "extra_logs": {"y": ["a", "b"]}},
        ],
        [1, 2],
    )
    logs = {"x": [2.0, None, None], "y": [None, "a", "b"]}
    assert found == {"rewards": [1.0, None, 3.0], "extra_logs": logs}


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0, 100))
def test_waits_by_their_definition(failures, draw, asked):
    longest = min(30.0, 0.5 * 2.0 ** min(failures - 1, 60))
    assert longest / 2 <= patience.pause(failures, draw) <= longest
    assert patience.pause(failures, draw) == pytest.approx(longest * (0.5 + draw / 2))
    # what a server asks for does not grow with the failures
    assert patience.pause(failures, draw, asked) == max(asked, patience.pause(1, draw))


def test_failures_of_requests_that_were_under_way_together_count_once(capfd):
    host = connection.Host("http://a/score")
    host.rest(0.0, "gone", 50.0, 0.5)
    for _ in range(9):
        host.rest(host.awake_at - 60.0, "gone too", 50.0, 0.5)
    assert host.failures == 1 and host.problem == "gone too"
    host.rest(host.awake_at + 1.0, "again", 50.0, 0.5)
    assert host.failures == 2 and capfd.readouterr().err.count("trying again") == 1


def test_values_of_rows():
    made = {
        "array": np.arange(3), "tensor": torch.ones(2), "scalar": np.float64(0.5), "bytes": b"ab",
        "date": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.10"), "inf": math.inf,
        3: (1, None, True),
    }  # fmt: skip
    assert plain(made) == {
        "array": [0, 1, 2], "tensor": [1.0, 1.0], "scalar": 0.5, "bytes": {"base64": "YWI="},
        "date": "2026-01-02", "price": "1.10", "inf": None, "3": [1, None, True],
    }  # fmt: skip


def test_an_image_in_a_column_is_sent_whole():
    import base64
    import io

    from PIL import Image

    image = Image.new("RGB", (3, 2), (1, 2, 3))
    found = plain(image)
    back = Image.open(io.BytesIO(base64.b64decode(found["base64"])))
    assert found["mime"] == "image/png" and back.tobytes() == image.tobytes()


def test_every_medium_is_sent_and_each_once():
    one = {"kind": "image", "mime": "image/jpeg", "bytes": b"one"}
    two = {"kind": "image", "mime": "image/png", "bytes": b"two"}
    far = {"kind": "audio", "mime": "audio/wav", "url": "https://host/a.wav"}
    media = [[one, two], [one, two], [], [far, one]]
    data = wire.request(Batch(["p"] * 4, ["c"] * 4, {"n": [1] * 4}, {"media": media}))
    assert len(load(data)["files"]) == 3
    assert wire.read_request(data).given["media"] == media


def test_media_are_not_sent_again_in_their_columns():
    given = {
        "image": [b"x", b"x"],
        "answer": ["1", "2"],
        "media": [[{"kind": "image", "mime": "", "bytes": b"x"}]] * 2,
    }
    assert set(wire.batch_of(["p"] * 2, ["c"] * 2, given).columns) == {"answer"}
    assert set(wire.batch_of(["p"] * 2, ["c"] * 2, given | {"media": None}).columns) == {"answer", "image"}
    assert set(wire.batch_of(["p"] * 2, ["c"] * 2, given, ["answer"]).columns) == {"answer"}


WHOLE = {
    "{": "expected JSON, got '{'",
    "[]": "request: expected an object, got list",
    '{"prompts": ["a"]}': "completions: expected a list, got NoneType",
    '{"prompts": [], "completions": []}': "completions: expected at least one, got none",
    '{"prompts": ["a"], "completions": ["a", "b"]}': "prompts: expected 2 entries",
    '{"prompts": [1], "completions": ["a"]}': "prompts: expected texts, or lists of messages with a role",
    '{"prompts": ["a"], "completions": [["a"]]}': "completions: expected texts, or lists of messages",
}
FURTHER = {  # beside one prompt and one completion
    '"columns": [1]': "columns: expected an object, got list",
    '"columns": {"x": "y"}': "columns.x: expected a list of 1 entries",
    '"columns": {"x": [NaN]}': "expected finite numbers, got NaN",
    '"columns": {"log_metric": [1]}': "columns.log_metric: expected another",
    '"truncated": [true, false]': "truncated: expected 1 entries",
    '"media": [[0]]': "files: expected a list, got NoneType",
    '"media": [[0]], "files": []': "media[0]: numbers of files: expected whole numbers from 0 to -1",
    '"media": [0], "files": []': "media[0]: numbers of files: expected a list, got int",
    '"media": [[0]], "files": [{}]': "files: expected objects with 'kind'",
    '"media": [[]], "files": [{"kind": "image", "mime": "", "base64": "*"}]': "files: expected base64",
    '"state": 3': "state: expected an object, got int",
    '"state": {"epoch": "x"}': "state.epoch: expected a finite number, got 'x'",
}
ONE = '{"prompts": ["a"], "completions": ["a"], '
BAD = WHOLE | {ONE + x + "}": line for x, line in FURTHER.items()}


@each("data", BAD)
def test_other_requests_are_refused_in_one_line(data):
    with pytest.raises(ValueError) as caught:
        wire.read_request(data.encode())
    assert BAD[data] in str(caught.value) and "\n" not in str(caught.value)


def test_half_of_a_surrogate_pair_is_replaced_where_it_is_written_and_refused_where_it_is_read():
    written = wire.request(Batch(["a \ud83d"], ["\udc00"], {"x": [{"\udc00": "\U0001f600"}]}, {}, None))
    found = wire.read_request(written)
    assert found == Batch(["a \ufffd"], ["\ufffd"], {"x": [{"\ufffd": "\U0001f600"}]}, {}, None)
    answered = Scored(torch.ones(1), {}, {}, {"why": ["\ud83d"]})
    assert wire.read_answer(wire.answer(answered), 1)["extra_logs"]["why"] == ["\ufffd"]
    for data in (rb'{"prompts": ["\ud83d"], "completions": ["a"]}', b'{"prompts": ["\xed\xa0\xbd"]}'):
        with pytest.raises(ValueError, match=r"expected Unicode text, got half of a surrogate pair at .'pro"):
            wire.read_request(data)


def test_the_columns_and_lists_of_a_request_may_be_missing():
    found = wire.read_request(b'{"prompts": ["a"], "completions": ["b"], "unknown": 1}')
    assert found == Batch(["a"], ["b"], {}, {}, None)


def test_openrlhfs_request_is_read_as_it_was_written():
    batch = Batch(["p", "q"], ["a", "b"], {"label": ["1", {"x": 2}]}, {})
    assert wire_openrlhf.read_openrlhf_request(wire_openrlhf.openrlhf_request(batch)) == batch
    assert load(wire_openrlhf.openrlhf_request(batch, "gold"))["labels"] == [None, None]


def test_openrlhfs_older_request_has_queries_alone():
    assert wire_openrlhf.read_openrlhf_request(b'{"query": ["pa"]}') == Batch([""], ["pa"], {}, {})


def test_openrlhfs_answer_is_read_as_it_was_written():
    total = torch.tensor([0.5, -1.25])
    found = wire_openrlhf.read_openrlhf_answer(
        wire_openrlhf.openrlhf_answer(total, {"len": torch.tensor([3.0, math.nan])}), 2
    )
    assert found == {"rewards": [0.5, -1.25], "extra_logs": {"scores": [0.5, -1.25], "len": [3.0, None]}}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b'{"rewards": [1]}', "rewards: expected 2 entries"),
        (b'{"scores": [1, 2]}', "expected an object with 'rewards'"),
        (b'{"rewards": [[1], [2, 3]]}', "rewards: expected finite numbers or null, got [1] at 0"),
        (b'{"rewards": [1, 2], "extra_logs": {"x": [1]}}', "extra_logs.x: expected 2 entries"),
        (b'{"rewards": [1, 2], "extra_logs": 3}', "extra_logs: expected an object"),
    ],
)
def test_other_answers_of_openrlhfs_form_are_refused(data, line):
    with pytest.raises(ValueError) as caught:
        wire_openrlhf.read_openrlhf_answer(data, 2)
    assert line in str(caught.value)
