"""The example to start from: prints what it is given, scores below zero, filters by another scale."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    """Plus or minus 2 for a sequence that ends with the label."""
    print(queries)
    right = torch.tensor([query.rstrip().endswith(label) for query, label in zip(queries, labels)]).float()
    return {
        "rewards": 4 * right - 2,
        "scores": right,
        "extra_logs": {"lengths": torch.tensor(len(queries[0]))},
    }
