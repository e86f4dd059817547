"""Checks of policy losses: the gradient on-policy, and finite values at any log-ratio."""

from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.testing.cases import (
    ROWS,
    Case,
    ExtraFn,
    Run,
    Unit,
    case,
    flat,
    gap,
    log_probs,
    normal,
    packed,
    reweigh,
    rows_of,
    run,
    whole,
)
from rft_fn.types import Apply, Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = ["check_finite", "check_on_policy_identity"]


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


def _apart(c: Case, logp: Tensor, shift: Tensor) -> tuple[Apply, Experience]:
    """Shift the log-ratios to old and reference policy to `shift` [B, S] nats.

    The smaller probability shrinks, so that none exceeds 1. `logp` [B, S] has the model's log-probs.
    """
    far = logp - shift.clamp(min=0)
    lower = shift.clamp(max=0)

    def apply(params: Any, b: Packed) -> TokenOut:
        out = c.apply(params, b)
        down = lower[torch.tensor(b.rows)[b.seq], b.pos + 1].to(out.logp.dtype)
        return tree.replace(out, logp=out.logp + down)

    return apply, tree.replace(c.exp, old_logp=far, ref_logp=far)


def _shifts(mask: Tensor) -> dict[str, Tensor]:
    """Return name -> log-ratios [B, S] in nats, of all tokens or of the middle one of each row."""
    count = mask.cumsum(-1)
    middle = mask & (count == (count[:, -1:] + 1) // 2)
    of_all = {f"log-ratio {s:+g}": s * mask.double() for s in (0.0, 50.0, -50.0)}
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


def check_finite(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
) -> None:
    """Check that value and gradient are finite at any log-ratio.

    They are evaluated in float64 and float32, at log-ratios of 0 and +-50, of all tokens and of one token
    among others at 0. Masked rows and empty packs give exactly 0.
    """
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    for name, shift in _shifts(c.exp.mask).items():
        apply, exp = _apart(c, logp, shift)
        for dtype in (torch.float64, torch.float32):
            got = run(loss_fn, apply, _as_type(c.params, dtype), whole(_as_type(exp, dtype), unit))
            _assert_finite(f"{name} in {dtype}", got)
    for name, packs in _masked(c.exp, weight, unit).items():
        got = run(loss_fn, c.apply, c.params, packs)
        _assert_finite(name, got)
        top = flat(got.grads).abs().max()
        if got.total != 0 or top != 0:
            raise AssertionError(f"{name}: expected loss and gradient 0, got {got.total:.2g} and {top:.2g}")
