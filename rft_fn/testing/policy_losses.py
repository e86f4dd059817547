"""Checks of policy losses: gradient on-policy, importance ratios, finite values at any log-ratio."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.testing.cases import (
    ROWS,
    Case,
    ExtraFn,
    Run,
    Unit,
    apart,
    case,
    flat,
    gap,
    log_probs,
    normal,
    packed,
    ragged,
    reweigh,
    rows_of,
    run,
    whole,
)
from rft_fn.types import Apply, Experience, LossFn, Packed, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "ImportanceBias", "World", "check_finite", "check_importance_bias", "check_on_policy_identity",
    "enumerated", "finite_cases", "importance_bias",
]  # fmt: skip


# ---------- checks of policy losses: the gradient on-policy, and finite values at any log-ratio


def check_on_policy_identity(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    per_sequence: bool = False,
    rtol: float = 1e-12,
) -> None:
    """Check that the gradient of a policy loss at logp == old_logp is that of -adv logp.

    The loss must have no KL or entropy term. `per_sequence` gives all tokens of a row one advantage, for
    losses with one ratio per sequence (GSPO).
    """
    apply, params, exp = case(seed, weight=weight, extra=extra)
    adv = normal(seed, "adv of the row", ROWS, 1) * exp.mask if per_sequence else exp.adv
    packs = whole(tree.replace(exp, adv=adv, old_logp=log_probs(apply, params, exp)))
    got = flat(run(loss_fn, apply, params, packs).grads)
    want = flat(run(lambda out, b: -b.adv * out.logp, apply, params, packs).grads)
    if not (got - want).abs().max() <= rtol * want.abs().max():
        raise AssertionError(f"logp == old_logp: the gradient is not that of -adv * logp: {gap(got, want)}")


def _as_type(x: Any, dtype: torch.dtype) -> Any:
    """Convert the floating point leaves of a tree."""

    def convert(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return tree.map(convert, x)


def _shifts(mask: Tensor) -> dict[str, Tensor]:
    """Return name -> log-ratios [B, S] in nats, of all tokens or of the middle one of each row."""
    count = mask.cumsum(-1)
    middle = mask & (count == (count[:, -1:] + 1) // 2)
    of_all = {f"log-ratio {s:+g}": s * mask.double() for s in (0.0, 50.0, -50.0, 100.0, -100.0)}
    return of_all | {f"log-ratio {s:+g} of one token per row": s * middle.double() for s in (50.0, -50.0)}


def _assert_finite(varied: str, got: Run) -> None:
    bad = []
    if not got.total.isfinite():
        bad.append(f"the total is {got.total:g}")
    for path, g in tree.leaves_with_path(got.grads):
        if count := int((~g.isfinite()).sum()):
            bad.append(f"{count} of {g.numel()} entries of the gradient of {path} are not finite")
    if bad:
        raise AssertionError(f"{varied}: {'; '.join(bad)}")


def _masked(exp: Experience, weight: WeightFn, unit: Unit) -> dict[str, list[Packed]]:
    """Return name -> packs without a token in mask."""
    nothing = reweigh(exp, torch.zeros_like(exp.mask), weight)
    first = rows_of(unit)[:2]
    return {
        "masked rows": [packed(nothing, [row for rows in first for row in rows], unit)],
        "a batch of masked rows": whole(nothing, unit),
        "an empty pack": [packed(exp, [], unit)],
    }


def _far(c: Case, unit: Unit) -> Iterator[tuple[str, Apply, Any, list[Packed]]]:
    """Yield (what was varied, apply, params, packs) of log-ratios far from 0, in both types."""
    logp = log_probs(c.apply, c.params, c.exp)
    for name, shift in _shifts(c.exp.mask).items():
        apply, exp = apart(c, logp, shift)
        for dtype in (torch.float64, torch.float32):
            yield f"{name} in {dtype}", apply, _as_type(c.params, dtype), whole(_as_type(exp, dtype), unit)


def finite_cases(c: Case, weight: WeightFn, unit: Unit) -> Iterator[tuple[Apply, Any, list[Packed]]]:
    """Yield (apply, params, packs) of everything on which `check_finite` evaluates a loss."""
    for _, apply, params, packs in _far(c, unit):
        yield apply, params, packs
    for packs in _masked(c.exp, weight, unit).values():
        yield c.apply, c.params, packs


def check_finite(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
) -> None:
    """Check that value and gradient are finite at any log-ratio.

    They are evaluated in float64 and float32, at log-ratios of 0, +-50 and +-100, of all tokens and of one
    token among others at 0. Masked rows and empty packs give exactly 0.
    """
    c = case(seed, weight=weight, extra=extra)
    for name, apply, params, packs in _far(c, unit):
        _assert_finite(name, run(loss_fn, apply, params, packs))
    for name, packs in _masked(c.exp, weight, unit).items():
        got = run(loss_fn, c.apply, c.params, packs)
        _assert_finite(name, got)
        top = flat(got.grads).abs().max()
        if got.total != 0 or top != 0:
            raise AssertionError(f"{name}: expected loss and gradient 0, got {got.total:.2g} and {top:.2g}")


# ---------- the exact bias of importance corrections, by enumeration of all sequences of a tiny vocabulary


# (w, the trainer's log-probs, the sampler's, mask) -> new w, all [B, S]
Correction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class ImportanceBias(NamedTuple):
    """The effect of a correction on the policy gradient."""

    bias: float  # |E[estimate] - gradient| / |gradient|
    cosine: float  # between E[estimate] and the gradient
    norm_ratio: float  # |E[estimate]| / |gradient|
    variance: float  # trace of one sample's covariance, relative to an on-policy sample


class World(NamedTuple):
    """All sequences x [B, S], under two policies, each with a reward."""

    theta: Tensor  # [prefixes, V] the trainer's logits after each prefix
    old_logp: Tensor  # [B, S] log p(x_t | x_<t), differentiable in theta
    logp: Tensor  # [B, S] log q(x_t | x_<t)
    reward: Tensor  # [B]
    size: Tensor  # [B, S] |grad log p(x_t | x_<t)|^2
    entropy: Tensor  # [B, S] of p(. | x_<t)


def enumerated(length: int, vocab: int, seed: int, gap: float) -> World:
    """Enumerate vocab^length sequences under a tabular trainer, and a sampler `gap` nats away."""
    if length < 1 or vocab < 2:
        raise ValueError(f"length, vocab: expected >= 1 and >= 2, got {length} and {vocab}")

    # sequences are numbers in base `vocab`, and so are prefixes, counted after all shorter ones
    number = torch.arange(vocab**length)[:, None]
    place = vocab ** torch.arange(length).flip(0)
    tokens = number // place % vocab
    shorter = (vocab ** torch.arange(length) - 1) // (vocab - 1)
    prefix = shorter + number // (place * vocab)

    # a tabular policy: logits for each prefix
    table = (int(prefix.max()) + 1, vocab)
    theta = normal(seed, "trainer", *table).requires_grad_()
    sampler = (theta.detach() + gap * normal(seed, "sampler", *table)).log_softmax(-1)
    trainer = theta.log_softmax(-1)

    p = trainer.detach().exp()
    size = 1 - 2 * p + p.square().sum(-1, keepdim=True)  # |onehot(a) - p|^2 for each a
    reward = normal(seed, "reward of the sequence", vocab**length)
    entropy = -(p * p.log()).sum(-1)[prefix]
    return World(
        theta, trainer[prefix, tokens], sampler[prefix, tokens], reward, size[prefix, tokens], entropy
    )


def _corrected(correct: Correction, world: World) -> Tensor:
    """Return the corrected weights [B, S] of w = 1.

    AssertionError if they depend on which rows share the batch, because this one is an enumeration and no
    sample of q.
    """
    old_logp = world.old_logp.detach()
    mask = torch.ones_like(world.logp, dtype=torch.bool)
    one = torch.ones_like(old_logp)
    w = correct(one, old_logp, world.logp, mask)
    if w.shape != mask.shape:
        raise AssertionError(f"correct: expected w [B, S] = {list(mask.shape)}, got {list(w.shape)}")

    # half of the rows tell whether the others matter
    half = correct(one[::2], old_logp[::2], world.logp[::2], mask[::2])
    if not torch.allclose(half, w[::2], rtol=1e-9, atol=1e-12, equal_nan=True):
        change = (half - w[::2]).abs().max()
        raise AssertionError(
            f"correct: with every other sequence left out the weights of the others changed by {change:.2g}; "
            "an enumeration has the bias only of functions of one row at a time"
        )
    return w.detach()


def _estimate(world: World, chance: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean [P], variance []) of one sample's gradient estimate.

    The variance is the trace of the covariance. The estimate is sum_t w_t R grad log p(x_t | x_<t), for x
    drawn with probability `chance` [B].
    """
    term = w * world.reward[:, None]
    total = (chance[:, None] * term * world.old_logp).sum()
    (mean,) = torch.autograd.grad(total, world.theta, retain_graph=True)
    # no two positions share parameters, so squares add up
    square = (chance * (term.square() * world.size).sum(-1)).sum()
    return mean.flatten(), square - mean.square().sum()


def importance_bias(
    correct: Correction, *, length: int = 3, vocab: int = 3, seed: int = 0, gap: float = 1.0
) -> ImportanceBias:
    """Compute the exact bias and variance of a correction for samples of another policy.

    A sampler q and a trainer p, tabular and autoregressive, are enumerated over all vocab^length sequences,
    with a random reward R for each. The gradient is that of E_p[R] in the logits of p; the estimate of
    one x ~ q is

        sum_t w_t R(x) grad log p(x_t | x_<t),    w = correct(w=1, old_logp=log p, logp=log q, mask)

    all [B, S] with mask True. `gap` [nats] is the deviation of the sampler's logits from the trainer's; at
    0 every correction is unbiased. A function of other arguments fits in by a lambda: `lambda w, old_logp,
    logp, mask: weight.truncated_is(w, old_logp, logp)`. ValueError for length < 1 or vocab < 2,
    AssertionError for weights of another shape, or that depend on the other rows (normalised over the
    batch).
    """
    world = enumerated(length, vocab, seed, gap)
    p = world.old_logp.sum(-1).exp()
    q = world.logp.sum(-1).exp()
    (gradient,) = torch.autograd.grad((p * world.reward).sum(), world.theta, retain_graph=True)
    want = gradient.flatten()

    w = _corrected(correct, world)
    mean, variance = _estimate(world, q, w)
    _, on_policy = _estimate(world, p.detach(), torch.ones_like(w))
    return ImportanceBias(
        bias=float((mean - want).norm() / want.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(mean, want, dim=0)),
        norm_ratio=float(mean.norm() / want.norm()),
        variance=float(variance / on_policy),
    )


def _assert_ragged(correct: Correction, seed: int) -> None:
    """Check that weights are w times a factor of the tokens in mask alone, on a ragged mask and random w."""
    mask, _ = ragged(seed)
    mask = mask[mask.any(-1)]
    w, old_logp, logp = (normal(seed, name, *mask.shape) * mask for name in ("w", "trainer's", "sampler's"))
    w = w.abs()
    found = correct(w, old_logp, logp, mask)
    if not (found[~mask] == 0).all():
        raise AssertionError(
            f"correct: expected weights of 0 outside mask, got {found[~mask].abs().max():.2g}"
        )
    most = 1e-12 * max(1.0, float(found.abs().max()))
    error = (found - w * correct(mask.double(), old_logp, logp, mask)).abs().max()
    if not error <= most:
        raise AssertionError(
            f"correct: expected w times a factor, and a random w is off by {error:.2g}: w is left out, "
            "or changes the factor"
        )
    for row, m in enumerate(mask):
        short = correct(*(x[row, m][None] for x in (w, old_logp, logp, mask)))[0]
        error = (found[row, m] - short).abs().max()
        if not error <= most:
            raise AssertionError(
                f"correct: the weights of row {row} changed by {error:.2g} when its {int((~m).sum())} "
                "tokens outside mask were deleted"
            )


def check_importance_bias(
    correct: Correction,
    *,
    length: int = 3,
    vocab: int = 3,
    seed: int = 0,
    gap: float = 1.0,
    atol: float = 1e-12,
) -> None:
    """Check that a correction keeps the expected policy gradient, to `atol`.

    The `importance_bias` of `correct(w, old_logp, logp, mask) -> w` must be at most `atol`; a larger one
    accepts a bias. The ratio of the whole sequence passes. The ratio of single tokens fails unless length
    = 1: it leaves out the prefix that q chose and the rest that the reward depends on. Truncating or
    masking a ratio fails if a ratio exceeds the limit: with `gap` = 1 the ratios of sequences of 3 span about
    0.3 to 48.

    Then, on a ragged mask and a random w, the weights must be w times a factor of the tokens in mask alone.
    """
    b = importance_bias(correct, length=length, vocab=vocab, seed=seed, gap=gap)
    if not b.bias <= atol:
        raise AssertionError(
            f"samples of a policy with other logits (by {gap:g}): over all {vocab**length} sequences of "
            f"{length} the expected gradient has a bias of {b.bias:.2g} of its norm (cosine {b.cosine:.4f}, "
            f"norm ratio {b.norm_ratio:.4f}; allowed {atol:g}); its variance is {b.variance:.2g} times that "
            "of on-policy samples"
        )
    _assert_ragged(correct, seed)
