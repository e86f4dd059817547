"""Losses of policies on single responses with a label, desirable or not.

Arguments [N] are log-probs of whole responses: sums over their tokens (`segment.sum`). `ref_` are the
reference's of the same responses.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check, segment
from rft_fn.loss.preference import Scalar
from rft_fn.types.batch import Packed

__all__ = ["Labels", "bco", "kto"]


def _signed(logp: Tensor, ref_logp: Tensor, desirable: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log(pi / ref) [N], 1 for desirable responses and -1 for others [N])."""
    check.given(ref_logp=ref_logp)
    check.shapes(logp=(logp, "N"), ref_logp=(ref_logp, "N"), desirable=(desirable, "N"))
    return logp - ref_logp, torch.where(desirable > 0.5, 1.0, -1.0).to(logp.dtype)


def kto(
    logp: Tensor,
    ref_logp: Tensor,
    desirable: Tensor,
    *,
    beta: Scalar = 0.1,
    baseline: Scalar = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the KTO loss of single responses, [N].

        weight (1 - sigmoid(+-beta (log(pi / ref) - z))),    + for desirable ones, z = `baseline`

    `desirable` [N] is bool, or above 0.5. z [nats] is an estimate of KL(pi, ref), at least 0 and without
    gradient, a number or [N]: the mean of log(pi / ref) over responses to other prompts of the batch. The
    weights balance both kinds: weight times count of one within 1 to 4/3 of the other's. arXiv 2402.01306.
    With z = 0 it is `apo_zero`, unpaired.
    """
    ratio, sign = _signed(logp, ref_logp, desirable)
    weight = torch.where(sign > 0, desirable_weight, undesirable_weight).to(logp.dtype)
    return weight * torch.sigmoid(-sign * beta * (ratio - baseline))


def bco(
    logp: Tensor, ref_logp: Tensor, desirable: Tensor, *, beta: Scalar = 0.1, baseline: Scalar = 0.0
) -> Tensor:
    """Return the BCO loss of single responses, [N].

        -log sigmoid(+-(beta log(pi / ref) - delta)),    + for desirable ones, delta = `baseline`

    `desirable` [N] is bool, or above 0.5: a classifier whose logit is the implicit reward. delta, a number
    or [N], is the mean of the means of the rewards of both kinds, without gradient; the paper keeps a running
    one. `bco_pair` is the sum of both sides of a pair, with 0. arXiv 2404.04656.
    """
    ratio, sign = _signed(logp, ref_logp, desirable)
    return -F.logsigmoid(sign * (beta * ratio - baseline))


class Labels(NamedTuple):
    """What losses of single responses read of each response, [K]."""

    desirable: Tensor  # 1 or 0, or a share
    baseline: Tensor

    @classmethod
    def of_pack(cls, b: Packed) -> "Labels":
        """Return the labels of the responses of a pack, from `extra` of their tokens."""
        given = b.extra or {}
        return cls(*(segment.mean(given[name], b.mask, b.seq, b.num_seqs) for name in cls._fields))
