"""The canary: weights with noise show whether an engine samples from all that it was sent.

At the size of a real update a weight that stayed behind hides in rounding: a dropped norm moves log-probs by
3e-7 at a relative update of 1e-4, and two copies of one model differ by as much. Noise of 5 % makes it 1e-3.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn import rng, strategy
from rft_fn.sync.push import push
from rft_fn.types import Engine, Rollout, Sampling, Strategy, TrainState

__all__ = ["CanaryError", "Probe", "canary", "with_noise"]

NOISE = 0.05  # of the size of each tensor
FACTOR = 30.0  # times the noise floor that the gap under noise may be
LEAST = 1e-6  # nats per token: the rounding of float32


class CanaryError(ValueError):
    """An engine does not sample from the weights that it was sent."""


class Probe(NamedTuple):
    """The mismatch of engine and trainer in nats per token."""

    noisy: float  # with noise on every weight
    floor: float  # with the true weights
    seconds: float
    key: int  # of the noise


def with_noise(name: str, x: Tensor, key: int, *, scale: float = NOISE) -> Tensor:
    """x plus normal noise of `scale` x its root mean square, drawn by (key, name).

    A tensor of zeros counts as one of ones. The noise does not depend on the device or on how the tensor is
    sharded.
    """
    wide = x.detach().cpu().float()
    size = float(wide.square().mean().sqrt()) or 1.0
    noise = torch.randn(wide.shape, generator=rng.generator(rng.fold_in(key, name)))
    return (wide + scale * size * noise).to(device=x.device, dtype=x.dtype)


class _Copied(Iterator[tuple[str, Tensor]]):
    """Weights on their way to an engine, which a plain model on the host gets too."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], copy: nn.Module | None, key: int | None):
        self.weights = iter(weights)
        self.frozen: frozenset[str] = frozenset(getattr(weights, "frozen", ()))
        self.key = key
        self.places: dict[str, Tensor] = {}
        if copy is not None:
            self.places = dict(copy.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self.weights)
        if self.key is not None:
            x = with_noise(name, x, self.key)
        place = self.places.get(name)
        if place is not None and place.shape == x.shape:
            place.copy_(x)
        return name, x


def _plain(model: str) -> nn.Module:
    """The model of a name without adapters, since weights arrive by the plain model's names."""
    lm = model_lib.load(model, quantize="none")
    merge = getattr(lm, "merge_and_unload", None)
    if merge is not None:
        lm = merge()
    return lm


def _agreed(st: Strategy, x: float) -> float:
    """The number of rank 0, on every rank."""
    return float(st.gather(torch.tensor([x], dtype=torch.float64))[0])


def canary(
    st: Strategy,
    state: TrainState,
    engine: Engine,
    model: str,
    prompts: Sequence[Any],
    *,
    version: int,
    max_new: int = 8,
    max_gap: float = 0.01,
    key: int | None = None,
) -> Probe:
    """Send weights with noise and score what the engine samples, then the same with the true weights.

    The engine has the true weights at the end, at `version`. The noise is drawn by `key`, a new one for each
    call unless it is given: with noise that repeats, a tensor that was dropped last time too would pass. A
    sample of the engine depends on nothing but prompt, key and weights, so nothing else of a run changes.

    The trainer's side is a plain copy of the model named `model`, on the host of rank 0: it takes each full
    tensor as it is sent, and scores by functional_call. This holds for every strategy, also for FSDP2 and
    ZeRO, whose own modules take no other parameters; it costs one model in host memory while it runs. All
    ranks call it. CanaryError where the two gaps differ by more than noise, or the smaller is above `max_gap`
    [nats per token].
    """
    began = time.perf_counter()
    if key is None:
        key = secrets.randbits(48)
    key = int(_agreed(st, key))
    copy: nn.Module | None = None
    if st.rank == 0:
        copy = _plain(model)
    noisy = _gap(st, state, engine, copy, prompts, version=version, max_new=max_new, key=key)
    floor = _gap(st, state, engine, copy, prompts, version=version, max_new=max_new, key=None)

    # either of the two syncs may have failed: the better one tells the noise. A fault that is in both does
    # not differ between them, and is larger than any noise
    probe = Probe(noisy, floor, time.perf_counter() - began, key)
    limit = min(max_gap, FACTOR * max(min(noisy, floor), LEAST))
    if not max(noisy, floor) <= limit:
        raise CanaryError(
            f"canary: expected the engine to sample from the weights that it was sent, got log-probs that "
            f"differ from the trainer's by {noisy:.3g} nats per token with noise on the weights, {floor:.3g} "
            f"without (limit {limit:.3g}): some weight did not arrive, or is in a wrong place (key {key})"
        )
    return probe


def _gap(
    st: Strategy,
    state: TrainState,
    engine: Engine,
    copy: nn.Module | None,
    prompts: Sequence[Any],
    *,
    version: int,
    max_new: int,
    key: int | None,
) -> float:
    """The mean |engine - trainer| of log-probs with noise by `key`, over the engines of all ranks."""

    def export(state: TrainState, /) -> Iterable[tuple[str, Tensor]]:
        return _Copied(st.export(state), copy, key)

    push(st._replace(export=export), state, engine, version=version)
    engine.wake()
    sampling = Sampling(max_new=max_new)
    rollout = engine.generate(prompts, range(len(prompts)), n=1, sampling=sampling)
    every: Rollout = st.gather(rollout)
    gap = 0.0
    if copy is not None:
        gap = _scored_gap(copy, every)
    return _agreed(st, gap)


@torch.no_grad()
def _scored_gap(copy: nn.Module, rollout: Rollout) -> float:
    """The mean |sampler - model| of the log-probs of a rollout."""
    plain = strategy.get_fake_strategy()
    apply, params = plain.bind(copy)
    found = plain.score(apply, params, rollout, 4096).logp
    gap = (found - rollout.logp).abs() * rollout.mask
    return float(gap.double().sum() / rollout.mask.sum())
