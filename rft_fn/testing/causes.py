"""The likeliest cause of what failed: facts of a loss, and the signs of each cause."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rft_fn import packing, segment, tree
from rft_fn.loss.evaluate import token_gradient
from rft_fn.testing.cases import Case, ExtraFn, Unit, case, log_probs, normal, token_losses, whole
from rft_fn.testing.diagnosis import Verdict, attempt, known_terms, raised
from rft_fn.testing.directions import Terms
from rft_fn.testing.policy_losses import finite_cases
from rft_fn.testing.sides import slopes_at
from rft_fn.types import Apply, Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = ["CAUSES", "likeliest_cause"]


class _FirstInfinite(TorchDispatchMode):
    """Remembers which operation made a number that is not finite, and casts to narrower types.

    A result has the operation of the first of its arguments that is not finite: what a metric divides by
    nothing is in no loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrowed = False
        self._made: dict[int, tuple[str, Tensor]] = {}  # by id: the operation, and the tensor to keep its id

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        wrong = [x for x in given if not x.isfinite().all()]
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for x in out if isinstance(out, tuple) else (out,):
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                continue
            self.narrowed |= bool(given) and name == "_to_copy" and x.itemsize < given[0].itemsize
            before = [self.name(y) for y in wrong if self.name(y)]
            if given and (before or not x.isfinite().all()):
                self._made[id(x)] = (before or [name])[0], x
        return out

    def name(self, x: Tensor) -> str:
        """Return the operation that first made a number of a tensor not finite, "" for none that was seen."""
        return self._made.get(id(x), ("", x))[0]


_DIVISIONS = ("div", "log", "log1p", "log2", "log10", "reciprocal", "rsqrt", "sqrt", "logit")


class _Facts(NamedTuple):
    """What is known of a loss that failed some checks."""

    failed: dict[str, str]  # check -> its error
    codes: dict[str, str]  # check -> its code
    b: Packed  # all rows, on-policy, one advantage a token
    slope: Tensor  # [N] d loss / d logp there of the tokens that count, without their weights
    none: Tensor  # [N] the same where all advantages are 0
    adv: Tensor  # [N]
    of_row: tuple[Tensor, Tensor]  # the slope and the advantage with one advantage a row
    to_reference: Tensor  # [N] the slope where the policy is the reference, and not the old one
    changed: int  # most tokens of a row with a loss that another order of rows changes
    after: bool  # rows see what is before them in the pack, or what is after them
    coupled: int  # most other tokens of a row with a loss that one token's advantage changes
    same: bool  # all tokens have one loss
    drawn: bool  # a second call has other losses or slopes
    runs_on: bool  # tokens with A > 0 learn when they are far more probable already
    terms: Terms | None  # what it has beside the advantage, where that is a KL and an entropy
    infinite: str  # the operation that made the first number of a gradient not finite
    narrowed: bool  # a cast to a narrower type


def _watched(loss_fn: LossFn, apply: Apply, params: tree.Named, packs: list[Packed]) -> tuple[str, bool]:
    """Return the operation that made losses or their gradient infinite, and whether one narrows a type."""
    watch, results = _FirstInfinite(), []

    def watched(out: TokenOut, b: Packed) -> Any:
        result = loss_fn(out, b)
        results.append(result[0] if isinstance(result, tuple) else result)
        return result

    for b in packs:
        with torch.no_grad():
            out = apply(params, b)
        with watch:
            results.append(token_gradient(watched, out, b))
    names = (watch.name(x) for x in results)
    return next((name for name in names if name), ""), watch.narrowed


def _first_infinite(loss_fn: LossFn, c: Case, weight: WeightFn, unit: Unit) -> str:
    """Return the operation that made the first number that is not finite, "" for none."""
    names = (_watched(loss_fn, *x)[0] for x in finite_cases(c, weight, unit))
    return next((name for name in names if name), "")


def _losses(loss_fn: LossFn, c: Case, exp: Experience, rows: list[int], unit: Unit) -> Tensor:
    """Return the losses [B, S] of rows in an order, 0 outside mask."""
    b = packing.pack(exp, rows, unit=unit)
    with torch.no_grad():
        x, _ = token_losses(loss_fn, c.apply(c.params, b), b)
    return packing.unpack([torch.where(b.mask, x, 0)], [b], exp.tokens)


def _runs_on(loss_fn: LossFn, c: Case, exp: Experience, unit: Unit) -> bool:
    """Return whether a change of one row reaches only the rows after it in its pack, or only those before."""
    if unit != 1:
        return False
    rows, middle = list(range(len(exp.mask))), len(exp.mask) // 2
    more = torch.zeros_like(exp.adv).index_add(0, torch.tensor([middle]), 0.3 * exp.mask[[middle]].double())
    other = tree.replace(exp, old_logp=exp.old_logp + more, adv=exp.adv + more)
    here, there = (_losses(loss_fn, c, e, rows, unit) for e in (exp, other))
    moved = (here - there).abs().amax(-1) > 1e-9
    before, after = int(moved[:middle].sum()), int(moved[middle + 1 :].sum())
    return (before == 0) != (after == 0) and before + after > 1


def _facts(
    loss_fn: LossFn, found: list[Verdict], weight: WeightFn, extra: ExtraFn | None, seed: int, unit: Unit
) -> _Facts:
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    at = tree.replace(c.exp, old_logp=logp)
    row = normal(seed, "adv of the row", len(logp), 1) * c.exp.mask
    rows = list(range(len(logp)))

    def slope(exp) -> tuple[Tensor, Tensor, Packed]:
        (b,) = whole(exp, unit)
        with torch.no_grad():
            out = c.apply(c.params, b)
        counts = b.mask & (b.w > 0)
        return token_gradient(loss_fn, out, b)[counts] / b.w[counts], b.adv[counts], b

    slopes, adv, b = slope(at)
    here = _losses(loss_fn, c, at, rows, unit)
    again = [_losses(loss_fn, c, at, rows, unit) for _ in range(4)]
    there = _losses(loss_fn, c, at, rows[::-1], unit)
    inside = here[c.exp.mask]

    # the advantage of one token a row is another
    last = c.exp.mask & (c.exp.mask.cumsum(-1) == c.exp.mask.sum(-1, keepdim=True))
    other = _losses(loss_fn, c, tree.replace(at, adv=at.adv + 0.5 * last), rows, unit)
    coupled = ((here - other).abs() > 1e-9) & c.exp.mask & ~last

    far, _, of = slopes_at(loss_fn, weight=weight, extra=extra, seed=seed, unit=unit)(1.5)
    failed = {v.check: v.error for v in found if v.error}
    return _Facts(
        failed=failed,
        codes={v.check: v.code for v in found if v.error},
        b=b,
        slope=slopes,
        none=slope(tree.replace(at, adv=torch.zeros_like(at.adv)))[0].nan_to_num(),
        adv=adv,
        of_row=slope(tree.replace(at, adv=row))[:2],
        to_reference=slope(tree.replace(c.exp, ref_logp=logp))[0],
        changed=int((((here - there).abs() > 1e-9) & c.exp.mask).sum(-1).max()),
        after=_runs_on(loss_fn, c, c.exp, unit),
        coupled=int(coupled.sum(-1).max()),
        same=bool((inside == inside[0]).all()),
        drawn=any(bool((x != here).any()) for x in again if x.isfinite().all()),
        runs_on=bool((far != 0)[of > 0].all()),
        terms=known_terms(loss_fn, weight, extra, seed) if unit == 1 else None,
        infinite=_first_infinite(loss_fn, c, weight, unit) if "finite" in failed else "",
        narrowed=_watched(loss_fn, c.apply, c.params, whole(at, unit))[1],
    )


def _close(x: Tensor, y: Tensor, rtol: float = 1e-6) -> bool:
    scale = float(y.abs().max().clamp(min=1e-12))
    return bool(((x - y).abs() <= rtol * scale).all())


def _factor(f: _Facts) -> Tensor:
    """Return slope / -adv of each token, of the row's advantage if that is smoother."""
    slope, adv = f.of_row
    return torch.where(adv == 0, 1, slope / -torch.where(adv == 0, 1, adv))


def _constant(x: Tensor) -> bool:
    return bool(x.any()) and _close(x, x.mean().expand_as(x))


def _of_length(f: _Facts) -> bool:
    """Return whether slopes have the length of the response, or one over it, as a factor."""
    x = _factor(f)
    n = segment.sum(f.b.mask.to(x.dtype), f.b.mask, f.b.seq, f.b.num_seqs)[f.b.seq][f.b.mask & (f.b.w > 0)]
    return "packing" not in f.failed and (_constant(x * n) or _constant(x / n))


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


def _not_detached(f: _Facts) -> bool:
    """Return whether the slopes are -A (1 + c log pi), as those of c r A log pi with r not detached."""
    counts = f.b.mask & (f.b.w > 0)
    return "on-policy" in f.failed and _constant((f.slope / -f.adv - 1) / f.b.old_logp[counts])


def _left_out(f: _Facts) -> bool:
    """Return whether some tokens of either sign have no slope, and all others -A."""
    zero = f.slope == 0
    both = bool((f.adv[zero] > 0).any() and (f.adv[zero] < 0).any()) and not zero.all()
    return "on-policy" in f.failed and both and _close(f.slope[~zero], -f.adv[~zero])


def _cut(f: _Facts) -> bool:
    none = "on-policy" in f.failed and not f.slope.any() and not f.of_row[0].any()
    return none or "cut" in f.codes.values()


def _divided(f: _Facts) -> bool:
    return "finite" in f.failed and f.infinite in _DIVISIONS


def _unlimited(f: _Facts) -> bool:
    return "bound" in f.failed or ("finite" in f.failed and not _divided(f))


def _rounded(f: _Facts) -> bool:
    near = _close(f.slope, -f.adv, 1e-6) or (f.narrowed and _close(f.slope, -f.adv, 0.05))
    return "on-policy" in f.failed and near


def _only_metrics(f: _Facts) -> bool:
    return set(f.failed) <= {"partition", "permutation", "padding"} and all(
        "metric" in x and "gradient" not in x and "of total" not in x for x in f.failed.values()
    )


def _beside(f: _Facts) -> bool:
    """Return whether the loss is the policy gradient and something without the advantage."""
    some = bool(f.none.any()) or (f.terms is not None and any(f.terms))
    return "on-policy" in f.failed and some and _close(f.slope - f.none, -f.adv)


# those that are plain from the first error, before any slope is taken
_PLAIN = {
    "written": "the arguments are changed in place: the next loss, and the metrics, read other data",
    "shape": "a dimension too many, where tokens were combined with a column or a row of others",
    "scalar": "a mean or a sum inside the loss: it has one number a token, averages belong in w",
    "cut": "the gradient is cut: a ratio that is detached, or a tensor that is built anew",
}
_PAIRS = "a loss of pairs or lists: unit=2 says that rows 2i and 2i + 1 belong together"

# cause -> its sign; the order matters: what explains more comes first
CAUSES: dict[str, Callable[[_Facts], bool]] = {
    _PLAIN["written"]: lambda f: "written" in f.codes.values(),
    _PLAIN["shape"]: lambda f: "shape" in f.codes.values(),
    _PLAIN["scalar"]: lambda f: "scalar" in f.codes.values() or ("packing" in f.failed and f.same),
    _PLAIN["cut"]: _cut,
    "a random draw or a counter inside the loss: draw for the whole batch, into extra": lambda f: f.drawn,
    "a metric that is a mean of means: take metric.mean over the mask": _only_metrics,
    "a division, root or logarithm of 0: mask what goes in, not what comes out": _divided,
    "advantages or log-probs of another token of the sequence: a shift by one": lambda f: (
        ("packing" not in f.failed or not f.changed) and _shifted(f)
    ),
    "tokens outside the mask in a statistic of a sequence": lambda f: (
        "masked" in f.failed and "packing" not in f.failed
    ),
    "the padding: its tokens or its width": lambda f: f.failed.keys() == {"padding"},
    "a second 1/n: w divides by the tokens already": lambda f: _one_over_n(f) or _of_length(f),
    "a shift that crosses the borders of sequences": lambda f: "packing" in f.failed and 0 < f.changed <= 2,
    "a running sum that goes on from one sequence into the next of the pack": lambda f: (
        "packing" in f.failed and f.after
    ),
    "the place of a row or a token in its pack": lambda f: "permutation" in f.failed and f.changed > 0,
    "a statistic of the pack, such as whitening: normalise the batch before it is packed": lambda f: (
        "packing" in f.failed or "partition" in f.failed
    ),
    "chosen and rejected are exchanged, or the sign is wrong": lambda f: "exchanged" in f.codes.values(),
    "the chosen response becomes less probable too: declare it, as of APO-down, by chosen_falls": lambda f: (
        "chosen falls" in f.codes.values()
    ),
    "the rejected response becomes more probable too: a wrong sign of one side": lambda f: (
        "rejected rises" in f.codes.values()
    ),
    "the reference with a wrong sign, or of the other side: log pi - log ref of each": lambda f: (
        "reference" in f.codes.values()
    ),
    "the sign of the value's error, or a clip with min in place of max": lambda f: (
        "values" in f.codes.values()
    ),
    "the sign of the KL: a loss adds it": lambda f: (
        "sign of the KL" in f.codes.values() or (_beside(f) and f.terms is not None and f.terms.kl < 0)
    ),
    "the sign of the entropy: a loss subtracts a bonus, which makes the policy more random": lambda f: (
        "sign of the entropy" in f.codes.values()
        or (_beside(f) and f.terms is not None and f.terms.entropy > 0)
    ),
    "k1 as a loss, a KL with no expected gradient: kl or kl_k3, or k1 in the reward": lambda f: (
        "k1" in f.codes.values() or (_beside(f) and f.terms is not None and f.terms.k1 > 0 and not f.terms.kl)
    ),
    "another coefficient of the KL or of the entropy than declared": lambda f: "terms" in f.codes.values(),
    "a factor of a log-prob that is not detached, so that its own gradient is added": _not_detached,
    "the sign: a loss is minus what is to grow": lambda f: (
        "on-policy" in f.failed and _close(f.slope.abs(), f.adv.abs()) and not _close(f.slope, -f.adv)
    ),
    "a statistic of the sequence in its advantages, such as whitening: adv is of the batch": lambda f: (
        "on-policy" in f.failed and f.coupled > 1
    ),
    "tokens that are left out whatever their advantage: the mask and w say which ones count": _left_out,
    "max in place of min in a clip, which stops tokens on the wrong side": lambda f: (
        "dead" in f.codes.values() and f.runs_on
    ),
    "a clip that stops tokens on the side from which they have to come back": lambda f: (
        "dead" in f.codes.values()
    ),
    "limits on other sides than claimed: low and high exchanged": lambda f: "limits" in f.codes.values(),
    "a constant factor: of the learning rate, or of a part of the ratio that should be detached": lambda f: (
        "on-policy" in f.failed and _constant(_factor(f)) and not _close(f.slope, -f.adv)
    ),
    "an exponential without a limit": _unlimited,
    "the reference in place of the old policy": lambda f: _close(f.to_reference, -f.adv),
    "log-probs without the old policy beside them": _old,
    "a term without the advantage, such as a KL or an entropy: kl=, entropy=, or on_policy=False": _beside,
    "rounding, as by a cast to float32 inside the loss: the checks are in float64": _rounded,
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
    failed = [v for v in found if v.error]
    if not failed:
        return ""
    if all(v.code == "raises" for v in failed) and len(failed) == len(found):
        return _does_not_run(loss_fn, found[0].error, weight, extra, seed, unit)
    if failed[0].code in _PLAIN:
        return _PLAIN[failed[0].code]
    try:
        facts = _facts(loss_fn, found, weight, extra, seed, unit)
    except Exception as error:  # a loss that runs on some packs
        return f"the loss does not run on every pack: {raised(error)}"
    return next((cause for cause, sign in CAUSES.items() if sign(facts)), "")


def _does_not_run(
    loss_fn: LossFn, error: str, weight: WeightFn, extra: ExtraFn | None, seed: int, unit: Unit
) -> str:
    """Say why a loss raises on every batch."""
    if unit == 1:
        c = case(seed, weight=weight, extra=extra)
        (pairs,) = whole(c.exp, 2)
        if (
            attempt("", lambda: (token_losses(loss_fn, c.apply(c.params, pairs), pairs), None)[1]).code
            != "raises"
        ):
            return _PAIRS
    return f"the loss does not run: {error.removeprefix('raised ')}"
