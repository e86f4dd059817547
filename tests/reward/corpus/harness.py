"""Judges the cases of the corpus through public doors: `reward.parse`, `data.from_rows`, `reward.judge`."""

from collections.abc import Sequence
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import chats
import torch
from corpus.cases import Case

from rft_fn import data, reward
from rft_fn.types import Rollout

LATE = reward.TrainerState(global_step=7, max_steps=10)
FILES = Path(__file__).resolve().parent / "rewards"
_KNOWN: dict[Any, reward.Judged] = {}


@cache
def tokenizer() -> Any:
    """A token a byte, and the chat template that most models have."""
    return chats.tokenizer(chats.CHATML)


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


def prompts_of(case: Case, score: Any) -> list[data.Prompt]:
    """A prompt of each row, as a script makes it: of a column of messages, or of a column of text."""
    name = next(name for name in ("prompt", "input") if name in case.rows[0])
    form = {"template": "{" + name + "}"}
    if isinstance(case.rows[0][name], list):
        form = {"messages": (name,)}
    rows = data.from_rows(case.rows, tokenizer(), columns=reward.columns(score), **form)
    return data.take(rows, len(case.rows), seed=0)[0]


def parsed(case: Case) -> Any:
    """The score of a case, and of what stands beside it."""
    with chdir(FILES):  # so that specs are those of a command line
        return reward.parse([case.spec, *case.beside])


def sampled(case: Case, score: Any) -> tuple[Rollout, list[data.Prompt]]:
    """The responses of a case, as if they had been sampled, and their prompts."""
    prompts = prompts_of(case, score)
    return rollout_of(prompts, case.responses), prompts


def judged(case: Case, state: Any = LATE) -> reward.Judged:
    """All responses of a case, scored; once for each case and state."""
    key = (case.spec, state)
    if key not in _KNOWN:
        score = parsed(case)
        _KNOWN[key] = reward.judge(score, *sampled(case, score), tokenizer(), state=state)
    return _KNOWN[key]


def part_of(case: Case, found: reward.Judged) -> list[list[float | None]]:
    """The values of a case's own function, None where it does not apply."""
    values = found.parts[next(iter(found.parts))].tolist()
    return [[None if x != x else x for x in row] for row in values]
