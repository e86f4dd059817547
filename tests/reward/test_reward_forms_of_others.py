"""Reward functions in forms of other libraries: adapters, and what is said of the others."""

import re
import sys
import types
import warnings

import chats
import pytest

from rft_fn import reward
from rft_fn.data import prompts
from rft_fn.reward import from_spec

FILE = """
import asyncio

class VLModule:
    @staticmethod
    def iou(completions, answer, **kwargs):
        return [float(c == a) for c, a in zip(completions, answer)]

    def method(self, completions, answer):
        return [float(c == a) for c, a in zip(completions, answer)]

async def custom_rm(args, sample, **kwargs):
    return float(sample.response == sample.label and sample.metadata["level"] == 1)

async def batched(args, samples, **kwargs):
    return [float(x.response == x.label) for x in samples]

def one_at_a_time(response, label):
    return float(response == label)

def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    return float(completions == answer and prompt == "q" and kwargs["level"] == 1)

def by_place(prompts, text, first, second, solutions, **kwargs):
    return float(text == solutions and prompts == "q" and kwargs["level"] == 1)

def nemo(ground_truth, response):
    return float(response == ground_truth), response == ground_truth

def tagged(ground_truth: str, response: str, tag: str = "b"):
    return float(ground_truth.strip() + tag == response + "+"), None

def in_metadata(response, label, metadata=None):
    return {"score": float(response == label and metadata["level"] == 1), "pred": response}

async def named_else(args, x, **kwargs):
    return {"score": float(x.response == x.label and x.metadata["kind"] == "sum" and x.reward is None)}

def qna(question, completion, answer):
    return float(completion == answer)

async def later(question, completion, answer):
    return float(completion == answer)

def made(script_args):
    return []

def thinks(completions, **kwargs):
    return [float(c.startswith("<think>")) for c in completions]
"""
COLUMNS = {"answer": ["a", "b"], "label": ["a", "b"], "ground_truth": ["a", "b"], "level": [1, 1]}
COLUMNS |= {"question": ["q", "q"], "solutions": ["a", "b"], "metadata": [{"kind": "sum"}] * 2}
PROMPTS, SAID = ["q", "q"], ["a", "x"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("forms") / "forms_of_others.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    "spec",
    [
        "{}:VLModule.iou", "slime:{}:custom_rm", "slime:{}:batched", "slime:{}:one_at_a_time:answer",
        "slime:{}:in_metadata", "slime:{}:named_else", "areal:{}:areal", "areal:{}:by_place",
        "nemo_rl:{}:nemo", "nemo_rl:{}:nemo:answer", "nemo_rl:{}:tagged(tag='+')",
    ],
)  # fmt: skip
def test_functions_of_others_are_called_as_they_call_them(spec, file):
    score = from_spec.parse([spec.format(file)])
    assert score(PROMPTS, SAID, COLUMNS).total.tolist() == [1.0, 0.0]


def test_a_sample_is_slimes_own_where_it_is_imported(file, monkeypatch):
    class Sample(types.SimpleNamespace):
        Status = types.SimpleNamespace(TRUNCATED="truncated", COMPLETED="completed")

    def rm(args, sample):
        assert isinstance(sample, Sample)
        return float(sample.status == "completed" and sample.tokens == [1, 2] and sample.response_length == 1)

    monkeypatch.setitem(sys.modules, "slime.utils.types", types.SimpleNamespace(Sample=Sample))
    ids = {"prompt_ids": [[1], [1]], "completion_ids": [[2], [2]], "truncated": [False, True]}
    score = reward.foreign.slime(rm)
    assert score(prompts=PROMPTS, completions=SAID, **COLUMNS, **ids) == [1.0, 0.0]


def test_a_function_without_the_four_places_is_none_of_areal(file):
    with pytest.raises(ValueError, match=r"expected a reward of \(prompt, completions, .*one of \(response"):
        from_spec.parse([f"areal:{file}:one_at_a_time"])


def test_a_number_of_the_data_is_a_text_for_nemo_rl():
    score = reward.foreign.nemo_rl(lambda ground_truth, response: (float(ground_truth == response), True))
    assert score(prompts=PROMPTS, completions=["3", "4"], ground_truth=[3, 3]) == [1.0, 0.0]


SENT = [
    ("custom_rm", "it takes args and sample, as functions for slime do; write slime:"),
    ("batched", "it takes args and samples, as functions for slime do; write slime:"),
    ("one_at_a_time", "it takes response and label, as functions for slime do; write slime:"),
    ("areal", "as functions for areal do; write areal:"),
    ("nemo", "it takes ground_truth and response, as functions for nemo_rl do; write nemo_rl:"),
    ("made", "if it makes reward functions, call it: "),
]


@pytest.mark.parametrize(("name", "said"), SENT)
def test_a_function_of_another_library_is_sent_to_its_adapter(name, said, file):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        from_spec.parse([f"{file}:{name}"])
    assert "three lines" not in str(error.value)


@pytest.mark.parametrize("name", ["qna", "later", "VLModule.method"])
def test_the_wrapper_of_three_lines_that_is_told_works(name, file):
    with pytest.raises(ValueError, match="or write three lines into a file beside it") as error:
        from_spec.parse([f"{file}:{name}"])
    lines = re.findall(r"`([^`]*)`", str(error.value))
    assert len(lines) == 3
    mine = file.with_name(f"mine_{name.replace('.', '_')}.py")
    mine.write_text("\n".join(lines))
    assert from_spec.parse([f"{mine}:reward"])(PROMPTS, SAID, COLUMNS).total.tolist() == [1.0, 0.0]


def test_a_format_that_the_template_opens_is_told(file):
    opening = chats.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    opens = chats.tokenizer(opening)
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(2)]
    for template, told in ((opens, True), (chats.tokenizer(chats.CHATML), False)):
        made = prompts.from_rows(rows, template)
        asked = [made.prompt(i) for i in range(2)]
        for spec in ("tags", f"{file}:thinks"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                reward.check(reward.parse([spec]), asked, tokenizer=template)
            said = " ".join(str(w.message) for w in caught)
            assert (
                "it looks for <think> in the response, and the chat template writes <think>" in said
            ) == told
