"""docs/recipes: the files of a page are written and its programs run; its training commands run dry.

Small models stand for weights of the hub, and for its rows those of the page, in the data set's columns.
"""

import json
import os
import re
import sys
import wave
from dataclasses import replace
from pathlib import Path

import call_templates
import chats
import forks
import pages
import pytest
import script_runs
import tiny
from test_house import load_script

import rft_fn as rft
from rft_fn import parsing

pytestmark = pytest.mark.docs

FOLDER = pages.ROOT / "docs" / "recipes"
# what a page names of the hub, and what stands for it: a built-in model, or a file of the page
STAND_INS = {
    "gsm8k.md": {"openai/gsm8k:main": "gsm8k.jsonl"},
    "countdown.md": {"Jiayi-Pan/Countdown-Tasks-3to4": "countdown.jsonl"},
    "geo3k.md": {"hiyouga/geometry3k": "geo3k.jsonl", "Qwen/Qwen2.5-VL-3B-Instruct": "tiny-vl"},
    "audio.md": {"Qwen/Qwen2-Audio-7B-Instruct": "tiny-audio"},
    "code.md": {"google-research-datasets/mbpp:full": "mbpp.jsonl"},
    "tools.md": {},
    "search.md": {"PeterJinGo/nq_hotpotqa_train": "nq.jsonl"},
    "helpful_and_safe.md": {},
}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """The folder of a narrow model whose template shows tools."""
    template = call_templates.FAMILIES["Hermes, Qwen 2.5, Qwen 3"]
    tokenizer = chats.tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + template)
    lm = tiny.llama(vocab_size=len(tokenizer), max_position_embeddings=1 << 14)
    return rft.model.save(tmp_path_factory.mktemp("speaker"), lm, tokenizer)


def media(rows):
    """Write a small picture or sound for each path in the text of rows."""
    from PIL import Image

    for name in re.findall(r'"([^"]+\.(?:png|wav))"', rows):
        Path(name).parent.mkdir(exist_ok=True)
        if name.endswith("png"):
            Image.new("RGB", (32, 32), "white").save(name)
        else:
            with wave.open(name, "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(bytes(3200))


def dry(script, args, known, speaker):
    """Parse a command of a training script, put what is here in place of what is not, and run it dry."""
    module = load_script(script)
    cfg = parsing.parse(module.Config, parsing.qualify(args, module.Config))
    standing = next((x for x in known.values() if x.startswith("tiny")), speaker)

    def here(name):
        return name if not name or name.startswith("tiny") or Path(name).exists() else standing

    changes = {"model": here(cfg.model), "data": tuple(known.get(x, x) for x in cfg.data)}
    changes["strategy"] = replace(cfg.strategy, engine_type="hf")
    if hasattr(cfg, "budget"):
        changes["budget"] = 4096  # of a size, with no forecast
    if hasattr(cfg, "max_new"):
        changes["max_new"] = 4
    if script == "evaluate":  # two questions are quick
        module.main(replace(cfg, **changes, beside=here(cfg.beside), count=2))
        return
    with pytest.raises(SystemExit) as ended:
        module.main(replace(cfg, **changes, dry_run=True))
    assert ended.value.code == 0
    if script == "train_rm":  # whose folder later commands read
        rm = rft.model.load_reward(changes["model"], new=True, heads=cfg.heads)
        rft.model.load_tokenizer(changes["model"]).save_pretrained(cfg.out)
        rft.model.save_reward(cfg.out, rm, rm.named_parameters())


@pytest.mark.parametrize("page", STAND_INS)
def test_the_commands_of_a_recipe_run_dry_on_rows_of_the_real_schema(page, tmp_path, monkeypatch, speaker):
    monkeypatch.chdir(tmp_path)
    script_runs.leave_out(monkeypatch.setattr)
    text = (FOLDER / page).read_text()
    files = pages.titled(text)
    for name, content in files.items():
        Path(name).write_text(content)
        media(content)
    env = forks.early(os.environ) | {"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ran = 0
    for words in pages.commands(text):
        script = next((Path(x) for x in words if x.endswith(".py")), Path())
        if script.name in files:
            done = forks.run([sys.executable, *words[1:]], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
        elif script.parent.name == "train_scripts":
            args = words[words.index(str(script)) + 1 :]
            dry(script.stem, args, STAND_INS[page], str(speaker))
            ran += 1
    assert ran


def file_of(page, name, monkeypatch, folder):
    """The module of a page's file, among the other files of the page."""
    monkeypatch.chdir(folder)
    files = pages.titled((FOLDER / page).read_text())
    for other, content in files.items():
        Path(other).write_text(content)
    return pages.as_module(folder / name)


def test_the_checker_of_countdown_wants_each_number_once(tmp_path, monkeypatch):
    checker = file_of("countdown.md", "countdown.py", monkeypatch, tmp_path)
    said = {
        "(5+1)*3": 1.0,
        "<think>3*5+1</think><answer>3 * (1 + 5)</answer>": 1.0,
        "3+5+1": 0.1,
        "6*3": 0.0,
        "3*5+3": 0.0,
        "3/(5-5)": 0.0,
        "(3*6)**1": 0.0,
        "-3": 0.0,
        "exit()": 0.0,
        "(" * 150: 0.0,
        "": 0.0,
    }
    count = len(said)
    assert checker.solved(list(said), [18] * count, [[3, 5, 1]] * count) == list(said.values())


def test_calls_are_right_in_any_order_and_without_text_around_them(tmp_path, monkeypatch):
    same_calls = file_of("tools.md", "calls.py", monkeypatch, tmp_path).same_calls
    one, two = ({"name": "add", "arguments": {"a": a, "b": 2}} for a in (1, 3))
    wrong = {"name": "add", "arguments": {"a": 4, "b": 2}}

    def said(*calls):
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    for text, right, score in (
        (said(one, two), [two, one], 1.0),
        (said(one, wrong), [one, two], 0.2),
        (said(one), [one, two], 0.0),
        (said(one) + "Done.", [one], 0.0),
        (said([1]), [one], 0.0),
        ("<tool_call>{</tool_call>", [one], 0.0),
        ("I cannot.", [], 1.0),
        (said(one), [], 0.0),
    ):
        assert same_calls([text], [right]) == [score], text


def test_functions_and_calls_of_toolace_become_columns(tmp_path, monkeypatch):
    (tmp_path / "toolace.json").write_text(pages.titled((FOLDER / "tools.md").read_text())["toolace.json"])
    monkeypatch.setattr(
        sys, "argv", ["toolace.py", str(tmp_path / "toolace.json"), str(tmp_path / "new.jsonl")]
    )
    file_of("tools.md", "toolace.py", monkeypatch, tmp_path)
    first, second = map(json.loads, (tmp_path / "new.jsonl").read_text().splitlines())
    assert first["calls"] == [{"name": "Market Trends API", "arguments": {"country": "us"}}]
    assert [x["arguments"] for x in second["calls"]] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
    assert second["messages"] == [{"role": "user", "content": "What is 2 plus 3, and 4 plus 5?"}]
    assert first["tools"][0]["function"]["parameters"]["type"] == "object"


def test_a_search_finds_the_passage_and_an_answer_ends_the_conversation(tmp_path, monkeypatch):
    env = file_of("search.md", "bm25.py", monkeypatch, tmp_path).searching()
    state, _ = env.reset({"golden_answers": ["Oslo"]}, 0)
    found = env.step(state, "<search>the river Akerselva</search>")
    assert "flows through Oslo" in found.observation and not found.done
    assert env.step(found.state, "<answer>The Oslo.</answer>")[2:] == (1.0, True)
    assert env.step(found.state, "<answer>Bergen</answer>")[2:] == (0.0, True)
    for _ in range(3):
        found = env.step(found.state, "hm")
    assert found.done and found.observation == "<information>search or answer</information>"


def test_the_index_has_every_recipe_and_each_its_sections():
    linked = re.findall(r"\]\((\w+\.md)\)", (FOLDER / "README.md").read_text())
    assert sorted(set(linked)) == sorted(STAND_INS) == sorted(x.name for x in FOLDER.glob("[!R]*.md"))
    for page in STAND_INS:
        found = re.findall(r"^## (.*)$", (FOLDER / page).read_text(), re.M)
        assert found == ["Rows", "On GPUs", "Here", "Watch", "What goes wrong"], page
