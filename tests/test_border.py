"""What comes in from outside: every reader of the package is listed here, and is fed the same lies."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import chats
import pytest
import torch
from each_case import each
from safetensors.torch import save_file
from test_house import ROOT

import rft_fn as rft
from rft_fn import border, ckpt
from rft_fn.data import file_formats, messages, template_variables
from rft_fn.data.medium import columns_of
from rft_fn.engine import EngineConfig, openai, served_words, sglang, speculative
from rft_fn.engine.server_protocol import Ask, Client, Described, Fault, check_reply
from rft_fn.foreign_json import parse_json
from rft_fn.model import head_folders, lora_folders
from rft_fn.reward import verdicts, wire, wire_openrlhf
from rft_fn.reward.results import read_result
from rft_fn.run import card, claim, config_file, earlier_run, files, manifest, plot, rollout_files
from rft_fn.strategy import diagnose
from rft_fn.tools import watch
from rft_fn.tools.page import build, recorded
from rft_fn.tools.serving import model_wire
from rft_fn.types import Sampling

# ----------------------------------------------------------------------------------- the readers, by the code

MODULES = {"json", "pickle", "torch", "tomllib", "yaml", "csv", "ast", "datasets", "safetensors", "np"}
OF_MODULES = {"loads", "load", "raw_decode", "reader", "literal_eval", "load_dataset", "load_dataset_builder"}
OF_MODULES |= {"safe_load", "SafeLoader", "frombuffer"}
OURS = {"parse_json", "json_at", "read_json", "json_rows", "safe_open", "load_file"}


def readers():
    """{FILE:FUNCTION: the calls in it that make values of what was written elsewhere}."""
    found: dict[str, set[str]] = {}

    def visit(node, trail, where):
        for child in ast.iter_child_nodes(node):
            inner = trail
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = [*trail, child.name]
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name | ast.Attribute):
                of = child.func.value if isinstance(child.func, ast.Attribute) else None
                called = child.func.id if isinstance(child.func, ast.Name) else child.func.attr
                of_module = isinstance(of, ast.Name) and of.id in MODULES and called in OF_MODULES
                answer = called == "json" and of is not None and not child.args  # of a response
                if of_module or answer or called in OURS:
                    found.setdefault(f"{where}:{'.'.join(inner)}", set()).add(called)
            visit(child, inner, where)

    root = ROOT / "rft_fn"
    for path in sorted(root.rglob("*.py")):
        visit(ast.parse(path.read_text()), [], path.relative_to(root).as_posix())
    return found


# ------------------------------------------------------------------------------------------------- the lies

# as text of JSON, in the place of each value of an answer that is well
LIES = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", f"1{'0' * 400}", f"1{'0' * 5000}", str(2**63)]
LIES += [str(10**9), "-1", "128", "-1e30", "1e30", "5", "5.5", "0.5", "3.0", "true", "null", '"7"', '"NaN"']
LIES += ["[]", "{}", "[1]", '[{"a": 1}]', '"\\ud800"', '""', '"x\\ny"', "[" * 150 + "]" * 150]
TEXTS = [b"", b"{", b"[]", b"null", b"3", b'"x"', b"NaN", b"1e999", b"[" * 100_000, b"\xff\xfe{", b"[{}]"]
TEXTS += [b'{"a": "\\ud800"}', b"<html>", b"\x00"]
HOLE = "a place that no text has"


class Reader(NamedTuple):
    """How a reader is fed."""

    right: Any  # what is well
    read: Callable[[bytes, Path], Any]
    must: dict[str, Callable[[Any], bool]] = {}  # noqa: RUF012  place -> whether a value may be taken there
    errors: tuple[type[Exception], ...] = (ValueError,)
    lines: bool = False  # the text is a line of a file, which ends where a line is no JSON: a kill cuts one


def places(x, trail=""):
    """The path of every value inside, itself included."""
    yield trail
    inner = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for name, value in inner:
        yield from places(value, f"{trail}/{name}")


def with_lie(x, place, lie):
    """The text of x with a lie in one place."""
    _, *trail = place.split("/")
    if not trail:
        return lie
    copy = json.loads(json.dumps(x))
    at = copy
    for name in trail[:-1]:
        at = at[int(name) if isinstance(at, list) else name]
    at[int(trail[-1]) if isinstance(at, list) else trail[-1]] = HOLE
    return json.dumps(copy).replace(json.dumps(HOLE), lie)


def lied(reader, tmp_path):
    """Feed a reader every lie: those that it took and must not, and errors that are none of its own."""
    wrong = []

    def fed(data, what, allowed):
        try:
            reader.read(data, tmp_path)
        except reader.errors as error:
            if "\n" in str(error) or len(str(error)) > 700:
                wrong.append(f"{what}: not one line: {str(error)[:200]!r}")
        except BaseException as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        else:
            if not allowed:
                wrong.append(f"{what}: was taken")

    for place in places(reader.right):
        rules = [rule for pattern, rule in reader.must.items() if re.fullmatch(pattern, place)]
        for lie in LIES:
            try:
                value = parse_json(lie)
                allowed = all(rule(value) for rule in rules)
            except ValueError:
                allowed = reader.lines or not rules
            fed(with_lie(reader.right, place, lie).encode(), f"{place} = {lie[:20]}", allowed)
    for data in TEXTS:
        fed(data, f"text {data[:20]}", True)
    return wrong


def number(x):
    return type(x) in (int, float) and abs(x) < 3.4e38


def absent_or_number(x):
    return x is None or x is True or x != x or (isinstance(x, float) and abs(x) > 1e300) or number(x)


def log_prob(x):
    return number(x) and -1e5 <= x <= 1e-3


def token(x):
    return type(x) is int and 0 <= x < 48


def a_text(x):
    return isinstance(x, str)


def at_least_0(x):
    return type(x) is int and 0 <= x < 2**63


# ------------------------------------------------------------------------------------------- what servers say

KNOWN = {
    "generate": Described(openai.GENERATE, "tiny", 99, "7", frozenset()),
    "completions": Described(openai.COMPLETIONS, "tiny", 99, "7", frozenset()),
    "sglang": Described("/generate", "tiny", 99, "7", frozenset()),
}
ASK = Ask([3, 4, 5], 7, Sampling(), 4, [1])
SERVED = (Fault,)


def served(data, kind, ask):
    """What a server of one answer says."""
    client = Client()

    async def exchange(*_):
        return SimpleNamespace(status=200, data=data, words="")

    client.__dict__["_exchange"] = exchange
    make = sglang.protocol if kind == "sglang" else openai.protocol
    return ask(make(client, 5.0), client, KNOWN[kind])


def sample_of(kind):
    def ask(protocol, client, known):
        reply = protocol.sample("http://x", known, ASK)
        check_reply(reply, ASK, vocabulary=48, label="7")

    return lambda data, _: served(data, kind, ask)


def words_of(kind, top_k=2):
    def ask(protocol, client, known):
        config = EngineConfig(type="sglang" if kind == "sglang" else "openai", servers=("http://x",))
        asked = served_words.ServedWords("http://x", protocol, client, known, config, vocabulary=48)
        return asked.ask([3, 4, 5], top_k)

    return lambda data, _: served(data, kind, ask)


def described(kind):
    return lambda data, _: served(data, kind, lambda protocol, client, known: protocol.describe("http://x"))


ROWS = [
    None,
    {"4": {"logprob": -0.5}, "9": {"logprob": -2.0}},
    {"5": {"logprob": -3}, "7": {"logprob": -0.25}},
]
ROWS[2]["8"] = {"logprob": -2.5}
ENTRIES = [[None, 3, None], [-0.5, 4, None], [-3.0, 5, None]]
BEST = [None, [[-0.5, 4, None], [-2.0, 9, None]], [[-0.25, 7, None], [-2.5, 8, None]]]
ABOUT = {"finish_reason": {"type": "length"}, "weight_version": "7"}
GENERATED = {"token_ids": [8, 1], "logprobs": {"content": [{"token_id": 8, "logprob": -0.5}] * 2}}
GENERATED["logprobs"]["content"] = [{"token_id": t, "logprob": p} for t, p in ((8, -0.5), (1, -1.5))]
SAMPLED = {
    "generate": ({"choices": [GENERATED]}, {".*/token_ids/.*": token, ".*/logprob": log_prob}),
    "completions": (
        {"choices": [{"token_ids": [8, 1], "logprobs": {"token_logprobs": [-0.5, -1.5]}}]},
        {".*/token_ids/.*": token, ".*/token_logprobs/.*": log_prob},
    ),
    "sglang": (
        {
            "output_ids": [8, 1],
            "meta_info": ABOUT | {"output_token_logprobs": [[-0.5, 8, None], [-1.5, 1, None]]},
        },
        {"/output_ids/.*": token, ".*/output_token_logprobs/./0": log_prob},
    ),
}
SGLANG_WORDS = {"input_token_logprobs": ENTRIES, "input_top_logprobs": BEST}
SCORED = {
    "generate": ({"prompt_logprobs": ROWS}, {"/prompt_logprobs/[12]/.*/logprob": log_prob}),
    "completions": (
        {"choices": [{"prompt_logprobs": ROWS}]},
        {".*/prompt_logprobs/[12]/.*/logprob": log_prob},
    ),
    "sglang": (
        {"output_ids": [3], "meta_info": ABOUT | SGLANG_WORDS},
        {
            ".*/input_token_logprobs/[12]/0": log_prob,
            ".*/input_top_logprobs/[12]/./0": log_prob,
            ".*/input_top_logprobs/[12]/./1": token,
        },
    ),
}
CALL = [
    *(Reader(right, sample_of(kind), must, SERVED) for kind, (right, must) in SAMPLED.items()),
    *(Reader(right, words_of(kind), must, SERVED) for kind, (right, must) in SCORED.items()),
    Reader(
        {"data": [{"id": "m", "max_model_len": 9}]}, described("generate"), {"/data/0/id": a_text}, SERVED
    ),
]


# --------------------------------------------------------------------------------------- files, and requests


def file_of(name, read):
    """Write what is fed into a file, and read that."""

    def fed(data, tmp_path):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return fed


def line_of(name, read):
    """Write it as the second line of a file of a run, behind one that is well."""

    def fed(data, tmp_path):
        first = json.dumps(RUN[Path(name).name][0] | {"step": 0}).encode()
        return file_of(name, read)(first + b"\n" + data + b"\n", tmp_path)

    return fed


TOKENS = {"step": 1, "group": 0, "prompt": "p", "reward": 1.0, "pieces": ["a", "b"], "mask": [1, 1]}
TOKENS |= {
    "logp": [-0.5, None],
    "conversation": [{"role": "user", "content": "x"}],
    "media": [["image", "a", ""]],
}
RUN = {
    "metrics.jsonl": ({"step": 1, "loss": 0.5, "lr": None}, {"/loss": absent_or_number}),
    "timing.jsonl": ({"step": 1, "seconds": 2.5}, {"/seconds": absent_or_number}),
    "distributions.jsonl": ({"step": 1, "length": [1, 2, 3, 4, 5, 6, 7]}, {"/length/.": number}),
    "tokens.jsonl": (TOKENS, {"/pieces/.": a_text, "/mask/.": absent_or_number, "/logp/.": absent_or_number}),
    "trajectories.jsonl": ({"step": 1, "prompt": "p", "response": "r", "reward": 0.5}, {}),
    "overrides.jsonl": ({"step": 1, "name": "lr", "old": 1.0, "new": 2.0}, {"/name": a_text}),
}


def shown(path):
    """All that people look at a run with."""
    (path.parent / "config.json").write_text('{"steps": 2}')
    if path.name != "metrics.jsonl":
        (path.parent / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    if path.name == "tokens.jsonl" or path.name == "distributions.jsonl":  # no first row of another form
        path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    found = recorded.read(path.parent)
    watch.frame(found)
    build._data([found], 10**6)
    for other in path.parent.glob("*.jsonl"):
        other.unlink()


def row_reader(name, read, must, folder=""):
    """The reader of a file of a run."""
    return Reader(RUN[name][0], line_of(f"{folder}{name}", read), must, lines=True)


SHOWN = [
    row_reader(name, shown, must, "run/") for name, (_, must) in RUN.items() if name != "overrides.jsonl"
]
METRICS = row_reader("metrics.jsonl", plot.read_metrics, {"/step": at_least_0})


def kept(path):
    files.keep_until(path, 2)


def carded(path):
    list(card._metric_lines(card._rows(path.parent, 3)))


def changed(path):
    list(card._changes(path.parent, 3))


REQUEST = {
    "prompts": ["p", "q"],
    "completions": ["c", [{"role": "assistant", "content": "x"}]],
    "columns": {"answer": ["1", 2]},
    "completion_ids": [[1, 2], [3]],
    "prompt_texts": ["p", "q"],
    "truncated": [True, False],
    "groups": [0, 1],
    "keys": [5, 6],
    "files": [{"kind": "image", "mime": "image/png", "base64": "aGk="}],
    "media": [[0], []],
    "state": {"global_step": 1, "epoch": 0.5},
}
REQUEST_MUST = {
    "/completion_ids/./.": at_least_0,
    "/truncated/.": lambda x: isinstance(x, bool),
    "/prompt_texts/.": a_text,
    "/(groups|keys)/.": lambda x: type(x) is int and -(2**63) <= x < 2**63,
    "/media/./.": lambda x: type(x) is int and x == 0,
    "/files/./(kind|mime)": a_text,
    "/state/.*": lambda x: isinstance(x, bool) or number(x),
}
ANSWER = {
    "rewards": [0.5, None],
    "parts": {"a": [1, 2]},
    "metrics": {"n": [1.0, None]},
    "extra": {"why": ["x", 3]},
}
number_or_none = {
    "/rewards/.": lambda x: x is None or number(x),
    "/(parts|metrics)/./.": lambda x: x is None or number(x),
}
THEIRS = {"rewards": [0.5, 1], "scores": [1, 2], "extra_logs": {"n": [1, 2], "m": 3.0}}


def adapters(path):
    return lora_folders.read_adapter_config(path.parent)


def heads(path):
    return head_folders._described(str(path.parent))


def fault(path):
    save_file({"tokens": torch.ones(3, dtype=torch.long)}, path.parent / "sequence.safetensors")
    save_file({"w": torch.ones(1)}, path.parent / "weights.safetensors")
    try:
        return diagnose.load_fault(path.parent)
    except TypeError as error:  # the pack has no other fields here: the file itself was taken
        assert "Packed" in str(error) or "argument" in str(error)


def rows_of(path):
    table = file_formats.READERS[path.suffix]([path], None)
    return [table[i] for i in range(len(table))]


def spoken(parser):
    return lambda data, _: parser(data.decode(errors="replace"))


def cells(data, _):
    return columns_of({"images": data.decode(errors="replace")})


HOOKS: dict[str, Any] = {
    "border/json_files.py:read_json": Reader(
        {"a": [1.5, "x"]}, lambda data, _: border.read_json(data), {"/a/0": lambda x: x == x}
    ),
    "border/json_files.py:json_rows": SHOWN,
    "engine/server_protocol.py:Client.call": CALL,
    "engine/speculative.py:of_option": Reader(
        {"method": "ngram", "num_speculative_tokens": 4},
        spoken(speculative.of_option),
        {"/method": a_text, "/num_speculative_tokens": lambda x: x is None or (at_least_0(x) and x > 0)},
    ),
    "reward/wire.py:read_request": Reader(REQUEST, lambda data, _: wire.read_request(data), REQUEST_MUST),
    "reward/wire.py:read_answer": Reader(ANSWER, lambda data, _: wire.read_answer(data, 2), number_or_none),
    "tools/serving/model_wire.py:_object": Reader(
        {"reward": 0.5}, lambda data, _: model_wire.read_reward(data), {"/reward": number}
    ),
    "reward/wire_openrlhf.py:read_openrlhf_request": Reader(
        {"query": ["pq"], "prompts": ["p"], "labels": ["x"]},
        lambda data, _: wire_openrlhf.read_openrlhf_request(data),
        {"/(query|prompts)/0": a_text},
    ),
    "reward/wire_openrlhf.py:read_openrlhf_answer": Reader(
        THEIRS,
        lambda data, _: wire_openrlhf.read_openrlhf_answer(data, 2),
        {
            "/(rewards|scores)/.": lambda x: x is None or number(x) or x == [1],
            "/extra_logs/n/.": lambda x: x is None or number(x),
        },
    ),
    "reward/verdicts.py:_objects": Reader({"score": 7}, spoken(verdicts.JsonNumber())),
    "run/plot.py:read_metrics": METRICS,
    "tools/page/recorded.py:read": SHOWN[:1],
    "run/files.py:keep_until": row_reader("metrics.jsonl", kept, {"/step": at_least_0}),
    "run/earlier_run.py:settings": Reader(
        {"lr": 0.5, "steps": 3},
        file_of("config.json", lambda path: earlier_run.settings(path.parent)),
        {"/lr": lambda x: x == x},
    ),
    "run/card.py:_rows": row_reader("metrics.jsonl", carded, {"/step": at_least_0}),
    "run/card.py:_changes": row_reader("overrides.jsonl", changed, {"/name": a_text}),
    "run/claim.py:_described": Reader({"pid": 1, "host": "h", "since": "x"}, spoken(claim._described)),
    "run/manifest.py:read": Reader(
        {"files": {"model": {"digest": "x"}}},
        file_of(manifest.NAME, lambda path: manifest.read(path.parent)),
        {"/files/model/digest": a_text},
    ),
    "run/config_file.py:_json": Reader({"lr": 0.5}, file_of("c.json", config_file._read)),
    "run/config_file.py:_yaml": Reader({"lr": 0.5}, file_of("c.yaml", config_file._read)),
    "model/lora_folders.py:read_adapter_config": Reader({"r": 8}, file_of("adapter_config.json", adapters)),
    "model/head_folders.py:_described": Reader(
        {"heads": [{"name": "a"}], "pool": "last"}, file_of(head_folders.HEADS, heads), {"/pool": a_text}
    ),
    "strategy/diagnose.py:load_fault": Reader(
        {"step": 3, "rank": 0, "row": 1},
        file_of("fault.json", fault),
        {"/step": at_least_0, "/rank": lambda x: x is None or at_least_0(x)},
    ),
    "data/file_formats.py:_parse_object": Reader({"q": "x", "n": 1}, file_of("rows.jsonl", rows_of)),
    "data/file_formats.py:_whole": Reader([{"q": "x", "n": 1}], file_of("rows.json", rows_of)),
    "data/file_formats.py:_is_json": Reader([{"q": "x", "n": 1}], file_of("rows.json", rows_of)),
    "data/messages.py:_json": Reader([{"role": "user"}], spoken(messages._listed)),
    "data/medium.py:_cells": Reader(["a.png"], cells),
    "data/template_variables.py:literals": Reader(
        {"a": 1}, spoken(lambda x: template_variables.literals((f"name={x}",)))
    ),
}
"""What each reader is fed with; FILE:FUNCTION as `readers` finds them."""

PRINTED = "values are printed for a person, and never computed with"
TOLD = "text of a model; its error is told to the model"
TYPED = "typed by the file; values are read where a column is used"
WEIGHTS = "weights: names and shapes compared, every number finite"
FREE = {
    "ckpt/folder.py:read_meta": "fed by test_a_checkpoint_with_other_values_is_refused, below",
    "ckpt/folder.py:_static": "text that it has written itself",
    "ckpt/layout.py:read": "the digest of each file is compared before it, and shapes and types",
    "confined.py:call": "bytes of a fork of this process",
    "reward/rubric_judge.py:criteria_of": "criteria of the data, whose names, weights and vetoes it checks",
    "run/mirror.py:_whole": "names and sizes; fed by tests/run/test_mirror.py",
    "reward/unit_tests.py:cases_of": "tests of the data, whose forms it checks",
    "sandbox/call_tests.py:_Asker.ask": "literals of the code, in a process whose end is a failed test",
    "sandbox/call_tests.py:_candidate": "literals of the tests",
    "sandbox/launcher.py:main": "the plan of this process",
    "sandbox/program.py:_read": "what the launcher tells, through a pipe that the program does not have",
    "data/decode.py:_wave": "samples of a WAV file, integers of a known width",
    "data/file_formats.py:_cells": "a CSV's cells are texts",
    "data/file_formats.py:_csv": "a CSV's cells are texts",
    "data/file_formats.py:_line_begins": "bytes, in which line ends are looked for",
    "data/file_formats.py:_read_parquet": TYPED,
    "data/processing.py:Cache._stored": "fed by test_a_damaged_cache_is_made_again, below",
    "data/row_cache.py:_tensors": "a checksum, and test_row_cache: a damaged or foreign file is made again",
    "data/row_cache.py:write": "arrays of this process",
    "data/row_workers.py:_answer": "answers of a process of its own",
    "data/sources.py:_layout": TYPED,
    "data/sources.py:_on_hub.load": TYPED,
    "engine/process.py:_Shared.__next__": "memory that the parent has written",
    "engine/process.py:_portable": "what it has pickled in the same line",
    "engine/process.py:_Server.answer": "requests of the parent, which has started this process",
    "engine/process.py:_Process.receive": "answers of a process of its own",
    "engine/requests.py:_adds_its_text": "how the loaded tokenizer writes its own decoder",
    "engine/weight_folder.py:Writer._link": "a folder that this process has written",
    "engine/weight_stage.py:_mapped": "memory of another worker, of the size that this one has received",
    "engine/weight_delta.py:Kept.read": "a folder that the trainer has written; a checksum for each tensor",
    "engine/weight_delta.py:_unzipped": "bytes of such a folder; the checksum of the result is compared",
    "engine/weight_delta.py:difference": "bytes that it has made itself",
    "engine/weight_folder.py:_stored": "a folder of the trainer; each tensor is met by LoadCheck",
    "engine/weight_folder.py:with_tied": "names of the trainer; each tensor is met by LoadCheck",
    "environment/call_forms.py:Objects.read": TOLD,
    "environment/call_forms.py:_Braces._value": TOLD,
    "environment/call_forms.py:_NameAndObject.read": TOLD,
    "environment/call_forms.py:_arguments": TOLD,
    "environment/call_forms.py:_as_name_and_object": TOLD,
    "environment/call_forms.py:_as_objects": TOLD,
    "environment/call_forms.py:_literal": TOLD,
    "environment/tool_use.py:_value": "text of a model; typed by the tool's signature",
    "model/classifier.py:pad_alike": "a config that this process has written",
    "model/head_folders.py:saved_heads": WEIGHTS,
    "model/head_folders.py:_in_files": WEIGHTS,
    "model/load.py:load_processor": "names of towers alone are looked for",
    "model/load.py:_smolvlm": "options of a processor, which checks them",
    "model/lora_folders.py:read_adapters": WEIGHTS,
    "model/weight_files.py:_headers": WEIGHTS,
    "model/weight_files.py:slices": WEIGHTS,
    "model/pretrained.py:require_held": "names of weights alone",
    "model/pretrained.py:unreadable": "a header, to say which file is broken",
    "option_help.py:_comments": "the source of this package",
    "reward/from_spec.py:_arguments": "what the user has typed",
    "reward/verifiable.py:_listed": "a list of texts alone; anything else stays the text that it is",
    "reward/mathematics.py:_serve": "lines that its parent writes",
    "rng.py:_words": "a digest that it has computed",
    "run/claim.py:Claim._first_difference": "marks of rows, compared as bytes",
    "run/rollout_files.py:_ordered": "bytes that the library has made in the line before",
    "run/rollout_files.py:read_rollout": "fed by test_a_rollout_file_that_lies_is_refused_in_a_line, below",
    "strategy/config.py:_docs": "the source of this package",
    "migrate/foreign_files.py:_parsed": PRINTED,
    "migrate/foreign_files.py:_of_yaml": PRINTED,
    "migrate/foreign_files.py:_of_notebook": PRINTED,
    "migrate/tables.py:plain": "a table of this package",
    "migrate/tables.py:read": "a table of this package",
    "data/reasoning_gym.py:_options": "options of a command, refused in tests/data/test_reasoning_gym.py",
    "tools/launch/ports.py:_kept": "a file of its own, refused otherwise in tests/run/test_launch_file.py",
    "tools/launch/roles.py:read": "a file of the user, refused in tests/run/test_launch_file.py",
    "tools/plan/cards.py:machine": "a table of this package",
}
"""Readers that are fed elsewhere, or whose values come from nobody else; and why."""


def test_every_reader_of_the_package_is_listed():
    """A new door is in one of the two tables, or this fails; and no entry outlives its reader."""
    found = readers()
    listed = HOOKS.keys() | FREE.keys()
    assert not sorted(found.keys() - listed), (
        "readers that nothing feeds: they belong into HOOKS, or into FREE with why"
    )
    assert not sorted(listed - found.keys()), "no readers any more"
    assert not HOOKS.keys() & FREE.keys()


def fed(name):
    return HOOKS[name] if isinstance(HOOKS[name], list) else [HOOKS[name]]


@pytest.mark.parametrize("name", HOOKS)
def test_no_lie_passes_a_reader(name, tmp_path):
    """Each lie in the place of each value ends in one line, or is of a value that nothing computes with."""
    wrong = []
    for i, reader in enumerate(fed(name)):
        reader.read(json.dumps(reader.right).encode(), tmp_path)
        wrong += [f"{i}: {line}" for line in lied(reader, tmp_path)]
    assert not wrong, f"{len(wrong)} lies, such as\n" + "\n".join(wrong[:25])


def test_1e999_is_no_number():
    """Python's reader makes infinity of it, whatever it makes of NaN."""
    for lie in ("1e999", "-1e999", "NaN", "Infinity", f"1{'0' * 5000}"):
        with pytest.raises(ValueError):
            border.read_json(f'{{"a": [{lie}]}}')
    assert border.read_json('{"a": [1e308, 1e-999]}') == {"a": [1e308, 0.0]}


# --------------------------------------------------------------------------- words of a teacher, one by one


WELL = {"ids": [[4, 9], [7, 8]], "logp": [[-0.5, -2.0], [-0.25, -2.5]]}
WORDS = {
    "one word twice": ({"ids": [[4, 4], [7, 8]]}, "words[0]: expected 2 words that differ, got [4, 4]"),
    "beyond the vocabulary": (
        {"ids": [[4, 48], [7, 8]]},
        "words[0]: expected whole numbers from 0 to 47, got 48",
    ),
    "a mass of 3": (
        {"logp": [[-0.5, -2.0], [-0.0, -0.0]]},
        "words[1]: expected a probability of at most 1 together",
    ),
    "the least first": ({"logp": [[-0.5, -2.0], [-2.5, -0.25]]}, "words[1]: expected the likeliest first"),
    "above 0": ({"logp": [[5.0, -2.0], [-0.25, -2.5]]}, "words[0]: log-probs: expected finite numbers in"),
    "too few": ({"ids": [[4], [7, 8]]}, "words[0]: expected 2 entries, got 1"),
    "another log-prob of the token": (
        {"own": [-1.5, -3.0]},
        "words[0]: expected the log-prob that the token itself has",
    ),
    "a likelier token": ({"own": [-0.5, -2.0]}, "words[1]: expected no word that is likelier"),
    "no places": ({"ids": []}, "words: expected 2 entries, got 0"),
}


@each("name", WORDS)
def test_words_that_no_model_has_are_refused(name):
    given = WELL | {"own": [-0.5, -3.0]}
    border.words(top_k=2, vocabulary=48, tokens=[4, 5], **given)
    lie, line = WORDS[name]
    with pytest.raises(ValueError, match=re.escape(line)):
        border.words(top_k=2, vocabulary=48, tokens=[4, 5], **given | lie)


def test_words_of_a_model_in_bfloat16_pass():
    """Rounding is no lie."""
    torch.manual_seed(3)
    for scale in (0.1, 3.0, 30.0):
        logp = (torch.randn(200, 48) * scale).bfloat16().float().log_softmax(-1)
        best = logp.topk(48, -1)
        token = torch.randint(0, 48, (200,))
        own = logp.gather(-1, token[:, None])[:, 0].tolist()
        lists = best.indices.tolist(), best.values.tolist()
        border.words(*lists, top_k=48, vocabulary=48, tokens=token.tolist(), own=own)


# ------------------------------------------------------------------------------------------ files of tensors


def rollout_tensors():
    tokens = torch.tensor([[3, 4, 5, 0], [3, 4, 5, 6], [7, 8, 9, 1], [7, 8, 0, 0]])
    length = torch.tensor([3, 4, 4, 2])
    mask = (torch.arange(4) > 0) & (torch.arange(4) < length[:, None])
    return {
        "tokens": tokens,
        "mask": mask,
        "logp": torch.where(mask, -0.5, 0.0),
        "length": length,
        "truncated": torch.tensor([False, True, False, False]),
        "group": torch.tensor([0, 0, 1, 1]),
        "version": torch.zeros(4, dtype=torch.long),
        "reward": torch.tensor([[0.0, 1.0], [0.5, 0.5]]),
    }


def put(name, at, value):
    def lie(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][at] = value

    return lie


def other(name, change):
    def lie(tensors):
        tensors[name] = change(tensors[name]).contiguous()

    return lie


NAN = float("nan")
ROLLOUTS = {
    "log-prob +5": (put("logp", (0, 1), 5.0), "logp: expected numbers in [-100000, 0.001], got 5.0"),
    "log-prob NaN": (put("logp", (0, 1), NAN), "logp: expected numbers"),
    "log-prob -inf": (put("logp", (0, 1), -torch.inf), "logp: expected numbers"),
    "log-prob -1e30": (put("logp", (0, 1), -1e30), "logp: expected numbers"),
    "log-prob outside mask": (put("logp", (0, 3), -1.0), "logp: expected 0 outside mask"),
    "a negative group": (put("group", 0, -1), "group: expected 2 rows of each of 2 prompts in order"),
    "a group of one": (put("group", 1, 1), "group: expected 2 rows of each"),
    "a group beyond": (put("group", 3, 7), "group: expected 2 rows of each"),
    "a negative token": (put("tokens", (0, 0), -1), "tokens: expected numbers in [0, 47], got -1"),
    "a token V": (put("tokens", (0, 0), 48), "tokens: expected numbers in [0, 47], got 48"),
    "length 0": (put("length", 0, 0), "length: expected numbers in [1, 4], got 0"),
    "length 9": (put("length", 0, 9), "length: expected numbers in [1, 4], got 9"),
    "a negative version": (put("version", 0, -1), "version: expected numbers of at least 0, got -1"),
    "mask on the first": (put("mask", (0, 0), True), "mask: expected tokens behind the first"),
    "mask beyond the length": (put("mask", (3, 3), True), "mask: expected tokens behind the first"),
    "reward NaN": (put("reward", (0, 0), NAN), "reward: expected numbers"),
    "reward inf": (put("reward", (0, 0), torch.inf), "reward: expected numbers"),
    "mask of floats": (other("mask", torch.Tensor.float), "mask: expected torch.bool, got torch.float32"),
    "tokens of floats": (other("tokens", torch.Tensor.float), "tokens: expected torch.int64"),
    "log-probs of bfloat16": (other("logp", torch.Tensor.bfloat16), "logp: expected torch.float32"),
    "truncated as numbers": (other("truncated", torch.Tensor.long), "truncated: expected torch.bool"),
    "flat tokens": (other("tokens", torch.flatten), "tokens: expected [B, S]"),
    "another length": (other("length", lambda x: x[:3]), "length: expected [B] = [4], got [3]"),
    "flat rewards": (other("reward", torch.flatten), "reward: expected [N, G]"),
    "few rewards": (other("reward", lambda x: x[:1]), "reward: expected 4 numbers, one for each response"),
    "no rows": (lambda x: x.update({n: y[:0] for n, y in x.items()}), "reward: expected 0 numbers"),
    "temperature 0": (
        lambda x: x.update(temperature=torch.zeros(4)),
        "temperature: expected finite numbers above 0",
    ),
    "experts as numbers of 64 bits": (
        lambda x: x.update(routing=torch.ones(4, 4, 2, 2, dtype=torch.long)),
        "routing: expected torch.uint8, got torch.int64",
    ),
    "experts of a token that nobody read": (
        lambda x: x.update(routing=torch.ones(4, 4, 2, 2, dtype=torch.uint8)),
        "routing: expected 0 from the last token of a row on",
    ),
    "a negative expert": (
        lambda x: x.update(routing=-torch.ones(4, 4, 2, 2, dtype=torch.int16)),
        "routing: expected numbers in [0, 32767], got -1",
    ),
    "no mask": (lambda x: x.pop("mask"), "expected the tensors tokens, mask, "),
    "one more": (lambda x: x.update(more=torch.ones(2)), "expected the tensors tokens, mask, "),
}
SAMPLINGS = ["", "[]", "0", '"x"', "{}", '{"stop": "abc"}', '{"stop": [], "temperature": -1}', "NaN"]
SAMPLINGS += [
    '{"stop": [], "temperature": 1e999}',
    '{"stop": [1.5]}',
    '{"stop": [], "more": 1}',
    "[" * 10_000,
]


def written(path, tensors, **about):
    save_file(tensors, path, {"sampling": "null", "media": "False"} | about)
    return path


@each("name", ROLLOUTS)
def test_a_rollout_file_that_lies_is_refused_in_a_line(name, tmp_path):
    lie, line = ROLLOUTS[name]
    tensors = rollout_tensors()
    rollout_files.read_rollout(written(tmp_path / "well", tensors), vocabulary=48)
    lie(tensors)
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        rollout_files.read_rollout(written(tmp_path / "lie", tensors), vocabulary=48)
    assert str(error.value).startswith("rollouts: expected a file that --rollouts-every wrote, got ")
    assert "\n" not in str(error.value)


def test_what_a_rollout_file_says_of_itself_is_checked(tmp_path):
    for about in [{"sampling": lie} for lie in SAMPLINGS] + [{"media": "True"}, {"media": ""}]:
        with pytest.raises(ValueError, match=r"^rollouts: expected a file [^\n]*$"):
            rollout_files.read_rollout(written(tmp_path / "lie", rollout_tensors(), **about))
    save_file(rollout_tensors(), tmp_path / "bare")
    for path in (tmp_path / "bare", tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=r"^rollouts: expected a file [^\n]*$"):
            rollout_files.read_rollout(path)


PLAIN = [
    ("floor", "x"),
    ("floor", True),
    ("floor", [1]),
    ("name", 3),
    ("count", 1.5),
    ("count", "3"),
    ("count", {}),
]


def test_a_checkpoint_with_other_values_is_refused(tmp_path):
    """Whoever lies can compute a digest too: the values are like those that the program asks for."""
    path = tmp_path / "step_00000001"
    state = rft.TrainState(params={"w": torch.ones(2)}, opt={}, step=3, tx=None)
    kept = {"floor": 0.5, "name": "x", "count": 3}

    def restored():
        like = rft.TrainState(params={"w": torch.zeros(2)}, opt={}, step=0, tx=None)
        return ckpt.restore(path, like, {"floor": 0.0, "name": "", "count": 0})[1]

    ckpt.save(path, state, kept)
    assert restored() == kept
    meta = json.loads((path / "meta.json").read_text())
    for name, lie in PLAIN:
        plain = meta["plain"] | {f"extra/{name}": lie}
        other = {**meta, "plain": plain}
        other["digest"] = ckpt.folder.sum_of(other)
        (path / "meta.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=rf"extra/{name}: expected a value like [^\n]*$"):
            restored()
    for text in TEXTS:
        (path / "meta.json").write_bytes(text)
        with pytest.raises(ValueError, match=r"is damaged \(meta.json: [^\n]*$"):
            restored()


def test_a_damaged_cache_is_made_again(tmp_path):
    from rft_fn.data.processing import Cache

    for text in ["", "[]", "{}", "[" * 1000, '{"names": 3, "notes": []}', '{"names": [], "notes": NaN}']:
        save_file({"ids": torch.tensor([1, 2])}, tmp_path / "key.safetensors", {"about": text})
        assert Cache(str(tmp_path))._stored("key") is None
    save_file(
        {"ids": torch.tensor([1.5, -2])},
        tmp_path / "key.safetensors",
        {"about": '{"names": [], "notes": []}'},
    )
    assert Cache(str(tmp_path))._stored("key") is None
    save_file(
        {"ids": torch.tensor([1, 2])}, tmp_path / "key.safetensors", {"about": '{"names": [], "notes": []}'}
    )
    assert Cache(str(tmp_path))._stored("key").ids == [1, 2]


# ------------------------------------------------------------------------------------- numbers in users' rows


CHOICE = {"question": "1=", "chosen": "1", "rejected": "2", "completion": "1", "completions": ["1", "2"]}
ASKED, SAID = {"role": "user", "content": "1="}, {"role": "assistant", "content": "1"}
TAKES = {"type": "function", "function": {"name": "f", "parameters": {"default": HOLE}}}


def called(arguments):
    """A talk with a call of a tool."""
    calls = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    return {"talk": [ASKED, calls, {"role": "tool", "content": "1"}]}


TALK = {"messages": ("talk",)}
OF_ROWS = {
    "text": (None, {"answer": HOLE}, {"template": "{question}{answer}"}),
    "margin": (rft.data.PAIRS, {"margin": HOLE}, {"margin": "margin"}),
    "preference": (rft.data.PAIRS, {"preference": HOLE}, {"preferences": ("preference",)}),
    "ranks": (rft.data.LISTS, {"ranks": [0, HOLE]}, {}),
    "scores": (rft.data.LISTS, {"scores": [0, HOLE]}, {}),
    "label": (rft.data.POINTS, {"label": HOLE}, {"labels": ("label",)}),
    "labels of steps": (rft.data.STEPS, {"labels": [1, HOLE]}, {"separator": "="}),
    "weight of a turn": (None, {"talk": [ASKED, SAID | {"weight": HOLE}]}, TALK | {"loss_on": "all"}),
    "a tool": (None, {"talk": [ASKED], "tools": [TAKES]}, TALK),
    "a call": (None, called({"x": [HOLE]}), TALK),
    "a call as text": (None, called(f"{{'x': {HOLE}}}"), TALK),
}
LABELS = ("margin", "preference", "ranks", "scores", "label", "labels of steps")


@each("name", OF_ROWS)
def test_a_number_of_a_row_that_is_used_is_finite(name, tmp_path):
    """JSON has no NaN, no Infinity, no 1e999; Python reads all three. A label is a float32 as well."""
    kind, columns, options = OF_ROWS[name]
    file, tokenizer = tmp_path / "rows.jsonl", chats.tokenizer(chats.CHATML)

    def load(number):
        text = json.dumps(CHOICE | columns).replace(json.dumps(HOLE), number).replace(HOLE, number)
        file.write_text(f"{text}\n".replace("'", '\\"') * 2)
        of_kind = {"kind": kind} if kind else {}
        rft.data.load(str(file), tokenizer, **{"template": "{question}"} | options | of_kind)

    load("1")
    for lie in (
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        *(("1e39", f"1{'0' * 400}") if name in LABELS else ()),
    ):
        line = rf"^data: {file}, lines 1, 2: [^\n]*(expected|is empty)[^\n]*$"
        with pytest.raises(ValueError, match=line):
            load(lie)


def test_a_reference_is_finite():
    for lie in (NAN, float("inf"), [1.0, -float("inf")]):
        for reward in ("exact", "numeric", "math", "boxed"):
            with pytest.raises(ValueError, match=r"^column 'answer': expected a text, a number, or"):
                rft.reward.parse([reward])(["1"], ["1"], {"answer": [lie]})


# ----------------------------------------------------------------------------- what a reward function returns


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


REWARDS = [NAN, float("inf"), 1e39, 10**400, 10**5000, "1", [1.0], {"x": 1}, Unprintable(), b"1", 1j]
FURTHER = [float("inf"), 10**400, -1e39]


def test_rewards_that_are_no_numbers_are_refused_in_a_line():
    for lie in REWARDS:
        for result in ([0.5, lie], {"rewards": [0.5, lie]}, [{"score": 0.5}, {"score": lie}]):
            with pytest.raises(ValueError, match=r"^reward 'it': [^\n]*$"):
                read_result("it", result, 2)
    for lie in FURTHER:
        with pytest.raises(ValueError, match=r"^reward 'it': more: expected finite numbers or None, got"):
            read_result("it", [{"score": 1.0, "more": 1}, {"score": 0.5, "more": lie}], 2)


def test_what_foreign_code_raises_is_an_exception():
    for error in (SystemExit(3), KeyboardInterrupt(), StopIteration(1), GeneratorExit(), BaseException("x")):
        made = border.contained(error)
        assert (
            isinstance(made, RuntimeError) and type(error).__name__ in str(made) and made.__cause__ is error
        )
    own = ValueError("x")
    assert border.contained(own) is own
    assert (
        border.quoted(Unprintable()) == border.printed(Unprintable(), repr) == "a value of type Unprintable"
    )
