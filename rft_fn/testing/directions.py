"""Checks of directions: chosen and rejected, the reference, and the signs of a KL and of an entropy."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rft_fn import check, loss, segment, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.testing.cases import ExtraFn, Failure, Unit, case, flat, log_probs, normal, run, whole
from rft_fn.types import Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = ["Terms", "check_pairs", "check_terms", "reads_advantage", "terms_of", "without_terms"]


# ---------- terms without the advantage: a KL to the reference, and an entropy


class Terms(NamedTuple):
    """The coefficients of what a loss has where all advantages are 0."""

    k1: float  # of log(pi / ref), which as a loss has no expected gradient
    reverse: float  # of `loss.kl` or `kl_k2`, with the gradient of KL(pi, ref)
    k3: float  # of `loss.kl_k3`, with the gradient of KL(ref, pi)
    entropy: float  # of the entropy: below 0 for a bonus

    @property
    def kl(self) -> float:
        """Return the coefficient of the KL, whichever its estimator."""
        return self.reverse + self.k3


def _k1(out: TokenOut, b: Packed) -> Tensor:
    (ref_logp,) = check.given(ref_logp=b.ref_logp)
    return loss.kl_k1(out.logp, ref_logp)


def _reverse(out: TokenOut, b: Packed) -> Tensor:
    return 0.5 * _k1(out, b).square()


def _k3(out: TokenOut, b: Packed) -> Tensor:
    d = _k1(out, b)
    return torch.expm1(-d) + d


def _entropy(out: TokenOut, b: Packed) -> Tensor:
    (entropy,) = check.given(entropy=out.entropy)
    return entropy


_TERMS = (_k1, _reverse, _k3, _entropy)  # in the order of the fields of `Terms`


def _on_policy(weight: WeightFn, extra: ExtraFn | None, seed: int) -> tuple[Callable, tree.Named, Experience]:
    """Return (apply, params, batch) with the old policy as the policy, and no advantages."""
    apply, params, exp = case(seed, weight=weight, extra=extra)
    old = log_probs(apply, params, exp)
    return apply, params, tree.replace(exp, old_logp=old, adv=torch.zeros_like(exp.adv))


def terms_of(
    loss_fn: LossFn, *, weight: WeightFn = token_mean, extra: ExtraFn | None = None, seed: int = 0
) -> Terms | None:
    """Return the known terms of the loss besides the policy gradient, or None if there is another.

    They are the coefficients that explain its gradient where all advantages are 0, which must leave nothing.
    """
    apply, params, exp = _on_policy(weight, extra, seed)
    packs = whole(exp)
    got = flat(run(loss_fn, apply, params, packs).grads)
    if not got.isfinite().all():
        return None
    basis = torch.stack([flat(run(f, apply, params, packs).grads) for f in _TERMS], -1)
    found = torch.linalg.lstsq(basis, got[:, None]).solution[:, 0]
    rest = (basis @ found - got).abs().max()
    if not rest <= 1e-9 * basis.abs().max().clamp(min=got.abs().max()):
        return None
    return Terms(*(0.0 if abs(x) < 1e-9 else x for x in found.tolist()))


def without_terms(loss_fn: LossFn, terms: Terms) -> LossFn:
    """Return the loss less its terms."""
    if not any(terms):
        return loss_fn

    def rest(out: TokenOut, b: Packed) -> Tensor:
        x, _ = evaluate(loss_fn, out, b)
        for coefficient, term in zip(terms, _TERMS):
            if coefficient:
                x = x - coefficient * term(out, b)
        return x

    return rest


def check_terms(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    kl: float | None = None,
    entropy: float | None = None,
) -> None:
    """Check the signs of a KL and an entropy in a loss, and their coefficients if these are declared.

    A loss that has +`kl` KL and -`entropy` H makes the policy stay near the reference and more random. Any
    estimator of the KL counts whose gradient is that of a KL: k1 as a loss is none, but k1 times the ratio
    is. Where nothing is declared, terms of other kinds pass.
    """
    found = terms_of(loss_fn, weight=weight, extra=extra, seed=seed)
    declared = kl is not None or entropy is not None
    if found is None:
        if declared:
            raise Failure(
                "terms",
                f"terms: expected nothing but a KL of {kl or 0:g} and an entropy of {entropy or 0:g} where "
                "all advantages are 0, got something else",
            )
        return
    want_kl = kl if kl is not None else (0.0 if declared else max(found.kl, 0.0))
    want_entropy = entropy if entropy is not None else (0.0 if declared else max(0 - found.entropy, 0.0))
    got = f"got {found.kl:g} and {0 - found.entropy:g}"
    want = f"terms: expected a KL of {want_kl:g} and an entropy of {want_entropy:g}, {got}"
    if found.k1 > 0 and not found.kl and (want_kl or not declared):
        raise Failure("k1", f"{want}: {found.k1:g} of log(pi / ref), whose expected gradient is 0")
    if found.k1 and abs(found.k1 - found.reverse) > 1e-6 and declared:
        raise Failure("k1", f"{want}, and {found.k1:g} of log(pi / ref), whose expected gradient is 0")
    if abs(found.kl - want_kl) > 1e-6 * max(1.0, abs(want_kl)):
        raise Failure("sign of the KL" if found.kl * want_kl < 0 or not declared else "terms", want)
    if abs(found.entropy + want_entropy) > 1e-6 * max(1.0, abs(want_entropy)):
        wrong = -found.entropy * want_entropy < 0 or not declared
        raise Failure("sign of the entropy" if wrong else "terms", want)


def reads_advantage(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
) -> bool:
    """Return whether other advantages change the gradient of a loss."""
    apply, params, exp = case(seed, weight=weight, extra=extra)
    none = tree.replace(exp, adv=torch.zeros_like(exp.adv))
    x, y = (flat(run(loss_fn, apply, params, whole(e, unit)).grads) for e in (exp, none))
    return bool((x != y).any())


# ---------- pairs: rows 2i are chosen and 2i + 1 rejected


def _of_sides(x: Tensor, b: Packed) -> Tensor:
    """Sum over the rows of each pair, [P, 2]."""
    return segment.sum(x, torch.ones_like(b.mask), b.seq, b.num_seqs).view(-1, 2)


def _pair_slopes(loss_fn: LossFn, out: TokenOut, b: Packed) -> list[Tensor]:
    """Return the gradients [P, 2] with respect to log-probs, and to scores, of chosen and rejected."""
    given = check.given(logp=out.logp, score=out.score)
    leaves = [x.detach().clone().requires_grad_() for x in given]
    x, _ = evaluate(loss_fn, tree.replace(out, logp=leaves[0], score=leaves[1]), b)
    total = (b.w * x).sum()
    if not total.requires_grad:
        return [x.new_zeros(b.num_seqs // 2, 2)]
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [_of_sides(g if g.dim() == 1 else g[:, 0], b) for g in found]


def _reads_value(loss_fn: LossFn, out: TokenOut, b: Packed) -> bool:
    """Return whether a loss learns from the values of a model, whose order the case does not choose."""
    if out.value is None:
        return False
    value = out.value.detach().clone().requires_grad_()
    x, _ = evaluate(loss_fn, tree.replace(out, value=value), b)
    total = (b.w * x).sum()
    if not total.requires_grad:
        return False
    (slope,) = torch.autograd.grad(total, [value], materialize_grads=True)
    return bool(slope.any())


def check_pairs(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    chosen_falls: bool = False,
) -> None:
    """Check the directions of a loss of pairs, and how the reference enters.

    Rows 2i are chosen and 2i + 1 rejected. Where policy and reference are the same, and where the pair is in
    the wrong order by up to 3 nats a token, no chosen response is made less probable and no rejected one
    more probable, and one of both moves; scores of a reward model alike. `chosen_falls` declares that the
    chosen one may fall too, as in APO-down. What the reference changes must be the same when it and the
    policy move together, as log(pi / ref) is.
    """
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    side = torch.tensor([1.0, -1.0]).double().repeat(len(logp) // 2)[:, None] * c.exp.mask
    (b,) = whole(c.exp, 2)
    with torch.no_grad():
        out = c.apply(c.params, b)

    def moved(x: Tensor, by: float) -> Packed:
        """Return the pack with the reference at the policy plus `x` [B, S] nats, less `by` of each side."""
        (far,) = whole(tree.replace(c.exp, ref_logp=logp + x + by * side), 2)
        return far

    moves = False
    for nats in (0.0, 1.0, 3.0):
        for of, slope in zip(
            ("probable", "highly scored"), _pair_slopes(loss_fn, out, moved(0 * side, nats))
        ):
            moves = moves or bool(slope.any())
            up, down = bool((slope[:, 0] > 1e-12).any()), bool((slope[:, 1] < -1e-12).any())
            where = f"where the pair is in the wrong order by {nats:g} nats a token"
            if up and not (chosen_falls and not down):
                code = "exchanged" if down else "chosen falls"
                raise Failure(code, f"pairs: chosen responses are made less {of} {where}")
            if down:
                raise Failure("rejected rises", f"pairs: rejected responses are made more {of} {where}")
    if not moves and not _reads_value(loss_fn, out, b):
        raise Failure(
            "cut", "pairs: neither chosen nor rejected responses learn where pairs are in the wrong order"
        )
    _check_reference(loss_fn, out, c.exp, logp, seed)


def _check_reference(loss_fn: LossFn, out: TokenOut, exp: Experience, logp: Tensor, seed: int) -> None:
    """Check that the effect of the reference is invariant to moving it together with the policy."""
    together = 0.3 * normal(seed, "together", len(logp), 1) * exp.mask
    step = 0.2 * normal(seed, "step of the reference", len(logp), 1) * exp.mask

    def losses(shift: Tensor, ref: Tensor) -> Tensor:
        (b,) = whole(tree.replace(exp, old_logp=exp.old_logp + shift, ref_logp=ref + shift), 2)
        (at,) = whole(tree.replace(exp, old_logp=shift), 2)  # the shift, by label
        x, _ = evaluate(loss_fn, tree.replace(out, logp=out.logp + at.old_logp), b)
        return x.detach()[b.mask]

    zero = torch.zeros_like(together)
    (ref,) = check.given(ref_logp=exp.ref_logp)
    here, there = (losses(shift, ref + step) - losses(shift, ref) for shift in (zero, together))
    error = (here - there).abs().max()
    if not error <= 1e-9 * max(1.0, float(here.abs().max())):
        raise Failure(
            "reference",
            f"pairs: moving policy and reference together changes what the reference does by {error:.2g}: it "
            "does not enter as log pi - log ref",
        )
