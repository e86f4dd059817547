"""Losses against known targets: texts, returns and scores of reward models.

Scores are raw numbers of any size, and none of these losses overflows. Losses of pairs are one family: with
hard labels `bradley_terry`, `hps` and `log_exp` are the same number, which is also `plackett_luce` of two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check

__all__ = [
    "bradley_terry", "centering", "hps", "log_exp", "nll", "plackett_luce", "score_bce", "score_mse",
    "smoothed", "value_clip",
]  # fmt: skip

Scalar = float | Tensor


# ---------- texts and returns


def nll(logp: Tensor) -> Tensor:
    """Return the negative log-likelihood, [*] nats.

    This is -logp, the loss of supervised fine-tuning.
    """
    return -logp


def value_clip(value: Tensor, old_value: Tensor, ret: Tensor, *, clip: Scalar = 0.2) -> Tensor:
    """Return PPO's clipped critic loss, [*].

        max((V - R)^2, (V_c - R)^2) / 2,    V_c = V_old + clip(V - V_old, +-clip)

    clip = inf is the plain squared error. ValueError that names a missing field.
    """
    check.given(value=value, old_value=old_value, ret=ret)
    check.shapes(value=(value, "..."), old_value=(old_value, "..."), ret=(ret, "..."))
    near = old_value + (value - old_value).clamp(min=-clip).clamp(max=clip)
    return 0.5 * torch.maximum((value - ret).square(), (near - ret).square())


# ---------- scores of reward models


def smoothed(h: Tensor, label_smoothing: float) -> Tensor:
    """Return -(1 - e) log sigmoid(h) - e log sigmoid(-h), [*]; ValueError unless 0 <= e < 0.5."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing: expected 0 <= label_smoothing < 0.5, got {label_smoothing}")
    return -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Scalar = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """Return the Bradley-Terry loss of reward models, [N].

        -(1 - e) log sigmoid(h) - e log sigmoid(-h)
        h = chosen - rejected - margin,    e = label_smoothing

    `margin` is a number or [N]: by how much the better response has to win, such as a rating of how clear the
    preference is (Llama 2, arXiv 2307.09288). e > 0 is for labels with a share e of wrong ones: the least
    loss is at h = log((1 - e) / e), not at infinity (as cDPO). Never overflows: at a difference of -1000 it
    is 1000. Bradley and Terry 1952, Biometrika 39. ValueError unless 0 <= e < 0.5.
    """
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    if isinstance(margin, Tensor) and margin.dim():
        check.shapes(chosen=(chosen, "N"), margin=(margin, "N"))
    return smoothed(chosen - rejected - margin, label_smoothing)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the square of a pair's sum of scores, [N].

        (chosen + rejected)^2

    Losses of pairs know scores up to a constant. With a small coefficient, such as 0.01, this one holds their
    mean at 0: `bradley_terry(c, r) + 0.01 * centering(c, r)`. arXiv 2312.09244.
    """
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    return (chosen + rejected).square()


def hps(first: Tensor, second: Tensor, preference: Scalar = 1.0, *, scale: Scalar = 1.0) -> Tensor:
    """Return the loss of human preference scores, with soft labels, [N] nats.

        KL(y, p) = y log(y / p) + (1 - y) log((1 - y) / (1 - p))
        p = softmax(scale * [first, second])[0]

    `preference` y is a number or [N] in [0, 1]: the share of votes for the first response, 0.5 for a tie. At
    y = 1 it is `bradley_terry` of scale times the scores; else smoothed Bradley-Terry with e = 1 - y, less
    the entropy of the label, so that the least value is 0. arXiv 2306.09341 (HPS v2), 2305.01569 (PickScore).
    """
    check.shapes(first=(first, "N"), second=(second, "N"))
    y = torch.as_tensor(preference, dtype=first.dtype, device=first.device)
    if y.dim():
        check.shapes(first=(first, "N"), preference=(y, "N"))
    logp = torch.log_softmax(scale * torch.stack([first, second]), 0)
    entropy = -torch.xlogy(y, y) - torch.xlogy(1 - y, 1 - y)
    return -y * logp[0] - (1 - y) * logp[1] - entropy


def log_exp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the log-exp loss of pairs, [N].

        log(1 + exp(rejected - chosen))

    It is `bradley_terry` without a margin, by another formula. Written like this the exponential overflows
    in float32 at a difference of 89; this one never does.
    """
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    worse = rejected - chosen
    return torch.logaddexp(torch.zeros_like(worse), worse)


def plackett_luce(score: Tensor, rank: Tensor, unit: Tensor) -> Tensor:
    """Return the listwise Plackett-Luce loss of ranked lists of any length, [N].

        x_i = log(sum of exp(score_j) over the j of i's list with rank_j >= rank_i) - score_i

    `rank` [N] is the place of each response, 0 for the best; any numbers do, lower is better. `unit`
    [N] is the list of each (`packing.unit_of`). The sum of x over a list is -log of the probability that
    responses are drawn in this order, each time among those that are left in proportion to exp(score): so
    `weight.unit_sum` makes the mean over lists, and `weight.unit_mean` divides by their lengths too. Two
    responses are Bradley-Terry. Tied responses are each drawn among all that are no better (Breslow 1974), so
    their order is nothing. Plackett 1975, Applied Statistics 24; Luce 1959.
    """
    check.shapes(score=(score, "N"), rank=(rank, "N"), unit=(unit, "N"))
    left = (unit[:, None] == unit) & (rank[:, None] <= rank)
    return score.expand(left.shape).masked_fill(~left, -torch.inf).logsumexp(-1) - score


def score_mse(score: Tensor, label: Tensor) -> Tensor:
    """Return the squared error of scores, [*].

        (score - label)^2

    For ratings, of responses or of steps.
    """
    check.shapes(score=(score, "..."), label=(label, "..."))
    return (score - label).square()


def score_bce(score: Tensor, label: Tensor) -> Tensor:
    """Return the binary cross-entropy of scores, which are logits, [*] nats.

        -y log sigmoid(score) - (1 - y) log sigmoid(-score)

    `label` y is bool or in [0, 1]: whether a response or a step is right, or how often it was (process
    rewards: arXiv 2305.20050, 2312.08935). Scores are at the ends of steps: see `packing.scored(ends=)`.
    """
    check.shapes(score=(score, "..."), label=(label, "..."))
    y = label.to(score.dtype)
    return -y * F.logsigmoid(score) - (1 - y) * F.logsigmoid(-score)
