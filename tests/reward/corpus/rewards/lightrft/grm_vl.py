"""Which of two pictures is better: references are dicts, the assistant's turn is found by its mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

ANSWERS = {"A": ("Image 1 is better",), "B": ("Image 2 is better",), "C": ("Both are equally good",)}


def reward_fn(
    model_reward_list: list[torch.Tensor],
    labels: Sequence[str],
    queries: Sequence[str],
    refs: Sequence[Any],
    **kwargs,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """1 for thinking before the answer, 1 for the preference of the row."""
    device = model_reward_list[0].device if model_reward_list else torch.device("cuda")
    formed, right = torch.zeros(len(labels), device=device), torch.zeros(len(labels), device=device)
    for i, query in enumerate(queries):
        said = query.rpartition("<|im_start|>assistant")[2].strip()
        formed[i] = float(
            re.search(r"<think>.*?</think>.*?<answer>.*?</answer>", said, re.DOTALL) is not None
        )
        answers = re.findall(r"<answer>(.*?)(?:</answer>|$)", said, re.DOTALL)
        right[i] = float(bool(answers) and answers[-1].strip() in ANSWERS[refs[i]["preference"]])
    return formed + right, {"format_reward": formed, "accuracy_reward": right}
