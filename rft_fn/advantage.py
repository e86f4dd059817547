"""Advantage estimators: rewards in, advantages out.

None of them whitens, clips or reads a log-prob. Rewards are [N, G], for G responses to each of N prompts;
`grpo_by` and the other names in _by take rewards [B] and `Rollout.group` [B], for groups that differ in
size. A group of equal rewards has no preference to teach: its advantages are exactly 0, whatever the
rounding of a mean.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import check, segment
from rft_fn.scan import linear_scan, step

__all__ = [
    "cpgd", "cpgd_by", "decoupled_gae", "discounted_return", "gae", "gdpo", "gdpo_by", "grpo", "grpo_by",
    "length_adaptive_lambda", "opo", "opo_by", "pass_at_k", "pass_at_k_by", "quantile", "quantile_by",
    "reinforce_pp", "reinforce_pp_baseline", "reinforce_pp_baseline_by", "remax", "remax_by", "rloo",
    "rloo_by", "whiten",
]  # fmt: skip


# ---------- advantages of responses from the rewards [N, G] of groups of equal size


def _size_of_groups(reward: Tensor) -> int:
    """Return G of rewards [N, G]; ValueError for groups of one."""
    size = check.shapes(reward=(reward, "N G"))["G"]
    if size < 2:
        raise ValueError(
            f"reward: expected [N, G] with G >= 2, got {list(reward.shape)}: a group of one has no baseline; "
            "sample more per prompt (group >= 2) or use an advantage that is not normalised by group"
        )
    return size


def _centre(reward: Tensor, share: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from rewards [N, G]; exactly 0 in a group without variance.

    `share` [N, G] weights the mean, which is uniform without it. ValueError for groups of one.
    """
    _size_of_groups(reward)
    uniform = share is None
    mean = reward.mean(-1, keepdim=True) if uniform else (share * reward).sum(-1, keepdim=True)
    equal = reward.amax(-1, keepdim=True) == reward.amin(-1, keepdim=True)
    return torch.where(equal, 0, reward - mean)


def grpo(reward: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantages [N, G], normalised per group.

        (r - mean) / (std + eps)

    std is the sample's, divided by G - 1. arXiv 2402.03300. `scale=False` leaves out the division: Dr. GRPO
    (arXiv 2503.20783), without its bias towards easy and hard questions. ValueError for groups of one. Does
    not whiten over the batch.
    """
    centred = _centre(reward)
    return centred / (reward.std(-1, keepdim=True) + eps) if scale else centred


def rloo(reward: Tensor) -> Tensor:
    """Return leave-one-out advantages, [N, G].

        r - mean of the other G - 1 = (r - mean) G / (G - 1)

    Unbiased, because the baseline of a sample does not depend on it. arXiv 2402.14740. ValueError for
    groups of one.
    """
    group = reward.shape[-1]
    return _centre(reward) * (group / max(group - 1, 1))


def remax(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """Return ReMax's advantages, [N, G]: rewards minus the reward [N] of the prompt's greedy response.

    Unbiased, because the baseline does not depend
    on the sample; also defined for G = 1. Not centred. arXiv 2310.10505.
    """
    check.shapes(reward=(reward, "N G"), greedy_reward=(greedy_reward, "N"))
    return reward - greedy_reward.unsqueeze(-1)


def opo(reward: Tensor, length: Tensor) -> Tensor:
    """Return OPO's advantages, [N, G], with a length-weighted baseline.

        r - sum(l r) / sum(l)    in each group, l [N, G] the tokens of a response

    The baseline of least variance if the squared score of a response grows with its length. With equal
    lengths it is `grpo(scale=False)`. Not divided by a deviation. arXiv 2505.23585. ValueError for groups
    of one.
    """
    check.shapes(reward=(reward, "N G"), length=(length, "N G"))
    share = length.to(reward.dtype) / length.sum(-1, keepdim=True).clamp(min=1)
    return _centre(reward, share)


def quantile(reward: Tensor, *, q: float, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return quantile advantages [N, G], with a quantile of the group's rewards as baseline.

        (r - Q) / (std + eps),    Q the smallest r of the group with #{r' <= Q} >= q G

    QAE, arXiv 2509.22611, which calls q K. With rewards 0 or 1 and a success rate p, Q is 0 where p <= 1 - q:
    a hard prompt teaches by its successes only, and an easy one, with Q = 1, by its failures only. std and
    `scale` as in `grpo`. Not centred; biased, because the baseline of a sample depends on it. ValueError for
    groups of one, and unless 0 < q <= 1.
    """
    size = _size_of_groups(reward)
    place = _place_of_quantile(q, torch.tensor(size))
    above = reward - reward.sort(-1).values[..., place, None]
    return above / (reward.std(-1, keepdim=True) + eps) if scale else above


def _place_of_quantile(q: float, size: Tensor) -> Tensor:
    """Return the place i64 of the q-quantile among `size` sorted numbers: the first with a share of q."""
    if not 0 < q <= 1:
        raise ValueError(f"q: expected 0 < q <= 1, got {q}")
    # 0.55 * 20 is a little more than 11
    return (q * size.double() - 1e-9).ceil().long() - 1


def cpgd(reward: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return CPGD's advantages [N, G], which equal `grpo`'s.

    CPGD (arXiv 2505.12504) differs in its loss, `loss.cpgd`.
    """
    return grpo(reward, scale=scale, eps=eps)


def reinforce_pp_baseline(reward: Tensor) -> Tensor:
    """Return the advantages [N, G] of REINFORCE++ with baseline, which equal `grpo(scale=False)`'s.

    The algorithm whitens them over the whole batch (arXiv 2501.03262). ValueError for groups of one.
    """
    return grpo(reward, scale=False)


def gdpo(parts: Tensor, weights: Tensor) -> Tensor:
    """Return GDPO's advantages for several rewards, [N, G].

    Normalises each of the K rewards in `parts` [K, N, G] by `grpo`, and sums them by `weights` [K]. Rewards
    of different spread then count only by their weights. arXiv 2601.05242. The paper whitens the sum over
    the batch; `whiten` does, this does not.
    """
    sizes = check.shapes(parts=(parts, "K N G"), weights=(weights, "K"))
    each = grpo(rearrange(parts, "k n g -> (k n) g"))
    each = rearrange(each, "(k n) g -> k n g", k=sizes["K"])
    return (rearrange(weights, "k -> k 1 1") * each).sum(0)


def pass_at_k(correct: Tensor, *, k: int) -> Tensor:
    """Return pass@k advantages [N, G] of responses, from correct [N, G] bool.

    A subset of k responses has reward 1 if any of them is correct. The advantage is the mean reward of the
    subsets with this response minus the mean over all, divided by the deviation over all. With m wrong
    responses:

        p = 1 - C(m, k) / C(G, k),    sigma = sqrt(p (1 - p))
        correct: (1 - p) / sigma,    wrong: (1 - p - C(m - 1, k - 1) / C(G - 1, k - 1)) / sigma

    It is 0 if all subsets are alike. k = 1 is `grpo` with the population's deviation. Computed in float64
    from ratios, so large groups lose nothing. arXiv 2508.10751. ValueError unless 1 <= k <= G.
    """
    size = check.shapes(correct=(correct, "N G"))["G"]
    if not 1 <= k <= size:
        raise ValueError(f"k: expected between 1 and the {size} responses of each prompt, got {k}")
    wrong = (~correct).double().sum(-1, keepdim=True)
    return advantage_of_subsets(correct, wrong, wrong.new_tensor(size), k)


def advantage_of_subsets(correct: Tensor, wrong: Tensor, size: Tensor, k: int) -> Tensor:
    """Return `pass_at_k` of correct [...], from the number of wrong and of all responses of each group.

    `wrong` and `size` are float64 and broadcast against correct.
    """
    i = torch.arange(1, k, device=correct.device)
    # a group of fewer than k has a factor of 0, as all of its subsets are alike
    ratios = (wrong.unsqueeze(-1) - i).clamp(min=0) / (size.unsqueeze(-1) - i).clamp(min=1)
    with_wrong = ratios.prod(-1)  # C(m-1, k-1) / C(G-1, k-1)
    none = with_wrong * wrong / size  # 1 - p
    sigma = (none * (1 - none)).sqrt()
    adv = torch.where(correct, none, -with_wrong * (1 - wrong / size)) / torch.where(sigma > 0, sigma, 1)
    return adv.to(torch.get_default_dtype())


# ---------- advantages of tokens, from rewards and values of tokens


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


# ---------- advantages [B] of responses in groups that may differ in size


Reduce = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # as `segment.sum`


def _index(reward: Tensor, group: Tensor) -> Tensor:
    """Number the groups [B] from 0 without gaps. ValueError unless there is one for each row."""
    check.shapes(reward=(reward, "B"), group=(group, "B"))
    return torch.unique(group, return_inverse=True)[1]


def _within(reduce: Reduce, x: Tensor, index: Tensor) -> Tensor:
    """Reduce x [B] over each group, and return the result on every row of the group [B]."""
    every_row = torch.ones_like(index, dtype=torch.bool)
    return segment.spread(reduce(x, every_row, index, len(index)), index)


def _size(index: Tensor, like: Tensor) -> Tensor:
    """Count the rows of each row's group [B], as floats of the type of `like`."""
    return _within(segment.sum, torch.ones_like(like), index)


def _centre_by_group(reward: Tensor, index: Tensor, share: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from rewards [B], as `_centre` does."""
    uniform = share is None
    mean = _within(segment.mean, reward, index) if uniform else _within(segment.sum, share * reward, index)
    equal = _within(segment.max, reward, index) == -_within(segment.max, -reward, index)
    return torch.where(equal, 0, reward - mean)


def _deviation(centred: Tensor, index: Tensor) -> Tensor:
    """Return the sample's standard deviation of each row's group [B], of centred rewards [B]."""
    others = (_size(index, centred) - 1).clamp(min=1)
    return (_within(segment.sum, centred.square(), index) / others).sqrt()


def grpo_by(reward: Tensor, group: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantages [B] of rewards [B], normalised per group of any size.

        (r - mean) / (std + eps)

    std is the sample's, divided by the rows of the group less one. `scale=False` leaves out the division: Dr.
    GRPO. 0 for the only row of a group. See `grpo`.
    """
    index = _index(reward, group)
    centred = _centre_by_group(reward, index)
    return centred / (_deviation(centred, index) + eps) if scale else centred


def rloo_by(reward: Tensor, group: Tensor) -> Tensor:
    """Return leave-one-out advantages [B] of rewards [B] in groups of any size.

        r - mean of the other rows of the group

    0 for the only row of a group. See `rloo`.
    """
    index = _index(reward, group)
    size = _size(index, reward)
    return _centre_by_group(reward, index) * (size / (size - 1).clamp(min=1))


def remax_by(reward: Tensor, group: Tensor, greedy_reward: Tensor) -> Tensor:
    """Return ReMax's advantages [B]: rewards [B] minus the reward of each prompt's greedy response.

    `group` [B] are rows of `greedy_reward` [N] here, numbers of prompts. Defined for groups of one too. See
    `remax`.
    """
    check.shapes(reward=(reward, "B"), group=(group, "B"), greedy_reward=(greedy_reward, "N"))
    return reward - segment.spread(greedy_reward, group)


def opo_by(reward: Tensor, group: Tensor, length: Tensor) -> Tensor:
    """Return OPO's advantages [B], with a baseline weighted by length in groups of any size.

        r - sum(l r) / sum(l)    in each group, l [B] the tokens of a response

    0 for the only row of a group. See `opo`.
    """
    index = _index(reward, group)
    check.shapes(reward=(reward, "B"), length=(length, "B"))
    tokens = length.to(reward.dtype)
    share = tokens / _within(segment.sum, tokens, index).clamp(min=1)
    return _centre_by_group(reward, index, share)


def quantile_by(reward: Tensor, group: Tensor, *, q: float, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return quantile advantages [B] of rewards [B], in groups of any size.

        (r - Q) / (std + eps),    Q the q-quantile of the group

    0 for the only row of a group. See `quantile`.
    """
    index = _index(reward, group)
    size = torch.bincount(index)

    # sorted by group, and by reward in each group
    order = reward.argsort()
    order = order[index[order].argsort(stable=True)]
    first = size.cumsum(0) - size
    above = reward - segment.spread(reward[order[first + _place_of_quantile(q, size)]], index)
    std = _deviation(_centre_by_group(reward, index), index)
    return above / (std + eps) if scale else above


def cpgd_by(reward: Tensor, group: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return CPGD's advantages [B], which equal `grpo_by`'s. See `cpgd`."""
    return grpo_by(reward, group, scale=scale, eps=eps)


def reinforce_pp_baseline_by(reward: Tensor, group: Tensor) -> Tensor:
    """Return the advantages [B] of REINFORCE++ with baseline, which equal `grpo_by(scale=False)`'s.

    See `reinforce_pp_baseline`.
    """
    return grpo_by(reward, group, scale=False)


def gdpo_by(parts: Tensor, group: Tensor, weights: Tensor) -> Tensor:
    """Return GDPO's advantages [B] for several rewards in groups of any size.

    Normalises each of the K rewards in `parts` [K, B] by `grpo_by`, and sums them by `weights` [K]. See
    `gdpo`.
    """
    sizes = check.shapes(parts=(parts, "K B"), group=(group, "B"), weights=(weights, "K"))
    index = torch.unique(group, return_inverse=True)[1]

    # each reward has its own groups
    start = torch.arange(sizes["K"], device=index.device) * sizes["B"]
    own = rearrange(start, "k -> k 1") + index
    each = grpo_by(parts.flatten(), own.flatten()).view_as(parts)
    return (rearrange(weights, "k -> k 1") * each).sum(0)


def pass_at_k_by(correct: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Return pass@k advantages [B] of responses in groups of any size, from correct [B] bool.

    0 in a group of fewer than k responses, which has no subset of k. See `pass_at_k`. ValueError unless k >=
    1.
    """
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    check.shapes(correct=(correct, "B"), group=(group, "B"))
    index = torch.unique(group, return_inverse=True)[1]
    wrong = (~correct).double()
    size = _size(index, wrong)
    return advantage_of_subsets(correct, _within(segment.sum, wrong, index), size, k)
