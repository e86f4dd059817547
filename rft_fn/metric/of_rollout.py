"""Metrics of whole rollouts, and of numbers at hand: pass@k, lengths, spread."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.reward_shaping import varied
from rft_fn.types import Rollout

__all__ = ["OF_REWARD", "pass_at_k", "rollout", "spread"]


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """Return the unbiased estimate of pass@k, [N].

    The probability that one of k samples is correct, from `correct` [N, G] bool with c correct samples:

        1 - C(G - c, k) / C(G, k)

    The k samples are drawn from the G without replacement. Unbiased (arXiv 2107.03374), by a product that
    cannot overflow. ValueError unless 1 <= k <= G.
    """
    sizes = check.shapes(correct=(correct, "N G"))
    if not 1 <= k <= sizes["G"]:
        raise ValueError(f"k: expected between 1 and the {sizes['G']} samples of each prompt, got {k}")
    wrong = (~correct).double().sum(-1, keepdim=True)  # [N, 1]
    i = torch.arange(k, dtype=torch.float64, device=correct.device)
    return 1 - ((wrong - i).clamp(min=0) / (sizes["G"] - i)).prod(-1)


OF_REWARD = ("mean", "std", "flat_groups")
"""What `rollout` and `reward.means` say of a whole reward, as reward/NAME: no part of one is called so."""


def rollout(batch: Rollout, reward: Tensor) -> dict[str, float]:
    """Describe a rollout with rewards [N, G]: spread, lengths, and the share of groups without signal."""
    size = batch.mask.sum(-1).double()
    flat = ~varied(reward)
    values = {
        "reward/std": float(reward.double().std(correction=0)),
        "reward/flat_groups": float(flat.double().mean()),
        "rollout/length_mean": float(size.mean()),
        "rollout/length_max": float(size.max()),
        "rollout/truncated": float(batch.truncated.double().mean()),
        "rollout/empty": float((size <= 1).double().mean()),
    }
    logp = {"rollout/sampler_logp": float(batch.logp.double().sum() / size.sum())}
    return values | (logp if size.any() else {})


def spread(name: str, x: Tensor, mask: Tensor) -> dict[str, float]:
    """Return mean, deviation, minimum and maximum over mask.

    The names are name/mean, name/std, name/min and name/max; none if mask is empty. x and mask are [*].
    """
    inside = x[mask].double()
    if not inside.numel():
        return {}
    return {
        f"{name}/mean": float(inside.mean()),
        f"{name}/std": float(inside.std(correction=0)),
        f"{name}/min": float(inside.min()),
        f"{name}/max": float(inside.max()),
    }
