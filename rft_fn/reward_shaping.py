"""Rewards in, rewards out: pure functions, with their state as an argument and a result."""

import torch
from torch import Tensor

from rft_fn import check, tree

__all__ = ["Moments", "clip", "kl_in_reward", "moments", "overlong_penalty", "running_norm"]


@tree.struct
class Moments:
    """Count, mean and sum of squared deviations of every reward seen so far (Welford)."""

    count: Tensor  # [] f64
    mean: Tensor  # [] f64
    m2: Tensor  # [] f64


def moments() -> Moments:
    """The state before any reward."""
    count, mean, m2 = torch.zeros(3, dtype=torch.float64).unbind()
    return Moments(count=count, mean=mean, m2=m2)


def running_norm(
    reward: Tensor, state: Moments, *, centre: bool = True, eps: float = 1e-8
) -> tuple[Tensor, Moments]:
    """([...], state): (r - mean) / (std + eps) with the moments of all rewards up to and including these.

    The merge of moments is Chan's, so any cut of the rewards gives the same state. With fewer than two
    rewards, or when all were equal, the scale is left alone. `centre=False` only divides.
    """
    r = reward.detach().to(torch.float64).flatten()
    n, gap = state.count + r.numel(), r.mean() - state.mean
    mean = state.mean + gap * r.numel() / n
    m2 = state.m2 + (r - r.mean()).square().sum() + gap.square() * state.count * r.numel() / n
    std = (m2 / (n - 1).clamp(min=1)).sqrt()
    scale = torch.where(std > 1e-12 * mean.abs(), std + eps, 1.0)  # equal rewards leave a std of rounding
    shift = mean if centre else torch.zeros_like(mean)
    return ((reward - shift) / scale).to(reward.dtype), Moments(count=n, mean=mean, m2=m2)


def clip(reward: Tensor, limit: float) -> Tensor:
    """[...]: reward bounded to +-limit."""
    if limit <= 0:
        raise ValueError(f"limit: expected > 0, got {limit}")
    return reward.clamp(-limit, limit)


def overlong_penalty(length: Tensor, *, max_new: int, buffer: int, scale: float = 1.0) -> Tensor:
    """response length [...] in tokens -> [...] <= 0: 0 up to max_new - buffer, then a
    line down to -scale at max_new.

    DAPO's soft overlong punishment, arXiv 2503.14476. ValueError unless 0 < buffer <= max_new.
    """
    if not 0 < buffer <= max_new:
        raise ValueError(f"buffer: expected 0 < buffer <= max_new = {max_new} tokens, got {buffer}")
    return -scale * ((length - (max_new - buffer)) / buffer).clamp(0, 1)


def kl_in_reward(reward: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """reward [B] and log-probs [B, S] -> token rewards [B, S]: -coef log(pi / ref) on each token in mask,
    plus the reward on the last of them. A row without a token in mask has none to carry its reward."""
    check.shapes(reward=(reward, "B"), logp=(logp, "B S"), ref_logp=(ref_logp, "B S"), mask=(mask, "B S"))
    after = mask.flip(-1).cumsum(-1).flip(-1)  # tokens in mask from here on
    last = mask & (after == 1)
    return torch.where(mask, -coef * (logp - ref_logp), 0) + torch.where(last, reward.unsqueeze(-1), 0)
