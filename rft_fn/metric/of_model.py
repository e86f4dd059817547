"""Metrics of what a model says of a pack: its mismatch with the sampler, and its routers."""

import torch
from torch import Tensor

from rft_fn.logprob import log_ratio
from rft_fn.metric.by_depth import by_depth, turn_of
from rft_fn.metric.kinds import Metric, effective_share, max, mean
from rft_fn.types import Packed, TokenOut

__all__ = ["mismatch", "policy", "router"]


def mismatch(logp: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Measure the mismatch of two log-probs of the same tokens, all [*], in nats per token.

    Mean and largest |logp - sampler|, and with d = logp - sampler in [-20, 20] the distance of the policy
    from what sampled: KL(sampler, policy) by k3, exp(d) - 1 - d, and by k1, -d; the chi-square divergence,
    exp(2 d) - 1; and the effective share of the tokens under the ratios exp(d). A token that both exclude
    has d = 0.
    """
    d = log_ratio(logp.detach(), sampler)
    near = d.clamp(-20, 20)
    kl = torch.expm1(near) - near
    return {
        "policy/logp_gap": mean(d.abs(), mask),
        "policy/logp_gap_max": max(d.abs(), mask),
        "policy/kl_sampler": mean(kl, mask),
        "policy/k1_sampler": mean(-near, mask),
        "policy/chi2_sampler": mean(torch.expm1(2 * near), mask),
        "policy/ess_sampler": effective_share(near.exp(), mask),
    }


def policy(out: TokenOut, b: Packed) -> dict[str, Metric]:
    """Measure the mismatch of log-probs with `old_logp`, and the entropy.

    The mismatch is in nats per token; the entropy is there if the model gives it. In the first update on a
    rollout with the sampler's log-probs as old_logp, `policy/logp_gap` is the mismatch of trainer and
    sampler on the same tokens and weights: 1e-6 in float32, and a bug if it is not small. `by_depth` says
    where it is.
    """
    metrics = mismatch(out.logp, b.old_logp, b.mask)
    gap, turn = log_ratio(out.logp.detach(), b.old_logp), turn_of(b.mask, b.pos)
    metrics |= by_depth(gap, b.mask, position=b.pos + 1, turn=turn)
    if out.entropy is not None:
        metrics["policy/entropy"] = mean(out.entropy, b.mask)
    return metrics


def router(out: TokenOut, b: Packed) -> dict[str, Metric]:
    """Measure the load balance of a mixture of experts.

    The model must be bound with aux=True. `router/aux` is 1 if all experts are used alike;
    `router/max_share` is the largest share that one expert has of the choices of a sequence.
    """
    assert out.aux is not None and out.expert_share is not None
    return {"router/aux": mean(out.aux, b.mask), "router/max_share": mean(out.expert_share, b.mask)}
