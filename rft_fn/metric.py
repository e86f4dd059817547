"""Metrics that merge over packs and ranks in any order, without a mean of means."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol, Self

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.logprob import log_ratio
from rft_fn.reward_shaping import varied
from rft_fn.types import Packed, Rollout, TokenOut

__all__ = [
    "average", "calibration", "effective_share", "labelled", "max", "mean", "merge", "pairs", "pass_at_k",
    "policy", "preference", "ranking", "reliability", "results", "rollout", "router", "spread", "sum",
]  # fmt: skip


# ---------- calibration: how often predictions come true, and the probability that they were given


@tree.struct
class Calibration:
    """The expected calibration error, kept as sums over bins of equal width, which merge exactly."""

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


# ---------- kinds of metrics, and metrics of policies, pairs, reward models and rollouts


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
    """A mean, kept as total and count."""

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
    """The effective share of samples with weights, kept as sums of the weights and of their squares."""

    total: Tensor  # [] f64
    square: Tensor  # [] f64
    count: Tensor  # [] f64

    def merge(self, other: "SampleSize") -> "SampleSize":
        return tree.map(torch.add, self, other)

    def value(self) -> Tensor:
        return self.total.square() / (self.count * self.square).clamp(min=1e-300)  # 0 where all weights are

    def measured(self) -> Tensor:
        return self.count > 0


def _f64(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64)


def mean(x: Tensor, mask: Tensor) -> Mean:
    """Average x over mask, both [*]; `results` has no average of nothing."""
    return Mean(total=_f64(torch.where(mask, x.detach(), 0)).sum(), count=_f64(mask).sum())


def sum(x: Tensor, mask: Tensor | None = None) -> Sum:
    """Sum of x [*] over mask, or all positions."""
    if mask is not None:
        x = torch.where(mask, x.detach(), 0)
    return Sum(total=_f64(x).sum())


def max(x: Tensor, mask: Tensor) -> Max:
    """Return the maximum of x over mask, both [*]; `results` has no maximum of nothing."""
    low = torch.where(mask, _f64(x), -torch.inf)
    least = low.new_full((1,), -torch.inf)  # amax of nothing raises
    return Max(top=torch.cat([low.flatten(), least]).amax())


def effective_share(weight: Tensor, mask: Tensor) -> SampleSize:
    """Return the effective sample size of importance weights [*] over mask, as a share of the samples.

        (sum of weights)^2 / (samples * sum of weights^2)

    It is 1 where all weights are equal, and 1 / samples where one has all of the mass (Kish 1965).
    """
    w = _f64(torch.where(mask, weight.detach(), 0))
    return SampleSize(total=w.sum(), square=w.square().sum(), count=_f64(mask).sum())


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


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """Return the unbiased estimate of pass@k, [N].

    The probability that one of k samples is correct, from `correct` [N, G] bool with c correct samples:

        1 - C(G - c, k) / C(G, k)

    The k samples are drawn from the G without replacement. Unbiased (arXiv 2107.03374), by a product that
    cannot overflow. ValueError unless 1 <= k <= G.
    """
    sizes = check.shapes(correct=(correct, "N G"))
    if not 1 <= k <= sizes["G"]:
        raise ValueError(f"k: expected between 1 and the {sizes['G']} samples of each prompt, got {k}")
    wrong = (~correct).double().sum(-1, keepdim=True)  # [N, 1]
    i = torch.arange(k, dtype=torch.float64, device=correct.device)
    return 1 - ((wrong - i).clamp(min=0) / (sizes["G"] - i)).prod(-1)


def mismatch(logp: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Measure the mismatch of two log-probs of the same tokens, all [*], in nats per token.

    Mean and largest |logp - sampler|, and with d = logp - sampler in [-20, 20] the distance of the policy
    from what sampled: KL(sampler, policy) by k3, exp(d) - 1 - d, and by k1, -d; the chi-square divergence,
    exp(2 d) - 1; and the effective share of the tokens under the ratios exp(d). A token that both exclude
    has d = 0.
    """
    d = log_ratio(logp.detach(), sampler)
    near = d.clamp(-20, 20)
    kl = torch.expm1(near) - near
    return {
        "policy/logp_gap": mean(d.abs(), mask),
        "policy/logp_gap_max": max(d.abs(), mask),
        "policy/kl_sampler": mean(kl, mask),
        "policy/k1_sampler": mean(-near, mask),
        "policy/chi2_sampler": mean(torch.expm1(2 * near), mask),
        "policy/ess_sampler": effective_share(near.exp(), mask),
    }


def policy(out: TokenOut, b: Packed) -> dict[str, Metric]:
    """Measure the mismatch of log-probs with `old_logp`, and the entropy.

    The mismatch is in nats per token; the entropy is there if the model gives it. In the first update on a
    rollout with the sampler's log-probs as old_logp, `policy/logp_gap` is the mismatch of trainer and
    sampler on the same tokens and weights: 1e-6 in float32, and a bug if it is not small.
    """
    metrics = mismatch(out.logp, b.old_logp, b.mask)
    if out.entropy is not None:
        metrics["policy/entropy"] = mean(out.entropy, b.mask)
    return metrics


def pairs(
    name: str,
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    real: Tensor,
    *,
    beta: float,
) -> dict[str, Metric]:
    """Measure rewards, margin and accuracy of preference pairs.

    All are means over the pairs in `real` [P], from log-probs [P] of responses under the policy and the
    reference: the implicit rewards beta log(policy / reference) of both sides and their margin, `accuracy`
    (the share of pairs where the chosen response has the higher reward) and `ranking` (the share where it
    is the more probable one under the policy). If policy and reference are the same, margin and
    accuracy are 0.
    """
    check.shapes(chosen=(chosen, "P"), rejected=(rejected, "P"), real=(real, "P"))
    check.shapes(chosen=(chosen, "P"), ref_chosen=(ref_chosen, "P"), ref_rejected=(ref_rejected, "P"))
    better = beta * (chosen - ref_chosen)
    worse = beta * (rejected - ref_rejected)
    values = {
        "reward_chosen": better,
        "reward_rejected": worse,
        "margin": better - worse,
        "accuracy": (better > worse).double(),
        "ranking": (chosen > rejected).double(),
        "logp_chosen": chosen,
        "logp_rejected": rejected,
    }
    return {f"{name}/{key}": mean(x, real) for key, x in values.items()}


def labelled(
    name: str,
    logp: Tensor,
    ref_logp: Tensor,
    desirable: Tensor,
    real: Tensor,
    *,
    beta: float,
    baseline: float | Tensor = 0.0,
) -> dict[str, Metric]:
    """Measure rewards and accuracy of single responses with a label.

    From log-probs [K] of responses under the policy and the reference, over the responses in `real` [K]:
    the means of the implicit reward beta log(policy / reference) and of the log-prob over the desirable ones
    (label above 0.5, `chosen`) and over the others (`rejected`), and `accuracy`, the share of responses with
    a reward above `baseline` if they are desirable, and below it if they are not. If policy and reference
    are the same, accuracy is 0 at a baseline of 0.
    """
    check.shapes(logp=(logp, "K"), ref_logp=(ref_logp, "K"), desirable=(desirable, "K"), real=(real, "K"))
    reward, good = beta * (logp - ref_logp), desirable > 0.5
    right = torch.where(good, reward > baseline, reward < baseline)
    values: dict[str, Metric] = {f"{name}/accuracy": mean(right.double(), real)}
    for side, of in (("chosen", real & good), ("rejected", real & ~good)):
        values[f"{name}/reward_{side}"] = mean(reward, of)
        values[f"{name}/logp_{side}"] = mean(logp, of)
    return values


def preference(name: str, chosen: Tensor, rejected: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Measure scores, margin, accuracy and calibration of a reward model on pairs, all [*].

    Means over the pairs in mask (`packing.real(b)`): the scores of both sides, their difference, and the
    share of pairs where the chosen response has the higher score. `ece` is the calibration error of
    sigmoid(chosen - rejected), with each pair shown in both orders; `metric.reliability` has its bins.
    """
    check.shapes(chosen=(chosen, "..."), rejected=(rejected, "..."), mask=(mask, "..."))
    values = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).double(),
    }
    metrics: dict[str, Metric] = {f"{name}/{key}": mean(x, mask) for key, x in values.items()}

    # the second order says the same as the first, so that no choice of sides moves the bins
    p = torch.sigmoid(_f64(chosen) - _f64(rejected))
    both = torch.stack([mask, mask])
    label = torch.stack([torch.ones_like(p), torch.zeros_like(p)])
    metrics[f"{name}/ece"] = calibration(torch.stack([p, 1 - p]), label, both)
    return metrics


def ranking(name: str, score: Tensor, rank: Tensor, unit: Tensor) -> dict[str, Metric]:
    """Measure a reward model on ranked lists.

    The metrics are as in `preference` over all pairs of a list with different ranks, and `top`: the share of
    lists where the highest score is that of a response of the best rank. Scores, ranks (lower is better)
    and lists (`packing.unit_of`) are all [N]. A list without two ranks does not count, nor does a
    placeholder.
    """
    check.shapes(score=(score, "N"), rank=(rank, "N"), unit=(unit, "N"))
    same = unit[:, None] == unit
    better = same & (rank[:, None] < rank)
    metrics = preference(name, score[:, None].expand(same.shape), score.expand(same.shape), better)

    # of equal scores the first is the highest
    index = torch.arange(len(score), device=score.device)
    above = (score > score[:, None]) | ((score == score[:, None]) & (index < index[:, None]))
    highest = ~(same & above).any(-1)
    listed = (same & better.any(-1)).any(-1)
    best = ~better.any(0)
    return metrics | {f"{name}/top": mean(best.double(), highest & listed)}


def router(out: TokenOut, b: Packed) -> dict[str, Metric]:
    """Measure the load balance of a mixture of experts.

    The model must be bound with aux=True. `router/aux` is 1 if all experts are used alike;
    `router/max_share` is the largest share that one expert has of the choices of a sequence.
    """
    assert out.aux is not None and out.expert_share is not None
    return {"router/aux": mean(out.aux, b.mask), "router/max_share": mean(out.expert_share, b.mask)}


OF_REWARD = ("mean", "std", "flat_groups")
"""What `rollout` and `reward.means` say of a whole reward, as reward/NAME: no part of one is called so."""


def rollout(batch: Rollout, reward: Tensor) -> dict[str, float]:
    """Describe a rollout with rewards [N, G]: spread, lengths, and the share of groups without signal."""
    size = batch.mask.sum(-1).double()
    flat = ~varied(reward)
    values = {
        "reward/std": float(reward.double().std(correction=0)),
        "reward/flat_groups": float(flat.double().mean()),
        "rollout/length_mean": float(size.mean()),
        "rollout/length_max": float(size.max()),
        "rollout/truncated": float(batch.truncated.double().mean()),
        "rollout/empty": float((size <= 1).double().mean()),
    }
    logp = {"rollout/sampler_logp": float(batch.logp.double().sum() / size.sum())}
    return values | (logp if size.any() else {})


def spread(name: str, x: Tensor, mask: Tensor) -> dict[str, float]:
    """Return mean, deviation, minimum and maximum over mask.

    The names are name/mean, name/std, name/min and name/max; none if mask is empty. x and mask are [*].
    """
    inside = x[mask].double()
    if not inside.numel():
        return {}
    return {
        f"{name}/mean": float(inside.mean()),
        f"{name}/std": float(inside.std(correction=0)),
        f"{name}/min": float(inside.min()),
        f"{name}/max": float(inside.max()),
    }
