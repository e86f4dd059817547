"""Engine "triton", for CUDA: kernels that make the logits they use.

Forward: one kernel, and no slice of the logits reaches memory. A program owns a block of tokens and every
S-th slice of the vocabulary, so all programs that run together read the same few slices of w and blocks of h,
which then stay in the L2 cache. Each leaves one running softmax per row; the S of them are merged in a fixed
order. S is larger where tokens are few, so that every multiprocessor has a program.

Backward: slice by slice of the vocabulary a kernel makes the logits and stores their gradient in 16 bits; the
two products behind it, and dlogp/dh of a frozen head, are those of `gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rft_kernels import gemm, softmax
from rft_kernels import tile_kernels as kernels
from rft_kernels.gemm import GradientTile, UnscaledHead, unscaled_head
from rft_kernels.interface import Gradients, Outputs, Problem
from rft_kernels.parallel import local_labels
from rft_kernels.row_kernels import INTERPRETED, launch
from rft_kernels.slices import ceil_div, cut, part
from rft_kernels.softmax import Cotangent, OnlineSoftmax

_READ = 1 / 57  # seconds to read a slice of w over seconds of a tile, by an H100's data sheet
_INTERPRETED_CORES = 16


def forward(problem: Problem, y: Tensor, *, entropy: bool, unit_grad: bool) -> Outputs:
    """Do as `interface.Forward`."""
    head = unscaled_head(problem)
    if unit_grad or not _fits(head):
        return gemm.forward(problem, y, entropy=entropy, unit_grad=unit_grad)
    y = local_labels(y, head.shard).contiguous()
    state = _merge(_partial(head, y, entropy=entropy), entropy=entropy)
    return Outputs(*softmax.outputs(state, y, head.shard, entropy=entropy), unit_grad=None)


def backward(problem: Problem, y: Tensor, cot: Cotangent, need: tuple[bool, bool, bool]) -> Gradients:
    """Do as `interface.Backward`."""
    head = unscaled_head(problem)
    if not _fits(head):
        return gemm.backward(problem, y, cot, need)
    return gemm.collect(head, y, cot, need, _gradient_tiles)


def _gradient_tiles(
    head: UnscaledHead, y: Tensor, cot: Cotangent, grad_scale: Tensor | None
) -> Iterator[GradientTile]:
    """Yield the gradient of each slice of the logits, one after another in one buffer."""
    tokens, width = head.h.shape
    vocabulary = head.w.shape[0]
    config = kernels.WIDE
    if INTERPRETED:
        config = kernels.SMALL

    # Rows of the buffer are aligned, whatever the last slice is.
    columns = config.columns
    fit = head.workspace // (head.h.element_size() * tokens)
    breadth = min(max(fit // columns * columns, columns), ceil_div(vocabulary, columns) * columns)
    buffer = head.h.new_empty(tokens, breadth)
    flags = {
        "BIAS": head.bias is not None,
        "SOFTCAP": head.outer is not None,
        "ENTROPY": cot.g_entropy is not None,
        "SCALED": grad_scale is not None,
    }

    # The products that follow read a slice's gradient before the next one overwrites it.
    for cols in cut(vocabulary, breadth):
        w = head.w[cols]
        dx = buffer[:, : len(w)]
        launch(
            kernels.backward_kernel,
            (ceil_div(tokens, config.tokens) * ceil_div(len(w), columns),),
            head.h.device,
            TensorDescriptor.from_tensor(head.h, [config.tokens, config.depth]),
            TensorDescriptor.from_tensor(w, [columns, config.depth]),
            part(head.bias, cols),
            head.inner,
            head.outer,
            y,
            *cot,
            grad_scale,
            TensorDescriptor.from_tensor(dx, [config.tokens, columns // 4]),
            cols.start,
            tokens,
            len(w),
            width,
            GROUP=kernels.GROUP,
            **flags,
            **kernels.constants(config),
            num_warps=config.warps,
        )
        yield GradientTile(cols, slice(0, tokens), w, dx)


def _fits(head: UnscaledHead) -> bool:
    """Return whether the kernels take this head; without tensor cores or aligned rows `gemm` does."""
    if head.h.dtype != head.w.dtype or not len(head.h) or not len(head.w):
        return False
    has_tensor_cores = INTERPRETED or head.h.element_size() == 2
    return has_tensor_cores and _aligned(head.h) and _aligned(head.w)


def _aligned(x: Tensor) -> bool:
    """Return whether the hardware can copy blocks of x [R, D] by itself.

    Its rows have to start at multiples of 16 bytes.
    """
    row_bytes = x.stride(0) * x.element_size()
    return x.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and x.stride(1) == 1


def _partial(head: UnscaledHead, y: Tensor, *, entropy: bool) -> OnlineSoftmax:
    """Return the running softmax of each split of the vocabulary: fields [splits, R]."""
    tokens, width = head.h.shape
    # A variant that would spill registers has a smaller tile.
    flags = {"BIAS": head.bias is not None, "SOFTCAP": head.outer is not None, "ENTROPY": entropy}
    config = kernels.forward_config(**flags)
    cores = _INTERPRETED_CORES
    if INTERPRETED:
        config = kernels.SMALL
    if head.h.is_cuda:
        cores = torch.cuda.get_device_properties(head.h.device).multi_processor_count
    blocks = ceil_div(tokens, config.tokens)
    splits = choose_splits(blocks, ceil_div(len(head.w), config.columns), cores)
    row_max, row_sum, row_moment, target_logit = head.inner.new_empty(4, splits, tokens)
    launch(
        kernels.forward_kernel,
        (splits, blocks),
        head.h.device,
        TensorDescriptor.from_tensor(head.h, [config.tokens, config.depth]),
        TensorDescriptor.from_tensor(head.w, [config.columns, config.depth]),
        head.bias,
        head.inner,
        head.outer,
        y,
        row_max,
        row_sum,
        row_moment,
        target_logit,
        tokens,
        len(head.w),
        width,
        SPLITS=splits,
        **flags,
        **kernels.constants(config),
        num_warps=config.warps,
    )
    return OnlineSoftmax(row_max, row_sum, row_moment, target_logit, row_max)


def choose_splits(blocks: int, tiles: int, cores: int) -> int:
    """Return the splits of the vocabulary with which the forward takes the least time.

    `blocks` of tokens, `tiles` of columns. One program runs on each of the `cores` multiprocessors: programs
    are [splits, blocks], and each wave of them reads all of w once more.
    """

    def seconds(splits: int) -> float:  # of one tile
        waves = ceil_div(splits * blocks, cores)
        return waves * (ceil_div(tiles, splits) + _READ * tiles)

    return min(kernels.SPLITS, key=seconds)


def _merge(parts: OnlineSoftmax, *, entropy: bool) -> OnlineSoftmax:
    """Merge fields [splits, R] -> [R]: the sums relative to the largest logit of all."""
    row_max = parts.row_max.amax(0)
    drop = parts.row_max - row_max
    rescale = drop.exp()
    row_sum = (parts.row_sum * rescale).sum(0)
    row_moment = row_sum
    if entropy:
        row_moment = ((parts.row_moment + drop * parts.row_sum) * rescale).sum(0)

    # At most one split has the target; in the others it is NaN.
    found = ~parts.target_logit.isnan()
    target_logit = torch.where(found, parts.target_logit, 0).sum(0).masked_fill(~found.any(0), torch.nan)
    return OnlineSoftmax(row_max, row_sum, row_moment, target_logit, row_max)
