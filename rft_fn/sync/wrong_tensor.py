"""The tensor that an engine does not have as it was sent, found by halves."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.model.lora_alone import B
from rft_fn.sync.changed_weights import Change, Sides, plain, unchanged

__all__ = ["locate", "uniform"]


def uniform(name: str, x: Tensor) -> Tensor:
    """Return a weight that all tensors of one shape share.

    It is ones for a vector, else signs times a power of two. Neither an exchange of two such tensors nor a
    narrower type changes what a model computes.
    """
    if x.ndim < 2:
        return torch.ones_like(x)
    size = 2.0 ** -round(math.log2(max(x[0].numel(), 1)) / 2)
    bits = torch.randint(2, x.shape, generator=rng.generator(rng.fold_in(0, str(list(x.shape)))))
    return (size * (2 * bits - 1)).to(device=x.device, dtype=x.dtype)


def locate(sides: Sides, wrong: Change, noise: Change, *, good: Callable[[float], bool]) -> str:
    """Find the name of a tensor that does not arrive where it belongs.

    "" if there is none. With the weights that `wrong` makes, engine and trainer differ; `good` says whether a
    gap is none. With some other weights they agree: with the true ones or those of `noise` where a tensor
    was taken in one load only, with the model's first ones where the engine still has one of these, and
    with `uniform` ones where tensors changed places or were rounded. Of the weights between the two, the
    first names from one and the rest from the other, some name is the first with which both sides differ:
    log2(names) loads find it.

    The engine is left with some of these weights. All ranks call it, and each loads the model once more.
    """
    first = dict(plain(sides.model).named_parameters(remove_duplicate=False))

    def initial(name: str, x: Tensor) -> Tensor:
        if name.endswith(B):  # adapters begin as none
            return torch.zeros_like(x)
        return first.get(name, x).detach().to(device=x.device, dtype=x.dtype)

    for right in (unchanged, noise, initial, uniform):
        if good(sides.gap(right)):
            return _first_wrong(sides, right, wrong, good)
    return ""


def _first_wrong(sides: Sides, right: Change, wrong: Change, good: Callable[[float], bool]) -> str:
    """Find the first name from `wrong` with which both sides differ; later names are from `right`."""
    names = sides.names
    fine = 0  # so many from `wrong` do no harm
    bad = len(names)  # so many do
    while bad - fine > 1:
        middle = (fine + bad) // 2
        chosen = frozenset(names[:middle])

        def mixed(name: str, x: Tensor, chosen: frozenset[str] = chosen) -> Tensor:
            return wrong(name, x) if name in chosen else right(name, x)

        if good(sides.gap(mixed)):
            fine = middle
        else:
            bad = middle
    return names[bad - 1]
