"""Given lists of whole sequences, prompts and labels; gives tensors for learning, filtering and logs."""

import re

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs) -> dict:
    r"""1 for the label in the last \boxed{} of what follows the prompt."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        response = query[len(prompt) :] if query.startswith(prompt) else query
        found = re.findall(r"\\boxed\{([^{}]*)\}", response)
        rewards.append(float(bool(found) and found[-1] == label))
    scores = torch.tensor(rewards, dtype=torch.float)
    return {"rewards": scores, "scores": scores, "extra_logs": {"math_accuracy": scores.mean()}}
