"""Rows of a batch that add nothing to the gradient, dropped before a model computes them.

A group of equal rewards has advantage 0, and under most policy losses its tokens have no gradient. `w` is of
the whole batch, so that without such rows the gradient is the same, and only the time is less.
"""

import torch
from torch import Tensor

from rft_fn import check, rng, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.packing.packs import pack
from rft_fn.packing.shards import take
from rft_fn.packing.units import members_of, total
from rft_fn.types import Experience, LossFn, Packed, TokenOut

__all__ = ["drop_flat", "has_gradient"]

_SCALES = (1e-4, 1e-2, 0.3, 1.0, 5.0)  # of the distance of log-probs from those of the rollout, in nats


def drop_flat(exp: Experience, loss_fn: LossFn, *, unit: int = 1, spare: int = 0) -> Experience:
    """Drop the rows of a batch that add nothing to the gradient of (w loss).sum().

    These are rows with w = 0 at each token in mask, whatever the loss is, and rows with advantage 0 if the
    loss has no gradient there: `has_gradient` tries it, so that all rows stay under a loss with a KL to a
    reference, an entropy bonus, or an auxiliary term. The metrics of a loss are then of the rows that stay.

    `unit` consecutive rows stay or go together. The first of those that would go stay, up to `spare` tokens,
    so that metrics watch some of them; one unit at least stays. ValueError for rows that units do not divide.
    """
    rows = check.units(unit, len(exp.tokens))
    weightless = (exp.w == 0) | ~exp.mask
    idle = total((~weightless).any(-1).long(), rows) == 0  # [U]
    flat = total((~weightless & (exp.adv != 0)).any(-1).long(), rows) == 0
    if bool((flat & ~idle).any()):
        tried = members_of(rows, (flat & ~idle).nonzero()[:, 0].tolist())
        if not has_gradient(loss_fn, pack(tree.replace(exp, media=None), tried, unit=unit)):
            idle = flat
    if not bool(idle.any()):
        return exp

    # some of them stay: the first ones that fit into `spare`, or one unit where no other row stays
    size = total(exp.length, rows)
    spared = idle & (torch.where(idle, size, 0).cumsum(0) <= spare)
    if bool(idle.all()) and not bool(spared.any()):
        spared[0] = True
    kept = (~idle | spared).nonzero()[:, 0].tolist()
    return take(exp, torch.tensor(members_of(rows, kept), device=exp.tokens.device))


def has_gradient(loss_fn: LossFn, b: Packed) -> bool:
    """Return whether (w loss).sum() of a pack has a gradient with respect to the outputs of a model.

    Tries it at random outputs, with log-probs near those of the rollout and far from them, tokens and
    sequences apart. True too for a gradient that is not finite, and for a loss that cannot be evaluated at
    such outputs.
    """
    generator = rng.generator(0)
    of_token = torch.randint(len(_SCALES), b.seq.shape, generator=generator)
    of_sequence = torch.randint(len(_SCALES), (b.num_seqs,), generator=generator)[b.seq.cpu()]
    return any(_has_gradient(loss_fn, b, scale, generator) for scale in (of_token, of_sequence))


def _has_gradient(loss_fn: LossFn, b: Packed, scale: Tensor, generator: torch.Generator) -> bool:
    """Return whether one draw of outputs has a gradient; `scale` [T] indexes the spread of each."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(len(b.tokens), *shape, generator=generator).to(b.w).requires_grad_()

    away = torch.randn(len(b.tokens), generator=generator) * torch.tensor(_SCALES)[scale]
    logp = (b.old_logp + away.to(b.w)).clamp(max=-1e-6).detach().requires_grad_()
    out = TokenOut(
        logp=logp,
        entropy=uniform(),
        value=uniform(),
        aux=uniform(),
        expert_share=uniform(),
        words_logp=None if b.words is None else uniform(b.words.shape[-1]),
        sum_p2=uniform(),
        divergence=uniform(),
        agreement=uniform(),
    )
    leaves = [x for x in vars(out).values() if isinstance(x, Tensor)]
    with torch.enable_grad():
        try:
            loss, _ = evaluate(loss_fn, out, b)
        except (
            Exception
        ):  # of the loss: it may need another output, or be wrong, which its gradient will tell
            return True
        whole = (b.w * loss).sum()
        if not whole.requires_grad:
            return False
        grads = torch.autograd.grad(whole, leaves, allow_unused=True)
    return any(bool((g != 0).any()) for g in grads if g is not None)
