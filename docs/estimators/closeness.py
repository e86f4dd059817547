"""A reward between 0 and 1 that small models do not miss altogether: how near the last number is."""

import math

import rft_fn as rft


def closeness(prompts, completions, answer, **columns):
    """Return 1 / (1 + |log((x + 1) / (y + 1))|) of the last numbers of response and answer, else 0."""
    return [_near(text, gold) for text, gold in zip(completions, answer)]


def _near(text: str, gold: str) -> float:
    x, y = (rft.reward.extract_number(each) for each in (text, gold))
    try:
        ratio = (abs(float(x or "")) + 1) / (abs(float(y or "")) + 1)
    except ValueError:
        return 0.0
    return 1 / (1 + abs(math.log(ratio)))
