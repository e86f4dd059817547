"""The public function: contracts are checked here, then one of the engines does the work.

Shapes: T tokens, D width of the hidden states, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rft_kernels import autograd, compiled, engines, parallel, products, reference
from rft_kernels.numerics import row_temperatures


class LogProb(NamedTuple):
    """The outputs of `linear_logprob`, in float32 (float64 if h or w is).

    Rows whose label is ignored are 0.
    """

    logp: Tensor  # [T] nats
    entropy: Tensor | None  # [T] nats, of the whole distribution
    lse: Tensor | None  # [T] logsumexp of the row of logits


def linear_logprob(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    lse: bool = False,
    workspace_mb: float | None = None,
    engine: str = "auto",
) -> LogProb:
    """Return log softmax(z)[t, y[t]] as [T], without the logits z [T, V].

    h [T, D], w [V, D], y [T] labels, bias [V]; z = cap(h wᵀ + bias) / temperature, where cap(x) is `softcap`
    tanh(x / softcap), or x without a softcap.

    Differentiable once, in h, w and bias, through each of the three outputs; `temperature` (a number, [] or
    [T]) is data. The logits [T, V] never exist: they are made tile by tile in about `workspace_mb` MB
    (default 4 or 12 on a CPU, 256 elsewhere; at least 64 columns at a time), and made again in the backward.

    Arithmetic is float32 whatever the inputs are (float64 as soon as h or w is), also under autocast;
    gradients have the types of their inputs. A row whose label is `ignore_index` yields 0 and no gradient
    even if its h is NaN; a row whose upstream gradients are all 0 costs nothing in the backward. Any other
    label outside [0, V) makes its row NaN; see `check_labels`. The number of live rows is read on the host,
    once in each pass.

    engine: "streamed": torch operations, anywhere. "gemm": matrix products in slices and Triton row kernels,
    on CUDA. "triton": the logits are made by Triton too, in the kernels that use them. "reference": plain
    operations on whole logits, for torch.func transforms of any order and for gradients of the temperature.
    "auto": on CUDA the engine that auto.json names for the device and D, if triton is there and nothing is
    float64; else "streamed".

    If neither w nor bias needs a gradient, dlogp/dh is accumulated in the forward and the backward only
    scales it: two matrix products instead of three. `lse=True` or a softcap turns that off; a gradient that
    arrives through the entropy pays for the recomputation.

    The head may be sharded over its vocabulary: w (and bias) a DTensor with Shard(0) on one mesh axis, h and
    y whole and the same on every rank. Then [T] numbers are reduced in the forward and dh in the backward.

    Raises ValueError for shapes, types and options that do not fit. It does not average, mask or shift.
    """
    w, bias, shard = parallel.split(w, bias)
    _check(h, w, y, bias, softcap, workspace_mb, engine, shard)
    scale = 1 / row_temperatures(temperature, h, w)

    # Plain operations: every gradient, also that of the temperature.
    if engine == "reference":
        found = reference.log_prob(h, w, y, scale, bias=bias, softcap=softcap, ignore_index=ignore_index)
        return _wanted(*found, entropy, lse)
    if scale.requires_grad:
        raise ValueError(
            "temperature: expected no gradient (engine='reference' has one), got requires_grad=True"
        )

    # The fused operation; as an operator of the dispatcher in a graph of torch.compile.
    options = autograd.Options(
        softcap=softcap,
        ignore_index=ignore_index,
        entropy=entropy,
        unit_grad=not lse and softcap is None and _only_h_is_trained(h, w, bias),
        workspace=int((workspace_mb or default_workspace_mb(h.device.type)) * 2**20),
        engine=engines.pick(engine, h, w),
        shard=shard,
    )
    log_prob = autograd.log_prob
    if torch.compiler.is_compiling() and shard is None:
        log_prob = compiled.log_prob
    return _wanted(*log_prob(h, w, y.long(), scale, bias, options), entropy, lse)


def default_workspace_mb(device_type: str) -> float:
    """Return the MB of logits at a time by default.

    A CPU's tile stays in its last-level cache, a GPU wants large products.
    """
    if device_type != "cpu":
        return 256.0
    # oneDNN's tiles are not all in one place: the allocator may hold two or three of them.
    if products.mkl_is_half():
        return 4.0
    return 12.0


def check_labels(y: Tensor, vocabulary: int, *, ignore_index: int = -100) -> None:
    """Raise ValueError for the first label of y [T] that is out of range.

    A label is in [0, vocabulary), or it is `ignore_index`.

    Reads y on the host, which is why `linear_logprob` does not do it: there such a row is NaN.
    """
    wrong = ((y < 0) | (y >= vocabulary)) & (y != ignore_index)
    for t in wrong.nonzero()[:1].flatten().tolist():
        expected = f"labels in [0, {vocabulary}) or ignore_index = {ignore_index}"
        raise ValueError(f"y: expected {expected}, got {int(y[t])} at row {t}")


def _wanted(
    logp: Tensor, found_entropy: Tensor | None, found_lse: Tensor, entropy: bool, lse: bool
) -> LogProb:
    """Return the outputs that were asked for."""
    out = LogProb(logp, None, None)
    if entropy:
        out = out._replace(entropy=found_entropy)
    if lse:
        out = out._replace(lse=found_lse)
    return out


def _only_h_is_trained(h: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Return whether autograd will ask only for the gradient of h."""
    head_is_trained = w.requires_grad or (bias is not None and bias.requires_grad)
    return torch.is_grad_enabled() and h.requires_grad and not head_is_trained


def _check(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    mb: float | None,
    engine: str,
    shard: parallel.Shard | None,
) -> None:
    """Raise ValueError for the first input that does not fit."""
    # Shapes.
    _expect(h.dim() == 2, "h", "[T, D]", list(h.shape))
    rows, width = h.shape
    _expect(w.dim() == 2 and w.shape[1] == width, "w", f"[V, D] with D = {width}", list(w.shape))
    _expect(w.shape[0] > 0 or shard is not None, "w", "[V, D] with V > 0", list(w.shape))
    _expect(y.shape == (rows,), "y", f"[T] = [{rows}]", list(y.shape))

    # Types and devices.
    for name, x in (("h", h), ("w", w), ("bias", bias)):
        if x is not None:
            _expect(x.is_floating_point(), name, "a floating-point tensor", x.dtype)
            _expect(x.device == h.device, name, f"a tensor on {h.device}", x.device)
    integer = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    _expect(integer, "y", "an integer tensor", y.dtype)
    _expect(y.device == h.device, "y", f"a tensor on {h.device}", y.device)
    if bias is not None:
        _expect(bias.shape == (w.shape[0],), "bias", f"[V] = [{w.shape[0]}]", list(bias.shape))

    # Options. The engine is picked later, but an unknown name fails before any work.
    _expect(softcap is None or softcap > 0, "softcap", "None or a number > 0", softcap)
    _expect(mb is None or mb > 0, "workspace_mb", "None or a number > 0", mb)
    engines.check(engine, h, also=("reference",))
    fits = shard is None or engine != "reference"
    _expect(fits, "engine", "another one for a head that is sharded over ranks", repr(engine))


def _expect(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")
