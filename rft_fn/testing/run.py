"""A loss, run as a train step runs it, and what two runs differ by."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import metric, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.types import Apply, LossFn, Packed, TokenOut

__all__ = ["Run", "assert_same", "flat", "gap", "run", "token_losses", "total_and_grad"]


class Run(NamedTuple):
    """What a step has of a loss."""

    total: Tensor  # []
    scale: Tensor  # [] sum of |w loss|: the error of the total is relative to it, as a total may cancel to 0
    grads: Any
    metrics: dict[str, float]


def token_losses(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, dict]:
    """(loss [T], metrics). AssertionError when it is not one number a token."""
    x, metrics = evaluate(loss_fn, out, b)
    if x.shape != b.target.shape:
        want, got = list(b.target.shape), list(x.shape)
        raise AssertionError(
            f"loss: expected one number a token, [T] = {want}, got {got}; averages belong in w"
        )
    return x, metrics


def run(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> Run:
    """The sum over packs of (w loss).sum(), its gradient, and the merged metrics."""
    leaf = tree.map(lambda p: p.detach().clone().requires_grad_(), params)
    terms, metrics = [], {}
    for b in packs:
        x, m = token_losses(loss_fn, apply(leaf, b), b)
        terms.append(b.w * x)
        metrics = metric.merge(metrics, m)
    all_terms = torch.cat(terms)
    if not all_terms.requires_grad:
        raise AssertionError("loss: it has no gradient; is it detached, or built by torch.tensor(...)?")
    grads = torch.autograd.grad(all_terms.sum(), tree.leaves(leaf), materialize_grads=True)
    total, scale = all_terms.detach().sum(), all_terms.detach().abs().sum()
    return Run(total, scale, tree.unflatten_like(params, list(grads)), metric.results(metrics))


def total_and_grad(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> tuple[Tensor, Any]:
    """([], like params): the sum over packs of (w loss).sum() and its gradient, as a train step has it.

    AssertionError when the loss is not one number a token, or has no gradient.
    """
    found = run(loss_fn, apply, params, packs)
    return found.total, found.grads


def flat(grads: Any) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([x.flatten() for x in tree.leaves(grads)])


def gap(got: Tensor, want: Tensor) -> str:
    """In words: by how much a gradient [P] is off, in size and in direction."""
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=0)
    norm = got.norm() / want.norm().clamp(min=1e-300)
    return f"off by at most {(got - want).abs().max():.2g} (cosine {cosine:.4f}, norm ratio {norm:.4f})"


def _errors(want: Run, got: Run) -> dict[str, float]:
    """What differs -> by how much, relative to: sum of |w loss|, the largest gradient, max(1, |metric|)."""
    errors = {"total": float((want.total - got.total).abs() / want.scale.clamp(min=1e-300))}
    scale = flat(want.grads).abs().max().clamp(min=1e-300)
    pairs = zip(tree.leaves_with_path(want.grads), tree.leaves(got.grads))
    errors |= {f"gradient of {path}": float((x - y).abs().max() / scale) for (path, x), y in pairs}
    for name in want.metrics.keys() | got.metrics.keys():
        x, y = (r.metrics.get(name, float("nan")) for r in (want, got))
        errors[f"metric {name}"] = 0.0 if x == y else abs(x - y) / max(1.0, abs(x))
    return errors


def assert_same(varied: str, want: Run, got: Run, rtol: float) -> None:
    """AssertionError that names what was `varied` and all that changed by more than `rtol`."""
    bad = {name: e for name, e in _errors(want, got).items() if not e <= rtol}  # so that NaN is bad too
    if bad:
        totals = f"the total loss {want.total:.6g} became {got.total:.6g}"
        change = ", ".join(f"{name} by {e:.2g}" for name, e in sorted(bad.items()))
        raise AssertionError(f"{varied}: {totals}; relative change of {change} (allowed {rtol:g})")
