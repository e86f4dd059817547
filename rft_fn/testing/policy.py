"""What a policy loss is at logp == old_logp, and that no log-ratio and no empty row breaks it."""

from typing import Any

import torch
from torch import Tensor

from rft_fn import packing, tree
from rft_fn.testing.cases import ROWS, Case, Extra, Weight, case, log_probs, normal, reweigh, whole
from rft_fn.testing.run import Run, flat, gap, run
from rft_fn.types import Apply, Experience, LossFn, Packed, TokenOut
from rft_fn.weight import token_mean

__all__ = ["check_finite", "check_on_policy_identity"]


def check_on_policy_identity(
    loss_fn: LossFn,
    *,
    weight: Weight = token_mean,
    extra: Extra | None = None,
    seed: int = 0,
    per_sequence: bool = False,
    rtol: float = 1e-12,
) -> None:
    """At logp == old_logp the gradient is that of -adv logp. For policy losses without a KL or entropy term.

    `per_sequence`: one advantage for all tokens of a row, for losses with one ratio a sequence (GSPO).
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


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


def _apart(c: Case, logp: Tensor, shift: Tensor) -> tuple[Apply, Experience]:
    """Log-ratios of `shift` [B, S] nats to old and reference. The smaller probability shrinks: none exceeds
    1. `logp` [B, S] is the model's own."""
    far, lower = logp - shift.clamp(min=0), shift.clamp(max=0)

    def apply(params: Any, b: Packed) -> TokenOut:
        out = c.apply(params, b)
        down = lower[torch.tensor(b.rows)[b.seq], b.pos + 1].to(out.logp.dtype)
        return tree.replace(out, logp=out.logp + down)

    return apply, tree.replace(c.exp, old_logp=far, ref_logp=far)


def _shifts(mask: Tensor) -> dict[str, Tensor]:
    """Names -> log-ratios [B, S]: of all tokens, and of the one in the middle of each row."""
    count = mask.cumsum(-1)
    middle = mask & (count == (count[:, -1:] + 1) // 2)
    found = {f"log-ratio {s:+g}": s * mask.double() for s in (0.0, 50.0, -50.0)}
    return found | {f"log-ratio {s:+g} of one token a row": s * middle.double() for s in (50.0, -50.0)}


def _assert_finite(varied: str, found: Run) -> None:
    bad = []
    if not found.total.isfinite():
        bad.append(f"the total is {found.total:g}")
    for path, g in tree.leaves_with_path(found.grads):
        if count := int((~g.isfinite()).sum()):
            bad.append(f"{count} of {g.numel()} entries of the gradient of {path} are not finite")
    if bad:
        raise AssertionError(f"{varied}: {'; '.join(bad)}")


def _silent(exp: Experience, weight: Weight, unit: int) -> dict[str, list[Packed]]:
    nothing = reweigh(exp, torch.zeros_like(exp.mask), weight)
    rows = [packing.pack(nothing, range(2 * unit), unit=unit)]
    packs = {"masked rows": rows, "a batch of masked rows": whole(nothing, unit)}
    return packs | {"an empty pack": [packing.pack(exp, [], unit=unit)]}


def check_finite(
    loss_fn: LossFn,
    *,
    weight: Weight = token_mean,
    extra: Extra | None = None,
    seed: int = 0,
    unit: int = 1,
) -> None:
    """Finite value and gradient in float64 and float32 at log-ratios of 0 and +-50, of all tokens and of one
    token among others at 0; exactly 0 for masked rows and empty packs."""
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    for name, shift in _shifts(c.exp.mask).items():
        apply, exp = _apart(c, logp, shift)
        for dtype in (torch.float64, torch.float32):
            found = run(loss_fn, apply, _cast(c.params, dtype), whole(_cast(exp, dtype), unit))
            _assert_finite(f"{name} in {dtype}", found)
    for name, packs in _silent(c.exp, weight, unit).items():
        found = run(loss_fn, c.apply, c.params, packs)
        _assert_finite(name, found)
        top = flat(found.grads).abs().max()
        if found.total != 0 or top != 0:
            raise AssertionError(f"{name}: expected loss and gradient 0, got {found.total:.2g} and {top:.2g}")
