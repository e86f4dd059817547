"""Log-probability and entropy of given logits, in one pass over them.

By a Triton kernel, or by slices of rows with operations of torch.

Two `autograd.Function`s, each with a vmap rule that makes the examples more rows: torch.func runs the
backward of the first one under the transforms that surround it. What is differentiated twice is the
definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_kernels import engines, reference, softmax
from rft_kernels.numerics import row_temperatures
from rft_kernels.slices import cut
from rft_kernels.softmax import Cotangent, OnlineSoftmax

_CPU_BYTES = 4 << 20  # of a slice of rows in float32: it stays in the cache


class FromLogits(NamedTuple):
    """In float32 (float64 if the logits are). Rows whose label is ignored are 0."""

    logp: Tensor  # [T] nats
    entropy: Tensor | None  # [T] nats


def logits_logprob(
    z: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    inplace_backward: bool = False,
    engine: str = "auto",
) -> FromLogits:
    """Return log softmax(z / temperature)[t, y[t]] as [T], and the entropy [T] if wanted.

    z [T, V], y [T].

    Arithmetic is float32 whatever the type of z (float64 if z is); z is read once, and only it, y and a few
    numbers per row are kept for the backward. Differentiable in z through both outputs, under torch.func too;
    forward mode and a second differentiation are plain operations on whole logits. `temperature`
    (a number, [] or [T]) is data. A row whose label is `ignore_index` yields 0 and no gradient, also if it is
    NaN; any other label outside [0, V) makes its row NaN.

    inplace_backward: the gradient overwrites z, which nobody may read afterwards, nor differentiate again.

    engine: "streamed": torch operations on slices of rows. "gemm" or "triton": the Triton row kernel, on
    CUDA. "auto" is the kernel on CUDA where triton is there and z is not float64.

    Raises ValueError for shapes, types and options that do not fit.
    """
    _check(z, y, engine)
    scale = 1 / row_temperatures(temperature, z, z)
    if scale.requires_grad:
        raise ValueError("temperature: expected no gradient, got requires_grad=True")
    fused = engines.pick(engine, z, z) != "streamed"
    options = Options(ignore_index, entropy, inplace_backward, fused)
    rows = _FromLogits if torch.compiler.is_compiling() else _FromLogitsEager
    logp, found, _ = rows.apply(z, y.long(), scale, options)  # found is None without entropy
    return FromLogits(logp, found)


@dataclass(frozen=True)
class Options:
    """All inputs but the tensors.

    A dataclass, because torch.func would flatten a tuple and batch its members.
    """

    ignore_index: int
    entropy: bool  # compute the entropy
    inplace: bool  # the gradient overwrites the logits
    fused: bool  # by the Triton kernels


class _FromLogits(torch.autograd.Function):
    """(z, y, scale, options) -> (logp, entropy or None, lse)."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, scale: Tensor, options: Options) -> tuple[Tensor | None, ...]:
        y = y.contiguous()
        scale = scale.contiguous()
        absorb = _absorb_slices
        if options.fused:
            absorb = _absorb_fused
        state = softmax.start(scale)
        absorb(state, z, y, scale, entropy=options.entropy)

        logp, lse = softmax.log_prob(state)
        ignored = y == options.ignore_index
        entropy = None
        if options.entropy:
            entropy = softmax.entropy_of(state, logp).masked_fill(ignored, 0)
        return logp.masked_fill(ignored, 0), entropy, lse.masked_fill(ignored, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        z, y, scale, ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(z, y, scale, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        g, g_entropy, _ = upstream
        if g is None and g_entropy is None:
            return None, None, None, None
        gradient = _Gradient if torch.compiler.is_compiling() else _GradientEager
        return gradient.apply(*ctx.saved_tensors, g, g_entropy, ctx.options), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        batch = info.batch_size
        out = []
        out_dims = []
        for x in _FromLogitsEager.apply(*_as_rows(batch, in_dims, args)):
            if x is None:
                out.append(None)
                out_dims.append(None)
            else:
                out.append(x.unflatten(0, (batch, -1)))
                out_dims.append(0)
        return tuple(out), tuple(out_dims)


class _FromLogitsEager(_FromLogits):
    """`_FromLogits` with forward mode; torch.compile takes no function that has a `jvp`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _FromLogits.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The derivative in the direction of z's tangent, by plain operations on whole logits."""
        z, y, scale = ctx.saved_tensors
        along = (_or_zeros(tangents[0], z),)
        dlogp, dentropy = torch.func.jvp(_definition(y, scale, ctx.options), (z,), along)[1]
        return dlogp, dentropy if ctx.options.entropy else None, None


class _Gradient(torch.autograd.Function):
    """Inputs and outputs of `_FromLogits`, gradients of logp and entropy -> the gradient of z."""

    @staticmethod
    def forward(
        z: Tensor,
        y: Tensor,
        scale: Tensor,
        logp: Tensor,
        entropy: Tensor | None,
        lse: Tensor,
        g: Tensor | None,
        g_entropy: Tensor | None,
        options: Options,
    ) -> Tensor:
        y = y.contiguous()
        scale = scale.contiguous()
        z = z.detach()
        dz = z
        if not options.inplace:
            dz = torch.empty_like(z, memory_format=torch.contiguous_format)
        differentiate = _differentiate_slices
        if options.fused:
            differentiate = _differentiate_fused
        cot = Cotangent.of(logp, entropy, lse, g, g_entropy, None)
        differentiate(z, dz, y, cot.each(Tensor.contiguous), scale)

        # Filled, not multiplied: a NaN of an ignored row, or of one without an upstream gradient, ends here.
        upstream = [x != 0 for x in (g, g_entropy) if x is not None]
        live = torch.stack(upstream).any(0) & (y != options.ignore_index)
        return dz.masked_fill_(~live[:, None], 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        z, y, scale, _, _, _, g, g_entropy, ctx.options = inputs
        ctx.save_for_backward(z, y, scale, g, g_entropy)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The second derivatives, by plain operations on whole logits."""
        if ctx.options.inplace:
            raise RuntimeError("z: expected one differentiation with inplace_backward=True, got two")
        z, y, scale, g, g_entropy = ctx.saved_tensors
        gradient = _gradient_of(_definition(y, scale, ctx.options))

        # An upstream gradient that was absent is 0 here, and gets no gradient.
        first = [_or_zeros(x, scale) for x in (g, g_entropy)]
        pull_back = torch.func.vjp(gradient, z, *first)[1]
        dz, dg, dg_entropy = pull_back(upstream[0])
        if g is None:
            dg = None
        if g_entropy is None:
            dg_entropy = None
        return dz, None, None, None, None, None, dg, dg_entropy, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        dz = _Gradient.apply(*_as_rows(info.batch_size, in_dims, args))
        return dz.unflatten(0, (info.batch_size, -1)), 0


class _GradientEager(_Gradient):
    """`_Gradient` with forward mode, as `_FromLogitsEager` has it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Gradient.setup_context(ctx, inputs, output)
        z, y, scale, _, _, _, g, g_entropy, _ = inputs
        ctx.save_for_forward(z, y, scale, g, g_entropy)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The derivative of the gradient in a direction, by plain operations on whole logits."""
        z, y, scale, g, g_entropy = ctx.saved_tensors
        dz, dg, dg_entropy = tangents[0], tangents[6], tangents[7]
        first = [_or_zeros(x, scale) for x in (g, g_entropy)]
        along = [_or_zeros(dz, z), _or_zeros(dg, scale), _or_zeros(dg_entropy, scale)]
        return torch.func.jvp(_gradient_of(_definition(y, scale, ctx.options)), (z, *first), tuple(along))[1]


def _definition(y: Tensor, scale: Tensor, options: Options) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the function z -> (logp, entropy) of plain operations."""

    def outputs(z: Tensor) -> tuple[Tensor, Tensor]:
        scaled = z.to(scale.dtype) * scale[:, None]
        logp, entropy, _ = reference.outputs(scaled, y, options.ignore_index)
        return logp, entropy

    return outputs


def _gradient_of(outputs: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return the function (z, gradients of the outputs) -> the gradient of z."""

    def gradient(z: Tensor, *upstream: Tensor) -> Tensor:
        pull_back = torch.func.vjp(outputs, z)[1]
        return pull_back(upstream)[0]

    return gradient


def _or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def _as_rows(batch: int, in_dims: tuple, args: tuple) -> list:
    """Reshape tensors of B examples of T rows each to B T rows.

    A tensor without a batch dimension is the same for all examples.
    """
    out = []
    for x, dim in zip(args, in_dims, strict=True):
        if isinstance(x, Tensor) and dim is None:
            x = x.expand(batch, *x.shape).flatten(0, 1)
        elif isinstance(x, Tensor):
            x = x.movedim(dim, 0).flatten(0, 1)
        out.append(x)
    return out


# -------------------------------------------------------------------------- torch operations, slice by slice
def _absorb_slices(state: OnlineSoftmax, z: Tensor, y: Tensor, scale: Tensor, *, entropy: bool) -> None:
    """Add the logits z [T, V], times scale [T], to the state."""
    for rows, scaled in _scaled_slices(z, scale):
        softmax.absorb(state.rows(rows), scaled, y[rows], None, entropy=entropy)


def _differentiate_slices(z: Tensor, dz: Tensor, y: Tensor, cot: Cotangent, scale: Tensor) -> None:
    """Write the gradient of z [T, V] into dz, which may be z."""
    for rows, scaled in _scaled_slices(z, scale):
        softmax.differentiate(scaled, y[rows], cot.rows(rows), None)
        torch.mul(scaled, scale[rows, None], out=dz[rows])


def _scaled_slices(z: Tensor, scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the rows of z, times their scale.

    In the type of the scale, one after another in one buffer.
    """
    height = max(1, _CPU_BYTES // (4 * z.shape[1]))
    buffer = scale.new_empty(min(height, z.shape[0]), z.shape[1])
    for rows in cut(z.shape[0], height):
        scaled = buffer[: rows.stop - rows.start]
        yield rows, torch.mul(z[rows], scale[rows, None], out=scaled)


# ----------------------------------------------------------------------------------------- one Triton kernel
def _absorb_fused(state: OnlineSoftmax, z: Tensor, y: Tensor, scale: Tensor, *, entropy: bool) -> None:
    """Do as `_absorb_slices`."""
    from rft_kernels import row_kernels

    z = _dense_rows(z)
    row_kernels.absorb(state, z, y, first=0, inner=scale, outer=None, bias=None, entropy=entropy)


def _differentiate_fused(z: Tensor, dz: Tensor, y: Tensor, cot: Cotangent, scale: Tensor) -> None:
    """Do as `_differentiate_slices`."""
    from rft_kernels import row_kernels

    z = _dense_rows(z)
    out = dz
    if dz.stride(1) != 1:
        out = torch.empty_like(z)  # the kernel writes rows whose columns are beside each other
    row_kernels.differentiate(z, out, y, cot, first=0, inner=scale, outer=None, bias=None)
    if out is not dz:
        dz.copy_(out)


def _dense_rows(z: Tensor) -> Tensor:
    """Return z [T, V] with the columns of a row next to each other in memory."""
    if z.stride(1) == 1:
        return z
    return z.contiguous()


def _check(z: Tensor, y: Tensor, engine: str) -> None:
    if z.dim() != 2 or z.shape[1] == 0:
        raise ValueError(f"z: expected [T, V] with V > 0, got {list(z.shape)}")
    if not z.is_floating_point():
        raise ValueError(f"z: expected a floating-point tensor, got {z.dtype}")
    if y.shape != z.shape[:1]:
        raise ValueError(f"y: expected [T] = [{z.shape[0]}], got {list(y.shape)}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y: expected an integer tensor, got {y.dtype}")
    if y.device != z.device:
        raise ValueError(f"y: expected a tensor on {z.device}, got {y.device}")
    engines.check(engine, z, also=())
