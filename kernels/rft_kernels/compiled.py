"""The differentiable operation as two operators of torch's dispatcher, for torch.compile.

How many rows are live decides shapes in `autograd`, and a graph has no such shapes: here the whole operation
is one node with outputs of [T]. Outputs that nobody wants are empty, for an operator returns tensors only.
torch.func does not come here; the operators have no vmap rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rft_kernels import autograd

_OPTIONS = "float? softcap, int ignore_index, bool has_entropy, bool has_unit_grad, int workspace, str engine"
_INPUTS = "Tensor h, Tensor w, Tensor? bias, Tensor y, Tensor scale"
_OUTPUTS = "Tensor logp, Tensor entropy, Tensor lse, Tensor unit_grad"
_UPSTREAM = "Tensor? g, Tensor? g_entropy, Tensor? g_lse"


def log_prob(
    h: Tensor, w: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, options: autograd.Options
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Do as `autograd.log_prob`."""
    o = options
    flat = (o.softcap, o.ignore_index, o.entropy, o.unit_grad, o.workspace, o.engine)
    logp, entropy, lse, _ = _forward(h, w, bias, y, scale, *flat)
    if not o.entropy:
        return logp, None, lse
    return logp, entropy, lse


@torch.library.custom_op(
    "rft_kernels::linear_logprob",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(h, w, bias, y, scale, *options):
    found = autograd.compute(h, w, bias, y, scale, autograd.Options(*options))
    out = []
    for x in found:
        if x is None:
            x = scale.new_empty(0)
        out.append(x)
    return tuple(out)


@_forward.register_fake
def _(h, w, bias, y, scale, softcap, ignore_index, has_entropy, has_unit_grad, workspace, engine):
    entropy_shape = unit_grad_shape = (0,)
    if has_entropy:
        entropy_shape = h.shape[:1]
    if has_unit_grad:
        unit_grad_shape = h.shape
    shapes = (h.shape[:1], entropy_shape, h.shape[:1], unit_grad_shape)
    return tuple(scale.new_empty(shape) for shape in shapes)


@torch.library.custom_op(
    "rft_kernels::linear_logprob_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OUTPUTS}, {_UPSTREAM}, {_OPTIONS}, bool[] need) -> (Tensor, Tensor, Tensor)",
)
def _backward(h, w, bias, y, scale, logp, entropy, lse, unit_grad, g, g_entropy, g_lse, *options_and_need):
    *options, need = options_and_need
    o = autograd.Options(*options)

    # Empty tensors stand for outputs that the forward did not have.
    if not o.entropy:
        entropy = g_entropy = None
    if not o.unit_grad:
        unit_grad = None
    outputs = (logp, entropy, lse, unit_grad)
    grads = autograd.gradients(h, w, bias, y, scale, *outputs, g, g_entropy, g_lse, o, tuple(need))
    wanted = zip(grads, (h, w, bias), need, strict=True)
    return tuple(_gradient(grad, like, of, h) for grad, like, of in wanted)


@_backward.register_fake
def _(h, w, bias, y, scale, logp, entropy, lse, unit_grad, g, g_entropy, g_lse, *options_and_need):
    need = options_and_need[-1]
    return tuple(_gradient(None, x, of, h) for x, of in zip((h, w, bias), need, strict=True))


def _gradient(grad: Tensor | None, like: Tensor | None, wanted: bool, h: Tensor) -> Tensor:
    """Return the tensor that a graph was promised for a gradient.

    Like its input, with 0 if no row had a gradient, or empty if none is wanted.
    """
    if like is None or not wanted:
        return h.new_empty(0)
    if grad is None:
        return torch.zeros_like(like)
    return grad


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)


def _differentiate(ctx: Any, *upstream: Any) -> tuple:
    need = list(ctx.needs_input_grad[:3])
    grads = _backward(*ctx.saved_tensors, *upstream[:3], *ctx.options, need)
    out: list[Tensor | None] = []
    for grad, of in zip(grads, need, strict=True):
        if not of:
            grad = None
        out.append(grad)
    return *out, *(None,) * 8  # y, scale and the options


_forward.register_autograd(_differentiate, setup_context=_save)
