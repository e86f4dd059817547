import torch


def reward_func(queries, prompts, labels):
    """A tensor and nothing else, from a function without **kwargs."""
    return torch.tensor([1.0 if label in query[len(prompt) :] else 0.0
                         for query, prompt, label in zip(queries, prompts, labels)])  # fmt: skip
