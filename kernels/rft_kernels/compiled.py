"""The differentiable operation as two operators of torch's dispatcher, which is what torch.compile calls.

How many rows are live decides shapes in `autograd`, and a graph has no such shapes: here the whole operation
is one node with outputs of [T]. Outputs that nobody wants are empty, for an operator returns tensors only.
torch.func does not come here; the operators have no vmap rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_kernels import autograd

_OPTIONS = "float? softcap, int ignore_index, bool has_entropy, bool has_unit, int workspace, str engine"
_INPUTS = "Tensor h, Tensor w, Tensor? bias, Tensor y, Tensor scale"
_OUTPUTS = "Tensor logp, Tensor entropy, Tensor lse, Tensor unit"
_UPSTREAM = "Tensor? g, Tensor? g_entropy, Tensor? g_lse"


def log_prob(
    h: Tensor, w: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, options: autograd.Options
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `autograd.log_prob`."""
    o = options
    flat = (o.softcap, o.ignore_index, o.entropy, o.unit, o.workspace, o.engine)
    logp, entropy, lse, _ = _forward(h, w, bias, y, scale, *flat)
    return logp, entropy if o.entropy else None, lse


@torch.library.custom_op(
    "rft_kernels::linear_logprob",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(h, w, bias, y, scale, *options):
    out = autograd.compute(h, w, bias, y, scale, autograd.Options(*options))
    return tuple(scale.new_empty(0) if x is None else x for x in out)


@_forward.register_fake
def _(h, w, bias, y, scale, softcap, ignore_index, has_entropy, has_unit, workspace, engine):
    sizes = [h.shape[:1], h.shape[:1] if has_entropy else (0,), h.shape[:1], h.shape if has_unit else (0,)]
    return tuple(scale.new_empty(size) for size in sizes)


@torch.library.custom_op(
    "rft_kernels::linear_logprob_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OUTPUTS}, {_UPSTREAM}, {_OPTIONS}, bool[] need) -> (Tensor, Tensor, Tensor)",
)
def _backward(h, w, bias, y, scale, logp, entropy, lse, unit, g, g_entropy, g_lse, *options_and_need):
    *options, need = options_and_need
    o = autograd.Options(*options)
    kept = (logp, entropy if o.entropy else None, lse, unit if o.unit else None)
    upstream = (g, g_entropy if o.entropy else None, g_lse)
    grads = autograd.gradients(h, w, bias, y, scale, *kept, *upstream, o, tuple(need))
    wanted = zip(grads, (h, w, bias), need, strict=True)
    return tuple(_gradient(x, like, of, h) for x, like, of in wanted)


@_backward.register_fake
def _(h, w, bias, y, scale, logp, entropy, lse, unit, g, g_entropy, g_lse, *options_and_need):
    pairs = zip((h, w, bias), options_and_need[-1], strict=True)
    return tuple(torch.empty_like(x) if of else h.new_empty(0) for x, of in pairs)


def _gradient(x: Tensor | None, like: Tensor | None, wanted: bool, h: Tensor) -> Tensor:
    """What a graph was promised: a gradient like its input, 0 if no row had one, or nothing."""
    if like is None or not wanted:
        return h.new_empty(0)
    return torch.zeros_like(like) if x is None else x


def _save(ctx, inputs, output):
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)


def _differentiate(ctx, *upstream):
    need = list(ctx.needs_input_grad[:3])
    grads = _backward(*ctx.saved_tensors, *upstream[:3], *ctx.options, need)
    return *(x if of else None for x, of in zip(grads, need, strict=True)), *(None,) * 8


_forward.register_autograd(_differentiate, setup_context=_save)
