"""The canary: weights with noise show whether an engine samples from all that it was sent.

At the size of a real update a weight that stayed behind hides in rounding: a dropped norm moves log-probs by
3e-7 at a relative update of 1e-4, and two copies of one model differ by as much. Noise of 5 % makes it 1e-3.
"""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import rng
from rft_fn.sync.compare import Sides, agreed, unchanged
from rft_fn.sync.locate import locate
from rft_fn.types import Engine, Strategy, TrainState

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

    Where both sides differ, the weights are sent again in parts, to find a tensor at which they do: this
    takes log2(tensors) loads more, and the engine is left with some of these weights. Where all is well it
    costs two loads, and one model in the host memory of rank 0.

    All ranks call it. CanaryError, which names the tensor where one was found, if the two gaps differ by more
    than noise, or the smaller is above `max_gap` [nats per token].
    """
    began = time.perf_counter()
    if key is None:
        key = secrets.randbits(48)
    key = int(agreed(st, key))
    noise = partial(with_noise, key=key)
    sides = Sides(st, state, engine, model, prompts, version=version, max_new=max_new)
    noisy = sides.gap(noise)
    floor = sides.gap(unchanged)

    # either of the two syncs may have failed: the better one tells the noise. A fault that is in both does
    # not differ between them, and is larger than any noise
    probe = Probe(noisy, floor, time.perf_counter() - began, key)
    limit = min(max_gap, FACTOR * max(min(noisy, floor), LEAST))
    if noisy <= limit and floor <= limit:  # neither is NaN
        return probe

    # the weights with noise show the fault, unless only the true ones do
    wrong = noise
    if noisy <= limit:
        wrong = unchanged
    name = locate(sides, wrong, noise, good=lambda gap: gap <= limit)
    raise CanaryError(_line(name, probe, limit))


def _line(name: str, probe: Probe, limit: float) -> str:
    """The text of an error, about a tensor or about all of them."""
    what = ""
    which = "some weight"
    if name:
        what = f"{name}: "
        which = "it"
    return (
        f"canary: {what}expected the engine to sample from the weights that it was sent, got log-probs that "
        f"differ from the trainer's by {probe.noisy:.3g} nats per token with noise on the weights, "
        f"{probe.floor:.3g} without (limit {limit:.3g}): {which} did not arrive, or is in a wrong place "
        f"(key {probe.key})"
    )
