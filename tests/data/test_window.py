"""Rows against the model's window: text, messages, pairs and media, each at its last token and one above."""

import json

import pytest
import test_processing as media
from test_house import load_script
from test_processing import hears, sees  # noqa: F401, fixtures

import rft_fn as rft
from rft_fn import data, model
from rft_fn.environment.tiny_models import new_tokenizer

TALK = [{"role": "user", "content": "12="}, {"role": "assistant", "content": "345"}]
MORE = [*TALK, {"role": "user", "content": "67="}, {"role": "assistant", "content": "8"}]


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(file, **how):
    return data.load(file, new_tokenizer(), **how)


# what it is, the options, the row, its tokens, and how many of them max_new is
CASES = [
    ("text", {"template": "{q}"}, {"q": "123="}, 4, 3),
    ("a conversation to answer", {"messages": ("m",)}, {"m": MORE[:3]}, 9, 3),
    ("a conversation to learn", {"messages": ("m",), "loss_on": "all"}, {"m": MORE}, 11, 0),
    ("a pair", {"kind": data.PAIRS}, {"prompt": "1=", "chosen": "2345", "rejected": "6"}, 7, 0),
    ("a pair whose worse side is longer", {"kind": data.PAIRS},
     {"prompt": "1=", "chosen": "2", "rejected": "34567"}, 8, 0),
    ("a pair of messages", {"kind": data.PAIRS, "messages": ("p", "c", "r")},
     {"p": TALK[:1], "c": TALK[1:], "r": [{"role": "assistant", "content": "3"}]}, 7, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "row", "count", "new"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_row_fits_to_the_last_token(tmp_path, how, row, count, new):
    """Learned turns and responses end with a token, which counts."""
    file = write(tmp_path, row)
    limit = {"window": count + new}
    if new:
        limit["max_new"] = new
    assert load(file, **how, **limit).size == 1
    size = f"{count}"
    if new:
        size = rf"{count} \+ {new}"
    limit["window"] -= 1
    with pytest.raises(ValueError, match=f"line 1: .* has {size} tokens.* of {count + new - 1}; ") as e:
        load(file, **how, **limit)
    assert "\n" not in str(e.value)


def test_a_pair_with_an_image_counts_its_tokens(tmp_path, sees):  # noqa: F811
    """16 of the image, 2 around it, 2 of the prompt, 1 of the response and its end."""
    media.picture(tmp_path, "a.png")
    row = {"prompt": "1=", "chosen": "2", "rejected": "3", "image": "a.png"}
    file = write(tmp_path, row)
    how = {"kind": data.PAIRS, "template": "{prompt}"}
    assert media.load(file, sees, **how, window=22).size == 1
    with pytest.raises(ValueError, match=r"line 1: .* has 22 tokens, those of media.* window of 21"):
        media.load(file, sees, **how, window=21)


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_a_pair_with_an_image_has_two_responses_and_a_template(tmp_path, sees, column):  # noqa: F811
    media.picture(tmp_path, "a.png")
    row = {"prompt": "1=", "chosen": "2", "rejected": "3", "image": "a.png"} | {column: " "}
    how = {"kind": data.PAIRS, "template": "{prompt}"}
    with pytest.raises(ValueError, match=f"rows.jsonl, line 1: the {column} response is empty"):
        media.load(write(tmp_path, row), sees, **how)
    with pytest.raises(ValueError, match=r"line 1: the row has media, .*empty template has no place"):
        media.load(write(tmp_path, row), sees, kind=data.PAIRS, template="")


def test_a_conversation_with_audio_counts_its_tokens(tmp_path, hears):  # noqa: F811
    """12 of half a second, 2 around them, 2 of the question."""
    media.sound(tmp_path, "a.wav")
    parts = [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "1="}]
    file = write(tmp_path, {"m": [{"role": "user", "content": parts}]})
    how = {"messages": ("m",), "max_new": 5}
    assert media.load(file, hears, **how, window=21).size == 1
    with pytest.raises(ValueError, match=r"16 \+ 5 tokens with max_new, .*media.*; lower max_new"):
        media.load(file, hears, **how, window=20)


def test_the_window_is_that_of_the_text_model(tmp_path):
    assert [model.read_window(name) for name in ("tiny", "tiny-vl", "tiny-audio")] == [128, 256, 256]
    (tmp_path / "empty").mkdir()
    assert model.read_window(tmp_path / "empty") is None
    adapted = model.apply_lora_configuration(model.load("tiny"), 2, 4)
    model.save(tmp_path / "adapter", adapted, model.load_tokenizer("tiny"))
    assert model.read_window(tmp_path / "adapter") == 128


LONG = "1" * 120
PAIR = {"prompt": LONG, "chosen": "2" * 9, "rejected": "3"}
SCRIPTS = [
    ("grpo", {"template": "{prompt}", "max_new": 9}, r"120 \+ 9"),
    ("ppo", {"template": "{prompt}", "max_new": 9}, r"120 \+ 9"),
    ("multi_turn", {"template": "{prompt}", "max_new": 9}, r"120 \+ 9"),
    ("evaluate", {"template": "{prompt}", "max_new": 9}, r"120 \+ 9"),
    ("sft", {"template": "{prompt}", "response": "{chosen}"}, "130"),
    ("dpo", {}, "130"),
]


@pytest.mark.parametrize(("name", "options", "size"), SCRIPTS, ids=[s[0] for s in SCRIPTS])
def test_scripts_refuse_a_row_above_the_window_before_a_model_is_loaded(
    tmp_path, monkeypatch, name, options, size
):
    """tiny reads 128 tokens."""
    file = write(tmp_path, {"prompt": "1", "chosen": "2", "rejected": "3"}, PAIR)
    script = load_script(name)
    monkeypatch.setattr(rft.model, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    reward = {}
    if "max_new" in options:
        (tmp_path / "mine.py").write_text(
            "def one(completions, **columns):\n    return [1.0] * len(completions)\n"
        )
        reward = {"reward": (f"{tmp_path}/mine.py:one",)}
    if name == "multi_turn":
        reward = {}
    out = {"out": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=f"line 2: the row has {size} tokens.* window of 128"):
        script.main(script.Config(model="tiny", data=(file,), **options, **reward, **out))
