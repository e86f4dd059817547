"""Advantage estimators: rewards in, advantages out. None of them whitens, clips or looks at a log-prob.

A group whose rewards are all equal has no preference to teach: its advantages are exactly 0, whatever the
rounding of a mean.
"""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.scan import linear_scan, step

__all__ = [
    "cpgd", "decoupled_gae", "discounted_return", "gae", "gdpo", "grpo", "length_adaptive_lambda", "opo",
    "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo", "whiten",
]  # fmt: skip


def _centre(reward: Tensor, share: Tensor | None = None) -> Tensor:
    """[N, G]: reward minus its group's mean, weighted by `share` [N, G] if given; exactly 0 in a group
    without variance."""
    sizes = check.shapes(reward=(reward, "N G"))
    if sizes["G"] < 2:
        raise ValueError(
            f"reward: expected [N, G] with G >= 2, got {list(reward.shape)}: a group of one has no baseline; "
            "sample more per prompt (group >= 2) or use an advantage that is not normalised by group"
        )
    mean = reward.mean(-1, keepdim=True) if share is None else (share * reward).sum(-1, keepdim=True)
    equal = reward.amax(-1, keepdim=True) == reward.amin(-1, keepdim=True)
    return torch.where(equal, 0, reward - mean)


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


def remax(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """[N, G], [N] -> [N, G]: r minus the reward of the prompt's greedy answer. ReMax, arXiv 2310.10505.

    The baseline does not depend on the sample, so it is unbiased, and works for G = 1. Not centred.
    """
    check.shapes(reward=(reward, "N G"), greedy_reward=(greedy_reward, "N"))
    return reward - greedy_reward.unsqueeze(-1)


def opo(reward: Tensor, length: Tensor) -> Tensor:
    """[N, G], [N, G] -> [N, G]: r - sum(l r) / sum(l) in each row, l the tokens of a response. OPO, arXiv
    2505.23585.

    The baseline of least variance when a response's squared score grows with its length. With equal lengths
    it is `grpo(scale=False)`. Not divided by a deviation. ValueError for groups of one.
    """
    check.shapes(reward=(reward, "N G"), length=(length, "N G"))
    return _centre(reward, length.to(reward.dtype) / length.sum(-1, keepdim=True).clamp(min=1))


def cpgd(reward: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """[N, G] -> [N, G]: the group-centred reward of CPGD (arXiv 2505.12504), divided by the group's deviation
    with `scale`, as `grpo` is; what differs is CPGD's loss."""
    return grpo(reward, scale=scale, eps=eps)


def reinforce_pp(token_reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[B, S] -> [B, S]: sum over the later tokens in mask of gamma^k r, 0 outside mask. REINFORCE++, arXiv
    2501.03262.

    Tokens outside mask (tool output) are passed over, as if they were not there. Does not whiten: the
    algorithm whitens this over the whole batch, `whiten(reinforce_pp(...), mask)`.
    """
    check.shapes(token_reward=(token_reward, "B S"), mask=(mask, "B S"))
    through = torch.where(mask, gamma, 1.0).to(token_reward.dtype)
    total = linear_scan(through, torch.where(mask, token_reward, 0))
    return torch.where(mask, total, 0)


def reinforce_pp_baseline(reward: Tensor) -> Tensor:
    """[N, G] -> [N, G]: r minus its group's mean, for whitening over the whole batch afterwards (arXiv
    2501.03262). Alone it is `grpo(scale=False)`. ValueError for groups of one."""
    return _centre(reward)


def gdpo(parts: Tensor, weights: Tensor) -> Tensor:
    """[K, N, G], [K] -> [N, G]: the weighted sum of K rewards, each first normalised in its group by `grpo`.

    Rewards of different spread then count as their weights say (GDPO, arXiv 2601.05242). The paper whitens
    the sum over the batch; `whiten` does, this does not.
    """
    sizes = check.shapes(parts=(parts, "K N G"), weights=(weights, "K"))
    flat = grpo(parts.reshape(-1, sizes["G"])).view_as(parts)
    return (weights.view(-1, 1, 1) * flat).sum(0)


def pass_at_k(correct: Tensor, *, k: int) -> Tensor:
    """correct [N, G] bool -> [N, G]: (mean over the k-subsets with this response of their best - mean over
    all) / deviation over all. Pass@k training, arXiv 2508.10751.

        p = 1 - C(m, k) / C(G, k),    m wrong ones;    sigma = sqrt(p (1 - p))
        right: (1 - p) / sigma,    wrong: (1 - p - C(m - 1, k - 1) / C(G - 1, k - 1)) / sigma

    0 where no subset differs from another. k = 1 is `grpo` with the population's deviation. Computed in
    float64 from ratios, so large groups lose nothing. ValueError unless 1 <= k <= G.
    """
    size = check.shapes(correct=(correct, "N G"))["G"]
    if not 1 <= k <= size:
        raise ValueError(f"k: expected between 1 and the {size} responses of each prompt, got {k}")
    wrong = (~correct).double().sum(-1, keepdim=True)
    i = torch.arange(1, k, device=correct.device)
    with_wrong = ((wrong - i).clamp(min=0) / (size - i)).prod(-1, keepdim=True)  # C(m-1, k-1) / C(G-1, k-1)
    none = with_wrong * wrong / size  # 1 - p
    sigma = (none * (1 - none)).sqrt()
    adv = torch.where(correct, none, -with_wrong * (1 - wrong / size)) / torch.where(sigma > 0, sigma, 1)
    return adv.to(torch.get_default_dtype())


def discounted_return(reward: Tensor, discount: Tensor) -> Tensor:
    """[..., S]: R[t] = r[t] + discount[t] R[t+1]. A sequence ends
    where discount is 0 (REINFORCE's return)."""
    check.shapes(reward=(reward, "... S"), discount=(discount, "... S"))
    return linear_scan(discount, reward)


def _shift(x: Tensor, last: Tensor) -> Tensor:
    return torch.cat([x[..., 1:], last.to(x.dtype)], -1)


def _through(discount: Tensor, mask: Tensor) -> Tensor:
    """1 on tokens outside mask, which hand on what comes after them, unless a sequence ends there."""
    return (~mask & (discount != 0)).to(discount.dtype)


def _errors(
    reward: Tensor, value: Tensor, discount: Tensor, mask: Tensor | None, bootstrap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(delta, value), 0 outside mask: the one-step errors r + discount V' - V of GAE."""
    check.shapes(reward=(reward, "... S"), value=(value, "... S"), discount=(discount, "... S"))
    check.shapes(reward=(reward, "... S"), mask=(mask, "... S"), bootstrap=(bootstrap, "..."))
    end = torch.zeros_like(reward[..., :1]) if bootstrap is None else bootstrap.unsqueeze(-1)
    if mask is None:
        return step(reward, discount, _shift(value, end)) - value, value
    value, through = torch.where(mask, value, 0), _through(discount, mask)
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
    """(adv, ret), each [..., S]: generalised advantage estimation, arXiv 1506.02438.

        delta[t] = r[t] + discount[t] V[t'] - V[t]
        adv[t] = delta[t] + discount[t] lambda adv[t'],    ret = adv + V

    t' is the next position *in mask*: tokens outside (tool output, padding) are passed over as if they were
    not there, not read as zeros; adv and ret are 0 on them. A sequence ends where discount is 0, in mask or
    not, so rows may be padded and a flat stream may hold many sequences. `bootstrap` [...] is the value after
    the last position (0 without). lambda = 1 is the discounted return minus V, lambda = 0 the one-step error;
    it may be a tensor that broadcasts against [..., S], e.g. [B, 1].
    Does not whiten. Gradients are the caller's to stop.
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
    """(adv, ret), each [..., S]: `gae` with one lambda for advantages, another for the critic's target.

    value_lambda = 1 gives the critic returns without bootstrapping, so no bias grows with the length. VC-PPO,
    arXiv 2503.01491; VAPO, arXiv 2504.05118. Equal lambdas are `gae`.
    """
    delta, value = _errors(reward, value, discount, mask, bootstrap)
    adv = _traced(delta, discount, policy_lambda, mask)
    return adv, _traced(delta, discount, value_lambda, mask) + value


def length_adaptive_lambda(length: Tensor, *, alpha: float = 0.05) -> Tensor:
    """[...] tokens -> [...]: 1 - 1 / (alpha length), at least 0: the longer a response, the further back its
    reward reaches. VAPO, arXiv 2504.05118. ValueError unless alpha > 0."""
    if not alpha > 0:
        raise ValueError(f"alpha: expected > 0, got {alpha}")
    return 1 - (1 / (alpha * length)).clamp(max=1)


def whiten(adv: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """[...]: (adv - mean) / sqrt(var + eps) over mask, var the sample's; 0 outside mask.
    Called by no other function here."""
    check.shapes(adv=(adv, "..."), mask=(mask, "..."))
    count = mask.sum().to(adv.dtype)
    centred = torch.where(mask, adv - torch.where(mask, adv, 0).sum() / count.clamp(min=1), 0)
    var = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(var + eps)
