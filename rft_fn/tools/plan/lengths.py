"""The law of response lengths: quantiles of a run, or a long-tailed law."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rft_fn.tools.page.recorded import Recorded

__all__ = ["Lengths", "draw", "lognormal", "mean", "of_runs", "read"]

_ALIKE = 0.3  # share of the variance that responses to one prompt have in common, where nobody knows


@dataclass(frozen=True)
class Lengths:
    """Lengths [tokens] by their quantiles."""

    levels: tuple[float, ...]  # from 0 to 1
    values: tuple[float, ...]  # one of each level, not falling
    alike: float = 0.0  # share of the variance that the responses to one prompt have in common
    source: str = ""


def lognormal(median: float, sigma: float) -> Lengths:
    """Return a log-normal law: long-tailed as responses are."""
    levels = torch.special.ndtr(torch.linspace(-5, 5, 201, dtype=torch.float64))
    values = median * torch.exp(sigma * torch.special.ndtri(levels))
    source = f"log-normal, median {median:g}, sigma {sigma:g}"
    return Lengths((0.0, *levels.tolist(), 1.0), (0.0, *values.tolist(), float(values[-1])), _ALIKE, source)


def read(text: str) -> Lengths:
    """Return the law of `lognormal:MEDIAN:SIGMA`, `constant:TOKENS` or a file of rollouts.

    ValueError for anything else.
    """
    name, *numbers = text.split(":")
    if Path(text).suffix == ".safetensors":
        from rft_fn.run.rollout_files import read_rollout

        own = read_rollout(text)[0].mask.sum(-1)
        return _of_lengths(own.numpy(), text)
    try:
        given = [float(x) for x in numbers]
    except ValueError:
        given = []
    if name == "constant" and len(given) == 1 and 1 <= given[0] < math.inf:
        return Lengths((0.0, 1.0), (given[0], given[0]), 0.0, f"{given[0]:g} tokens each")
    if name == "lognormal" and len(given) == 2 and 1 <= given[0] < math.inf and 0 < given[1] <= 4:
        return lognormal(*given)
    raise ValueError(
        "lengths: expected lognormal:MEDIAN:SIGMA with a sigma up to 4, constant:TOKENS or a file that "
        f"--rollouts-every wrote, got {text!r}"
    )


def _of_lengths(lengths: np.ndarray, source: str) -> Lengths:
    levels = np.linspace(0, 1, min(len(lengths), 1000))
    return Lengths(tuple(levels), tuple(np.quantile(lengths, levels)), 0.0, source)


def of_runs(runs: Sequence[Recorded]) -> Lengths:
    """Return the law of the largest run, by the mean of the quantiles of its steps.

    It is the run of the largest max_new, and of the most responses, which know more of the tail. Between two
    quantiles the tail is exponential. ValueError for a run without distributions.jsonl.
    """
    from rft_fn.run.samples import QUANTILES

    run = max(runs, key=lambda run: (int(run.config["max_new"]), _responses(run)))
    rows = np.asarray([row["length"] for row in run.distributions if "length" in row], dtype=float)
    if not len(rows):
        raise ValueError(f"measured: expected distributions.jsonl with lengths in {run.folder}, got none")
    levels = np.linspace(0, 1, 1001)
    last = 1 - 1 / (_responses(run) + 1)
    tail, known = (-np.log1p(-np.asarray(x) * last) for x in (levels, QUANTILES))
    values = np.interp(tail, known, rows.mean(0))
    return Lengths(tuple(levels), tuple(values), 0.0, f"as in {run.name}")


def _responses(run: Recorded) -> int:
    return int(run.config["prompts"]) * int(run.config["group"])


def draw(law: Lengths, rng: np.random.Generator, prompts: int, group: int, *, most: int) -> np.ndarray:
    """Draw the lengths [N, G] of responses, of 1 to `most` tokens."""
    own, common = rng.standard_normal((prompts, group)), rng.standard_normal((prompts, 1))
    z = math.sqrt(law.alike) * common + math.sqrt(1 - law.alike) * own
    level = torch.special.ndtr(torch.from_numpy(z)).numpy()
    return np.clip(np.rint(np.interp(level, law.levels, law.values)), 1, most)


def mean(law: Lengths, *, most: int) -> float:
    """Return the mean length, where no response has more than `most` tokens."""
    levels = np.linspace(0, 1, 10_001)
    return float(np.clip(np.interp(levels, law.levels, law.values), 1, most).mean())
