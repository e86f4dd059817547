"""Checks of policy losses.

They are of the gradient on-policy, and of finite values at any log-ratio.
"""

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
    """Check the gradient of a policy loss on-policy.

    At logp == old_logp it is that of -adv logp. The loss must have no KL or entropy term. `per_sequence`
    gives all tokens of a row one advantage, for losses with one ratio per sequence (GSPO).
    """
    apply, params, exp = case(seed, weight=weight, extra=extra)
    adv = exp.adv
    if per_sequence:
        adv = normal(seed, "adv of the row", ROWS, 1) * exp.mask
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
    """Shift log-ratios to old and reference policy.

    They become `shift` [B, S] nats. The smaller probability shrinks, so that none exceeds 1. `logp` [B, S]
    has the model's log-probs.
    """
    far = logp - shift.clamp(min=0)
    lower = shift.clamp(max=0)

    def apply(params: Any, b: Packed) -> TokenOut:
        out = c.apply(params, b)
        down = lower[torch.tensor(b.rows)[b.seq], b.pos + 1].to(out.logp.dtype)
        return tree.replace(out, logp=out.logp + down)

    return apply, tree.replace(c.exp, old_logp=far, ref_logp=far)


def _shifts(mask: Tensor) -> dict[str, Tensor]:
    """Name -> log-ratios [B, S] in nats.

    They are of all tokens, or of the one in the middle of each row.
    """
    count = mask.cumsum(-1)
    middle = mask & (count == (count[:, -1:] + 1) // 2)
    found = {f"log-ratio {s:+g}": s * mask.double() for s in (0.0, 50.0, -50.0)}
    return found | {f"log-ratio {s:+g} of one token per row": s * middle.double() for s in (50.0, -50.0)}


def _assert_finite(varied: str, found: Run) -> None:
    bad = []
    if not found.total.isfinite():
        bad.append(f"the total is {found.total:g}")
    for path, g in tree.leaves_with_path(found.grads):
        if count := int((~g.isfinite()).sum()):
            bad.append(f"{count} of {g.numel()} entries of the gradient of {path} are not finite")
    if bad:
        raise AssertionError(f"{varied}: {'; '.join(bad)}")


def _masked(exp: Experience, weight: WeightFn, unit: Unit) -> dict[str, list[Packed]]:
    """Name -> packs without a token in mask."""
    nothing = reweigh(exp, torch.zeros_like(exp.mask), weight)
    first = rows_of(unit)[:2]
    rows = [packed(nothing, [row for rows in first for row in rows], unit)]
    packs = {"masked rows": rows, "a batch of masked rows": whole(nothing, unit)}
    return packs | {"an empty pack": [packed(exp, [], unit)]}


def check_finite(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
) -> None:
    """Check that value and gradient are always finite.

    They are evaluated in float64 and float32, at log-ratios of 0 and +-50, of all tokens and of one token
    among others at 0. Masked rows and empty packs give exactly 0.
    """
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    for name, shift in _shifts(c.exp.mask).items():
        apply, exp = _apart(c, logp, shift)
        for dtype in (torch.float64, torch.float32):
            found = run(loss_fn, apply, _as_type(c.params, dtype), whole(_as_type(exp, dtype), unit))
            _assert_finite(f"{name} in {dtype}", found)
    for name, packs in _masked(c.exp, weight, unit).items():
        found = run(loss_fn, c.apply, c.params, packs)
        _assert_finite(name, found)
        top = flat(found.grads).abs().max()
        if found.total != 0 or top != 0:
            raise AssertionError(f"{name}: expected loss and gradient 0, got {found.total:.2g} and {top:.2g}")
