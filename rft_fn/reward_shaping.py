"""Pure functions from rewards to rewards.

State, where there is any, is an argument and a result. Mixtures of rewards are `rft_fn.reward.weighted` (a
sum) and `gated` (one counts only where another holds).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check, tree
from rft_fn.logprob import log_ratio
from rft_fn.types import Rollout

__all__ = [
    "Shaping", "adaptive_kl", "chain", "clip", "gated", "kl_in_reward", "last_token", "length_penalty",
    "moments", "on_last_token", "overlong_penalty", "running_norm", "steps_last", "steps_min",
    "steps_product", "varied",
]  # fmt: skip


@tree.struct
class Moments:
    """Running count, mean and spread of all rewards, by Welford's method."""

    count: Tensor  # [] f64
    mean: Tensor  # [] f64
    m2: Tensor  # [] f64, sum of squared deviations from the mean


def moments() -> Moments:
    """Return the moments of no rewards."""
    count, mean, m2 = torch.zeros(3, dtype=torch.float64).unbind()
    return Moments(count=count, mean=mean, m2=m2)


def running_norm(
    reward: Tensor, state: Moments, *, centre: bool = True, eps: float = 1e-8
) -> tuple[Tensor, Moments]:
    """Normalise rewards [...] by the running moments, which include them.

        (reward - mean) / (std + eps)

    Returns (normalised rewards, new moments). Moments are merged by Chan's method, so any cut of the
    rewards gives the same state. With fewer than two rewards, or equal ones, the scale does not change.
    `centre=False` only divides. An empty batch changes nothing.
    """
    if reward.numel() == 0:
        return reward, state
    r = reward.detach().to(torch.float64).flatten()

    # the moments of both sets together
    n = state.count + r.numel()
    gap = r.mean() - state.mean
    mean = state.mean + gap * r.numel() / n
    m2 = state.m2 + (r - r.mean()).square().sum() + gap.square() * state.count * r.numel() / n

    # equal rewards leave a deviation of rounding, which must not be divided by
    std = (m2 / (n - 1).clamp(min=1)).sqrt()
    scale = torch.where(std > 1e-12 * mean.abs(), std + eps, 1.0)
    shift = mean if centre else torch.zeros_like(mean)
    return ((reward - shift) / scale).to(reward.dtype), Moments(count=n, mean=mean, m2=m2)


def clip(reward: Tensor, limit: float) -> Tensor:
    """Bound rewards [...] to +-limit. ValueError unless limit > 0."""
    if limit <= 0:
        raise ValueError(f"limit: expected > 0, got {limit}")
    return reward.clamp(-limit, limit)


def overlong_penalty(length: Tensor, *, max_new: int, buffer: int, scale: float = 1.0) -> Tensor:
    """Return DAPO's soft penalty of long responses, [...].

    The penalty is 0 up to a `length` [...] of max_new - buffer tokens, then falls on a line to -scale at
    max_new. arXiv 2503.14476. ValueError unless 0 < buffer <= max_new.
    """
    if not 0 < buffer <= max_new:
        raise ValueError(f"buffer: expected 0 < buffer <= max_new = {max_new} tokens, got {buffer}")
    return -scale * ((length - (max_new - buffer)) / buffer).clamp(0, 1)


def length_penalty(length: Tensor, correct: Tensor) -> Tensor:
    """Return Kimi's length penalty [N, G], to be added to the reward.

        x = 0.5 - (length - shortest) / (longest - shortest)    of the group
        x where correct, else min(0, x)

    `length` [N, G] is in tokens, `correct` [N, G] is bool. Of two correct responses the shorter is better,
    and no wrong one gains by being short. It is 0 in a group of equal lengths. Kimi k1.5, arXiv 2501.12599.
    """
    check.shapes(length=(length, "N G"), correct=(correct, "N G"))
    size = length.to(torch.get_default_dtype())
    low = size.amin(-1, keepdim=True)
    high = size.amax(-1, keepdim=True)
    spread = torch.where(high > low, high - low, 1)
    x = torch.where(high > low, 0.5 - (size - low) / spread, 0)
    return torch.where(correct, x, x.clamp(max=0))


def gated(reward: Tensor, gate: Tensor) -> Tensor:
    """Return rewards [...] where the gate [...] is True, else 0.

    An example is accuracy that counts only in the right format.
    """
    check.shapes(reward=(reward, "..."), gate=(gate, "..."))
    return torch.where(gate, reward, 0)


def best_and_worst(reward: Tensor) -> Tensor:
    """Mark the best and the worst responses of each group with 1, the others with 0, [N, G].

    All of a group in which rewards are equal. `rollout.draw_rows` draws by them: PF-PPO, arXiv 2409.06957.
    """
    check.shapes(reward=(reward, "N G"))
    best, worst = reward.amax(-1, keepdim=True), reward.amin(-1, keepdim=True)
    return ((reward == best) | (reward == worst)).to(reward.dtype)


def varied(reward: Tensor) -> Tensor:
    """Return whether rewards differ within each group, [N] bool.

    `reward` is [N, G]. Groups of equal rewards have advantages of 0 and teach nothing.
    """
    check.shapes(reward=(reward, "N G"))
    return reward.amax(-1) > reward.amin(-1)


def adaptive_kl(coef: float, kl: float, *, target: float, horizon: float, count: float) -> float:
    """Return the next KL coefficient of a proportional controller.

        coef (1 + clip(kl / target - 1, +-0.2) count / horizon)

    `kl` [nats] is the mean over the last `count` samples; the controller steers it to `target`. The state
    is the coefficient itself. arXiv 1909.08593. ValueError unless target and horizon are > 0.
    """
    for name, x in (("target", target), ("horizon", horizon)):
        if not x > 0:
            raise ValueError(f"{name}: expected > 0, got {x}")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * count / horizon)


def last_token(mask: Tensor) -> Tensor:
    """Mark the last token in mask of each row, [B, S] bool; none in a row without one."""
    check.shapes(mask=(mask, "B S"))
    from_here_on = mask.flip(-1).cumsum(-1).flip(-1)  # tokens in mask
    return mask & (from_here_on == 1)


def on_last_token(reward: Tensor, mask: Tensor) -> Tensor:
    """Put rewards on the last tokens in mask, [B, S].

    Other tokens get 0. `reward` [B] has one number per row; a row without a token in mask loses its reward.
    """
    check.shapes(reward=(reward, "B"), mask=(mask, "B S"))
    return torch.where(last_token(mask), reward.unsqueeze(-1), 0)


def steps_last(score: Tensor, mask: Tensor) -> Tensor:
    """Return the score of the last step of each response, [B].

    `score` [B, S] has the scores of its steps, where `mask` is True, as a process reward model gives them
    (`packing.scored(ends=)`). A response without a step gets 0.
    """
    check.shapes(score=(score, "B S"), mask=(mask, "B S"))
    return torch.where(last_token(mask), score, 0).sum(-1)


def steps_min(score: Tensor, mask: Tensor) -> Tensor:
    """Return the lowest score of the steps of each response, [B].

    A chain of thought is as good as its worst step: arXiv 2305.20050, 2312.08935. Arguments as in
    `steps_last`.
    """
    check.shapes(score=(score, "B S"), mask=(mask, "B S"))
    lowest = torch.where(mask, score, torch.inf).amin(-1)
    return torch.where(mask.any(-1), lowest, 0)


def steps_product(logit: Tensor, mask: Tensor) -> Tensor:
    """Return the probability that all steps of each response are right, [B].

        product over its steps of sigmoid(logit)

    The steps are taken to be independent: arXiv 2305.20050. Arguments as in `steps_last`; the scores are
    logits, as `loss.score_bce` trains them. A response without a step gets 0.
    """
    check.shapes(logit=(logit, "B S"), mask=(mask, "B S"))
    logp = torch.where(mask, F.logsigmoid(logit), 0).sum(-1)
    return torch.where(mask.any(-1), logp.exp(), 0)


def kl_in_reward(reward: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Return token rewards with a KL penalty, [B, S].

    Each token gets -coef log(pi / ref), and the last one the reward too. `reward` is [B], all else [B, S];
    0 outside mask. A row without a token in mask loses its reward.
    """
    check.shapes(reward=(reward, "B"), logp=(logp, "B S"), ref_logp=(ref_logp, "B S"), mask=(mask, "B S"))
    penalty = torch.where(mask, -coef * log_ratio(logp, ref_logp), 0)
    return penalty + on_last_token(reward, mask)


# ---------- the changes that a run makes to the rewards of a step, in their order


class Shaping(NamedTuple):
    """A chain of changes to rewards: a pair of functions like optax's Transform."""

    init: Callable[[], Moments]
    apply: Callable[..., tuple[Tensor, Moments, dict[str, float]]]


def chain(
    *, clip: float = 0.0, overlong: int = 0, max_new: int = 0, kl: float = 0.0, normalize: bool = False
) -> Shaping:
    """Return the chain of the given changes, in this order; 0 and False leave one out.

        clip        rewards are bounded to +-clip
        overlong    DAPO's penalty in the last `overlong` tokens before `max_new`
        kl          less kl times the sum over a response of log(policy / initial model)
        normalize   the running mean is subtracted, and the running deviation divided by: `running_norm`

    `apply(reward, state, rollout, ref_logp=None)` takes rewards [N, G] of a rollout of B = N G rows, and the
    initial model's log-probs [B, S] for the KL; it returns (reward, state, metrics). The policy's log-probs
    are the sampler's. The state is the moments of all rewards so far.
    """

    def apply(
        reward: Tensor, state: Moments, rollout: Rollout, ref_logp: Tensor | None = None
    ) -> tuple[Tensor, Moments, dict[str, float]]:
        metrics = {}
        if clip:
            reward = reward.clamp(-clip, clip)
        if overlong:
            length = rollout.mask.sum(-1).view_as(reward)
            reward = reward + overlong_penalty(length, max_new=max_new, buffer=overlong)
        if kl:
            (ref_logp,) = check.given(ref_logp=ref_logp)
            log_ratio = ((rollout.logp - ref_logp) * rollout.mask).sum(-1)
            reward = reward - kl * log_ratio.view_as(reward)
            metrics["kl/in_reward"] = float(log_ratio.mean())
        if normalize:
            reward, state = running_norm(reward, state)
        return reward, state, metrics

    return Shaping(moments, apply)
