"""The gradient of the total loss: a forward and a backward of each pack, added up by name."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.metric import kinds as metric
from rft_fn.optim.updates import local_parts
from rft_fn.precision import wide
from rft_fn.types.batch import Packed, TokenOut
from rft_fn.types.functions import Apply, LossFn

__all__ = ["gradient", "loss_and_metrics"]


def loss_and_metrics(loss_fn: LossFn, out: TokenOut, pack: Packed) -> tuple[Tensor, dict]:
    """Return (the pack's part of the total loss [], metrics).

    ValueError unless the loss is one number per token.
    """
    per_token, metrics = evaluate(loss_fn, out, pack)
    if per_token.shape != pack.w.shape:
        raise ValueError(
            f"loss: expected [T] = {list(pack.w.shape)}, one number a token, got {list(per_token.shape)}; "
            "the average is in w, so a loss must not reduce"
        )
    total = (pack.w * per_token).sum()
    return total, {"loss": metric.sum(total.detach()), **metrics}


def gradient(
    params: Mapping[str, Tensor],
    apply: Apply,
    loss_fn: LossFn,
    packs: Iterable[Packed],
    *,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    note: Callable[[int, Mapping[str, Tensor]], None] | None = None,
) -> tuple[tree.Named, dict[str, metric.Metric]]:
    """Return (gradients by name of the sum over packs of (w loss).sum(), merged metrics).

    The only place that calls backward. A parameter that no loss depends on has a gradient of 0. `phase` names
    what runs, for errors; `note(i, sums)` sees the sums after pack i, which the next backward adds to.
    """
    # gradients of an earlier backward are not part of this sum
    for p in params.values():
        p.grad = None
    metrics: dict[str, metric.Metric] = {}
    narrow: dict[str, Tensor] = {}

    for i, pack in enumerate(packs):
        with phase("forward"):
            total, more = loss_and_metrics(loss_fn, apply(params, pack), pack)
        with phase("backward"):
            if total.requires_grad:
                total.backward()
        metrics = metric.merge(metrics, more)
        _widen_gradients(narrow, params)
        if note is not None:
            note(i, _sums(narrow, params))

    # what no pack's loss depends on has a gradient of 0
    grads, sums = tree.Named(), _sums(narrow, params)
    for name, p in params.items():
        p.grad, total = None, sums.get(name)
        grads[name] = torch.zeros_like(p, dtype=wide(p.dtype)) if total is None else total.detach()
    return grads, metrics


def _widen_gradients(sums: dict[str, Tensor], params: Mapping[str, Tensor]) -> None:
    """Move the 16-bit gradients of one pack from the parameters into wide sums.

    The others stay where they are: the next backward adds to them, parameter by parameter, so that there are
    never two whole gradients.
    """
    parts = {name: p.grad for name, p in params.items() if p.dtype != wide(p.dtype) and p.grad is not None}
    old = [name for name in parts if name in sums]
    if old:
        torch._foreach_add_(local_parts([sums[name] for name in old]), local_parts([parts[n] for n in old]))
    for name in list(parts):
        params[name].grad = None
        part = parts.pop(name)  # so that its memory is free before the next one is made wide
        if name not in sums:  # in bfloat16 a sum stops growing after 256 terms
            sums[name] = part.to(wide(part.dtype))


def _sums(narrow: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums so far, in the order of the parameters, of those that a loss depended on."""
    found = {name: narrow.get(name, p.grad) for name, p in params.items()}
    return {name: x for name, x in found.items() if x is not None}
