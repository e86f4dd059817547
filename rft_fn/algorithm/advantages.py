"""Advantages of rows: rewards [N, G] to [B, 1] of responses, or [B, S] of tokens."""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import advantage
from rft_fn.algorithm.options import with_options_of
from rft_fn.reward_shaping import last_token, on_last_token
from rft_fn.types import AdvantageFn, Rollout

__all__ = ["opo", "per_group", "ppo", "raw", "reinforce_pp", "reinforce_pp_baseline", "remax", "vapo"]


def _rows(adv: Tensor, rollout: Rollout) -> Tensor:
    """One number per row, [N, G] -> [B, 1].

    ValueError unless N G is the number of rows of the rollout.
    """
    rows = len(rollout.mask)
    if adv.dim() != 2 or adv.numel() != rows:
        raise ValueError(
            f"reward: expected [N, G] with N G = {rows} rows of the rollout, got {list(adv.shape)}"
        )
    return rearrange(adv, "n g -> (n g) 1")


def per_group(estimator: Callable[[Tensor], Tensor]) -> AdvantageFn:
    """Adapt an estimator of rewards [N, G] alone."""

    def advantage_fn(reward: Tensor, rollout: Rollout, /) -> Tensor:
        return _rows(estimator(reward), rollout)

    return advantage_fn


def raw(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """The rewards themselves, [B, 1]."""
    return _rows(reward, rollout).clone()


def remax(reward: Tensor, rollout: Rollout, /, *, greedy_reward: Tensor) -> Tensor:
    """`advantage.remax` of each row, [B, 1]."""
    return _rows(advantage.remax(reward, greedy_reward), rollout)


def opo(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """`advantage.opo` of each row, [B, 1], by the tokens that were sampled."""
    _rows(reward, rollout)  # an error about the rewards comes before one about their lengths
    length = rearrange(rollout.mask.sum(-1), "(n g) -> n g", n=len(reward))
    return _rows(advantage.opo(reward, length.to(reward.dtype)), rollout)


@with_options_of(advantage.reinforce_pp)
def reinforce_pp(reward: Tensor, rollout: Rollout, /, **options: Any) -> Tensor:
    """Whitened returns of the rewards on last tokens."""
    token_reward = on_last_token(_rows(reward, rollout)[:, 0], rollout.mask)
    returns = advantage.reinforce_pp(token_reward, rollout.mask, **options)
    return advantage.whiten(returns, rollout.mask)


def reinforce_pp_baseline(reward: Tensor, rollout: Rollout, /) -> Tensor:
    """Rewards less their group's mean, whitened over the tokens of the batch, [B, S]."""
    centred = _rows(advantage.reinforce_pp_baseline(reward), rollout)
    return advantage.whiten(centred * rollout.mask, rollout.mask)


def _discount(token_reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounts [B, S] of responses.

    It is gamma on every token but the last one in mask of its row, where the sequence ends with 0.
    """
    return torch.where(last_token(mask), 0.0, gamma).to(token_reward.dtype)


@with_options_of(advantage.gae, "lambda_")
def ppo(
    token_reward: Tensor, value: Tensor, mask: Tensor, /, *, gamma: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """GAE with one lambda for actor and critic: (adv, ret), [B, S]."""
    discount = _discount(token_reward, mask, gamma)
    return advantage.gae(token_reward, value, discount, mask=mask, **options)


@with_options_of(advantage.length_adaptive_lambda)
def vapo(
    token_reward: Tensor, value: Tensor, mask: Tensor, /, *, gamma: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """GAE with a lambda by length for the actor and 1 for the critic: (adv, ret), [B, S]."""
    length = mask.sum(-1, keepdim=True)
    policy_lambda = advantage.length_adaptive_lambda(length, **options)
    discount = _discount(token_reward, mask, gamma)
    return advantage.decoupled_gae(token_reward, value, discount, policy_lambda=policy_lambda, mask=mask)
