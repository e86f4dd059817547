"""Losses of policies and critics against known targets: texts, returns and preferences."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.loss.preference import smoothed

__all__ = ["dpo", "ipo", "nll", "value_clip"]

Scalar = float | Tensor


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


def _preference(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """Return log(pi / ref)(chosen) - log(pi / ref)(rejected), [N]."""
    check.given(ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    check.shapes(chosen=(chosen, "N"), rejected=(rejected, "N"))
    check.shapes(chosen=(chosen, "N"), ref_chosen=(ref_chosen, "N"), ref_rejected=(ref_rejected, "N"))
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: Scalar = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the DPO loss of preference pairs, [N].

        -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        h = log(pi / ref)(chosen) - log(pi / ref)(rejected),    e = label_smoothing

    The four arguments [N] are log-probs of whole responses, sums over tokens (`segment.sum`). e > 0 is
    cDPO, for labels with a share e of wrong ones. A pair must share a pack: `packing.shard(..., unit=2)`;
    metrics count the pairs in `packing.real(b)`, which leaves out placeholders. arXiv 2305.18290.
    ValueError unless 0 <= e < 0.5.
    """
    return smoothed(beta * _preference(chosen, rejected, ref_chosen, ref_rejected), label_smoothing)


def ipo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: Scalar = 0.1
) -> Tensor:
    """Return the IPO loss of preference pairs, [N].

    h has a margin to reach, not one to stretch:

        (h - 1 / (2 beta))^2,    h as in `dpo`

    The paper's h is of sums over tokens; TRL takes means over tokens (`segment.mean`). arXiv 2310.12036.
    """
    h = _preference(chosen, rejected, ref_chosen, ref_rejected)
    return (h - 1 / (2 * beta)).square()
