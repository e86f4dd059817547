"""All checks of a loss in one table, and the likeliest cause of what failed."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rft_fn import packing, segment, tree
from rft_fn.loss.evaluate import token_gradient
from rft_fn.testing.cases import ExtraFn, Unit, case, log_probs, normal, token_losses, whole
from rft_fn.testing.invariance import (
    check_packing_invariance,
    check_padding_invariance,
    check_partition_invariance,
    check_permutation_invariance,
)
from rft_fn.testing.policy_losses import check_finite, check_on_policy_identity
from rft_fn.testing.sides import check_bounded, check_masked, check_sides, slopes_at
from rft_fn.types import LossFn, Packed, WeightFn
from rft_fn.weight import token_mean

__all__ = ["CAUSES", "Verdict", "likeliest_cause", "table", "verdicts"]


class Verdict(NamedTuple):
    """The result of one check."""

    check: str
    error: str  # "" if it passed


def verdicts(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    on_policy: bool = True,
    low: float | None = None,
    high: float | None = None,
) -> list[Verdict]:
    """Run every check of a loss, whatever fails, finite values first; arguments as of `check_all`."""
    on = partial(_identity, loss_fn, weight=weight, extra=extra, seed=seed)
    sides = partial(check_sides, loss_fn, weight=weight, extra=extra, seed=seed, low=low, high=high)
    bounded = partial(check_bounded, loss_fn, weight=weight, extra=extra, seed=seed)
    checks: dict[str, Callable[..., None]] = {
        "finite": check_finite,
        "partition": check_partition_invariance,
        "padding": check_padding_invariance,
        "packing": check_packing_invariance,
        "permutation": check_permutation_invariance,
        "masked": check_masked,
    }
    calls = {
        name: partial(check, loss_fn, weight=weight, extra=extra, seed=seed, unit=unit)
        for name, check in checks.items()
    }
    if on_policy and unit == 1:
        calls |= {"on-policy": on, "sides": sides, "bound": bounded}
    found = []
    for name, call in calls.items():
        try:
            call()
        except AssertionError as error:
            found.append(Verdict(name, str(error) or "failed"))
        except (RuntimeError, IndexError, ZeroDivisionError) as error:
            found.append(Verdict(name, f"raised {type(error).__name__}: {str(error).splitlines()[0]}"))
        else:
            found.append(Verdict(name, ""))
    return found


def _identity(loss_fn: LossFn, *, weight: WeightFn, extra: ExtraFn | None, seed: int) -> None:
    """Check the on-policy identity with an advantage a token, or a row where a ratio is of a sequence."""
    check = partial(check_on_policy_identity, loss_fn, weight=weight, extra=extra, seed=seed)
    try:
        check()
    except AssertionError as error:
        try:
            check(per_sequence=True)
        except AssertionError:
            raise error from None


def table(found: list[Verdict], cause: str = "") -> str:
    """Return the verdicts as text, a line each, and the cause."""
    failed = sum(bool(v.error) for v in found)
    lines = [f"{failed} of {len(found)} checks failed"]
    lines[0] += f"; the likeliest cause: {cause}" if cause else ""
    lines += [f"  {v.check:<12}{'FAILS  ' + v.error if v.error else 'passes'}" for v in found]
    return "\n".join(lines)


# ---------- causes: the first whose sign is there


class _Facts(NamedTuple):
    """What is known of a loss that failed some checks."""

    failed: dict[str, str]  # check -> its error
    b: Packed  # all rows, on-policy, one advantage a token
    slope: Tensor  # [N] d loss / d logp there of the tokens that count, without their weights
    none: Tensor  # [N] the same where all advantages are 0
    adv: Tensor  # [N]
    of_row: tuple[Tensor, Tensor]  # the slope and the advantage with one advantage a row
    to_reference: Tensor  # [N] the slope where the policy is the reference, and not the old one
    changed: int  # most tokens of a row with a loss that another order of rows changes
    same: bool  # all tokens have one loss
    drawn: bool  # a second call has other losses or slopes
    runs_on: bool  # tokens with A > 0 learn when they are far more probable already


def _facts(
    loss_fn: LossFn, found: list[Verdict], weight: WeightFn, extra: ExtraFn | None, seed: int, unit: Unit
) -> _Facts:
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    at = tree.replace(c.exp, old_logp=logp)
    row = normal(seed, "adv of the row", len(logp), 1) * c.exp.mask

    def slope(exp) -> tuple[Tensor, Tensor, Packed]:
        (b,) = whole(exp, unit)
        with torch.no_grad():
            out = c.apply(c.params, b)
        counts = b.mask & (b.w > 0)
        return token_gradient(loss_fn, out, b)[counts] / b.w[counts], b.adv[counts], b

    slopes, adv, b = slope(at)
    with torch.no_grad():
        out = c.apply(c.params, b)
        single, _ = token_losses(loss_fn, out, b)
        again = [token_losses(loss_fn, out, b)[0][b.mask] for _ in range(4)]
        backwards = packing.pack(at, list(range(len(logp)))[::-1], unit=unit)
        other, _ = token_losses(loss_fn, c.apply(c.params, backwards), backwards)
    here = packing.unpack([torch.where(b.mask, single, 0)], [b], c.exp.tokens)
    there = packing.unpack([torch.where(backwards.mask, other, 0)], [backwards], c.exp.tokens)
    moved = ((here - there).abs() > 1e-9) & c.exp.mask
    inside = single[b.mask]
    far, _, of = slopes_at(loss_fn, weight=weight, extra=extra, seed=seed)(1.5)
    return _Facts(
        failed={v.check: v.error for v in found if v.error},
        b=b,
        slope=slopes,
        none=slope(tree.replace(at, adv=torch.zeros_like(at.adv)))[0].nan_to_num(),
        adv=adv,
        of_row=slope(tree.replace(at, adv=row))[:2],
        to_reference=slope(tree.replace(c.exp, ref_logp=logp))[0],
        changed=int(moved.sum(-1).max()),
        same=bool((inside == inside[0]).all()),
        drawn=any(bool((x != inside).any()) for x in again if x.isfinite().all()),
        runs_on=bool((far != 0)[of > 0].all()),
    )


def _close(x: Tensor, y: Tensor) -> bool:
    scale = float(y.abs().max().clamp(min=1e-12))
    return bool(((x - y).abs() <= 1e-6 * scale).all())


def _factor(f: _Facts) -> Tensor:
    """Return slope / -adv of each token, of the row's advantage if that is smoother."""
    slope, adv = f.of_row
    return torch.where(adv == 0, 1, slope / -torch.where(adv == 0, 1, adv))


def _constant(x: Tensor) -> bool:
    return _close(x, x.mean().expand_as(x))


def _of_length(f: _Facts) -> bool:
    """Return whether slopes have the length of the response, or one over it, as a factor."""
    x = _factor(f)
    n = segment.sum(f.b.mask.to(x.dtype), f.b.mask, f.b.seq, f.b.num_seqs)[f.b.seq][f.b.mask & (f.b.w > 0)]
    return _constant(x * n) or _constant(x / n)


def _one_over_n(f: _Facts) -> bool:
    x = _factor(f)
    n = f.b.mask.sum(), f.b.mask.numel(), f.b.num_seqs
    return _constant(x) and any(abs(float(x.mean()) * int(k) - 1) < 1e-6 for k in n)


def _shifted(f: _Facts) -> bool:
    """Return whether slopes match the advantage or old log-prob of a neighbouring token."""
    counts = f.b.mask & (f.b.w > 0)
    at = torch.arange(len(counts))
    for k in (-2, -1, 1, 2):
        inside = (f.b.seq.roll(k) == f.b.seq) & (at >= k) & (at < len(at) + k)
        adv = torch.where(inside, f.b.adv.roll(k), f.b.adv)[counts]
        old = torch.where(inside, f.b.old_logp.roll(k), f.b.old_logp)
        ratio = (f.b.old_logp - old)[counts].exp()
        if any(((f.slope + want).abs() < 1e-6).double().mean() > 0.7 for want in (adv, ratio * f.adv)):
            return True
    return False


def _old(f: _Facts) -> bool:
    """Return whether the slopes are -A pi, which a probability in place of a ratio gives."""
    counts = f.b.mask & (f.b.w > 0)
    return _close(f.slope, -f.adv * f.b.old_logp[counts].exp())


def _cut(f: _Facts) -> bool:
    none = "on-policy" in f.failed and bool((f.slope == 0).all())
    return none or any("has no gradient" in x for x in f.failed.values())


def _unlimited(f: _Facts) -> bool:
    finite = f.failed.get("finite", "log-ratio +50")
    return finite.startswith(("log-ratio +50", "log-ratio -50", "log-ratio +100", "log-ratio -100")) and bool(
        {"bound", "finite"} & f.failed.keys()
    )


def _only_metrics(f: _Facts) -> bool:
    return set(f.failed) <= {"partition", "permutation", "padding"} and all(
        "metric" in x and "gradient" not in x and "of total" not in x for x in f.failed.values()
    )


# those that are plain from the first error, before any slope is taken
_SHAPE = "a dimension too many, where tokens were combined with a column or a row of others"
_MEAN = "a mean or a sum inside the loss: it has one number a token, averages belong in w"
_CUT = "the gradient is cut: a ratio that is detached, or a tensor that is built anew"

# cause -> its sign; the order matters: what explains more comes first
CAUSES: dict[str, Callable[[_Facts], bool]] = {
    _SHAPE: lambda f: any("bring it to [T]" in x for x in f.failed.values()),
    _MEAN: lambda f: (
        any("one number per token" in x for x in f.failed.values()) or ("packing" in f.failed and f.same)
    ),
    _CUT: _cut,
    "a random draw or a counter inside the loss: draw for the whole batch, into extra": lambda f: f.drawn,
    "a metric that is a mean of means: take metric.mean over the mask": _only_metrics,
    "a division, root or logarithm of 0: mask what goes in, not what comes out": lambda f: (
        "finite" in f.failed and not _unlimited(f)
    ),
    "advantages or log-probs of another token of the sequence: a shift by one": lambda f: (
        ("packing" not in f.failed or not f.changed) and _shifted(f)
    ),
    "tokens outside the mask in a statistic of a sequence": lambda f: (
        "masked" in f.failed and "packing" not in f.failed
    ),
    "the padding: its tokens or its width": lambda f: f.failed.keys() == {"padding"},
    "a second 1/n: w divides by the tokens already": lambda f: _one_over_n(f) or _of_length(f),
    "a shift that crosses the borders of sequences": lambda f: "packing" in f.failed and 0 < f.changed <= 2,
    "the place of a row or a token in its pack": lambda f: "permutation" in f.failed and f.changed > 0,
    "a statistic of the pack, such as whitening: normalise the batch before it is packed": lambda f: (
        "packing" in f.failed or "partition" in f.failed
    ),
    "the sign: a loss is minus what is to grow": lambda f: (
        "on-policy" in f.failed and _close(f.slope.abs(), f.adv.abs()) and not _close(f.slope, -f.adv)
    ),
    "max in place of min in a clip": lambda f: "do not learn" in f.failed.get("sides", "") and f.runs_on,
    "a clip that stops tokens on the side from which they have to come back": lambda f: (
        "do not learn" in f.failed.get("sides", "")
    ),
    "limits on other sides than claimed: low and high exchanged": lambda f: (
        "expected tokens with" in f.failed.get("sides", "")
    ),
    "an exponential without a limit": _unlimited,
    "the reference in place of the old policy": lambda f: _close(f.to_reference, -f.adv),
    "log-probs without the old policy beside them": _old,
    "rounding, as by a cast to float32 inside the loss: the checks are in float64": lambda f: (
        "on-policy" in f.failed and _close(f.slope, -f.adv)
    ),
    "a term without the advantage, such as a KL or an entropy: on_policy=False": lambda f: (
        "on-policy" in f.failed and _close(f.slope - f.none, -f.adv)
    ),
    "a constant factor, which belongs in the learning rate": lambda f: (
        "on-policy" in f.failed and _constant(_factor(f))
    ),
    "the advantage is changed inside the loss: capped, or nothing but its sign": lambda f: (
        "on-policy" in f.failed and bool((f.slope[f.adv.argsort()].diff() <= 1e-12).all())
    ),
    "the advantage has a factor of tokens or rows, which belongs in w": lambda f: (
        "on-policy" in f.failed and bool((f.slope * f.adv <= 0).all() and (f.none == 0).all())
    ),
}


def likeliest_cause(
    loss_fn: LossFn,
    found: list[Verdict],
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
) -> str:
    """Return the cause that explains the failed checks best, "" for none.

    Patterns of failures decide, and a few slopes of the loss on-policy: -A times a factor, A of a neighbour,
    a rest where all advantages are 0.
    """
    if not any(v.error for v in found):
        return ""
    first = next(v.error for v in found if v.error)
    if "one number per token" in first:
        return _SHAPE if "bring it to [T]" in first else _MEAN
    if "has no gradient" in first:
        return _CUT
    facts = _facts(loss_fn, found, weight, extra, seed, unit)
    return next((cause for cause, sign in CAUSES.items() if sign(facts)), "")
