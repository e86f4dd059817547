"""Advantage estimators: rewards in, advantages out. None of them whitens, clips or looks at a log-prob.

A group whose rewards are all equal has no preference to teach: its advantages are exactly 0, whatever the
rounding of a mean.
"""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.scan import linear_scan

__all__ = ["discounted_return", "gae", "grpo", "rloo", "whiten"]


def _centre(reward: Tensor) -> Tensor:
    """[N, G]: reward minus its group's mean, exactly 0 in a group without variance."""
    sizes = check.shapes(reward=(reward, "N G"))
    if sizes["G"] < 2:
        raise ValueError(
            f"reward: expected [N, G] with G >= 2, got {list(reward.shape)}: a group of one has no baseline; "
            "sample more per prompt (group >= 2) or use an advantage that is not normalised by group"
        )
    equal = reward.amax(-1, keepdim=True) == reward.amin(-1, keepdim=True)
    return torch.where(equal, 0, reward - reward.mean(-1, keepdim=True))


def grpo(reward: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """[N, G] -> [N, G]: (r - mean) / (std + eps) in each row, std the sample's (G - 1). arXiv 2402.03300.

    `scale=False` leaves the division out: Dr. GRPO (arXiv 2503.20783), without its bias towards easy and hard
    questions. Raises ValueError for groups of one. Does not whiten over the batch.
    """
    centred = _centre(reward)
    return centred / (reward.std(-1, keepdim=True) + eps) if scale else centred


def rloo(reward: Tensor) -> Tensor:
    """[N, G] -> [N, G]: r minus the mean of the *other* G - 1 rewards of its row = (r - mean) G / (G - 1).

    Leave-one-out, so that the baseline of a sample does not depend on it: unbiased. arXiv 2402.14740.
    ValueError if G = 1.
    """
    group = reward.shape[-1]
    return _centre(reward) * (group / max(group - 1, 1))


def discounted_return(reward: Tensor, discount: Tensor) -> Tensor:
    """[..., S]: R[t] = r[t] + discount[t] R[t+1]. A sequence ends
    where discount is 0 (REINFORCE's return)."""
    check.shapes(reward=(reward, "... S"), discount=(discount, "... S"))
    return linear_scan(discount, reward)


def gae(
    reward: Tensor,
    value: Tensor,
    discount: Tensor,
    lambda_: float = 0.95,
    *,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(adv, ret), each [..., S]: generalised advantage estimation, arXiv 1506.02438.

        delta[t] = r[t] + discount[t] V[t'] - V[t]
        adv[t] = delta[t] + discount[t] lambda adv[t'],    ret = adv + V

    t' is the next position *in mask*: tokens outside (tool output, padding) are passed over as if they were
    not there, not read as zeros; adv and ret are 0 on them. A sequence ends where discount is 0, in mask or
    not, so rows may be padded and a flat stream may hold many sequences. `bootstrap` [...] is the value after
    the last position (0 without). lambda = 1 is the discounted return minus V, lambda = 0 the one-step error.
    Does not whiten. Gradients are the caller's to stop.
    """
    check.shapes(reward=(reward, "... S"), value=(value, "... S"), discount=(discount, "... S"))
    check.shapes(reward=(reward, "... S"), mask=(mask, "... S"), bootstrap=(bootstrap, "..."))
    mask = torch.ones_like(reward, dtype=torch.bool) if mask is None else mask
    end = torch.zeros_like(reward[..., :1]) if bootstrap is None else bootstrap.unsqueeze(-1)
    through = (~mask & (discount != 0)).to(reward.dtype)  # a token outside mask hands on what comes after it
    after = linear_scan(_append(through, 0), _append(torch.where(mask, value, 0), end))[..., 1:]
    zero = torch.zeros_like(reward)
    delta = torch.where(mask, reward + discount * after - value, zero)
    adv = linear_scan(torch.where(mask, discount * lambda_, through), delta)
    adv = torch.where(mask, adv, zero)
    return adv, torch.where(mask, adv + value, zero)


def _append(x: Tensor, last: Tensor | float) -> Tensor:
    tail = last if isinstance(last, Tensor) else torch.full_like(x[..., :1], last)
    return torch.cat([x, tail.to(x.dtype)], -1)


def whiten(adv: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """[...]: (adv - mean) / sqrt(var + eps) over mask, var the sample's; 0 outside mask.
    Called by no other function here."""
    check.shapes(adv=(adv, "..."), mask=(mask, "..."))
    count = mask.sum().to(adv.dtype)
    centred = torch.where(mask, adv - torch.where(mask, adv, 0).sum() / count.clamp(min=1), 0)
    var = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(var + eps)
