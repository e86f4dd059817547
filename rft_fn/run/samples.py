"""Sampled responses with their rewards, to be read."""

from collections.abc import Sequence
from typing import Any

import torch

from rft_fn.reward import Judged
from rft_fn.reward.from_spec import HELD
from rft_fn.types import Rollout

__all__ = ["QUANTILES", "TOP", "distribution", "response_row", "rows", "top_rows"]


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The quantiles of `distribution`."""


def distribution(step: int, rollout: Rollout, judged: Judged) -> dict[str, Any]:
    """Return the `QUANTILES` of the lengths [tokens] and rewards of a step's responses, as a row."""
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    row: dict[str, Any] = {"step": step}
    for name, x in (("length", rollout.mask.sum(-1)), ("reward", judged.reward.flatten())):
        finite = x.double()[x.double().isfinite()]
        if len(finite):
            row[name] = finite.quantile(levels).tolist()
    return row


def response_row(prompt: Any, response: str) -> dict[str, Any]:
    """Return a prompt and a response to it, with the names of the prompt's media if it has any."""
    row: dict[str, Any] = {"prompt": prompt.text, "response": response}
    names = getattr(prompt, "media_names", ())
    if names:
        row["media"] = list(names)
    return row


def rows(
    step: int, prompts: Sequence[Any], judged: Judged, *, count: int, split: str
) -> list[dict[str, Any]]:
    """Return a row for every prompt of the first `count`: its first response, with the rewards.

    `split` is "train", or the name that other rows carry. A conversation of several turns is whole in the
    column of that name, where the rewards have it. Numbers that do not apply to a response (NaN) are left
    out.
    """
    return [_row(step, prompt, judged, i, 0, split) for i, prompt in enumerate(prompts[:count])]


TOP = "99th percentile"
"""The split of the responses of `top_rows`."""


def top_rows(step: int, prompts: Sequence[Any], judged: Judged) -> list[dict[str, Any]]:
    """Return a row for the response at the 99th percentile of the rewards, where some reward is held.

    What a policy over-optimises is to be seen there: the held reward is beside the one that is learned.
    """
    if not any(name.endswith(HELD) for name in judged.parts):
        return []
    order = judged.reward.flatten().argsort(stable=True)
    i, j = divmod(int(order[int(0.99 * (len(order) - 1))]), judged.reward.shape[1])
    return [_row(step, prompts[i], judged, i, j, TOP)]


def _row(step: int, prompt: Any, judged: Judged, i: int, j: int, split: str) -> dict[str, Any]:
    """Return the row of response j to prompt i."""
    at = i * judged.reward.shape[1] + j
    row = {"step": step, **response_row(prompt, judged.texts[at])}
    row["reward"] = float(judged.reward[i, j])
    if split != "train":
        row["split"] = split
    numbers = {**judged.parts, **judged.metrics}
    row |= {name: float(x[i, j]) for name, x in numbers.items() if not x[i, j].isnan()}
    return row | {name: values[at] for name, values in judged.extra.items()}
