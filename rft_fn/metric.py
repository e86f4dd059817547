"""Metrics that know how to merge: over packs, over ranks, in any order, without a mean of means."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.logprob import log_ratio
from rft_fn.types import Packed, Rollout, TokenOut

__all__ = [
    "Max",
    "Mean",
    "Sum",
    "average",
    "max",
    "mean",
    "merge",
    "pass_at_k",
    "policy",
    "results",
    "rollout",
    "router",
    "spread",
    "sum",
]


@tree.struct
class Mean:
    """total / count."""

    total: Tensor  # [] f64
    count: Tensor  # [] f64

    def merge(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    def value(self) -> Tensor:
        return self.total / self.count.clamp(min=1e-300)


@tree.struct
class Sum:
    """A plain sum."""

    total: Tensor  # [] f64

    def merge(self, other: "Sum") -> "Sum":
        return Sum(total=self.total + other.total)

    def value(self) -> Tensor:
        return self.total


@tree.struct
class Max:
    """The largest value."""

    top: Tensor  # [] f64

    def merge(self, other: "Max") -> "Max":
        return Max(top=torch.maximum(self.top, other.top))

    def value(self) -> Tensor:
        return self.top


Metric = Mean | Sum | Max


def _f64(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64)


def mean(x: Tensor, mask: Tensor) -> Mean:
    """Mean of x over mask; 0 where no position is in mask."""
    return Mean(total=_f64(torch.where(mask, x.detach(), 0)).sum(), count=_f64(mask).sum())


def sum(x: Tensor, mask: Tensor | None = None) -> Sum:
    """Sum of x over mask."""
    if mask is not None:
        x = torch.where(mask, x.detach(), 0)
    return Sum(total=_f64(x).sum())


def max(x: Tensor, mask: Tensor) -> Max:
    """Largest x over mask; -inf where no position is in mask."""
    low = torch.where(mask, _f64(x), -torch.inf)
    least = low.new_full((1,), -torch.inf)  # amax of nothing raises
    return Max(top=torch.cat([low.flatten(), least]).amax())


def _check(metrics: Mapping[str, Metric]) -> None:
    for name, m in metrics.items():
        if not hasattr(m, "merge"):
            raise ValueError(
                f"metric {name!r}: expected a Metric, got {type(m).__name__}; use metric.mean(x, b.mask), "
                "metric.sum(x) or metric.max(x, b.mask), which know how to merge over packs and ranks"
            )


def merge(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> dict[str, Metric]:
    """Both dicts in one; a name in both is merged by its own rule. ValueError if the rules differ, or for a
    value that is no metric."""
    _check(a)
    _check(b)
    out = dict(a)
    for name, m in b.items():
        if name not in out:
            out[name] = m
            continue
        if type(out[name]) is not type(m):
            raise ValueError(f"metric {name!r}: expected {type(out[name]).__name__}, got {type(m).__name__}")
        out[name] = out[name].merge(m)  # type: ignore[arg-type]
    return out


def average(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it: of the updates of one rollout."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers, in one transfer from each device. ValueError for a value that is no metric."""
    _check(metrics)
    values = {name: m.value() for name, m in metrics.items()}
    numbers: dict[str, float] = {}
    for device in dict.fromkeys(x.device for x in values.values()):
        here = {name: x for name, x in values.items() if x.device == device}
        numbers |= zip(here, torch.stack(list(here.values())).tolist())
    return {name: numbers[name] for name in metrics}


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """correct [N, G] bool -> [N]: the chance that one of k samples drawn from
    the G without return is correct.

    1 - C(G - c, k) / C(G, k), unbiased (arXiv 2107.03374), by a product that cannot overflow. ValueError
    unless 1 <= k <= G.
    """
    sizes = check.shapes(correct=(correct, "N G"))
    if not 1 <= k <= sizes["G"]:
        raise ValueError(f"k: expected between 1 and the {sizes['G']} samples of each prompt, got {k}")
    wrong = (~correct).double().sum(-1, keepdim=True)  # [N, 1]
    i = torch.arange(k, dtype=torch.float64, device=correct.device)
    return 1 - ((wrong - i).clamp(min=0) / (sizes["G"] - i)).prod(-1)


def policy(out: TokenOut, b: Packed) -> dict[str, Metric]:
    """How far the trainer's log-probs are from `old_logp` [nats a token], and the
    entropy where the model gives it.

    In the first update on a rollout whose old_logp is the sampler's own, `policy/logp_gap` is the
    disagreement of trainer and sampler about the same tokens under the same weights: 1e-6 in float32, and a
    bug when it is not small.
    """
    gap = log_ratio(out.logp.detach(), b.old_logp).abs()
    found: dict[str, Metric] = {"policy/logp_gap": mean(gap, b.mask), "policy/logp_gap_max": max(gap, b.mask)}
    if out.entropy is not None:
        found["policy/entropy"] = mean(out.entropy, b.mask)
    return found


def router(out: TokenOut, b: Packed) -> dict[str, Metric]:
    """How evenly a mixture of experts is used: its balance, which is 1 where all experts are used alike,
    and the largest share of a sequence's choices that one expert has. Of a model bound with aux=True."""
    assert out.aux is not None and out.expert_share is not None
    return {"router/aux": mean(out.aux, b.mask), "router/max_share": mean(out.expert_share, b.mask)}


def rollout(batch: Rollout, reward: Tensor) -> dict[str, float]:
    """What one reads of a rollout and its rewards [N, G]: spread, lengths, and
    the shares of what teaches nothing."""
    size = batch.mask.sum(-1).double()
    flat = reward.amax(-1) == reward.amin(-1)
    return {
        "reward/std": float(reward.double().std(correction=0)),
        "reward/flat_groups": float(flat.double().mean()),
        "rollout/length_mean": float(size.mean()),
        "rollout/length_max": float(size.max()),
        "rollout/truncated": float(batch.truncated.double().mean()),
        "rollout/empty": float((size <= 1).double().mean()),
        "rollout/sampler_logp": float(batch.logp.double().sum() / size.sum().clamp(min=1)),
    }


def spread(name: str, x: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, standard deviation, least and largest of x over mask, as name/mean, ...; 0 of nothing."""
    inside = x[mask].double()
    if not inside.numel():
        inside = torch.zeros(1, dtype=torch.float64)
    return {
        f"{name}/mean": float(inside.mean()),
        f"{name}/std": float(inside.std(correction=0)),
        f"{name}/min": float(inside.min()),
        f"{name}/max": float(inside.max()),
    }
