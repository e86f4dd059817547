"""The distribution that tokens are drawn from: logits by temperature, top_k and top_p."""

import torch
from torch import Tensor

from rft_fn.precision import widen
from rft_fn.scan import linear_scan
from rft_fn.types import Sampling

__all__ = ["process_logits", "truncated_on_device"]

_FIRST = 64  # ranks that are looked at before more, for top_p


def process_logits(
    logits: Tensor,
    sampling: Sampling,
    *,
    keep: Tensor | None = None,
    temperature: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Return logits / temperature, -inf where top_k or top_p exclude a token, [..., V] -> [..., V].

    Only the top_k largest stay, and of them the smallest set with a mass of top_p. This is the one definition
    of the distribution that is sampled from, for the engine and for the trainer. `keep` [...] is a token that
    stays whatever its rank: the trainer's target, which the policy of the rollout did draw, so that its
    log-prob stays finite after an update. The exclusion carries no gradient. `temperature` [...] > 0 is one
    for each distribution, in place of that of `sampling`. `kept` [..., W] are the words that were left when
    the token was drawn, as of a `Rollout`: they stay in place of what these logits would leave, where known.
    """
    z = widen(logits)
    if temperature is not None:
        z = z / temperature.unsqueeze(-1)
    elif sampling.temperature not in (0, 1):
        z = z / sampling.temperature
    if not sampling.truncates:
        return z
    drop = _excluded_or_known(z.detach(), sampling, kept)
    if keep is not None:
        drop = drop.scatter(-1, keep.unsqueeze(-1), False)
    return z.masked_fill(drop, -torch.inf)


def _excluded_or_known(z: Tensor, sampling: Sampling, kept: Tensor | None) -> Tensor:
    """Return what is excluded of z [..., V], [..., V] bool: all but the words `kept` where they are known."""
    if kept is None:
        return _excluded(z.reshape(-1, z.shape[-1]), sampling).view(z.shape)
    drop = torch.ones(*z.shape[:-1], z.shape[-1] + 1, dtype=torch.bool, device=z.device)
    drop = drop.scatter(-1, kept.long(), False)[..., 1:]  # the first place is for no word
    unknown = ~(kept > 0).any(-1)
    if not _can_branch(z):
        return torch.where(unknown.unsqueeze(-1), _excluded_or_known(z, sampling, None), drop)
    if bool(unknown.any()):
        drop[unknown] = _excluded(z[unknown], sampling)
    return drop


def _excluded(z: Tensor, sampling: Sampling) -> Tensor:
    """Return what top_k and top_p exclude, [R, V] bool; equal logits go by place in the vocabulary."""
    can_branch = _can_branch(z)
    most = min(sampling.top_k or z.shape[-1], z.shape[-1])
    if sampling.top_p == 1:
        least = z.topk(most).values[:, -1]
        count = torch.full_like(least, most, dtype=torch.long)
    elif sampling.top_k or not can_branch:
        ranked = z.topk(most).values
        least, count = _nucleus(ranked, ranked.logsumexp(-1, keepdim=True), sampling.top_p)
    else:
        least, count = _growing_nucleus(z, z.logsumexp(-1, keepdim=True), sampling.top_p, _FIRST)

    # without equals of the last one that stays, a comparison decides
    drop = z < least.unsqueeze(-1)
    if can_branch and bool((drop.sum(-1) + count == z.shape[-1]).all()):
        return drop
    return _beyond(z, least, count)


def truncated_on_device(z: Tensor, sampling: Sampling, ranks: int) -> tuple[Tensor, Tensor]:
    """Return (logits as `process_logits` does, [R] bool, not sure), without a read by the host.

    Of logits z [R, V] that the temperature has divided. For top_p only the first `ranks` are looked at; a row
    is not sure where its set may go on after them.
    """
    every = z.shape[-1]
    most = min(sampling.top_k or (every if sampling.top_p == 1 else ranks), every)
    ranked = z.topk(most).values
    norm = (ranked if sampling.top_k else z).logsumexp(-1, keepdim=True)
    least, count = ranked[:, -1], torch.full_like(ranked[:, 0], most, dtype=torch.long)
    if sampling.top_p < 1:
        least, count = _nucleus(ranked, norm, sampling.top_p)
    unsure = (count == most) & (not sampling.top_k and most < every)
    return z.masked_fill(_beyond(z, least, count), -torch.inf), unsure


def _beyond(z: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """Mark the tokens after the first `count` [R] of z [R, V], [R, V] bool; `least` [R] is the last kept."""
    least = least.unsqueeze(-1)
    drop, equal = z < least, z == least
    room = count - (z > least).sum(-1)
    return drop | (equal & (equal.cumsum(-1) > room.unsqueeze(-1)))


def _growing_nucleus(z: Tensor, norm: Tensor, top_p: float, size: int) -> tuple[Tensor, Tensor]:
    """Return `_nucleus` of the first `size` ranks of z [R, V], and of more in rows that need them."""
    size = min(size, z.shape[-1])
    least, count = _nucleus(z.topk(size).values, norm, top_p)
    wider = count == size
    if size < z.shape[-1] and bool(wider.any()):
        least[wider], count[wider] = _growing_nucleus(z[wider], norm[wider], top_p, 16 * size)
    return least, count


def _nucleus(ranked: Tensor, norm: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return ([R] the last logit that stays, [R] how many do).

    Of ranked logits [R, K] with normaliser [R, 1].
    """
    p = (ranked - norm).exp()
    # a running sum of floats has no deterministic form on CUDA
    exact = torch.are_deterministic_algorithms_enabled()
    mass = linear_scan(torch.ones_like(p), p, reverse=False) if exact else p.cumsum(-1)
    count = (mass - p < top_p).sum(-1).clamp(min=1)  # the token that crosses top_p is kept
    return ranked.gather(-1, count.unsqueeze(-1) - 1).squeeze(-1), count


def _can_branch(z: Tensor) -> bool:
    """Return whether values of z can be read, which they cannot under vmap and on the meta device."""
    try:
        return bool(z[:0].sum() == 0)
    except RuntimeError:
        return False
