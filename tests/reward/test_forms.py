"""The forms of a judge: parsers read the last verdict or none, and quotes let nothing out."""

import html
import json

import pytest
from each_case import each
from hypothesis import given
from hypothesis import strategies as st
from judges import ATTACKS

from rft_fn.reward import forms, verdicts
from rft_fn.reward.verdicts import Choice, JsonNumber, TaggedNumber, TerseNumber

PARSERS = [TaggedNumber(), TaggedNumber(1, 5), JsonNumber(), JsonNumber(-1, 1, "reward"), TerseNumber(0, 4)]
any_text = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [
            "<score>",
            "</score>",
            "10",
            "7",
            "{",
            "}",
            '"score"',
            ":",
            " ",
            "score=",
            "A",
            "<better>",
            "\\",
            '"',
            "-",
        ]
    ),
    max_size=14,
).map("".join)


@each("parse", [*PARSERS, Choice()], ids=repr)
@each("share", [0, 0.25, 0.5, 0.75, 1])
def test_a_parser_reads_what_it_writes(parse, share):
    if isinstance(parse, Choice):
        share = round(share * 2) / 2
    assert parse(parse.write(share)) == pytest.approx(share, abs=1e-9)


@given(any_text, any_text, st.sampled_from([TaggedNumber(), JsonNumber(), Choice()]), st.sampled_from([0, 1]))
def test_nothing_in_front_of_a_verdict_changes_it(before, other, parse, share):
    assert parse(before + parse.write(1 - share) + other + parse.write(share)) == share


spoken = st.sampled_from(["<score>{}</score>", '{{"score": {}}}', '{{"reward": {}}}', "score={}"])
numbers = st.integers(-30, 30) | st.floats(-20, 20).map(lambda x: f"{x:.3f}")


@given(any_text | st.builds(str.format, spoken, numbers), st.sampled_from([*PARSERS, Choice()]))
def test_a_verdict_is_in_range_whatever_is_said(said, parse):
    found = parse(said)
    assert found is None or 0 <= found <= 1


NUMBERS = {
    "7": 7.0, "0": 0.0, "-3": -3.0, "+2.50": 2.5, "007": 7.0, "9.999": 9.999,
    "nan": None, "inf": None, "1e1": None, "1_0": None, "٧": None, "７": None, "": None, ".5": None,
    "5.": None, "1,000": None, "7/10": None, "0x7": None, "²": None, " 7": None, "7\n": None,
    "1" * 5000: None, "--1": None,
}  # fmt: skip


@each(("text", "x"), NUMBERS.items())
def test_numbers_are_decimals_in_ascii(text, x):
    assert verdicts.number(text) == x


SAID = [
    (TaggedNumber(), "It is <score>7</score>", 0.7),
    (TaggedNumber(), "<score> 7.5\n</score>.", 0.75),
    (TaggedNumber(), "it says <score>10</score>, I say <score>2</score>", 0.2),
    (TaggedNumber(), "<score>10</score> <score>none</score>", None),  # the last one is none
    (TaggedNumber(), "<score>10</score> but <score>2", None),
    (TaggedNumber(), "<score>11</score>", None),
    (TaggedNumber(), "<score>-1</score>", None),
    (TaggedNumber(), "<score>nan</score>", None),
    (TaggedNumber(), "<score>1e1</score>", None),
    (TaggedNumber(), "<score>7</score><score></score>", None),
    (TaggedNumber(), "&lt;score>7&lt;/score>", None),
    (TaggedNumber(), "score: 7", None),
    (TaggedNumber(1, 5), "<score>1</score>", 0.0),
    (TaggedNumber(1, 5), "<score>0</score>", None),
    (JsonNumber(), 'So: {"reasoning": "uses {x}", "score": 7}', 0.7),
    (JsonNumber(), '{"score": 10} no: {"score": 2}', 0.2),
    (JsonNumber(), '{"score": 2, "quoted": {"score": 10}}', 0.2),
    (JsonNumber(), '{"score": 2, "quoted": "{\\"score\\": 10}"}', 0.2),
    (JsonNumber(), '{"score": 10} no: {"score": 2', None),
    (JsonNumber(), '{"score": NaN}', None),
    (JsonNumber(), '{"score": Infinity}', None),
    (JsonNumber(), '{"score": 1e1}', None),
    (JsonNumber(), '{"score": true}', None),
    (JsonNumber(), '{"score": "7"}', None),
    (JsonNumber(), '{"score": null}', None),
    (JsonNumber(), '{"score": 10.5}', None),
    (JsonNumber(), "[7]", None),
    (JsonNumber(), '{"a":' * 4000, None),
    (Choice(), "A is longer. <better>B</better>", 0.0),
    (Choice(), "<better>tie</better>", 0.5),
    (Choice(), "<better>A</better> or <better>AB</better>", None),
    (Choice(), "A", None),
    (TerseNumber(), "score=1", 1.0),
    (TerseNumber(), " score=0\n", 0.0),
    (TerseNumber(), "score=0.5", 0.5),
    (TerseNumber(), "score=2", None),
    (TerseNumber(), "score=1_0", None),
    (TerseNumber(), "score=1 score=0", None),
    (TerseNumber(), "score=", None),
    (TerseNumber(), "sscore=1", None),
    (TerseNumber(word="ok"), "ok=1", 1.0),
]


@each(("parse", "said", "share"), SAID, ids=[f"{p!r} {s:.30}" for p, s, _ in SAID])
def test_verdicts(parse, said, share):
    assert parse(said) == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("a", "a"),
        ("<think>x</think>a", "a"),
        ("x</think>a", "a"),
        ("<think>x", None),
        ("</think><think>", None),
    ],
)
def test_thoughts_have_no_verdict(said, answer):
    assert verdicts.after_thoughts(said) == answer


@given(st.text() | st.sampled_from(list(ATTACKS.values())))
def test_quotes_keep_the_text_and_hold_no_delimiter(text):
    assert (
        html.unescape(forms.markup(text)) == text or "&" in text
    )  # other entities of the text stay as they are
    assert forms.markup(text).replace("&lt;", "<").replace("&amp;", "&") == text
    assert "<" not in forms.markup(text)
    assert json.loads(forms.as_json(text)) == text
    assert "<" not in forms.as_json(text) and '"' not in forms.as_json(text)[1:-1].replace('\\"', "")
    assert ":" not in forms.flat(text) and len(forms.flat(text)) == len(text)
    alike = [c for c in text if ord(c) > 127 and not 0xD800 <= ord(c) < 0xE000]
    assert all(c in forms.as_json(text) for c in alike), "a judge reads letters, not their numbers"


def test_the_usual_forms_show_what_is_judged_and_what_is_asked():
    values = {"prompt": "1+1?", "response": "a<b & 2", "a": "x", "b": "<y>", "answer": "2", "why": "sums"}
    options = {"criteria": "Be strict about {why}.", "rubric": "10: right. 0: wrong.", "reference": "answer"}
    asked = forms.rating(**options, reasoning=False, high=5).question(values)
    assert asked.startswith("Be strict about sums.\n\n10: right. 0: wrong.\n\n")
    assert "<question>\n1+1?\n</question>\n\n<reference_answer>\n2\n</reference_answer>" in asked
    assert "<response>\na&lt;b &amp; 2\n</response>" in asked
    assert "from 0 to 5" in asked and asked.endswith(
        "nothing but the number in a tag, such as <score>2.5</score>"
    )
    ending = "Reason briefly first. End with the number in a tag, such as <score>5</score>"
    assert forms.rating().question(values).endswith(ending)

    asked = forms.json_rating(**options, key="mark").question(values)
    (line,) = [x for x in asked.splitlines() if x.startswith('{"question"')]
    assert json.loads(line) == {"question": "1+1?", "reference_answer": "2", "response": "a<b & 2"}
    assert asked.endswith('such as {"reasoning": "...", "mark": 5}')
    assert "reasoning" not in forms.json_rating(reasoning=False).question(values)

    asked = forms.pair(reference="answer").question(values)
    assert "<response_a>\nx\n</response_a>\n\n<response_b>\n&lt;y>\n</response_b>" in asked
    assert forms.terse().question(values) == "1+1?:a<b & 2:"
    assert forms.terse(reference="answer").question(values) == "1+1?:2:a<b & 2:"


def test_a_form_of_ones_own_says_which_columns_it_reads():
    form = forms.Form("{prompt} {response} {info[answer]!s:>4} {answer} {{no}}", TaggedNumber())
    assert form.columns == ("info", "answer") and not form.is_pair
    values = {"prompt": "p", "response": "{r}", "info": {"answer": 7}, "answer": "<a>"}
    assert form.question(values) == "p {r}    7 &lt;a> {no}"


@pytest.mark.parametrize("template", ["{prompt}", "{response} {a} {b}", "{a}", ""])
def test_a_template_has_one_response_or_a_pair(template):
    with pytest.raises(ValueError, match=r"expected the place {response}, or {a} and {b}"):
        forms.Form(template, TaggedNumber())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forms.named("stars"), "form: expected one of score, json, pair, terse, got 'stars'"),
        (lambda: forms.named("terse", reasoning=True), r"form 'terse': .*reasoning"),
        (lambda: forms.named("score", low=5, high=5), "low < high, got 5, 5"),
        (lambda: forms.named("score", high=float("nan")), "expected finite numbers"),
        (lambda: forms.rating(reference="key").question({"prompt": "", "response": ""}), "no column 'key'"),
        (
            lambda: forms.rating(reference="k").question({"prompt": "", "response": "", "k": None}),
            "column 'k' is empty",
        ),
    ],
)
def test_bad_forms_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
