"""Kinds of metrics, which merge over packs and ranks in any order, without a mean of means."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol, Self

import torch
from torch import Tensor

from rft_fn import tree

__all__ = [
    "Max", "Mean", "Metric", "SampleSize", "Sum", "average", "effective_share", "f64", "max", "mean",
    "merge", "results", "sum",
]  # fmt: skip


class Metric(Protocol):
    """A quantity that merges: over packs, over ranks, in any order.

    One that can be over nothing says so by a method `measured() -> Tensor`, [] bool; `results` leaves it out.
    """

    def merge(self, other: Self) -> Self:
        """Return the metric of both parts together."""
        ...

    def value(self) -> Tensor:
        """Return the number [] to report."""
        ...


@tree.struct
class Mean:
    """A mean, as total and count."""

    total: Tensor  # [] f64
    count: Tensor  # [] f64

    def merge(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    def value(self) -> Tensor:
        return self.total / self.count

    def measured(self) -> Tensor:
        return self.count > 0


@tree.struct
class Sum:
    """A sum."""

    total: Tensor  # [] f64

    def merge(self, other: "Sum") -> "Sum":
        return Sum(total=self.total + other.total)

    def value(self) -> Tensor:
        return self.total


@tree.struct
class Max:
    """A maximum."""

    top: Tensor  # [] f64

    def merge(self, other: "Max") -> "Max":
        return Max(top=torch.maximum(self.top, other.top))

    def value(self) -> Tensor:
        return self.top

    def measured(self) -> Tensor:
        return self.top != -torch.inf  # of nothing; NaN is measured


@tree.struct
class SampleSize:
    """The effective share of weighted samples, as sums of the weights and of their squares."""

    total: Tensor  # [] f64
    square: Tensor  # [] f64
    count: Tensor  # [] f64

    def merge(self, other: "SampleSize") -> "SampleSize":
        return tree.map(torch.add, self, other)

    def value(self) -> Tensor:
        return self.total.square() / (self.count * self.square).clamp(min=1e-300)  # 0 where all weights are

    def measured(self) -> Tensor:
        return self.count > 0


def f64(x: Tensor) -> Tensor:
    """Return numbers in float64, without gradient."""
    return x.detach().to(torch.float64)


def mean(x: Tensor, mask: Tensor) -> Mean:
    """Average x over mask, both [*]; `results` has no average of nothing."""
    return Mean(total=f64(torch.where(mask, x.detach(), 0)).sum(), count=f64(mask).sum())


def sum(x: Tensor, mask: Tensor | None = None) -> Sum:
    """Sum of x [*] over mask, or all positions."""
    if mask is not None:
        x = torch.where(mask, x.detach(), 0)
    return Sum(total=f64(x).sum())


def max(x: Tensor, mask: Tensor) -> Max:
    """Return the maximum of x over mask, both [*]; `results` has no maximum of nothing."""
    low = torch.where(mask, f64(x), -torch.inf)
    least = low.new_full((1,), -torch.inf)  # amax of nothing raises
    return Max(top=torch.cat([low.flatten(), least]).amax())


def effective_share(weight: Tensor, mask: Tensor) -> SampleSize:
    """Return the effective sample size of importance weights [*] over mask, as a share of the samples.

        (sum of weights)^2 / (samples * sum of weights^2)

    It is 1 where all weights are equal, and 1 / samples where one has all of the mass (Kish 1965).
    """
    w = f64(torch.where(mask, weight.detach(), 0))
    return SampleSize(total=w.sum(), square=w.square().sum(), count=f64(mask).sum())


def _check(metrics: Mapping[str, Metric]) -> None:
    for name, m in metrics.items():
        if not hasattr(m, "merge"):
            raise ValueError(
                f"metric {name!r}: expected a Metric, got {type(m).__name__}; use metric.mean(x, b.mask), "
                "metric.sum(x) or metric.max(x, b.mask), which know how to merge over packs and ranks"
            )


def merge(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> dict[str, Metric]:
    """Merge two dicts of metrics.

    A name in both is merged by its kind. ValueError if the kinds differ, or for a value that is no metric.
    """
    _check(a)
    _check(b)
    out = dict(a)
    for name, m in b.items():
        if name not in out:
            out[name] = m
            continue
        if type(out[name]) is not type(m):
            raise ValueError(f"metric {name!r}: expected {type(out[name]).__name__}, got {type(m).__name__}")
        out[name] = out[name].merge(m)
    return out


def average(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each name over the rows that have it, for example the updates of a rollout."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the values of metrics as numbers, in one transfer per device.

    A mean, a maximum or a share over nothing is absent: it was not measured, and is not 0. ValueError for a
    value that is no metric.
    """
    _check(metrics)
    values = {name: (m.value(), _measured(m)) for name, m in metrics.items()}
    numbers: dict[str, float] = {}
    for device in dict.fromkeys(x.device for x, _ in values.values()):
        here = {name: pair for name, pair in values.items() if pair[0].device == device}
        flat = torch.stack([x for column in zip(*here.values()) for x in column]).tolist()
        found = zip(here, flat, flat[len(here) :])
        numbers |= {name: x for name, x, measured in found if measured}
    return {name: numbers[name] for name in metrics if name in numbers}


def _measured(m: Metric) -> Tensor:
    """Return whether a metric is over anything, []; it is unless it says otherwise."""
    return getattr(m, "measured", lambda: torch.ones_like(m.value()))()
