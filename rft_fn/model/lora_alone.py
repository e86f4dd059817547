"""Adapters that travel alone: two matrices of each layer, of one rank and with a scale of 1.

So whoever takes them needs no config of peft: rsLoRA, patterns of ranks and alphas, and several adapters on
one layer are in the matrices already.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.finite import require_finite
from rft_fn.model.lora import active, adapted
from rft_fn.model.lora_experts import takes_weight
from rft_fn.model.lora_merged import Export, plain_name
from rft_fn.model.quantize import low_kind
from rft_fn.precision import wide

__all__ = [
    "A",
    "AdaptersAlone",
    "B",
    "add_to",
    "are_adapters",
    "layer_of",
    "matrices",
    "rank_of",
    "shapes",
    "why_whole",
]  # fmt: skip


A = ".lora_A.weight"
B = ".lora_B.weight"


def layer_of(name: str) -> str:
    """Return the path of the layer that a matrix belongs to, in the plain model."""
    return name.removesuffix(A).removesuffix(B)


def are_adapters(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are matrices of adapters, and not weights."""
    return any(name.endswith((A, B)) for name in names)


def _paths(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, path in the plain model, layer) of every layer with active adapters."""
    for path, layer in adapted(module):
        if active(layer):
            yield path, plain_name(module, f"{path}.weight").removesuffix(".weight"), layer


def rank_of(module: nn.Module) -> int:
    """Return the largest rank that the adapters of a layer have together; 0 without adapters."""
    ranks = [sum(layer.r[x] for x in active(layer)) for _, _, layer in _paths(module)]
    return max(ranks, default=0)


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the matrices of a module's adapters, by their names; A [R, in], B [out, R]."""
    rank = rank_of(module)
    found: dict[str, torch.Size] = {}
    for _, plain, layer in _paths(module):
        first = active(layer)[0]
        found[plain + A] = torch.Size((rank, layer.lora_A[first].in_features))
        found[plain + B] = torch.Size((layer.lora_B[first].out_features, rank))
    return found


@torch.no_grad()
def matrices(
    layer: Any, path: str, weights: Mapping[str, Tensor], rank: int, full: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank] of a layer in float32 at least: B A is what its adapters add.

    Zeros fill up the rank. `full` puts a weight together.
    """
    first: list[Tensor] = []
    second: list[Tensor] = []
    for adapter in active(layer):
        a = full(weights[f"{path}.lora_A.{adapter}.weight"])
        b = full(weights[f"{path}.lora_B.{adapter}.weight"])
        first.append(a.to(wide(a.dtype)))
        second.append(b.to(wide(b.dtype)) * layer.scaling[adapter])
    a, b = torch.cat(first, 0), torch.cat(second, 1)
    left = rank - len(a)
    return nn.functional.pad(a, (0, 0, 0, left)), nn.functional.pad(b, (0, left))


def add_to(weight: Tensor, a: Tensor, b: Tensor, *, transposed: bool) -> Tensor:
    """Return weight + B A in float32 at least, rounded once to its type; `transposed` as of a Conv1D."""
    out = weight.to(wide(weight.dtype))
    step = b.to(out) @ a.to(out)
    return (out + (step.T if transposed else step)).to(weight.dtype)


def why_whole(export: Export, base: str = "") -> str:
    """Return what keeps trained weights from traveling as adapters alone; empty where nothing does.

    `base` is the low precision of the base that they are to be put on, empty for full precision.
    """
    module = export.module
    if module is None or not any(_paths(module)):
        return "no adapters"
    beside = [name for name in export.params if ".lora_" not in name]
    if beside:
        return f"{plain_name(module, beside[0])}, which is trained beside the adapters"
    around = next((path for path, layer in adapted(module) if takes_weight(layer)), None)
    if around is not None:
        return f"{plain_name(module, around)}, whose adapters are of routed experts"
    own = low_kind(module)
    if own != base:
        return f"a base in {own or 'full precision'}, where the engine's is in {base or 'full precision'}"
    return ""


class AdaptersAlone(Iterator[tuple[str, Tensor]]):
    """The trained adapters of an export, (name, matrix) pairs, once; all else is `frozen`.

    All ranks iterate where putting a parameter together takes them. ValueError at a matrix with NaN or inf.
    """

    adapters = True  # the pairs are matrices of adapters, not weights

    def __init__(self, export: Export):
        """Take an export that `why_whole` has nothing against."""
        module = export.module
        assert module is not None
        self.finite = export.finite
        self.frozen = frozenset(
            plain_name(module, x) for x, _ in module.named_parameters() if ".lora_" not in x
        )
        self._pairs = self._read(module, export)

    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self._pairs)
        if self.finite:
            require_finite("weights", name, x)
        return name, x

    @staticmethod
    def _read(module: nn.Module, export: Export) -> Iterator[tuple[str, Tensor]]:
        every = dict(module.named_parameters()) | dict(export.params)
        rank = rank_of(module)
        for path, plain, layer in _paths(module):
            a, b = matrices(layer, path, every, rank, export.full)
            yield plain + A, a
            yield plain + B, b
