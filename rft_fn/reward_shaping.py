"""Rewards in, rewards out: pure functions, with their state as an argument and a result.

Mixtures of rewards are `rft_fn.reward.weighted` (a sum) and `gated` (one counts only where another holds).
"""

import torch
from torch import Tensor

from rft_fn import check, tree
from rft_fn.logprob import log_ratio

__all__ = [
    "Moments", "adaptive_kl", "clip", "gated", "kl_in_reward", "length_penalty", "moments",
    "overlong_penalty", "running_norm", "varied",
]  # fmt: skip


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
    rewards, or when all were equal, the scale is left alone. `centre=False` only divides. An empty batch
    leaves the state as it is.
    """
    if reward.numel() == 0:
        return reward, state
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


def length_penalty(length: Tensor, correct: Tensor) -> Tensor:
    """response length [N, G], correct [N, G] bool -> [N, G]: x = 0.5 - (l - shortest) / (longest - shortest)
    of the group for right answers, min(0, x) for wrong ones.

    To be added to the reward: of two right answers the shorter is better, and no wrong one gains by being
    short. Kimi k1.5, arXiv 2501.12599. 0 in a group of equal lengths.
    """
    check.shapes(length=(length, "N G"), correct=(correct, "N G"))
    size = length.to(torch.get_default_dtype())
    low, high = size.amin(-1, keepdim=True), size.amax(-1, keepdim=True)
    x = torch.where(high > low, 0.5 - (size - low) / torch.where(high > low, high - low, 1), 0)
    return torch.where(correct, x, x.clamp(max=0))


def gated(reward: Tensor, gate: Tensor) -> Tensor:
    """[...], [...] bool -> [...]: the reward where the gate holds, else 0: accuracy that counts only in the
    right format."""
    check.shapes(reward=(reward, "..."), gate=(gate, "..."))
    return torch.where(gate, reward, 0)


def varied(reward: Tensor) -> Tensor:
    """[N, G] -> [N] bool: groups whose rewards are not all equal, the only ones that teach anything."""
    check.shapes(reward=(reward, "N G"))
    return reward.amax(-1) > reward.amin(-1)


def adaptive_kl(coef: float, kl: float, *, target: float, horizon: float, count: float) -> float:
    """The KL coefficient after `count` samples whose mean KL was `kl` [nats]:
    coef (1 + clip(kl / target - 1, +-0.2) count / horizon).

    A proportional controller that steers the KL to `target`; arXiv 1909.08593. The state is the coefficient
    itself; a fixed one is a number that is left alone. ValueError unless target and horizon are > 0.
    """
    for name, x in (("target", target), ("horizon", horizon)):
        if not x > 0:
            raise ValueError(f"{name}: expected > 0, got {x}")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * count / horizon)


def kl_in_reward(reward: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """reward [B] and log-probs [B, S] -> token rewards [B, S]: -coef log(pi / ref) on each token in mask,
    plus the reward on the last of them. A row without a token in mask has none to carry its reward."""
    check.shapes(reward=(reward, "B"), logp=(logp, "B S"), ref_logp=(ref_logp, "B S"), mask=(mask, "B S"))
    after = mask.flip(-1).cumsum(-1).flip(-1)  # tokens in mask from here on
    last = mask & (after == 1)
    return torch.where(mask, -coef * log_ratio(logp, ref_logp), 0) + torch.where(
        last, reward.unsqueeze(-1), 0
    )
