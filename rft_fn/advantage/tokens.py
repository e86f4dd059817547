"""Advantages of tokens, from rewards and values of tokens."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.scan import linear_scan, step

__all__ = [
    "decoupled_gae", "discounted_return", "gae", "length_adaptive_lambda", "reinforce_pp", "whiten",
]  # fmt: skip


def reinforce_pp(token_reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++'s advantages, discounted sums of rewards [B, S].

        A[t] = r[t] + gamma A[t'],    t' the next token in mask

    Tokens outside mask (tool output) get 0 and are skipped, as if they were not there. Does not whiten; the
    algorithm whitens over the whole batch: `whiten(reinforce_pp(...), mask)`. arXiv 2501.03262.
    """
    check.shapes(token_reward=(token_reward, "B S"), mask=(mask, "B S"))
    through = torch.where(mask, gamma, 1.0).to(token_reward.dtype)
    total = linear_scan(through, torch.where(mask, token_reward, 0))
    return torch.where(mask, total, 0)


def discounted_return(reward: Tensor, discount: Tensor) -> Tensor:
    """Discounted returns [..., S] from rewards and discounts [..., S].

        R[t] = r[t] + discount[t] R[t+1]

    A sequence ends where discount is 0.
    """
    check.shapes(reward=(reward, "... S"), discount=(discount, "... S"))
    return linear_scan(discount, reward)


def _shift(x: Tensor, last: Tensor) -> Tensor:
    """x [..., S] shifted left, with `last` [..., 1] at the end."""
    return torch.cat([x[..., 1:], last.to(x.dtype)], -1)


def _through(discount: Tensor, mask: Tensor) -> Tensor:
    """1 on tokens that only pass on later values, else 0.

    Those are the tokens outside mask, unless a sequence ends there.
    """
    return (~mask & (discount != 0)).to(discount.dtype)


def _errors(
    reward: Tensor, value: Tensor, discount: Tensor, mask: Tensor | None, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(one-step errors, value) of GAE, 0 outside mask.

    The errors are r + discount V' - V.
    """
    check.shapes(reward=(reward, "... S"), value=(value, "... S"), discount=(discount, "... S"))
    check.shapes(reward=(reward, "... S"), mask=(mask, "... S"), bootstrap=(bootstrap, "..."))
    end = torch.zeros_like(reward[..., :1])
    if bootstrap is not None:
        end = bootstrap.unsqueeze(-1)
    if mask is None:
        return step(reward, discount, _shift(value, end)) - value, value

    # the next value in mask reaches back over the tokens outside
    value = torch.where(mask, value, 0)
    through = _through(discount, mask)
    after = linear_scan(_shift(through, torch.zeros_like(end)), _shift(value, end))
    return torch.where(mask, step(reward, discount, after) - value, 0), value


def _traced(delta: Tensor, discount: Tensor, lambda_: float | Tensor, mask: Tensor | None) -> Tensor:
    """adv[t] = delta[t] + discount[t] lambda adv[t'], 0 outside mask."""
    if mask is None:
        return linear_scan(discount * lambda_, delta)
    carry = torch.where(mask, discount * lambda_, _through(discount, mask))
    return torch.where(mask, linear_scan(carry, delta), 0)


def gae(
    reward: Tensor,
    value: Tensor,
    discount: Tensor,
    lambda_: float | Tensor = 0.95,
    *,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation.

    Returns (adv, ret), each [..., S].

        delta[t] = r[t] + discount[t] V[t'] - V[t]
        adv[t] = delta[t] + discount[t] lambda adv[t'],    ret = adv + V

    t' is the next position in mask. Tokens outside mask (tool output, padding) are skipped as if they were
    not there, not read as zeros; adv and ret are 0 on them. A sequence ends where discount is 0, in mask or
    not, so rows may be padded and a flat stream may hold many sequences. `bootstrap` [...] is the value
    after the last position, by default 0. lambda = 1 gives the discounted return minus V, lambda = 0 the
    one-step error; it may be a tensor that broadcasts against [..., S], such as [B, 1]. Does not whiten or
    stop gradients. arXiv 1506.02438.
    """
    delta, value = _errors(reward, value, discount, mask, bootstrap)
    adv = _traced(delta, discount, lambda_, mask)
    return adv, adv + value


def decoupled_gae(
    reward: Tensor,
    value: Tensor,
    discount: Tensor,
    *,
    policy_lambda: float | Tensor,
    value_lambda: float | Tensor = 1.0,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with separate lambdas for actor and critic.

    Returns (adv, ret), each [..., S]. value_lambda = 1 gives the critic returns without bootstrapping, so
    no bias grows with the length. Equal lambdas give `gae`. VC-PPO, arXiv 2503.01491; VAPO, arXiv
    2504.05118.
    """
    delta, value = _errors(reward, value, discount, mask, bootstrap)
    adv = _traced(delta, discount, policy_lambda, mask)
    return adv, _traced(delta, discount, value_lambda, mask) + value


def length_adaptive_lambda(length: Tensor, *, alpha: float = 0.05) -> Tensor:
    """VAPO's lambda [...] for responses of `length` [...] tokens.

        1 - 1 / (alpha length), at least 0

    The longer a response, the further back its reward reaches. arXiv 2504.05118. ValueError unless alpha >
    0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha: expected > 0, got {alpha}")
    return 1 - (1 / (alpha * length)).clamp(max=1)


def whiten(adv: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Advantages [...] whitened over mask, 0 outside.

        (adv - mean) / sqrt(var + eps)

    var is the sample's. No other function here calls this.
    """
    check.shapes(adv=(adv, "..."), mask=(mask, "..."))
    count = mask.sum().to(adv.dtype)
    mean = torch.where(mask, adv, 0).sum() / count.clamp(min=1)
    centred = torch.where(mask, adv - mean, 0)
    var = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(var + eps)
