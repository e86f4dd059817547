"""Log-probs and entropies of tokens, from logits."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.precision import widen

__all__ = [
    "entropy_from_logits", "log_probs_and_entropy", "log_probs_from_logits", "sum_p2",
]  # fmt: skip


def log_probs_from_logits(logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Return log softmax(logits / temperature)[target], [..., V], [...] -> [...] nats.

    In float32 at least. One pass over the logits: no copy is made or kept, and the backward makes one more
    pass. A tensor as temperature may have any shape that `logits / temperature` takes. ValueError when
    the shapes disagree. A target outside [0, V) is torch's RuntimeError on a CPU, and an assertion on a
    GPU.
    """
    return _from_logits(logits, target, temperature, entropy=False)[0]


def entropy_from_logits(logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Return the entropy of softmax(logits / temperature), [..., V] -> [...] nats.

    In float32 at least. Logits of -inf add 0.
    """
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _from_logits(logits, target, temperature, entropy=True)[1]


def sum_p2(logp: Tensor, half_logp: Tensor) -> Tensor:
    """Return the sum of the squared probabilities of all words, [*], without gradient.

        p(y)^2 / p'(y) = exp(2 logp - half_logp),    p' the same distribution at half the temperature

    of any word y: p' is in proportion to p^2, and its normaliser is the sum. So two log-probs of one target
    tell it, whatever computed them: scores of `tree.replace(rollout, temperature=temperature / 2)` on any
    backend, or `linear_logprob(squares=True)`. `advantage.optimal_token_baseline` reads it.
    """
    check.shapes(logp=(logp, "..."), half_logp=(half_logp, "..."))
    return (2 * logp.detach() - half_logp.detach()).exp()


def log_probs_and_entropy(
    logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return both of the above in one pass, [..., V], [...] -> [...] and [...] nats."""
    return _from_logits(logits, target, temperature, entropy=True)


def _from_logits(
    logits: Tensor, target: Tensor, temperature: float | Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return (logp, entropy), in one fused pass over the rows.

    The entropy is logp again where it was not asked for.
    """
    from rft_kernels import logits_logprob

    check.shapes(target=(target, "..."), logits=(logits[..., 0], "..."))
    # A tensor broadcasts against the logits, and may be differentiated: the kernel takes numbers.
    if isinstance(temperature, Tensor):
        logits = widen(logits) / temperature
        temperature = 1.0

    # Raises for a target outside [0, V), which the kernel would make NaN.
    logits.detach().gather(-1, target.unsqueeze(-1))
    rows = logits.reshape(-1, logits.shape[-1])
    labels = target.reshape(-1)
    logp, ent = logits_logprob(rows, labels, temperature=temperature, ignore_index=-1, entropy=entropy)
    return logp.view(target.shape), (logp if ent is None else ent).view(target.shape)
