"""The interface of an engine: its inputs, its outputs and its two functions."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from rft_kernels.parallel import Shard
from rft_kernels.softmax import Cotangent


class Problem(NamedTuple):
    """R rows of hidden states and a head: z = cap(h wᵀ + bias) scale."""

    h: Tensor  # [R, D]
    w: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    scale: Tensor  # [R] 1 / temperature, in the type of the results
    softcap: float | None  # cap(x) = softcap tanh(x / softcap)
    workspace: int  # bytes that tiles of logits may take
    shard: Shard | None = None  # of a vocabulary that is spread over ranks: w is its local rows


class Outputs(NamedTuple):
    """The results of a forward; NaN in the rows of a bad label."""

    logp: Tensor  # [R]
    entropy: Tensor | None  # [R]
    lse: Tensor  # [R]
    unit_grad: Tensor | None  # [R, D] dlogp/dh


class Gradients(NamedTuple):
    """The results of a backward, each where it was needed."""

    h: Tensor | None  # [R, D] in the type of the results
    w: Tensor | None  # [V, D] in the type of w
    bias: Tensor | None  # [V] in the type of the results


class Forward(Protocol):
    """Computes the outputs."""

    def __call__(self, problem: Problem, y: Tensor, *, entropy: bool, unit_grad: bool) -> Outputs:
        """Return the outputs of a problem for labels y [R]; entropy and dlogp/dh only if asked for."""
        ...


class Backward(Protocol):
    """Computes the gradients from nothing but the problem; the logits are made again."""

    def __call__(
        self, problem: Problem, y: Tensor, cot: Cotangent, need: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return the gradients of h, w and bias that `need` names, in this order."""
        ...


class Engine(NamedTuple):
    """One way of doing the arithmetic."""

    forward: Forward
    backward: Backward
