"""The distance between an engine and its trainer under changed weights."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn import strategy
from rft_fn.model import lora_alone
from rft_fn.model.bind import Scorer
from rft_fn.model.lora import active, adapted, adapted_name
from rft_fn.model.lora_merged import plain_name, product
from rft_fn.model.quantize import is_low, whole
from rft_fn.sync.push import push, trained_weights
from rft_fn.types import Apply, Engine, Rollout, Sampling, Strategy, TrainState

__all__ = ["Change", "Sides", "agreed", "plain", "unchanged", "weights_read_as"]


Change = Callable[[str, Tensor], Tensor]  # a weight and its name -> what is sent in its place


def unchanged(name: str, x: Tensor) -> Tensor:
    """Return the weight itself."""
    return x


def plain(model: str) -> nn.Module:
    """Load the model of a name in host memory, with adapters merged."""
    lm = model_lib.load(model, quantize="none", device="cpu")
    merge = getattr(lm, "merge_and_unload", None)
    if merge is not None:
        lm = merge()
    return lm


def agreed(st: Strategy, x: float) -> float:
    """Return the number of rank 0, on every rank."""
    return float(st.gather(torch.tensor([x], dtype=torch.float64))[0])


class _Changed(Iterator[tuple[str, Tensor]]):
    """Weights on their way to an engine, changed on a device; a plain model on the host gets them too."""

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        change: Change,
        copy: nn.Module | None,
        device: torch.device | None,
    ):
        self.weights = iter(weights)
        self.change = change
        self.device = device  # None: where each of them is
        self.finite: bool = getattr(weights, "finite", False)  # checked already
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))
        self.adapters: bool = getattr(weights, "adapters", False)
        self.share = getattr(weights, "share", frozenset) if change is unchanged else frozenset
        self.names: list[str] = []
        named = () if copy is None else copy.named_parameters(remove_duplicate=False)
        self.places: dict[str, Tensor] = dict(named)
        if copy is not None and self.adapters:
            self.places = _WithAdapters.of(copy).matrices

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self.weights)
        self.names.append(name)
        x = self.change(name, x if self.device is None else x.to(self.device))
        place = self.places.get(name)
        if place is not None and place.shape == x.shape:
            place.copy_(x)
        elif self.adapters:
            self.places[name] = x.to("cpu", copy=True)
        return name, x


class _WithAdapters:
    """Matrices of adapters that a plain model computes with, next to the weights of its layers."""

    def __init__(self, module: nn.Module):
        self.matrices: dict[str, Tensor] = {}
        for path, part in module.named_modules():
            part.register_forward_hook(partial(self._add, path))

    @staticmethod
    def of(module: nn.Module) -> "_WithAdapters":
        """Return those of a module, which begin with none."""
        found = module.__dict__.get("rft_adapters")
        if found is None:
            found = module.__dict__["rft_adapters"] = _WithAdapters(module)
        return found

    def _add(self, path: str, part: nn.Module, inputs: tuple[Tensor, ...], out: Any) -> Any:
        a, b = (self.matrices.get(path + end) for end in (lora_alone.A, lora_alone.B))
        if a is None or b is None:
            return None  # as it is
        x = inputs[0].to(a)
        return out + ((x @ a.T) @ b.T).to(out)


COPIED = frozenset({"cpu"})  # kinds of device where a copy costs less than noise for each reading


@contextmanager
def weights_read_as(
    root: nn.Module, module: nn.Module, change: Change, names: Collection[str]
) -> Iterator[None]:
    """Have a bound module compute with changed weights, by the names that an export gives them.

    Each is made when the module reads it and forgotten after, so there is no copy of the model; the weights
    themselves stay as they were. Adapters are merged on the way and off meanwhile. Log-probs are those of
    `Sampling()`.
    """
    layers = {adapted_name(path, layer): layer for path, layer in adapted(module)}
    rank = lora_alone.rank_of(module) if lora_alone.are_adapters(names) else 0  # of adapters that come alone
    first = {id(p): name for name, p in module.named_parameters()}  # of a tied weight the one that is sent
    classes: list[tuple[nn.Module, type[nn.Module]]] = []
    scorers = [(x, x.sampling) for x in root.modules() if isinstance(x, Scorer)]
    try:
        for path, part in module.named_modules():
            reads: dict[str, Any] = {}
            for key, p in part._parameters.items():
                name = "" if p is None else plain_name(module, first[id(p)])
                layer = layers.get(f"{path}.{key}")
                if name in names:
                    reads[key] = _read_as(key, change, name, layer)
                elif layer is not None and rank:
                    reads[key] = _read_with_adapters(change, name.removesuffix(".weight"), layer, rank)
            if reads:
                classes.append((part, type(part)))
                reading: Any = type(type(part).__name__, (type(part),), reads)
                part.__class__ = reading
        for x, _ in scorers:
            x.sampling = Sampling()
        for layer in layers.values():
            layer._disable_adapters = True
        with torch.compiler.set_stance("force_eager"):  # compiled blocks read their weights themselves
            yield
    finally:
        for layer in layers.values():
            layer._disable_adapters = False
        for x, sampling in scorers:
            x.sampling = sampling
        for part, cls in classes:
            part.__class__ = cls


def _read_as(key: str, change: Change, name: str, layer: Any) -> property:
    """Return the attribute `key` of a module: the changed parameter, with the adapters of `layer` in it."""

    def read(part: nn.Module) -> Tensor:
        x: Any = part._parameters[key]
        x = x.detach()
        if layer is not None:
            both = [(a, layer.lora_A[a].weight, layer.lora_B[a].weight) for a in active(layer)]
            x = product(layer, x, both)
        return change(name, x)

    return property(read)


def _read_with_adapters(change: Change, path: str, layer: Any, rank: int) -> property:
    """Return the attribute `weight` of a module whose adapters came alone: with the changed ones in it."""

    def read(part: nn.Module) -> Tensor:
        weight: Any = part._parameters["weight"]
        own = {f".{name}": p.detach() for name, p in layer.named_parameters()}
        a, b = lora_alone.matrices(layer, "", own, rank, lambda x: x)
        a, b = change(path + lora_alone.A, a), change(path + lora_alone.B, b)
        return lora_alone.add_to(weight.detach(), a, b, transposed=layer.fan_in_fan_out)

    return property(read)


def _trainer_of(st: Strategy, state: TrainState) -> Apply | None:
    """Return the apply of a state; None if its weights are better not changed as it reads them."""
    bound = None if state.residence is None else state.residence.bound
    apply = None if bound is None else bound()
    if apply is None or st.device.type in COPIED or any(is_low(p) for p in state.module.parameters()):
        return None
    return apply


@torch.no_grad()
def _copy_low(module: nn.Module, copy: nn.Module) -> None:
    """Give a plain model the numbers that a module has in low precision."""
    for name, p in module.named_parameters():
        if is_low(p):
            copy.get_parameter(plain_name(module, name)).copy_(whole(p))


class Sides:
    """An engine, and the trainer: on a GPU itself, else as a plain copy of the model named `model`.

    On a GPU the trainer makes each changed weight as it reads it, so nothing is loaded. On a CPU, where a
    weight is drawn more slowly than it is read, and for weights in low precision, the copy is in the host
    memory of rank 0, takes each full tensor as it is sent, and scores by functional_call. Both hold for every
    strategy, also for FSDP2 and ZeRO, where a module takes no parameters but its own.
    """

    def __init__(
        self,
        st: Strategy,
        state: TrainState,
        engine: Engine,
        model: str,
        prompts: Sequence[Any],
        *,
        version: int,
        max_new: int,
        lend: bool = False,
    ):
        self.st = st
        self.state = state
        self.engine = engine
        self.model = model
        self.prompts = prompts
        self.version = version
        self.max_new = max_new
        self.lend = lend  # to the engine, the weights that are not changed
        self.names: list[str] = []  # of the tensors that are sent, in order
        self.trainer = _trainer_of(st, state)
        self.copy: nn.Module | None = None
        if self.trainer is None and st.rank == 0:
            self.copy = plain(model)
            if engine.status().get("base"):  # else it gets these weights from an export, in full precision
                _copy_low(state.module, self.copy)

    def gap(self, change: Change) -> float:
        """Return the mean |engine - trainer| of log-probs with changed weights.

        It is over the engines of all ranks. The engine keeps these weights. All ranks call it.
        """

        def export(state: TrainState, /) -> Iterable[tuple[str, Tensor]]:
            # noise is drawn by device, and the trainer draws it on its own
            device = None if self.trainer is None else self.st.device
            sent = _Changed(trained_weights(self.st, state, self.engine), change, self.copy, device)
            self.names = sent.names
            return sent

        push(self.st._replace(export=export), self.state, self.engine, version=self.version, lend=self.lend)
        self.engine.wake()
        sampling = Sampling(max_new=self.max_new)
        keys = range(len(self.prompts))
        rollout = self.engine.generate(self.prompts, keys, n=1, sampling=sampling)
        every: Rollout = self.st.gather(rollout)
        logp = self._scored(change, every)
        if logp is None:
            return agreed(self.st, 0.0)
        gap = (logp - every.logp).abs() * every.mask
        return agreed(self.st, float(gap.double().sum() / every.mask.sum()))

    @torch.no_grad()
    def _scored(self, change: Change, rollout: Rollout) -> Tensor | None:
        """Return the trainer's log-probs of a rollout; None on a rank that has no copy."""
        if self.trainer is not None:
            residence = self.state.residence
            with weights_read_as(residence.root, residence.module, change, set(self.names)):
                return self.st.score(self.trainer, self.state.params, rollout, 4096).logp
        if self.copy is None:
            return None
        st = strategy.get_fake_strategy()
        apply, params = st.bind(self.copy)
        return st.score(apply, params, rollout, 4096).logp
