"""From logits, or straight from hidden states, to the log-probs of the targets."""

import math
from typing import Any

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.types import Sampling, TokenOut

__all__ = [
    "default_workspace_mb",
    "entropy_from_logits",
    "linear_logprob",
    "log_probs_and_entropy",
    "log_probs_from_logits",
    "log_ratio",
    "truncate",
]


def _wide(x: Tensor) -> Tensor:
    """bf16 and fp16 to float32; float64 stays: a softmax in bf16 is off by up to 0.05 nats."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def log_ratio(logp: Tensor, old_logp: Tensor, *, limit: float = math.inf) -> Tensor:
    """[*] nats: log(pi / pi_old) = logp - old_logp, bounded to +-limit.

    A token that both exclude (-inf, e.g. by top_k) has a ratio of 1: 0 here, without a gradient.
    """
    check.shapes(logp=(logp, "..."), old_logp=(old_logp, "..."))
    excluded = (logp == -torch.inf) & (old_logp == -torch.inf)
    gap = torch.where(excluded, 0, logp) - torch.where(excluded, 0, old_logp)
    return gap.clamp(-limit, limit)


def log_probs_from_logits(logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """[..., V], [...] -> [...] nats: log softmax(logits / temperature)[target], in float32 at least.

    One pass over the logits, of which no copy is made nor kept; the gradient is one more. A tensor as
    temperature is anything that `logits / temperature` takes. ValueError when the shapes disagree. A target
    outside [0, V) is a RuntimeError of torch's on a CPU, and an assertion on a GPU.
    """
    return _from_logits(logits, target, temperature, entropy=False)[0]


def entropy_from_logits(logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """[..., V] -> [...] nats: the entropy of softmax(logits / temperature), in float32
    at least; -inf logits count 0."""
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _from_logits(logits, target, temperature, entropy=True)[1]


def log_probs_and_entropy(
    logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """[..., V], [...] -> [...] and [...] nats: the two functions above in one pass over the logits."""
    return _from_logits(logits, target, temperature, entropy=True)


def _from_logits(
    logits: Tensor, target: Tensor, temperature: float | Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """One fused pass over the rows -> logp, and the entropy (logp again where it was not asked for)."""
    from rft_kernels import logits_logprob

    check.shapes(target=(target, "..."), logits=(logits[..., 0], "..."))
    if isinstance(temperature, Tensor):  # whatever it broadcasts against, and whoever differentiates it
        logits, temperature = _wide(logits) / temperature, 1.0
    logits.detach().gather(-1, target.unsqueeze(-1))  # raises for a target outside [0, V): else it were NaN
    rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    logp, ent = logits_logprob(rows, labels, temperature=temperature, ignore_index=-1, entropy=entropy)
    ent = logp if ent is None else ent
    return logp.view(target.shape), ent.view(target.shape)


def truncate(logits: Tensor, sampling: Sampling, *, keep: Tensor | None = None) -> Tensor:
    """[..., V] -> [..., V]: logits / temperature, -inf outside the top_k largest and
    the smallest set with mass top_p.

    The one definition of what is sampled from, for the engine and for the trainer. `keep` [...] names a token
    that stays whatever its rank: the trainer's target, which the policy of the rollout did draw, so that its
    log-prob stays finite after an update. The cut itself carries no gradient.
    """
    z = _wide(logits) / (sampling.temperature or 1.0)
    if not sampling.truncates:
        return z
    ranked, index = z.detach().sort(-1, descending=True)
    drop = torch.zeros_like(ranked, dtype=torch.bool)
    if sampling.top_k:
        drop[..., sampling.top_k :] = True
    if sampling.top_p < 1:
        p = ranked.masked_fill(drop, -torch.inf).softmax(-1)
        drop |= p.cumsum(-1) - p >= sampling.top_p  # the token that crosses top_p is kept
    drop = torch.zeros_like(drop).scatter(-1, index, drop)
    if keep is not None:
        drop = drop.scatter(-1, keep.unsqueeze(-1), False)
    return z.masked_fill(drop, -torch.inf)


def default_workspace_mb(device_type: str) -> float:
    """The logits that `linear_logprob` holds at a time by default [MiB], on "cpu" or "cuda"."""
    from rft_kernels.linear_logprob import default_workspace_mb as found

    return found(device_type)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    words: Tensor | None = None,
    workspace_mb: float | None = None,
    engine: str = "auto",
) -> TokenOut:
    """[T, D], [V, D], [T] -> TokenOut: log softmax(hidden weight^T /
    temperature)[target] without ever holding [T, V].

    Targets of -100 give 0 and no gradient, even where hidden is NaN. `words` [T, K] asks for the log-probs of
    K more words of each token, as `words_logp` [T, K] (0 with target -100): K dot products each, the
    normaliser is there already. `workspace_mb` bounds the logits that exist at a time (None: what suits the
    device). The work is `rft_kernels.linear_logprob`, by one of its engines: they can be differentiated once.
    "reference" holds whole logits and has derivatives of any order, in the temperature too. ValueError when
    shapes disagree.
    """
    from rft_kernels import linear_logprob as fused

    options: dict[str, Any] = {"temperature": temperature, "bias": bias, "softcap": softcap}
    options |= {"workspace_mb": workspace_mb, "engine": engine}
    logp, ent, lse = fused(hidden, weight, target, entropy=entropy, lse=words is not None, **options)
    if words is None or lse is None:
        return TokenOut(logp=logp, entropy=ent)
    check.shapes(target=(target, "T"), words=(words, "T K"))
    live = (target != -100).unsqueeze(-1)
    # a where on the result alone would leave 0 * NaN in the gradient of the weight
    hidden = torch.where(live, hidden, 0)
    z = torch.einsum("td,tkd->tk", hidden.to(logp.dtype), weight[words].to(logp.dtype))
    if bias is not None:
        z = z + bias[words]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.unsqueeze(-1)  # one for each token
    found = z / temperature - lse.unsqueeze(-1)
    return TokenOut(logp=logp, entropy=ent, words_logp=torch.where(live, found, 0))
