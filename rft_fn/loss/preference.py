"""Losses of policies on preferences: pairs of responses, and single responses with a label."""

from torch import Tensor

from rft_fn import check
from rft_fn.loss.targets import smoothed

__all__ = ["dpo", "ipo"]

Scalar = float | Tensor


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
