"""Any function of whole distributions over the vocabulary, of some tokens at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.logprob.head import default_workspace_mb
from rft_fn.precision import wide, widen

__all__ = ["linear_rows", "logits"]

_COPIES = 8  # tensors [C, V] that a function of C tokens and its gradient hold at a time
_LEAST = 16  # tokens at a time, whatever the workspace
_COLUMNS = 8192  # of a narrow weight that are converted at a time


def linear_rows(
    fn: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    *data: Tensor,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    workspace_mb: float | None = None,
) -> Tensor:
    """Return fn(log softmax(hidden weight^T / temperature), *data), [T, D], [V, D] -> [T, ...].

    Never holds [T, V]: `fn` gets log-probs [C, V] of C tokens at a time and the same tokens of `data`
    [T, ...], and returns [C, ...]. It must treat each token by itself. The log-probs are made again in the
    backward pass. Differentiable once, in hidden, weight and bias; `data` carries no gradient. `workspace_mb`
    bounds what `fn` and its gradient hold (None: chosen per device), but C is 16 at least. `temperature` may
    be one for each token [T].
    """
    check.shapes(hidden=(hidden, "T D"), weight=(weight, "V D"), bias=(bias, "V"))
    for i, x in enumerate(data):
        if len(x) != len(hidden):
            raise ValueError(f"data[{i}]: expected [T, ...] with T = {len(hidden)}, got {list(x.shape)}")
    mb = default_workspace_mb(hidden.device.type) if workspace_mb is None else workspace_mb
    rows = max(_LEAST, int(mb * 2**20 / (4 * _COPIES * weight.shape[0])))
    scale = torch.as_tensor(temperature, dtype=wide(hidden.dtype), device=hidden.device).expand(len(hidden))
    return _Rows.apply(hidden, weight, bias, fn, rows, scale, *data)  # type: ignore[return-value]


class _Rows(torch.autograd.Function):
    """`linear_rows`; the backward pass makes the logits of each chunk again."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, fn: Any, rows: int, scale: Tensor, *data: Tensor
    ) -> Tensor:
        found = []
        for at in _chunks(len(hidden), rows):
            z = logits(hidden[at], weight, bias)
            found.append(fn(_log_softmax(z, scale[at]), *(x[at] for x in data)))
        return torch.cat(found) if found else fn(hidden.new_zeros(0, len(weight)), *data)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        hidden, weight, bias, ctx.fn, ctx.rows, scale, *data = inputs
        if not output.is_floating_point():
            ctx.mark_non_differentiable(output)
        ctx.save_for_backward(hidden, weight, bias, scale, *data)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, scale, *data = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        dh = torch.zeros_like(hidden) if of_hidden else None
        dw = torch.zeros_like(weight, dtype=wide(weight.dtype)) if of_weight else None
        db = torch.zeros_like(bias) if of_bias else None
        for at in _chunks(len(hidden), ctx.rows):
            z = logits(hidden[at], weight, bias).requires_grad_()
            with torch.enable_grad():
                out = ctx.fn(_log_softmax(z, scale[at]), *(x[at] for x in data))
            (dz,) = torch.autograd.grad(out, z, grads[0][at])
            if dh is not None:
                for cols in _chunks(len(weight), _columns(weight, dz)):
                    dh[at] += (dz[:, cols] @ weight[cols].to(dz.dtype)).to(dh.dtype)
            if dw is not None:
                dw.addmm_(dz.T, hidden[at].to(dz.dtype))
            if db is not None:
                db += dz.sum(0).to(db.dtype)
        dw = None if dw is None else dw.to(weight.dtype)
        return dh, dw, db, *[None] * (3 + len(data))


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden weight^T + bias in float32 at least, [C, D], [V, D] -> [C, V]."""
    h = widen(hidden)
    z = torch.cat([h @ weight[cols].to(h.dtype).T for cols in _chunks(len(weight), _columns(weight, h))], -1)
    return z if bias is None else z + bias


def _log_softmax(z: Tensor, scale: Tensor) -> Tensor:
    return (z / scale.unsqueeze(-1)).log_softmax(-1)


def _columns(weight: Tensor, wide: Tensor) -> int:
    """Return how many rows of a weight are converted at a time: all if it has the type already."""
    return len(weight) if weight.dtype == wide.dtype else _COLUMNS


def _chunks(size: int, each: int) -> Iterator[slice]:
    return (slice(at, min(at + each, size)) for at in range(0, size, max(each, 1)))
