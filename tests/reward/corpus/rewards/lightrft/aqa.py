"""Questions about sounds; its tensors are made on "cuda" by that name, whatever the machine has."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch


def reward_fn(
    model_reward_list: list[torch.Tensor],
    labels: Sequence[str],
    queries: Sequence[str],
    refs: Sequence[str],
    label_map: dict[str, int],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """1 for an answer in tags, 1 for the right one."""
    device = torch.device("cuda")
    formed, right = torch.zeros(len(queries), device=device), torch.zeros(len(queries), device=device)
    for i, (query, reference) in enumerate(zip(queries, refs)):
        found = re.search(r"<answer>(.*?)</answer>", query, re.DOTALL)
        formed[i] = float(found is not None)
        right[i] = float(found is not None and found[1].strip() == reference)
    return formed + right, {"format_reward": formed, "accuracy_reward": right}
