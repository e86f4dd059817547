"""A linear layer with large products, forward and backward, by the faster library of this CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn import functional as F

from rft_kernels import narrow, products

_ROWS = 4  # below, oneDNN takes as long as for four, or longer
_PACKED_FOR = 64  # rows; packs for others are as fast, and serve any number


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] weightᵀ [K, N] + bias [N], as [..., N].

    It has derivatives of any order, in both directions, and works under torch.func's transforms. Where
    `products` knows that oneDNN is faster, large products of float32 are its own, and large ones of bfloat16
    are made the way that `narrow` measured; all others are torch's `linear`, and so are those that
    torch.compile traces.
    """
    if not (_is_known(x, weight) and _pays(x, weight)):
        return F.linear(x, weight, bias)
    out = _Product.apply(x.reshape(-1, x.shape[-1]), weight).unflatten(0, x.shape[:-1])
    if bias is None:
        return out
    return out + bias


class Packed:
    """A weight [N, K] in the order in which oneDNN reads it, from the first large product on.

    For a weight that does not change meanwhile, and that needs no gradient. Its shapes recur with every token
    of a rollout, so oneDNN pays for smaller products here than in `linear`.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight.detach()
        self.packed: Tensor | None = None
        self.least = products.packing()
        if narrow.fits(self.weight):
            self.least = narrow.packing()
        self.pays = self.weight.numel() >= self.least.elements and _dense(self.weight)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`linear` of the weight, bit for bit where both are oneDNN's; few rows from torch 2.13 on."""
        count = x.numel() // max(x.shape[-1], 1)
        if count < self.least.rows or not (self.pays and self._packs(x)):
            return linear(x, self.weight, bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR)
        if count >= _ROWS:
            out = self._product(x)
        else:
            filled = F.pad(x.reshape(count, -1), (0, 0, 0, _ROWS - count))
            out = self._product(filled)[:count].reshape(*x.shape[:-1], len(self.weight))
        if bias is None:
            return out
        return out + bias

    def _packs(self, x: Tensor) -> bool:
        if narrow.fits(self.weight):
            return _is_plain(x, self.weight) and narrow.fits(x)
        return _has_both(x, self.weight)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


def _is_known(x: Tensor, weight: Tensor) -> bool:
    """Return whether a layer has products that are not always best as torch makes them."""
    if weight.dtype == torch.bfloat16:
        return _is_plain(x, weight) and narrow.fits(x) and narrow.differs()
    return _has_both(x, weight) and products.mkl_is_half()


def _has_both(x: Tensor, weight: Tensor) -> bool:
    """Return whether both libraries have the product of a layer in float32."""
    return _is_plain(x, weight) and weight.dtype == torch.float32 and products.both_multiply(x)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch multiplies these as they are.

    Subclasses of tensors have their own products, and autocast has its own types.
    """
    if torch.compiler.is_compiling():
        return False
    plain = type(x) in (Tensor, Parameter) and type(weight) in (Tensor, Parameter)
    return plain and not torch.is_autocast_enabled("cpu")


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Return whether a layer of a pack is large enough for another product than torch's."""
    rows = x.numel() // max(x.shape[-1], 1)
    return rows >= _ROWS and rows * weight.numel() >= products.large_layer()


class _Product(Function):
    """a [M, K] bᵀ [K, N]. Each derivative is a product of the same kind, so that it has derivatives too."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        if narrow.fits(a):
            return narrow.product(a, b)
        if _dense(a) and _dense(b) and products.wins(a):
            return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return F.linear(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        # each factor is read by the gradient of the other: under a frozen weight nothing of x is kept
        a, b = inputs
        of_a, of_b = ctx.needs_input_grad
        kept = [None, None]
        if of_b:
            kept[0] = a
        if of_a:
            kept[1] = b
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        grad_a = grad_b = None
        if of_a:
            grad_a = _Product.apply(grad, b.T)
        if of_b:
            grad_b = _Product.apply(grad.T, a.T)
        return grad_a, grad_b

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        along_a, along_b = tangents
        a, b = ctx.saved_tensors
        parts = []
        if along_a is not None:
            parts.append(_Product.apply(along_a, b))
        if along_b is not None:
            parts.append(_Product.apply(a, along_b))
        return sum(parts[1:], parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *factors: Any) -> tuple[Tensor, int]:
        # one larger product where only one factor varies; a product for each where both do
        a, b = factors
        of_a, of_b = in_dims
        if of_b is None:
            a = a.movedim(of_a, 0)
            return _Product.apply(a.flatten(0, 1), b).unflatten(0, a.shape[:2]), 0
        b = b.movedim(of_b, 0)
        if of_a is None:
            return _Product.apply(a, b.flatten(0, 1)).unflatten(1, b.shape[:2]), 1
        pairs = zip(a.movedim(of_a, 0), b)
        return torch.stack([_Product.apply(each, other) for each, other in pairs]), 0


def _dense(x: Tensor) -> bool:
    """Return whether a matrix has elements without gaps; for others oneDNN has only plain loops."""
    return x.numel() > 0 and (x.is_contiguous() or x.T.is_contiguous())
