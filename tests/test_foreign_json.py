"""JSON of strangers: what Python's reader reads, up to a depth, in a time that grows with the length."""

import json
import time

import pytest
from each_case import each

from rft_fn.foreign_json import json_at, parse_json


def nested(levels, inner="1"):
    return "[" * levels + inner + "]" * levels


def test_json_is_read_as_python_reads_it_up_to_the_limit_of_depth():
    for text in ('{"a": [1, 2.5, null, "[[[{\\"["]}', "3", ' "x" ', nested(100), '[{"a": {}}, []]', "[NaN]"):
        assert repr(parse_json(text)) == repr(json.loads(text)), text
        assert repr(parse_json(text.encode())) == repr(json.loads(text)), text
    assert parse_json(nested(3), depth=3) == [[[1]]]
    assert parse_json("[" + "[]," * 500 + "[]]", depth=2) == [[]] * 501  # many, and none is deep
    assert parse_json(json.dumps("{[" * 5000)) == "{[" * 5000  # brackets in a text are none
    for encoding in ("utf-8-sig", "utf-16"):
        assert parse_json('{"a": "ä"}'.encode(encoding)) == {"a": "ä"}


@each("levels", [101, 1_200, 100_000])
@each("opening", ["[", '{"a":', '["\\"]",{"a":'])
@each("around", [0, 700])
def test_brackets_beyond_the_limit_are_an_error_wherever_the_caller_stands(levels, opening, around):
    def call():
        with pytest.raises(ValueError, match="brackets nest deeper than 100"):
            parse_json(opening * levels)
        with pytest.raises(ValueError, match="brackets nest deeper than 100"):
            json_at("call " + opening * levels, 5)

    def stand(depth):
        return call() if depth == 0 else stand(depth - 1)

    stand(around)


def test_a_value_at_a_place_ends_there_whatever_stands_behind():
    text = 'x{"a": [1]} ' + "[" * 5000
    assert json_at(text, 1) == ({"a": [1]}, 11)
    assert json_at("3 " + "[" * 5000) == (3, 1)
    for broken in ("", "{", '{"a', "nul", '"' + "\\" * 4001):
        with pytest.raises(ValueError):
            json_at(broken)
        with pytest.raises(ValueError):
            parse_json(broken)


@pytest.mark.parametrize("text", ['"' + '\\"' * 300_000, '{"a' * 300_000, '"' * 300_001, "\\" * 300_000])
def test_the_time_for_broken_json_grows_with_its_length(text):
    start = time.process_time()
    with pytest.raises(ValueError):
        parse_json(text)
    assert time.process_time() - start < 2  # an hour, were it the square
