"""A gradient as a sum over parts of the buffer: its noise, signal and standard errors."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Parts", "Totals", "cosine", "direction", "noise", "signal", "standard_error", "totals"]


class Parts(NamedTuple):
    """A gradient g = sum_p g_p over P parts of a buffer, each of as many independent prompts, all f64."""

    square: Tensor  # [P], |g_p|^2
    onto: Tensor  # [P], <g_p, g>
    along: Tensor  # [P], <g_p, r> with a reference r


class Totals(NamedTuple):
    """Sums over all parts, then over all parts but each one: [1 + P]."""

    parts: Tensor  # how many
    square: Tensor  # |g|^2
    squares: Tensor  # sum of |g_p|^2
    along: Tensor  # <g, r>


def totals(x: Parts) -> Totals:
    """Return the sums over the whole buffer, and over the buffer without each part, [1 + P] each."""
    n = len(x.square)
    without = torch.cat([torch.zeros(1, dtype=torch.float64), torch.ones(n, dtype=torch.float64)])
    left_out = Parts(*(torch.cat([torch.zeros(1, dtype=torch.float64), part.double()]) for part in x))
    return Totals(
        parts=n - without,
        square=x.onto.double().sum() - 2 * left_out.onto + left_out.square,
        squares=x.square.double().sum() - left_out.square,
        along=x.along.double().sum() - left_out.along,
    )


def noise(t: Totals) -> Tensor:
    """Return the unbiased estimate of E |g - E g|^2 over draws of the prompts.

    P / (P - 1) sum_p |g_p - g / P|^2
    """
    return t.parts / (t.parts - 1) * (t.squares - t.square / t.parts)


def signal(t: Totals) -> Tensor:
    """Return the unbiased estimate of |E g|^2, which may be negative in a noisy buffer."""
    return t.square - noise(t)


def cosine(t: Totals, reference_square: float) -> Tensor:
    """Return the cosine of the gradient and a reference: how far this batch points its way.

    Noise and bias both lower it.
    """
    return t.along / (t.square * reference_square).sqrt()


def direction(t: Totals, reference_signal: float) -> Tensor:
    """Return the cosine of the *expected* gradient and the true reference: bias without noise.

    `reference_signal` is the square of the reference's norm without its noise. NaN where no signal was seen;
    by chance it may be above 1.
    """
    s = signal(t)
    return torch.where(s > 0, t.along / (s.clamp(min=1e-300) * reference_signal).sqrt(), torch.nan)


def standard_error(x: Tensor) -> float:
    """Return the jackknife standard error of a statistic of `Totals`, [1 + P].

    The parts are left out in turn. It errs on the safe side where noise itself lowers the statistic.
    """
    left_out = x[1:]
    n = len(left_out)
    return float(((n - 1) / n * (left_out - left_out.mean()).square().sum()).sqrt())
