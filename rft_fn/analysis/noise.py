"""How noisy a gradient is, from both halves of its batch, and how far an update went, from two scores."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rft_fn import check, metric, optim
from rft_fn.optim.updates import local_parts
from rft_fn.types import Packed

__all__ = ["Meter", "Noise", "UpdateKL", "noise_scale", "update_kl"]


class Noise(NamedTuple):
    """Estimates from one batch of prompts; the first two are unbiased, so average them over steps first."""

    signal: float  # |E g|^2, the square of the true gradient; may be negative in a noisy batch
    noise: float  # E |g - E g|^2, the variance of this batch's gradient
    prompts: int  # N, of the batch

    @property
    def snr(self) -> float:
        """Return signal / noise of this batch's gradient; NaN without noise."""
        return self.signal / self.noise if self.noise else math.nan

    @property
    def scale(self) -> float:
        """Return the noise scale in prompts: a batch of as many has as much signal as noise.

        inf where no signal was seen.
        """
        if not self.noise:
            return math.nan
        return self.prompts * self.noise / self.signal if self.signal > 0 else math.inf


def noise_scale(first: float, second: float, whole: float, *, prompts: tuple[int, int]) -> Noise:
    """Return the noise scale of a gradient (arXiv 1812.06162), from its halves g = h_1 + h_2.

        signal = <h_1, h_2> / (a b),    noise = a b |h_1 / a - h_2 / b|^2,    scale = N noise / signal

    `first`, `second` and `whole` are the squares |h_1|^2, |h_2|^2 and |g|^2; the halves are sums over
    different `prompts`, (a N, b N) independent draws, with the weights of the whole batch. McCandlish et al.
    compare small batches with a large one; with two halves their estimators are these. A batch far below the
    scale could be larger without loss: each prompt would teach as much. Far above it, half of the
    prompts would do nearly as well.
    """
    total = sum(prompts)
    a, b = prompts[0] / total, prompts[1] / total
    product = (whole - first - second) / 2
    noise = (b / a) * first + (a / b) * second - 2 * product
    return Noise(signal=product / (a * b), noise=max(noise, 0.0), prompts=total)


class Meter:
    """What `Strategy.grad` reads of the sums of gradients, of packs that `shard(halves=True)` has cut.

    Memory: a copy of the sums (a shard of them where they are sharded), from the end of the first half to the
    end of the second. Time: the copy and three norms; no backward.
    """

    def __init__(self, packs: Sequence[Packed]):
        self.halves = [pack.half for pack in packs]
        self.squares: list[float] = []  # of the first half, the second, and both
        self.kept: dict[str, Tensor] = {}

    def ends(self, i: int) -> int | None:
        """Return which half ends with pack i, 0 or 1; None where none does."""
        half = self.halves[i]
        if half is None or (i + 1 < len(self.halves) and self.halves[i + 1] == half):
            return None
        return half[0]

    @torch.no_grad()
    def note(self, i: int, sums: Mapping[str, Tensor]) -> None:
        """Note the sums of gradients after pack i. All ranks call it."""
        side = self.ends(i)
        if side == 0:
            self.squares = [_square(sums)]
            self.kept = {name: x.clone() for name, x in sums.items()}
        elif side == 1 and self.squares:
            for name, x in self.kept.items():  # the copy of the first half becomes the second
                torch.sub(local_parts(sums[name])[0], local_parts(x)[0], out=local_parts(x)[0])
            second = {name: self.kept.get(name, x) for name, x in sums.items()}
            self.squares += [_square(second), _square(sums)]
            self.kept = {}

    def add(self, square: float) -> None:
        """Note the square of a norm: of the first half, the second, then both."""
        self.squares.append(square)

    def metrics(self) -> dict[str, metric.Metric]:
        """Return grad/snr and grad/noise_scale, the same on all ranks; nothing unless both halves ended."""
        half = next(half for half in self.halves if half)
        if len(self.squares) < 3:
            return {}
        found = noise_scale(*self.squares, prompts=half[1:])
        numbers = {"grad/snr": found.snr, "grad/noise_scale": found.scale}
        one = torch.ones((), dtype=torch.float64)
        return {name: metric.Mean(total=x * one, count=one) for name, x in numbers.items()}


def _square(grads: Mapping[str, Tensor]) -> float:
    return float(optim.global_norm(list(grads.values()))) ** 2


# ---------- how far an update went


class UpdateKL(NamedTuple):
    """The KL of an update, in nats per token."""

    kl: float  # KL(policy before, policy after)
    quadratic: float  # half of the mean square of the log-ratio: what a quadratic model predicts

    @property
    def ratio(self) -> float:
        """Return kl / quadratic: 1 for a small update, further off the less a quadratic model holds."""
        return self.kl / self.quadratic if self.quadratic else math.nan


def update_kl(before: Tensor, after: Tensor, mask: Tensor) -> UpdateKL:
    """Return the KL that an update made, and its quadratic prediction, from log-probs before and after it.

        kl = mean of exp(d) - 1 - d,    quadratic = mean of d^2 / 2,    d = after - before

    Over the tokens in mask, all [*], which the policy before the update has sampled: then `kl` is unbiased
    and never negative. The prediction is dtheta^T F dtheta / 2 with the Fisher matrix F of these tokens, to
    second order in the step; trust regions count on it. Memory: a few tensors like `before`.
    """
    check.shapes(before=(before, "..."), after=(after, "..."), mask=(mask, "..."))
    d = (after - before).double()
    return UpdateKL(
        kl=float(metric.mean(torch.expm1(d) - d, mask).value()),
        quadratic=float(metric.mean(d.square() / 2, mask).value()),
    )
