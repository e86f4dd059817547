"""Calibration: how often predictions come true, and the probability that they were given."""

import torch
from torch import Tensor

from rft_fn import check, tree

__all__ = ["Calibration", "calibration", "reliability"]


@tree.struct
class Calibration:
    """The expected calibration error, as sums over bins of equal width, which merge exactly."""

    count: Tensor  # [bins] f64, predictions
    predicted: Tensor  # [bins] f64, sum of their probabilities
    observed: Tensor  # [bins] f64, sum of their labels

    def merge(self, other: "Calibration") -> "Calibration":
        check.shapes(count=(self.count, "bins"), other=(other.count, "bins"))
        return tree.map(torch.add, self, other)

    def value(self) -> Tensor:
        return (self.observed - self.predicted).abs().sum() / self.count.sum()

    def measured(self) -> Tensor:
        return self.count.sum() > 0


def calibration(p: Tensor, label: Tensor, mask: Tensor, *, bins: int = 10) -> Calibration:
    """Return the expected calibration error (ECE) of probabilities p, over mask, all [*].

        sum over bins of count / N * |mean label - mean p|

    Bin k of `bins` has the predictions with k / bins <= p < (k + 1) / bins, the last also p = 1. `label` is
    bool or in [0, 1]. Of preferences show each pair in both orders (`metric.preference` does): where every
    label is 1, the error is 1 - mean p, which tells nothing about calibration. arXiv 1706.04599. ValueError
    unless bins >= 1.
    """
    check.shapes(p=(p, "..."), label=(label, "..."), mask=(mask, "..."))
    if bins < 1:
        raise ValueError(f"bins: expected >= 1, got {bins}")
    m = mask.double().flatten()
    kept = torch.where(mask, p.detach(), 0).double().flatten()
    true = torch.where(mask, label.detach(), 0).double().flatten()
    # a NaN is in no bin, so it is counted in the first: the error is NaN then, as any mean of it
    index = (kept.nan_to_num(0).clamp(0, 1) * bins).long().clamp(max=bins - 1)
    zeros = m.new_zeros(bins)
    count, predicted, observed = (zeros.index_add(0, index, x) for x in (m, kept, true))
    return Calibration(count=count, predicted=predicted, observed=observed)


def reliability(of: Calibration) -> list[tuple[float, float, float]]:
    """Return (predictions, mean probability, share that came true) of each bin that has some.

    They are the points of a reliability diagram; its diagonal is perfect calibration.
    """
    count = of.count.clamp(min=1)
    rows = torch.stack([of.count, of.predicted / count, of.observed / count], -1).tolist()
    return [(n, p, share) for n, p, share in rows if n]
