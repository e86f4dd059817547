"""Metrics of preference pairs, labelled responses and ranked lists."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.metric.calibration import calibration
from rft_fn.metric.kinds import Metric, f64, mean

__all__ = ["labelled", "pairs", "preference", "ranking"]


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
    p = torch.sigmoid(f64(chosen) - f64(rejected))
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
