"""How a backend lays out a model: what is gathered together, sharded, and kept on the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rft_fn.types import Transform

__all__ = ["Groups", "Layout", "WrapOptimizer"]


WrapOptimizer = Callable[[Transform, Mapping[str, Tensor]], Transform]
"""(tx, params) -> the transform that updates params: tx, with clipping or float32 masters around it."""

Groups = Callable[[nn.Module], Sequence[Sequence[nn.Parameter]]]
"""Root -> its parameters that are gathered and reduced together.

The last group is the root's: it stays gathered from its forward to the end of the backward.
"""


@dataclass(frozen=True)
class Layout:
    """How a backend lays out a model; by default one process in the types of the module."""

    # numbers of processes that these are sharded over
    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    sequence: int = 1  # the tokens of a pack

    # types of floating-point parameters; None: as the module has them
    kept: torch.dtype | None = None  # while they are trained
    frozen: torch.dtype | None = None  # while they are not
    stepped: torch.dtype | None = None  # in the optimizer
    computed: torch.dtype | None = None  # in forward and backward

    # the optimizer
    wrap_optimizer: WrapOptimizer = lambda tx, params: tx
    flat_copy: bool = False  # it holds a copy of the parameters that it steps
    sum_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype  # of gradients, by the parameter's

    # copies for the time of a forward and backward
    cast_copy: bool = False  # all parameters in the computed type
    groups: Groups | None = None  # gradients are reduced group by group; None: they stay whole
    in_place: bool = False  # a backward adds wide gradients to their sums; else those of a pack are extra
    gathered: bool = False  # parameters are gathered group by group

    # "parameters", "gradients", "optimizer", "update": what lives in host memory
    on_host: frozenset[str] = frozenset()
    copied_for_update: bool = False  # parameters and gradients go to the host, and updates come back
