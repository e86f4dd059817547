"""Judges the cases of the corpus through the library's public door: `reward.parse` and `reward.judge`."""

import os
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from corpus.cases import Case

from rft_fn import data, reward
from rft_fn.types import Rollout

LATE = reward.TrainerState(global_step=7, max_steps=10)
FILES = Path(__file__).resolve().parent / "rewards"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KNOWN: dict[Any, reward.Judged] = {}


@cache
def tokenizer() -> Any:
    """One token a byte and one for each mark of a turn, with the chat template that most models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    names = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=marks[0],
        eos_token=marks[2],
        additional_special_tokens=marks[1:2],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def rollout_of(prompts: Sequence[data.Prompt], responses: Sequence[Sequence[str]]) -> Rollout:
    """What an engine would have returned: each prompt's responses, one after the other."""
    rows = [
        (p.ids, tokenizer().encode(text, add_special_tokens=False))
        for p, texts in zip(prompts, responses, strict=True)
        for text in texts
    ]
    longest = max(len(ids) + len(response) for ids, response in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (ids, response) in enumerate(rows):
        end = len(ids) + len(response)
        tokens[row, :end] = torch.tensor(ids + response)
        mask[row, len(ids) : end] = True
    group = torch.arange(len(prompts)).repeat_interleave(len(responses[0]))
    length = torch.tensor([len(ids) + len(response) for ids, response in rows])
    return Rollout(
        tokens=tokens, mask=mask, logp=torch.zeros(tokens.shape), length=length,
        truncated=torch.zeros(len(rows), dtype=torch.bool), group=group, version=torch.zeros_like(group),
    )  # fmt: skip


def prompts_of(rows: Sequence[dict[str, Any]]) -> list[data.Prompt]:
    """A prompt of each row, as a data set makes it."""
    return [prompt_of(row, i) for i, row in enumerate(rows)]


def prompt_of(row: dict[str, Any], index: int) -> data.Prompt:
    """Of messages through the chat template, of text as it is."""
    asked = row.get("prompt", row.get("input"))
    if isinstance(asked, str):
        return data.Prompt(tokenizer().encode(asked, add_special_tokens=False), asked, row, index)
    text = tokenizer().apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer().encode(text, add_special_tokens=False)
    return data.Prompt(ids, asked[-1]["content"], row, index, messages=asked)


@contextmanager
def at_files() -> Any:
    """In the folder of the corpus, so that specs are those of a command line."""
    before = Path.cwd()
    os.chdir(FILES)
    try:
        yield
    finally:
        os.chdir(before)


def parsed(case: Case) -> Any:
    """The score of a case, and of what stands beside it."""
    with at_files():
        return reward.parse([case.spec, *case.beside])


def judged(case: Case, state: Any = LATE) -> reward.Judged:
    """All responses of a case, scored; once for each case and state."""
    key = (case.spec, state)
    if key not in _KNOWN:
        score = parsed(case)
        prompts = prompts_of(case.rows)
        rollout = rollout_of(prompts, case.responses)
        _KNOWN[key] = reward.judge(score, rollout, prompts, tokenizer(), state=state)
    return _KNOWN[key]


def part_of(case: Case, found: reward.Judged) -> list[list[float | None]]:
    """The values of a case's own function, None where it does not apply."""
    values = found.parts[next(iter(found.parts))].tolist()
    return [[None if x != x else x for x in row] for row in values]
