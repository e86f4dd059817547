"""The log-ratio of two policies, from their log-probs of the same tokens."""

import math

import torch
from torch import Tensor

from rft_fn import check

__all__ = ["log_ratio"]


def log_ratio(logp: Tensor, old_logp: Tensor, *, limit: float = math.inf) -> Tensor:
    """Return log(pi / pi_old) = logp - old_logp, [*] nats, clamped to +-limit.

    A token that both exclude (-inf, e.g. by top_k) has a ratio of 1: 0 here, without a gradient.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."))
    excluded = (logp == -torch.inf) & (old_logp == -torch.inf)
    ratio = torch.where(excluded, 0, logp) - torch.where(excluded, 0, old_logp)
    return ratio.clamp(-limit, limit)
