"""Checks of a loss token by token: sides, limits and bound off-policy, its mask, the sides of a value."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rft_fn import check, rng, tree
from rft_fn.loss.evaluate import evaluate, token_gradient
from rft_fn.testing.cases import (
    ROWS,
    ExtraFn,
    Failure,
    Unit,
    apart,
    case,
    log_probs,
    normal,
    token_losses,
    whole,
)
from rft_fn.types import LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = ["check_bounded", "check_masked", "check_sides", "check_values", "learns_value", "slopes_at"]


FADED = 1e-30  # a slope that fell so far has faded, as soft weights of long responses do: no clip

# a log-ratio in nats -> (slopes [T], slopes without an advantage [T], advantages [T]) of tokens that count
Slopes = Callable[[float], tuple[Tensor, Tensor, Tensor]]


def slopes_at(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
) -> Slopes:
    """Return a function from a log-ratio [nats] to d loss / d logp, the same where A = 0, and A, each [T].

    All tokens of all rows are at this log-ratio to the old policy, and at 0 to the reference. A row has one
    advantage, so that a loss with one ratio a sequence has the same sides as one with a ratio a token. A
    slope is the gradient with respect to a token's log-prob, without its weight.
    """
    c = case(seed, weight=weight, extra=extra)
    logp = log_probs(c.apply, c.params, c.exp)
    sign = torch.tensor([1.0, -1.0]).double().repeat(ROWS // 2)[:, None]
    adv = sign * (0.5 + normal(seed, "adv of the row", ROWS, 1).abs()) * c.exp.mask

    @torch.no_grad()
    def slopes(log_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        apply, exp = apart(c, logp, log_ratio * c.exp.mask.double())
        (b,) = whole(tree.replace(exp, adv=adv), unit)
        out = apply(c.params, b)
        b = tree.replace(b, ref_logp=out.logp)
        counts = b.mask & (b.w > 0)
        none = tree.replace(b, adv=torch.zeros_like(b.adv))
        token_losses(loss_fn, out, b)  # one number a token, or an error
        slope, rest = [token_gradient(loss_fn, out, x)[counts] / b.w[counts] for x in (b, none)]
        return slope, rest, b.adv[counts]

    return slopes


def check_sides(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    low: float | None = None,
    high: float | None = None,
    span: float = 0.7,
) -> None:
    """Check that a token that moved against its advantage still learns, and none is pushed the wrong way.

    For log-ratios of up to 2 nats a token with A > 0 becomes no less probable and one with A < 0 no more
    probable. Up to `span` nats one that has moved against its advantage has a gradient; further out a dual
    clip may stop it. `low` and `high` are claims about the loss: that tokens with A < 0 stop below a ratio of
    1 - low, and tokens with A > 0 above 1 + high, and not before. What the loss does where all advantages are
    0 (a KL, an entropy) is taken off.
    """
    slopes = slopes_at(loss_fn, weight=weight, extra=extra, seed=seed)
    wrong: list[float] = []
    dead: list[float] = []
    steps = 40
    last: dict[int, Tensor] = {}  # on each way out from 0, the slope of a token before it became 0
    for i in sorted(range(-steps, steps + 1), key=abs):
        at = 2.0 * i / steps
        slope, rest, adv = slopes(at)
        slope = slope - rest.nan_to_num()
        push = -slope * adv  # > 0: along the advantage
        if (push < -1e-9 * adv.abs().max()).any():
            wrong.append(at)
        way = (i > 0) - (i < 0)
        last[way] = torch.where(slope == 0, last.get(way, last[0] if i else slope), slope)
        faded = (last[way] != 0) & (last[way].abs() < FADED)
        if abs(at) <= span and (slope[(at * adv < 0) & ~faded] == 0).any():
            dead.append(at)
    if wrong:
        raise Failure(
            "pushed",
            f"sides: tokens are pushed against their advantage at log-ratios of {_range(wrong)} nats: a "
            "wrong sign, or max in place of min",
        )
    if dead:
        raise Failure(
            "dead",
            f"sides: tokens that moved against their advantage do not learn at log-ratios of {_range(dead)} "
            "nats: a clip stops them on the side from which they have to come back",
        )
    claims = [("high", high, 1 + (high or 0), 1), ("low", low, 1 - (low or 0), -1)]
    for name, claim, ratio, sign in claims:
        if claim is None:
            continue
        edge = float(torch.tensor(ratio).double().log())
        for out, stops in ((-1e-3, False), (1e-3, True)):
            slope, rest, adv = slopes(edge + sign * out)
            stopped = (slope == rest)[sign * adv > 0]
            if not (stopped.all() if stops else not stopped.any()):
                side = "A > 0 stop above" if sign > 0 else "A < 0 stop below"
                where = "beyond" if stops else "before"
                raise Failure(
                    "limits",
                    f"sides: expected tokens with {side} a ratio of {ratio:g} ({name} = {claim:g}) and not "
                    f"before, got {int(stopped.sum())} of {len(stopped)} stopped {where} it: low and high "
                    "are exchanged, or the limit is another",
                )


def _range(values: list[float]) -> str:
    return f"{min(values):+.2f} to {max(values):+.2f}" if len(values) > 1 else f"{values[0]:+.2f}"


def check_bounded(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    bound: float = 20.0,
) -> None:
    """Check that the gradient of a token is bounded as its ratio grows or vanishes.

    At log-ratios of up to 12 nats it is at most `bound` |A|, times the ratio where that is above 1: a token
    with A < 0 has it in PPO without a dual clip. A larger one must grow like a power of the log-ratio, as
    that of a square that holds the policy does: from 4 to 12 nats at most as its cube.
    """
    slopes = slopes_at(loss_fn, weight=weight, extra=extra, seed=seed)
    for side in (-1, 1):
        near = slopes(4.0 * side)[0].abs() / max(1.0, math.exp(4.0 * side))
        for at in (4.0 * side, 8.0 * side, 12.0 * side):
            slope, _, adv = slopes(at)
            power = torch.maximum(near, adv.abs()) * (abs(at) / 4) ** 3
            most = torch.maximum(bound * adv.abs(), power) * max(1.0, math.exp(at))
            over = ~(slope.abs() <= most)  # NaN too
            if over.any():
                i = int((slope.abs() / most).nan_to_num(nan=torch.inf).argmax())
                raise AssertionError(
                    f"bound: at a log-ratio of {at:+g} nats a token with A = {adv[i]:.3g} has a gradient of "
                    f"{slope[i]:.3g}, above {most[i]:.3g}: an exponential without a limit"
                )


def _kept(x: Any, keep: Tensor) -> Any:
    """Return a tree with the tokens to keep, in each of its tensors [T, ...]."""

    def take(leaf: Any) -> Any:
        return leaf[keep] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(keep) else leaf

    return tree.map(take, x)


def check_masked(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    seed: int = 0,
    unit: Unit = 1,
    atol: float = 1e-12,
) -> None:
    """Check that tokens outside mask, of prompts and tools, change nothing when they are deleted.

    What the model says of the others stays. It catches means and maxima over whole sequences, in which a
    prompt counts.
    """
    c = case(seed, weight=weight, extra=extra)
    (b,) = whole(c.exp, unit)
    with torch.no_grad():
        out = c.apply(c.params, b)
    generator = rng.generator(rng.fold_in(seed, "kept"))
    keep = b.mask | (torch.rand(b.mask.shape, generator=generator) < 0.3)
    want = _losses(loss_fn, out, b)
    got = _losses(loss_fn, _kept(out, keep), _kept(b, keep))
    for name, x, y in zip(("loss", "gradient"), want, got):
        error = (x - y).abs().max()
        if not error <= atol * max(1.0, float(x.abs().max())):
            raise AssertionError(
                f"masked: the {name} of tokens in mask changed by {error:.2g} when {int((~keep).sum())} "
                f"tokens outside it were deleted: a mean, a maximum or a shift takes them in"
            )


def _losses(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, Tensor]:
    """Return (loss, gradient with respect to its log-prob) of each token in mask."""
    loss, _ = token_losses(loss_fn, out, b)
    return loss.detach()[b.mask], token_gradient(loss_fn, out, b)[b.mask]


def _value_slopes(
    loss_fn: LossFn, weight: WeightFn, extra: ExtraFn | None, seed: int
) -> Callable[..., Tensor]:
    """Return a function from (distance of values from old values, and of returns) to d loss / d value [N]."""
    c = case(seed, weight=weight, extra=extra)
    (b,) = whole(c.exp)
    with torch.no_grad():
        out = c.apply(c.params, b)
    (old,) = check.given(ret=b.ret)
    counts = b.mask & (b.w > 0)

    def slopes(far: float, ret: float = 0.0) -> Tensor:
        value = (old + far).requires_grad_()
        x, _ = evaluate(
            loss_fn, tree.replace(out, value=value), tree.replace(b, old_value=old, ret=old + ret * b.mask)
        )
        if not x.requires_grad:
            return torch.zeros_like(x)[counts]
        (slope,) = torch.autograd.grad((b.w * x).sum(), [value], materialize_grads=True)
        return slope[counts]

    return slopes


def learns_value(
    loss_fn: LossFn, *, weight: WeightFn = token_mean, extra: ExtraFn | None = None, seed: int = 0
) -> bool:
    """Return whether a loss teaches a value what `ret` says."""
    slopes = _value_slopes(loss_fn, weight, extra, seed)
    return not torch.equal(slopes(0.1), slopes(0.1, 10.0))


def check_values(
    loss_fn: LossFn, *, weight: WeightFn = token_mean, extra: ExtraFn | None = None, seed: int = 0
) -> None:
    """Check that a value that has moved away from its return by 0.5 to 3 is pushed back.

    The old value is the return, so that a clip that stops such a value is on the wrong side.
    """
    slopes = _value_slopes(loss_fn, weight, extra, seed)
    for far in (-3.0, -0.5, 0.5, 3.0):
        push = slopes(far) * math.copysign(1, far)  # > 0: back
        if not (push > 0).all():
            how = "away from them" if (push < 0).any() else "nowhere"
            raise Failure("values", f"values: values that are off their returns by {far:+g} are pushed {how}")
