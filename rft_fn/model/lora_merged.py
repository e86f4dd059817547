"""Adapters merged into the weights that are exported."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.finite import require_all_finite, require_finite
from rft_fn.model.lora import BELOW, BUCKET, active, adapted, adapted_name
from rft_fn.model.lora_experts import step_of, takes_weight
from rft_fn.model.parts import outside_layers
from rft_fn.model.quantize import is_low, whole
from rft_fn.optim.updates import local_parts
from rft_fn.precision import wide

__all__ = ["Export", "merged", "plain_name", "product"]


def product(layer: Any, base: Tensor, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Tensor:
    """Return base + sum of scale B A over adapters, in float32 at least, rounded once to its type."""
    out = base.to(wide(base.dtype))
    for adapter, a, b in pairs:
        out = out + layer.scaling[adapter] * _step(layer, a.to(out), b.to(out))
    return out.to(base.dtype)


def _step(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return B A, in the order of dimensions of a layer's weight."""
    if takes_weight(layer):
        return step_of(layer, a, b)
    return (b @ a).T if layer.fan_in_fan_out else b @ a


def plain_name(module: nn.Module, name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    if hasattr(module, "get_base_model"):
        name = name.removeprefix(BELOW)
    return outside_layers(name)


@torch.no_grad()
def merged(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge LoRA adapters into weights, by the plain model's names: base + scale B A."""
    out = dict(weights)
    for name, layer in adapted(module):
        pairs = []
        for adapter in layer.lora_A:
            a = out.pop(f"{name}.lora_A.{adapter}.weight")
            b = out.pop(f"{name}.lora_B.{adapter}.weight")
            if adapter in layer.active_adapters:
                pairs.append((adapter, a, b))
        base = adapted_name(name, layer)
        out[base] = product(layer, out[base], pairs)
    return {plain_name(module, name): x for name, x in out.items()}


class Export(Iterator[tuple[str, Tensor]]):
    """The trained weights for an engine: (name, full tensor) pairs, once.

    For a module with adapters the names are those of the plain model, and an adapted layer's weight is its
    base weight plus scale B A; frozen weights are left out, or with `rest` at the end. These are copies,
    which no later update changes, except for those that are lent. `own` gives the same weights by the
    module's names, adapters too; they may be the parameters themselves. `full` puts one parameter together:
    if that takes all ranks, all must iterate. With `finite`, ValueError at a tensor with NaN or inf; a GPU
    holds a bucket of them, to be checked at once. With `whole` the parameters are whole tensors, which
    updates change in place.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        module: nn.Module | None,
        full: Callable[[Tensor], Tensor],
        *,
        finite: bool = True,
        rest: bool = False,
        whole: bool = False,
    ):
        self.params = params
        self.module = module
        self.gathered = full
        self.finite = finite
        self.whole = whole
        self.lent: frozenset[str] = frozenset()
        self._ready: deque[tuple[str, Tensor]] = deque()  # that were checked
        layers = {} if module is None else dict(adapted(module))
        self._pairs = self._merged(module, layers) if module is not None and layers else self._copies()
        self.rest = rest
        if rest:
            self._pairs = chain(self._pairs, self._frozen())

    def __next__(self) -> tuple[str, Tensor]:
        if not self._ready:
            self._ready.extend(self._read())
        return self._ready.popleft()

    def _read(self) -> list[tuple[str, Tensor]]:
        """Read the next weight and check it; on a device, where a check waits, a bucket of them at once."""
        name, x = next(self._pairs)
        pairs, size, most = [(name, x)], x.nbytes, BUCKET.get(x.device.type, 0)
        if not self.finite:
            return pairs
        if size >= most:
            require_finite("weights", name, x)
            return pairs
        for name, x in self._pairs:
            pairs.append((name, x))
            size += x.nbytes
            if size >= most:
                break
        require_all_finite("weights", pairs)
        return pairs

    def share(self) -> frozenset[str]:
        """Yield the trained tensors themselves from now on, and return their names.

        They change with the next update. On a device, in shards and under adapters weights stay copies.
        """
        module = self.module
        if module is not None and self.whole:
            adapters = {adapted_name(path, layer) for path, layer in adapted(module)}
            self.lent = frozenset(
                plain_name(module, name)
                for name, p in self.params.items()
                if p.device.type == "cpu" and not (name in adapters or ".lora_" in name or is_low(p))
            )
        return self.lent

    @property
    def frozen(self) -> frozenset[str]:
        """Return names of the plain model's weights that are left out because nothing trains them."""
        return frozenset() if self.rest else frozenset(self._left_out())

    def _left_out(self) -> dict[str, Tensor]:
        """Return the weights that nothing trains, by the plain model's names."""
        module = self.module
        if module is None:
            return {}
        trained = {name.partition(".lora_")[0] for name in self.params if ".lora_" in name}
        merged_here = {adapted_name(path, layer) for path, layer in adapted(module) if path in trained}
        sent = self.params.keys() | merged_here
        return {
            plain_name(module, name): p
            for name, p in module.named_parameters()
            if not (name in sent or ".lora_" in name or is_low(p))
        }

    @torch.no_grad()
    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._left_out().items():
            yield name, self.copied(p)

    def full(self, p: Tensor) -> Tensor:
        """Put a parameter together, in full precision."""
        return self.gathered(whole(p))

    def copied(self, p: Tensor) -> Tensor:
        """Put a parameter together in new memory: an update is in place."""
        x = self.full(p)
        if is_low(p):  # its numbers were unpacked
            return x
        (mine,) = local_parts([p])
        shared = x.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
        return x.clone() if shared else x

    def _sent(self, name: str, p: Tensor) -> tuple[str, Tensor]:
        """Return a trained parameter by the plain model's name, itself or a copy."""
        return name, self.full(p) if name in self.lent else self.copied(p)

    @torch.no_grad()
    def own(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by the module's own names."""
        for name, p in self.params.items():
            yield name, self.full(p)

    @torch.no_grad()
    def _copies(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.params.items():
            yield self._sent(name, p)

    @torch.no_grad()
    def _merged(self, module: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        every = dict(module.named_parameters()) | dict(self.params)
        bases = {path: adapted_name(path, layer) for path, layer in layers.items()}
        paths = {base: path for path, base in bases.items()}
        done: set[str] = set()
        for name in self.params:
            path = name.partition(".lora_")[0] if ".lora_" in name else paths.get(name, "")
            base = bases.get(path)
            if base is None:
                yield self._sent(plain_name(module, name), every[name])
            elif base not in done:  # both of its matrices at once, at the first of them
                done.add(base)
                yield plain_name(module, base), self._one_merged(layers[path], path, base, every)

        # Frozen weights in low precision go too: an engine that is not quantised gets the same numbers.
        for name, p in module.named_parameters():
            if is_low(p) and name not in done:
                yield plain_name(module, name), self.copied(p)

    def _one_merged(self, layer: Any, path: str, name: str, every: Mapping[str, Tensor]) -> Tensor:
        """Return the weight of one layer, by its name, with its active adapters in it."""
        read = self.full if active(layer) else self.copied
        base = read(every[name])
        pairs = []
        for adapter in active(layer):
            a = self.full(every[f"{path}.lora_A.{adapter}.weight"])
            b = self.full(every[f"{path}.lora_B.{adapter}.weight"])
            pairs.append((adapter, a, b))
        return product(layer, base, pairs)
