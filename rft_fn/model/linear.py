"""Linear layers of a module through the faster library of a CPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from rft_kernels.linear import Packed

__all__ = ["FastLinear", "is_plain", "packed", "set_fast"]


class FastLinear(nn.Linear):
    """A linear layer by `rft_kernels.linear`. A copy of it, or a pickle, is a layer of torch's own class."""

    pack: "Packed | None" = None  # of the weight, inside of `packed`

    def forward(self, input: Tensor) -> Tensor:
        if self.pack is not None:
            return self.pack.linear(input, self.bias)
        from rft_kernels.linear import linear

        return linear(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        # protocol 1 names the class among plain arguments; from 2 on it must be the object's
        reduced: Any = super().__reduce_ex__(1)
        make, (_, *rest), state, *more = reduced
        own = {name: x for name, x in state.items() if name != "pack"}
        return make, (nn.Linear, *rest), own, *more


def set_fast(module: nn.Module, on: bool) -> None:
    """Make all plain linear layers of a module `FastLinear`, or make those plain again.

    Only the class of a layer changes: parameters, names and hooks stay. Left alone are layers of other
    classes, with quantised weights, or with forwards from elsewhere, and every layer where the processor does
    not gain by it.
    """
    from rft_kernels import products

    old: type[nn.Module] = FastLinear
    new: type[nn.Module] = nn.Linear
    if on and products.packing().elements < math.inf:  # also what gains in sampling alone
        old, new = new, old
    for layer in module.modules():
        kind = type(layer)
        whole = type(layer._parameters.get("weight")) is nn.Parameter
        if kind is old and whole and "forward" not in vars(layer):
            layer.__class__ = new


@contextmanager
def packed(module: nn.Module) -> Iterator[None]:
    """Run a module without gradients, on weights that stay as they are: each is packed once for oneDNN.

    The packs are a second copy of the weights of its `FastLinear`, and are gone afterwards.
    """
    from rft_kernels.linear import Packed

    layers = [m for m in module.modules() if type(m) is FastLinear]
    for layer in layers:
        layer.pack = Packed(layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            layer.pack = None


def is_plain(layer: Any) -> TypeGuard[nn.Linear]:
    """Whether a layer is one matrix, with or without bias, and nothing else."""
    return type(layer) in (nn.Linear, FastLinear)
