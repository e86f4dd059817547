"""Attacks by files: each ends in one line, and the process that reads it goes on."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rft_fn import confined, model
from rft_fn.migrate.foreign_files import read
from rft_fn.model import lora_folders


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(confined, "SECONDS", 1)
    monkeypatch.setattr(confined, "MEMORY", 300 << 20)


# ---------- the child


def loop():
    while True:
        pass


def take():
    return [bytearray(1 << 20) for _ in range(1 << 14)]


def panic():
    raise BaseException("a panic")


def refuse():
    raise ValueError("a line")


ENDS = {
    "loops": (loop, "x: expected to be read within 1 s, got no end"),
    "sleeps": (lambda: time.sleep(1000), "x: expected to be read within 1 s, got no end"),
    "takes memory": (take, "x: expected to be read within 300 MiB of memory, got more"),
    "aborts": (os.abort, "x: expected a file that can be read, got SIGABRT in the library that reads it"),
    "exits": (lambda: os._exit(3), "x: expected a file that can be read, got an exit in the library"),
    "answers too much": (lambda: "x" * (70 << 20), "x: expected an answer of at most 64 MiB, got more"),
    "refuses": (refuse, "^a line$"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_child_that_misbehaves_is_one_line(name, monkeypatch):
    monkeypatch.setattr(confined, "_WAIT", 2)
    function, line = ENDS[name]
    with pytest.raises(ValueError, match=line):
        confined.call("x", function, seconds=1 if "no end" in line else 30)


def children():
    """The processes that this one has started."""
    return {x for path in Path("/proc/self/task").glob("*/children") for x in path.read_text().split()}


def test_a_child_returns_a_value_and_leaves_this_process_as_it_is():
    before = len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGTERM)
    others = children()
    assert confined.call("x", lambda a: {"a": a, "pid": os.getpid()}, 3)["pid"] != os.getpid()
    with pytest.raises(confined.Raised, match=r"^BaseException: a panic$"):
        confined.call("x", panic)
    assert children() <= others  # none is left
    assert before == (len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGTERM))


# ---------- folders of models


@pytest.fixture
def tiny(tmp_path):
    whole = model.load_tokenizer("tiny").name_or_path
    folder = tmp_path / "whole"
    shutil.copytree(whole, folder)
    return folder


TEMPLATES = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro f(n) %}{% for i in range(9999) %}{{ n }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{{ f(1) }}{% endfor %}",
    "a text doubled": "{% set n = namespace(x='a' * 99) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}{{ n.x }}",
    "a constant": "{{ 'a' * 10 ** 11 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a filter": "{{ 'a' | center(99999999999) }}",
    "with a system prompt only": "{% if messages[0].role == 'system' %}{{ 9 ** (9 ** 9) }}{% endif %}",
    "with tools only": "{% if tools %}{{ 9 ** (9 ** 9) }}{% endif %}",
    "long": "{{ 'a' * 2000000 }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_has_limits(name, tiny):
    (tiny / "chat_template.jinja").write_text(TEMPLATES[name])
    with pytest.raises(ValueError, match=r"^tokenizer: .*chat template") as error:
        model.load_tokenizer(tiny)
    assert "\n" not in str(error.value)


def nested(depth):
    return json.loads('{"type": "Sequence", "normalizers": [' * depth + "]}" * depth)


def with_pattern(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]}}


TOKENIZERS = {
    "a pattern that repeats repeats": with_pattern("((((a{1000}){1000}){1000}){1000})"),
    "a pattern that tries all ways": with_pattern("(a|a?)+(a|a?)+(a|a?)+$b"),
    "deep": {"normalizer": nested(60)},
    "a token's number": {"added_tokens": [{
        "id": 2**32 - 1, "content": "x", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }]},
    "a template of nothing": {"post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [],
        "special_tokens": {},
    }},
    "padding": {"padding": {
        "strategy": {"Fixed": 2**60}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    }},
    "truncation": {"truncation": {
        "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 2**60,
    }},
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_loaded_or_refused_in_one_line(name, tiny):
    path = tiny / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | TOKENIZERS[name]))
    try:
        model.load_tokenizer(tiny)
    except ValueError as error:
        assert str(error).startswith("tokenizer: ") and "\n" not in str(error), error


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
@pytest.mark.parametrize("what", ["pipe", "device"])
def test_a_folder_with_a_pipe_is_refused(file, what, tiny):
    kept = (tiny / file).read_bytes() if (tiny / file).exists() else None
    (tiny / file).unlink(missing_ok=True)
    os.mkfifo(tiny / file) if what == "pipe" else (tiny / file).symlink_to("/dev/zero")
    for load in (model.load, model.load_tokenizer, model.load_reward):
        with pytest.raises(ValueError, match=rf"model: .*{file}: expected a file or a folder, got a pipe"):
            load(tiny)
    (tiny / file).unlink()
    if kept is not None:
        (tiny / file).write_bytes(kept)


ADAPTERS = {
    "targets": {"target_modules": "(.*)*(.*)*z"},
    "exclusions": {"target_modules": ["q_proj"], "exclude_modules": "(.*)*(.*)*z"},
    "ranks": {"target_modules": ["q_proj"], "rank_pattern": {"(.*)*(.*)*z": 3}},
    "alphas": {"target_modules": ["q_proj"], "alpha_pattern": {"((a|b|.)+)+z": 3}},
    "layers": {
        "target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["(.*)*(.*)*(.*)*z"],
    },
    "no expression": {"target_modules": "(("},
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_expressions_of_an_adapter_have_limits(name, tmp_path):
    module = model.load("tiny")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **ADAPTERS[name]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "adapter_model.safetensors")
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^model: .*adapter_config.json: expected ") as error:
        lora_folders.with_adapter(module, tmp_path)
    assert "\n" not in str(error.value) and time.process_time() - began < 5


def test_expressions_of_a_quantised_model_have_limits(tiny):
    path = tiny / "config.json"
    bomb = {"quant_method": "fp8", "modules_to_not_convert": ["(.*)*(.*)*z"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": bomb}))
    with pytest.raises(ValueError, match=r"^model: .*quantization_config: expected to be read within 1 s"):
        model.load(tiny)


# ---------- files of other libraries


def doubled(names):
    return "A0=(x x x x)\n" + "".join(f'A{i + 1}=("${{A{i}[@]}}" "${{A{i}[@]}}")\n' for i in range(names))


BOMBS = {
    "a.sh": [
        "A=()\nA+=('' '')\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + 'run "${A[@]}"',
        doubled(40) + 'run "${A40[@]}"',
        "eval " * 3000 + "run",
        "eval 'eval \"eval " + "$(eval " * 2000 + "run" + ")" * 2000 + "\"'",
        "run $((" + "(" * 20000 + "1" + ")" * 20000 + "))",
        "run $((" + "1+" * 100000 + "1))",
        "A=1\n" * 400_000 + "run --a $A",
        "run ${A:-" * 3000 + "}" * 3000,
        "A=" + "a" * 15000 + "\nrun ${A//" + "*a" * 400 + "b/c}",
    ],
    "a.toml": [
        "a = " + "[" * 100_000 + "]" * 100_000,
        "a = " + "{b=" * 5000 + "1" + "}" * 5000,
        "[" + "a." * 100_000 + "b]\nc = 1",
        "\n".join(f"[[{'a.' * k}b]]" for k in range(1, 1500)),
    ],
    "a.yaml": ["a: " + "[" * 100_000, "b0: &b0 [1, 2]\n" + "".join(
        f"b{i + 1}: &b{i + 1} [*b{i}, *b{i}]\n" for i in range(40)
    )],
    "a.json": ["[" * 1_000_000, '{"a":' * 100_000 + "1" + "}" * 100_000],
    "a.py": [
        "from trl import GRPOConfig\nGRPOConfig(learning_rate=" + "(" * 50_000 + "1" + ")" * 50_000 + ")",
        "from trl import GRPOConfig\nGRPOConfig(seed=" + "-" * 100_000 + "1)",
        "from trl import GRPOConfig\na0 = 'x' * 10\n"
        + "".join(f"a{i + 1} = a{i} + a{i}\n" for i in range(40)) + "GRPOConfig(run_name=a40)",
        "from trl import GRPOConfig\na0 = [1, 2]\n"
        + "".join(f"a{i + 1} = [a{i}, a{i}]\n" for i in range(25)) + "GRPOConfig(run_name=a25)",
        "from trl import GRPOConfig\na0 = 99999999999\n"
        + "".join(f"a{i + 1} = a{i} * a{i}\n" for i in range(28)) + "GRPOConfig(seed=a28)",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, number", [(name, i) for name, texts in BOMBS.items() for i in range(len(texts))]
)
def test_a_bomb_in_a_script_is_read_or_refused(name, number, tmp_path):
    path = tmp_path / name
    path.write_text(BOMBS[name][number])
    began = time.process_time()
    try:
        read(str(path))
    except ValueError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 1000
    assert time.process_time() - began < 2


def test_an_alarm_of_this_process_is_kept():
    signal.setitimer(signal.ITIMER_REAL, 1000)
    confined.call("x", int)
    assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 900
