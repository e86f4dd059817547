"""Rules by the label of a row: scores of reward models come first, and there are none here."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

RECIPE: dict[str, list[tuple[str, str | None, float]]] = {
    "gsm8k_rule": [("gsm8k_rule", None, 1.0)],
    "geo3k_rule": [("geo3k_rule", None, 1.0)],
}


def _accuracy(text: str, reference: str) -> float:
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return float(bool(found) and found[-1].strip() == reference)


def _format(text: str) -> float:
    return float(re.search(r"<think>.*?</think>.*?\\boxed\{.*?\}", text, re.DOTALL) is not None)


def reward_fn(
    model_reward_list: list[torch.Tensor],
    labels: Sequence[str],
    queries: Sequence[str],
    refs: Sequence[str],
    label_map: dict[str, int],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """0.9 for the reference in the box and 0.1 for thinking before it, and both as metrics."""
    device = model_reward_list[0].device if model_reward_list else torch.device("cuda")
    rewards = torch.zeros(len(labels), device=device)
    metrics = {name: torch.zeros_like(rewards) for name in ("format_reward", "accuracy_reward")}
    for i, label in enumerate(labels):
        for _, _, weight in RECIPE.get(label, []):
            metrics["accuracy_reward"][i] = _accuracy(queries[i], refs[i])
            metrics["format_reward"][i] = _format(queries[i])
            rewards[i] += weight * (0.9 * metrics["accuracy_reward"][i] + 0.1 * metrics["format_reward"][i])
    return rewards, metrics
