"""Runs of a loss, and their comparison.

A loss runs as in a train step.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import metric, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.types import Apply, LossFn, Packed, TokenOut

__all__ = ["Run", "assert_same", "flat", "gap", "run", "token_losses", "total_and_grad"]


class Run(NamedTuple):
    """The results of a loss on a batch."""

    total: Tensor  # []
    scale: Tensor  # [] sum of |w loss|, to compare totals by: they may cancel to 0
    grads: Any
    metrics: dict[str, float]


def token_losses(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, dict]:
    """(loss [T], metrics) of a pack.

    AssertionError unless the loss is one number per token.
    """
    x, metrics = evaluate(loss_fn, out, b)
    if x.shape != b.target.shape:
        want = list(b.target.shape)
        got = list(x.shape)
        raise AssertionError(
            f"loss: expected one number per token, [T] = {want}, got {got}; averages belong in w"
        )
    return x, metrics


def run(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> Run:
    """Total, gradient and metrics over packs.

    The total is that of (w loss).sum().
    """
    leaf = tree.map(lambda p: p.detach().clone().requires_grad_(), params)
    terms = []
    metrics = {}
    for b in packs:
        x, m = token_losses(loss_fn, apply(leaf, b), b)
        terms.append(b.w * x)
        metrics = metric.merge(metrics, m)
    all_terms = torch.cat(terms)
    if not all_terms.requires_grad:
        raise AssertionError("loss: it has no gradient; is it detached, or built by torch.tensor(...)?")
    grads = torch.autograd.grad(all_terms.sum(), tree.leaves(leaf), materialize_grads=True)
    values = all_terms.detach()
    like_params = tree.unflatten_like(params, list(grads))
    return Run(values.sum(), values.abs().sum(), like_params, metric.results(metrics))


def total_and_grad(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> tuple[Tensor, Any]:
    """(total [], gradient like params) over packs.

    The total is that of (w loss).sum(), as in a train step. AssertionError if the loss is not one number
    per token, or has no gradient.
    """
    found = run(loss_fn, apply, params, packs)
    return found.total, found.grads


def flat(grads: Any) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([x.flatten() for x in tree.leaves(grads)])


def gap(got: Tensor, want: Tensor) -> str:
    """The error of a gradient [P] in words.

    It tells of size and direction.
    """
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=0)
    norm = got.norm() / want.norm().clamp(min=1e-300)
    return f"off by at most {(got - want).abs().max():.2g} (cosine {cosine:.4f}, norm ratio {norm:.4f})"


def _errors(want: Run, got: Run) -> dict[str, float]:
    """Name -> relative error.

    The scales are the sum of |w loss|, the largest gradient, and max(1, |metric|).
    """
    errors = {"total": float((want.total - got.total).abs() / want.scale.clamp(min=1e-300))}
    scale = flat(want.grads).abs().max().clamp(min=1e-300)
    pairs = zip(tree.leaves_with_path(want.grads), tree.leaves(got.grads))
    errors |= {f"gradient of {path}": float((x - y).abs().max() / scale) for (path, x), y in pairs}
    for name in want.metrics.keys() | got.metrics.keys():
        x = want.metrics.get(name, math.nan)
        y = got.metrics.get(name, math.nan)
        error = 0.0
        if x != y:  # the difference of two infinities is NaN
            error = abs(x - y) / max(1.0, abs(x))
        errors[f"metric {name}"] = error
    return errors


def assert_same(varied: str, want: Run, got: Run, rtol: float) -> None:
    """Assert that two runs are equal, to `rtol`.

    The message names what was `varied`, and all that changed.
    """
    bad = {name: e for name, e in _errors(want, got).items() if not e <= rtol}  # NaN is bad too
    if bad:
        totals = f"the total loss {want.total:.6g} became {got.total:.6g}"
        change = ", ".join(f"{name} by {e:.2g}" for name, e in sorted(bad.items()))
        raise AssertionError(f"{varied}: {totals}; relative change of {change} (allowed {rtol:g})")
