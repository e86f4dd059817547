"""Send the trained weights to an engine, checked on the way."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rft_fn.engine.lifetime import Unchanged
from rft_fn.model import lora_alone
from rft_fn.model.finite import is_finite
from rft_fn.model.lora_merged import Export, plain_name
from rft_fn.model.packed_attention import warn_once
from rft_fn.model.quantize import is_low
from rft_fn.types import Engine, Strategy, TrainState
from rft_fn.types.engine import Delivered

__all__ = [
    "CheckedWeights", "Expected", "ManifestError", "check_tensor", "manifest_of", "missing", "push",
    "trained_weights",
]  # fmt: skip


# ---------- the manifest: which tensors a sync must send, by the trainer's own module


class ManifestError(ValueError, Unchanged):
    """Weights that the trainer must not send: the fault is not the engine's."""


class Expected(NamedTuple):
    """A tensor that a sync must send."""

    shape: torch.Size | None  # None: not known before it is put together
    dtype: torch.dtype | None  # it may be wider, not narrower
    names: tuple[str, ...]  # all by which the plain model knows it; several where it is tied


def manifest_of(state: TrainState, *, adapters: bool = False) -> dict[str, Expected]:
    """Return the tensors of the plain model, under all of their names, from the module of `state`.

    Nothing is gathered. Adapters are not among them, since they are sent as part of their layers' weights;
    with `adapters` only their matrices are. Empty for a state without a module.
    """
    module: nn.Module | None = state.module
    if module is None:
        return {}
    if adapters:
        return {name: Expected(size, None, (name,)) for name, size in lora_alone.shapes(module).items()}
    tied: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            tied.setdefault(p, []).append(plain_name(module, name))
    manifest: dict[str, Expected] = {}
    for p, names in tied.items():
        manifest |= dict.fromkeys(names, _expected(p, names))
    return manifest


def _expected(p: nn.Parameter, names: list[str]) -> Expected:
    if is_low(p):  # stored in another shape and type than it is sent in
        return Expected(None, None, tuple(names))
    shape = getattr(p, "ds_shape", p.shape)  # of the whole parameter, also where ZeRO 3 has taken it away
    return Expected(torch.Size(shape), p.dtype, tuple(names))


def check_tensor(manifest: Mapping[str, Expected], name: str, x: Tensor) -> None:
    """Raise ManifestError for a tensor that is not the module's: by its name, shape or type."""
    if not manifest:
        return
    want = manifest.get(name)
    if want is None:
        raise ManifestError(f"weights: {name}: expected a parameter of the model, got {list(x.shape)}")
    if want.shape is not None and want.shape != x.shape:
        raise ManifestError(f"weights: {name}: expected {list(want.shape)}, got {list(x.shape)}")
    if want.dtype is not None and torch.promote_types(want.dtype, x.dtype) != x.dtype:
        raise ManifestError(f"weights: {name}: expected {want.dtype} or wider, got {x.dtype}")


def missing(manifest: Mapping[str, Expected], sent: set[str], frozen: frozenset[str]) -> list[str]:
    """Return the weights that were neither sent nor frozen, by the first of their names."""
    present = sent | frozen
    firsts = dict.fromkeys(want.names for want in manifest.values())
    return [names[0] for names in firsts if not present & set(names)]


# ---------- send the trained weights to an engine, checked on the way


class CheckedWeights(Iterator[tuple[str, Tensor]]):
    """Weights on their way, checked and counted as they are read, one full tensor at a time.

    Each is compared with `manifest` before it is handed on, and the manifest must be complete at the end.
    `dtype` is the type that floating tensors are sent in, where it is given; with `tied` a tied weight is
    sent under all of its names. With `lends` a receiver may `lend` the sender's own tensors.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        manifest: Mapping[str, Expected] | None = None,
        *,
        dtype: torch.dtype | None = None,
        tied: bool = False,
        lends: bool = False,
    ):
        self.weights = iter(weights)
        self.manifest = manifest or {}
        self.dtype = dtype
        self.tied = tied
        self.lends = lends
        self.finite: bool = getattr(weights, "finite", False)  # an export that refuses NaN and inf itself
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))  # names that are not sent
        self.adapters: bool = getattr(weights, "adapters", False)  # matrices of adapters alone
        self.names: set[str] = set()
        self.bytes = 0
        self._waiting: deque[tuple[str, Tensor]] = deque()  # further names of a tied weight

    def __next__(self) -> tuple[str, Tensor]:
        if not self._waiting:
            self._waiting.extend(self._read())
        name, x = self._waiting.popleft()
        self.names.add(name)
        self.bytes += x.numel() * x.element_size()
        return name, x

    def _read(self) -> list[tuple[str, Tensor]]:
        """Read the next tensor, by one name or by all."""
        try:
            name, x = next(self.weights)
        except StopIteration:
            self._check_complete()
            raise
        except ValueError as error:  # of such an export
            raise ManifestError(str(error)) from error
        if name in self.names:
            raise ManifestError(f"weights: {name}: expected each name once, got it twice")
        if not self.finite and not is_finite(x):
            raise ManifestError(f"weights: {name}: expected finite numbers, got NaN or inf")
        check_tensor(self.manifest, name, x)
        if self.dtype is not None and x.is_floating_point():
            x = x.to(self.dtype)

        # a name that comes by itself as well is not an alias
        names = [name]
        if self.tied and name in self.manifest:
            names += [other for other in self.manifest[name].names if other not in {name, *self.names}]
        return [(each, x) for each in names]

    def lend(self) -> frozenset[str]:
        """Yield the sender's own tensors in place of copies, where it lends them; return their names."""
        names: frozenset[str] = getattr(self.weights, "share", frozenset)() if self.lends else frozenset()
        types = {name: want.dtype for name, want in self.manifest.items()}
        return frozenset(name for name in names if self.dtype in (None, types.get(name)))

    def _check_complete(self) -> None:
        """Raise ManifestError for a weight that was not sent: the engine must not finish its load."""
        left_out = missing(self.manifest, self.names, self.frozen)
        if left_out:
            raise ManifestError(
                f"weights: {left_out[0]}: expected it among the weights that are sent, got {len(self.names)} "
                f"without it ({len(left_out)} missing in all)"
            )

    def drain(self) -> None:
        """Read the remaining tensors and drop them: gathering a sharded tensor takes all ranks."""
        for _ in self.weights:
            pass


def trained_weights(strategy: Strategy, state: TrainState, engine: Engine) -> Iterable[tuple[str, Tensor]]:
    """Return the trained weights as an engine takes them: by adapters alone where it does, else whole.

    Warns where it would take adapters, and something else is trained too. ValueError for an engine whose base
    is in low precision, which takes nothing else.
    """
    weights = strategy.export(state)
    status = engine.status()
    if not isinstance(weights, Export) or not status.get("adapters"):
        return weights
    base = status.get("base", "")
    reason = lora_alone.why_whole(weights, base)
    if not reason:
        return lora_alone.AdaptersAlone(weights)
    if base:
        raise ValueError(f"sync: expected adapters alone for an engine with a base in {base}, got {reason}")
    warn_once(f"sync: expected adapters alone to send, got {reason}: whole weights are sent")
    return weights


def push(
    strategy: Strategy, state: TrainState, engine: Engine, *, version: int, lend: bool = False
) -> Delivered:
    """Load the trained weights of `state` into `engine`; its rollouts carry `version` from then on.

    Every rank must call it, because sharded tensors are put together by all ranks. The engine's status may
    ask for a `dtype`, for `tied` names, and for `adapters` alone. Returns the engine's record of what it
    took. ManifestError, which names the tensor, for weights that are not the module's own. ValueError for
    weights that the engine's model does not have, and for an engine that took less than was sent.

    With `lend` the engine may sample from the trained tensors themselves in place of copies, as `hf` does on
    the CPU of one process where the types are the same: it refuses to sample between an update and the next
    push. With offload_models the device has these weights meanwhile, without their optimizer, and no trained
    model afterwards.
    """
    status = engine.status()
    strategy.make_room()
    try:
        exported = trained_weights(strategy, state, engine)
        adapters = getattr(exported, "adapters", False)
        weights = CheckedWeights(
            exported,
            manifest_of(state, adapters=adapters),
            dtype=None if adapters else status.get("dtype"),
            tied=status.get("tied", False),
            lends=lend,
        )
        try:
            delivered = engine.load(weights, version=version)
        except BaseException:
            if strategy.world > 1:
                weights.drain()
            raise
    finally:
        strategy.make_room()

    # an engine of another process may drop what it does not know, and answer that all is well
    sent = len(weights.names)
    if delivered.tensors != sent or delivered.bytes != weights.bytes:
        raise ValueError(
            f"sync: expected the engine to take {sent} tensors ({weights.bytes} bytes), got "
            f"{delivered.tensors} ({delivered.bytes} bytes)"
        )
    if delivered.version != version:
        raise ValueError(f"sync: expected the engine to be at version {version}, got {delivered.version}")
    return delivered
