"""The canary: weights with noise show whether an engine samples from all that it was sent.

At the size of a real update a weight that did not arrive hides in rounding: a dropped norm moves log-probs by
3e-7 at a relative update of 1e-4, and two copies of one model differ by as much. Noise of 5 % makes it 1e-3.
"""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import precision, rng
from rft_fn.engine.lifetime import Unchanged
from rft_fn.model.lora_alone import B
from rft_fn.sync.changed_weights import Sides, agreed, unchanged
from rft_fn.sync.wrong_tensor import locate
from rft_fn.types import Engine, Strategy, TrainState

__all__ = ["CanaryError", "Probe", "canary", "with_noise"]


NOISE = 0.05  # of the size of each tensor
FACTOR = 30.0  # times the noise floor that the gap under noise may be
LEAST = 1e-6  # nats per token: the rounding of float32
CHANCE = 2.0  # times the limit that a gap may be by chance, which another draw of the noise tells


class CanaryError(ValueError, Unchanged):
    """An engine does not sample from the weights that it was sent."""


class Probe(NamedTuple):
    """The mismatch of engine and trainer in nats per token."""

    noisy: float  # with noise on every weight
    floor: float  # with the true weights
    seconds: float
    key: int  # of the noise


def with_noise(name: str, x: Tensor, key: int, *, scale: float = NOISE) -> Tensor:
    """Add normal noise of `scale` x its root mean square to x, drawn by (key, name).

    A tensor of zeros counts as one of ones, and so does the second matrix of an adapter, which begins with
    zeros: its noise shows a base model that is not the trainer's, whatever it has learned. The noise is drawn
    where x is, and draws differ between kinds of device; it does not depend on how the tensor is sharded.
    Nothing is read on the host.
    """
    x = x.detach()
    noise = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)
    size = noise.square_().mean().sqrt()
    size = torch.where(size == 0, 1, size) if not name.endswith(B) else torch.ones_like(size)
    size = size.double() * scale
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
    lend: bool = False,
) -> Probe:
    """Send weights with noise and score what the engine samples, then the same with the true weights.

    The engine has the true weights at the end, at `version`, and `lend` is as in `push`. The noise is drawn
    by `key`, a new one for each call unless it is given: with noise that repeats, a tensor that was dropped
    last time too would pass. A sample of the engine depends on nothing but prompt, key and weights, so
    nothing else of a run changes.

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
    sides = Sides(st, state, engine, model, prompts, version=version, max_new=max_new, lend=lend)
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
