"""Advantages of tokens, from rewards and values of tokens."""

import torch
from torch import Tensor

from rft_fn import check, segment
from rft_fn.scan import linear_scan, step

__all__ = [
    "decoupled_gae", "discounted_return", "gae", "length_adaptive_lambda", "optimal_token_baseline",
    "reinforce_pp", "whiten",
]  # fmt: skip


def reinforce_pp(token_reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return REINFORCE++'s advantages, discounted sums of rewards [B, S].

        A[t] = r[t] + gamma A[t'],    t' the next token in mask

    Tokens outside mask (tool output) get 0 and are skipped, as if they were not there. Does not whiten; the
    algorithm whitens over the whole batch: `whiten(reinforce_pp(...), mask)`. arXiv 2501.03262.
    """
    check.shapes(token_reward=(token_reward, "B S"), mask=(mask, "B S"))
    through = torch.where(mask, gamma, 1.0).to(token_reward.dtype)
    total = linear_scan(through, torch.where(mask, token_reward, 0))
    return torch.where(mask, total, 0)


def discounted_return(reward: Tensor, discount: Tensor) -> Tensor:
    """Return discounted returns [..., S] of rewards and discounts [..., S].

        R[t] = r[t] + discount[t] R[t+1]

    A sequence ends where discount is 0.
    """
    check.shapes(reward=(reward, "... S"), discount=(discount, "... S"))
    return linear_scan(discount, reward)


def gae(
    reward: Tensor,
    value: Tensor,
    discount: Tensor,
    lambda_: float | Tensor = 0.95,
    *,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates and returns (adv, ret), each [..., S].

        delta[t] = r[t] + discount[t] V[t'] - V[t]
        adv[t] = delta[t] + discount[t] lambda adv[t'],    ret = adv + V

    t' is the next position in mask. Tokens outside mask (tool output, padding) are skipped as if they were
    not there, not read as zeros; adv and ret are 0 on them. A sequence ends where discount is 0, in mask or
    not, so rows may be padded and a flat stream may hold many sequences. `bootstrap` [...] is the value
    after the last position, by default 0. lambda = 1 gives the discounted return minus V, lambda = 0 the
    one-step error; it may be a tensor that broadcasts against [..., S], such as [B, 1]. Does not whiten or
    stop gradients. arXiv 1506.02438.
    """
    check.shapes(reward=(reward, "... S"), value=(value, "... S"), discount=(discount, "... S"))
    check.shapes(reward=(reward, "... S"), mask=(mask, "... S"), bootstrap=(bootstrap, "..."))
    mask = torch.ones_like(reward, dtype=torch.bool) if mask is None else mask
    value = torch.where(mask, value, 0)

    # 1 on tokens outside mask, over which later values and advantages pass unless a sequence ends there
    skip = (~mask & (discount != 0)).to(discount.dtype)
    last = torch.zeros_like(value[..., :1]) if bootstrap is None else bootstrap.unsqueeze(-1).to(value.dtype)
    skip_next = torch.cat([skip[..., 1:], torch.zeros_like(skip[..., :1])], -1)
    next_value = linear_scan(skip_next, torch.cat([value[..., 1:], last], -1))

    delta = torch.where(mask, step(reward, discount, next_value) - value, 0)
    adv = linear_scan(torch.where(mask, discount * lambda_, skip), delta)
    adv = torch.where(mask, adv, 0)
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
    """Return (adv, ret), each [..., S]: `gae` with separate lambdas for actor and critic.

    value_lambda = 1 gives the critic returns without bootstrapping, so no bias grows with the length. Equal
    lambdas give `gae`. VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118.
    """
    adv, _ = gae(reward, value, discount, policy_lambda, mask=mask, bootstrap=bootstrap)
    _, ret = gae(reward, value, discount, value_lambda, mask=mask, bootstrap=bootstrap)
    return adv, ret


def length_adaptive_lambda(length: Tensor, *, alpha: float = 0.05) -> Tensor:
    """Return VAPO's lambda [...] for responses of `length` [...] tokens.

        1 - 1 / (alpha length), at least 0

    The longer a response, the further back its reward reaches. arXiv 2504.05118. ValueError unless alpha >
    0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha: expected > 0, got {alpha}")
    return 1 - (1 / (alpha * length)).clamp(max=1)


def whiten(adv: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Whiten advantages [...] over mask; 0 outside.

        (adv - mean) / sqrt(var + eps)

    var is the sample's. No other function here calls this.
    """
    check.shapes(adv=(adv, "..."), mask=(mask, "..."))
    count = mask.sum().to(adv.dtype)
    mean = torch.where(mask, adv, 0).sum() / count.clamp(min=1)
    centred = torch.where(mask, adv - mean, 0)
    var = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(var + eps)


def optimal_token_baseline(
    ret: Tensor, logp: Tensor, sum_p2: Tensor, mask: Tensor, group: Tensor, *, ratio: Tensor | None = None
) -> Tensor:
    """Return advantages [B, S] with the optimal baseline of each token of a group (OTB).

        A[b, t] = R[b, t] - sum over b' of W[b', t] R[b', t] / sum of W[b', t]
        W[b, t] = sum over j <= t of rho^2 (1 - 2 p + sum of p^2)

    over the responses b' of the group that have a t-th token in mask; t counts these. `ret` [B, S] or [B, 1]
    are the returns R, `logp` the log-probs of the sampled tokens, `sum_p2` the sum of the squared
    probabilities of all words there (`TokenOut.sum_p2`): 1 - 2 p + sum of p^2 is the squared norm of the
    gradient of log p by the logits. `ratio` are importance weights rho, 1 without them. A token that only one
    response of the group reaches has a baseline of 0, as in verl. Biased, because a sample is in its own
    baseline. arXiv 2602.07078. For one turn and for several, tool tokens are passed over.
    """
    check.shapes(logp=(logp, "B S"), sum_p2=(sum_p2, "B S"), mask=(mask, "B S"), group=(group, "B"))
    energy = 1 - 2 * logp.exp() + sum_p2
    if ratio is not None:
        energy = energy * ratio.square()
    size = torch.where(mask, energy, 0).cumsum(-1)

    # the tokens in mask of each row, by their number; each number of each group is a cell
    place = (mask.cumsum(-1) - 1).clamp(min=0)
    index = torch.unique(group, return_inverse=True)[1]
    width = mask.shape[1]
    cell = (index[:, None] * width + place).flatten()
    cells, flat = len(mask) * width, mask.flatten()
    weight, value = size.flatten(), ret.expand(mask.shape).flatten()
    total = segment.sum(weight, flat, cell, cells)
    count = segment.sum(torch.ones_like(weight), flat, cell, cells)
    mean = segment.sum(weight * value, flat, cell, cells) / torch.where(total > 0, total, 1)
    baseline = torch.where(count > 1, mean, 0)[cell].view(mask.shape)
    return torch.where(mask, ret - baseline, 0)
