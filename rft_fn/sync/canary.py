"""The canary: weights with noise show whether an engine samples from all that it was sent.

At the size of a real update a weight that did not arrive hides in rounding: a dropped norm moves log-probs by
3e-7 at a relative update of 1e-4, and two copies of one model differ by as much. Noise of 5 % makes it 1e-3.
"""

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn import precision, rng, strategy
from rft_fn.model.bind import Scorer
from rft_fn.model.lora import adapted
from rft_fn.model.lora_merged import plain_name, product
from rft_fn.model.quantize import is_low
from rft_fn.sync.push import push
from rft_fn.types import Apply, Engine, Rollout, Sampling, Strategy, TrainState

__all__ = [
    "CanaryError", "Change", "Probe", "Sides", "agreed", "canary", "locate", "plain", "unchanged",
    "uniform", "weights_read_as", "with_noise",
]  # fmt: skip


# ---------- the distance between an engine and its trainer under changed weights


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
        self.names: list[str] = []
        named = () if copy is None else copy.named_parameters(remove_duplicate=False)
        self.places: dict[str, Tensor] = dict(named)

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self.weights)
        self.names.append(name)
        x = self.change(name, x if self.device is None else x.to(self.device))
        place = self.places.get(name)
        if place is not None and place.shape == x.shape:
            place.copy_(x)
        return name, x


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
    layers = dict(adapted(module))
    first = {id(p): name for name, p in module.named_parameters()}  # of a tied weight the one that is sent
    classes: list[tuple[nn.Module, type[nn.Module]]] = []
    scorers = [(x, x.sampling) for x in root.modules() if isinstance(x, Scorer)]
    try:
        for path, part in module.named_modules():
            layer = layers.get(path.removesuffix(".base_layer"))
            reads: dict[str, Any] = {}
            for key, p in part._parameters.items():
                name = "" if p is None else plain_name(module, first[id(p)])
                if name in names:
                    reads[key] = _read_as(key, change, name, layer)
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
        if layer is not None and key == "weight":
            both = [(a, layer.lora_A[a].weight, layer.lora_B[a].weight) for a in layer.active_adapters]
            x = product(layer, x, both)
        return change(name, x)

    return property(read)


def _trainer_of(st: Strategy, state: TrainState) -> Apply | None:
    """Return the apply of a state; None if its weights are better not changed as it reads them."""
    bound = getattr(state.residence, "bound", None)
    apply = None if bound is None else bound()
    if apply is None or st.device.type in COPIED or any(is_low(p) for p in state.module.parameters()):
        return None
    return apply


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
    ):
        self.st = st
        self.state = state
        self.engine = engine
        self.model = model
        self.prompts = prompts
        self.version = version
        self.max_new = max_new
        self.names: list[str] = []  # of the tensors that are sent, in order
        self.trainer = _trainer_of(st, state)
        self.copy: nn.Module | None = None
        if self.trainer is None and st.rank == 0:
            self.copy = plain(model)

    def gap(self, change: Change) -> float:
        """Return the mean |engine - trainer| of log-probs with changed weights.

        It is over the engines of all ranks. The engine keeps these weights. All ranks call it.
        """

        def export(state: TrainState, /) -> Iterable[tuple[str, Tensor]]:
            # noise is drawn by device, and the trainer draws it on its own
            device = None if self.trainer is None else self.st.device
            sent = _Changed(self.st.export(state), change, self.copy, device)
            self.names = sent.names
            return sent

        push(self.st._replace(export=export), self.state, self.engine, version=self.version)
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


# ---------- the tensor that an engine does not have as it was sent


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


# ---------- the canary: weights with noise show whether an engine samples from all that it was sent


NOISE = 0.05  # of the size of each tensor
FACTOR = 30.0  # times the noise floor that the gap under noise may be
LEAST = 1e-6  # nats per token: the rounding of float32
CHANCE = 2.0  # times the limit that a gap may be by chance, which another draw of the noise tells


class CanaryError(ValueError):
    """An engine does not sample from the weights that it was sent."""


class Probe(NamedTuple):
    """The mismatch of engine and trainer in nats per token."""

    noisy: float  # with noise on every weight
    floor: float  # with the true weights
    seconds: float
    key: int  # of the noise


def with_noise(name: str, x: Tensor, key: int, *, scale: float = NOISE) -> Tensor:
    """Add normal noise of `scale` x its root mean square to x, drawn by (key, name).

    A tensor of zeros counts as one of ones. The noise is drawn where x is, and draws differ between kinds of
    device; it does not depend on how the tensor is sharded. Nothing is read on the host.
    """
    x = x.detach()
    noise = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)
    size = noise.square_().mean().sqrt()
    size = torch.where(size == 0, 1, size).double() * scale
    noise.normal_(generator=rng.generator(rng.fold_in(key, name), x.device))
    return noise.mul_(size).add_(x).to(x.dtype)


def canary(
    st: Strategy,
    state: TrainState,
    engine: Engine,
    model: str,
    prompts: Sequence[Any],
    *,
    version: int,
    max_new: int = 8,
    max_gap: float | None = None,
    key: int | None = None,
) -> Probe:
    """Send weights with noise and score what the engine samples, then the same with the true weights.

    The engine has the true weights at the end, at `version`. The noise is drawn by `key`, a new one for each
    call unless it is given: with noise that repeats, a tensor that was dropped last time too would pass. A
    sample of the engine depends on nothing but prompt, key and weights, so nothing else of a run changes.

    Where both sides differ, the weights are sent again in parts, to find a tensor at which they do: this
    takes log2(tensors) loads more, and the engine is left with some of these weights. Where all is well it
    costs two loads, and on a CPU one model in the host memory of rank 0; a gap under noise that is above the
    limit by less than twice, as 1 in 30 is where logits are peaked and in bfloat16, costs two more.

    All ranks call it. CanaryError, which names the tensor where one was found, if the two gaps differ by more
    than noise, or the smaller is above `max_gap` [nats per token]: by default the rounding of the coarser of
    the types that both sides compute in, or of the trainer's where the engine does not tell its own.
    """
    began = time.perf_counter()
    key = int(agreed(st, secrets.randbits(48) if key is None else key))
    noise = partial(with_noise, key=key)
    sides = Sides(st, state, engine, model, prompts, version=version, max_new=max_new)
    noisy = sides.gap(noise)
    floor = sides.gap(unchanged)
    limit = _limit(sides, noisy, floor, max_gap)

    if floor <= limit < noisy <= CHANCE * limit:  # a fault is in the next draw too, chance is not
        key = rng.fold_in(key, "again")
        noise = partial(with_noise, key=key)
        noisy = sides.gap(noise)
        floor = sides.gap(unchanged)
        limit = _limit(sides, noisy, floor, max_gap)

    probe = Probe(noisy, floor, time.perf_counter() - began, key)
    if noisy <= limit and floor <= limit:  # neither is NaN
        return probe

    # the weights with noise show the fault, unless only the true ones do
    wrong = unchanged if noisy <= limit else noise
    name = locate(sides, wrong, noise, good=lambda gap: gap <= limit)
    raise CanaryError(_line(name, probe, limit))


def _limit(sides: Sides, noisy: float, floor: float, max_gap: float | None) -> float:
    """Return the gap that is noise.

    Either of the two syncs may have failed: the better one tells the noise. A fault that is in both does not
    differ between them, and is larger than any noise.
    """
    return min(max_gap or _by_rounding(sides), FACTOR * max(min(noisy, floor), LEAST))


def _by_rounding(sides: Sides) -> float:
    """Return the gap that rounding explains, the same on every rank."""
    model = sides.copy if sides.trainer is None else sides.state.module
    types = [p.dtype for p in model.parameters()] if model is not None else []
    if sides.trainer is not None and sides.st.config.bf16:
        types.append(torch.bfloat16)  # of float32 parameters
    if "computes" in (status := sides.engine.status()):
        types.append(status["computes"])
    return agreed(sides.st, precision.gap_by_rounding(types))


def _line(name: str, probe: Probe, limit: float) -> str:
    """Return the text of an error, about a tensor or about all of them."""
    which = "it" if name else "some weight"
    return (
        f"canary: {name + ': ' if name else ''}expected the engine to sample from the weights that it was "
        f"sent, got log-probs that differ from the trainer's by {probe.noisy:.3g} nats per token with noise "
        f"on the weights, {probe.floor:.3g} without (limit {limit:.3g}): {which} did not arrive, or is in a "
        f"wrong place (key {probe.key})"
    )
