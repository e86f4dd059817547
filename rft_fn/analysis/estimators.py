"""Estimators of a policy gradient on one buffer: how far they point its way, and what their noise is.

A loss adds to the gradient by its slopes c, one number per token, as long as it reads only log-probs of the
model:

    g = sum_t c_t grad logp_t,    c_t = d (w * loss).sum() / d logp_t

So the slopes are data, and every gradient here is `Strategy.grad` of `logp` weighted by them: on one process,
under FSDP2 and under ZeRO alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rft_fn import packing, rng, tree
from rft_fn.analysis.gradients import Kept, keep, local_parts
from rft_fn.analysis.loss_slopes import effective_size, gains, length_slope, slopes, stopped
from rft_fn.analysis.noise import Noise
from rft_fn.analysis.part_sums import Parts, Totals, cosine, direction, noise, signal, standard_error, totals
from rft_fn.types import Apply, Experience, Packed, Strategy, TokenOut, TrainState

__all__ = [
    "Measured", "Parts", "Reference", "Totals", "compare", "cosine", "direction", "effective_size", "gains",
    "length_slope", "measure", "noise", "reference", "signal", "slopes", "split_prompts", "standard_error",
    "stopped", "totals",
]  # fmt: skip


def split_prompts(group: Tensor, parts: int) -> list[list[int]]:
    """Return the rows of each of `parts` parts of a buffer, each of as many prompts of `group` [B].

    ValueError unless 2 <= parts and parts divides the prompts.
    """
    prompts = group.unique().tolist()
    if parts < 2 or len(prompts) % parts:
        raise ValueError(
            f"parts: expected at least 2 that divide the {len(prompts)} prompts evenly, got {parts}"
        )
    size = len(prompts) // parts
    place = {g: i // size for i, g in enumerate(prompts)}
    rows: list[list[int]] = [[] for _ in range(parts)]
    for row, g in enumerate(group.tolist()):
        rows[place[g]].append(row)
    return rows


def _logp(out: TokenOut, b: Packed) -> Tensor:
    return out.logp


def gradients_of_parts(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    exp: Experience,
    slope: Tensor,
    rows: Sequence[Sequence[int]],
    *,
    budget: int,
) -> Iterator[Kept | None]:
    """Yield the gradient of slopes [B, S] over each list of `rows`; None for rows that push nothing.

    All ranks iterate to the end.
    """
    pushed = (slope != 0).any(-1).tolist()
    weighted = tree.replace(exp, w=slope.to(exp.w.dtype), extra=None)
    for part in rows:
        index = torch.tensor([i for i in part if pushed[i]], dtype=torch.long)
        if len(index):
            packs = st.shard(packing.take(weighted, index), budget)
            yield keep(st, st.grad(state, apply, _logp, packs)[0])
        else:
            yield None


def _dot(st: Strategy, a: Kept | None, b: Kept | None) -> float:
    """Return the inner product of two gradients, summed over all ranks; 0 if one is None or empty.

    Each parameter's is in its own type, and their sum in float64: no copy of a gradient is made.
    """
    if not a or not b:
        return 0.0
    found = [float(torch.dot(a[name][0].flatten(), x.flatten())) / n for name, x, n in local_parts(st, b)]
    total = torch.tensor(sum(found), dtype=torch.float64)
    return float(st.all_reduce(total, "sum")) if st.world > 1 else float(total)


def _add(total: Kept, part: Kept | None) -> None:
    """Add a gradient to a sum, in place."""
    for name, (x, copies) in (part or {}).items():
        if name in total:
            total[name][0].add_(x)
        else:
            total[name] = (x.clone(), copies)


class Reference(NamedTuple):
    """A gradient that others are compared with."""

    gradient: Kept
    square: float  # of its norm
    signal: float  # the same without its noise; the square of an exact one

    @property
    def ceiling(self) -> float:
        """Return the cosine that the true policy gradient has with this reference."""
        return max(self.signal / self.square, 0.0) ** 0.5


def reference(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    exp: Experience,
    slope: Tensor,
    rows: Sequence[Sequence[int]],
    *,
    budget: int,
) -> Reference:
    """Return the gradient of slopes [B, S] over all `rows` as a reference, with its noise by these parts.

    Rows in a single list are an exact gradient, without noise. Memory: a gradient more than `Strategy.grad`
    holds. ValueError for slopes that are all 0.
    """
    whole = Kept()
    squares = 0.0
    for part in gradients_of_parts(st, state, apply, exp, slope, rows, budget=budget):
        if part is not None:
            _add(whole, part)
            squares += _dot(st, part, part)
        del part  # before the next one is computed
    if not whole:
        raise ValueError("reference: expected groups with different rewards, got none; take more prompts")
    square = _dot(st, whole, whole)
    if len(rows) == 1:
        return Reference(whole, square, square)
    of = Totals(*(torch.tensor(x, dtype=torch.float64) for x in (len(rows), square, squares, 0.0)))
    return Reference(whole, square, float(signal(of)))


class Measured(NamedTuple):
    """What the gradient of a row is made of."""

    parts: Parts
    with_first: float  # cosine with another gradient on this buffer; NaN without one
    tokens: float  # sum over tokens of the square of a token's gradient, by random signs
    largest: float  # share of |g|^2 that `largest` responses bring: <g_largest, g> / |g|^2


def measure(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    exp: Experience,
    slope: Tensor,
    rows: Sequence[Sequence[int]],
    ref: Reference,
    *,
    budget: int,
    first: Kept | None = None,
    largest: int = 10,
    probes: int = 1,
    key: int = 0,
) -> tuple[Measured, Kept]:
    """Measure the gradient of slopes [B, S] over the parts `rows`; return the gradient too.

    Its products are with a reference, and its cosine is with `first`, another gradient on the same buffer.

    `largest` responses are the ones with the largest sum of squared slopes. `tokens` is the mean over
    `probes` draws of random signs on the slopes, E |sum_t +- g_t|^2 = sum_t |g_t|^2: the noise that
    independent tokens would make. Passes over the buffer: 1 + probes, and one over the largest responses.
    Memory: 3 gradients and one for each part, in shards where they are sharded. All ranks call it alike.
    """

    def gradient(c: Tensor, index: Sequence[int]) -> Kept | None:
        return next(gradients_of_parts(st, state, apply, exp, c, [index], budget=budget))

    found = list(gradients_of_parts(st, state, apply, exp, slope, rows, budget=budget))
    whole = Kept()
    for part in found:
        _add(whole, part)
    squares = [_dot(st, g, g) for g in found]
    onto = [_dot(st, whole, g) for g in found]
    along = [_dot(st, ref.gradient, g) for g in found]
    parts = Parts(*(torch.tensor(x, dtype=torch.float64) for x in (squares, onto, along)))
    del found

    tokens = 0.0
    everything = range(len(slope))
    for i in range(probes):
        source = rng.generator(rng.fold_in(key, "signs", i))
        signs = torch.randint(0, 2, slope.shape, generator=source) * 2 - 1
        probe = gradient(slope * signs.to(slope), everything)
        tokens += _dot(st, probe, probe) / probes
    top = slope.double().square().sum(-1).argsort(descending=True, stable=True)[:largest].tolist()
    brought = _dot(st, whole, gradient(slope, top)) if top else float("nan")
    square = max(sum(onto), 1e-300)
    near = _dot(st, whole, first) / (square * _dot(st, first, first)) ** 0.5 if first else float("nan")
    return Measured(parts, near, tokens if probes else float("nan"), brought / square), whole


def compare(
    st: Strategy,
    state: TrainState,
    apply: Apply,
    buffers: Mapping[str, tuple[Experience, Tensor]],
    rows: Sequence[Sequence[int]],
    ref: Reference,
    *,
    budget: int,
    prompts: int,
    largest: int = 10,
    probes: int = 1,
    key: int = 0,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (name, numbers) of each estimator: a buffer with its advantages and weights, and slopes.

    Slopes are [B, S], `rows` the parts of the buffer, of `prompts` prompts in all. `cosine` and `direction`
    are with the reference; `minus_first` is the cosine less the first row's on the same prompts, and
    `with_first` the cosine of both gradients. NAME_se is the standard error of NAME over draws of the
    prompts, with the reference as given. `noise_prompts` and `noise_tokens` are shares of |g|^2: what the
    draw of prompts adds to it, and what tokens would if they were independent. `noise_scale` is in prompts,
    `effective` in responses; `largest` and `longest` are the shares of the largest responses in the gradient,
    and of the longest quarter in the push; `length` is the elasticity of the push per advantage.

    Slopes that are another row's up to a factor are measured once.
    """
    seen: list[tuple[Tensor, Measured]] = []  # slopes of norm 1, and what they gave
    first: Tensor | None = None
    held: Kept | None = None  # the gradient of the first row
    for name, (exp, slope) in buffers.items():
        size = slope.double().norm()
        unit = slope.double() / size.clamp(min=1e-300)
        same = [found for other, found in seen if float((other - unit).abs().max()) < 1e-6]
        if not same:
            found, whole = measure(
                st, state, apply, exp, unit, rows, ref,
                budget=budget, first=held, largest=largest, probes=probes, key=key,
            )  # fmt: skip
            held = held or whole
            del whole
            same = [found]
            seen.append((unit, same[0]))
        t = totals(same[0].parts)
        cos, bias = cosine(t, ref.square), direction(t, ref.signal)
        first = cos if first is None else first
        noises, length = noise(t), exp.mask.sum(-1)
        push = slope.double().abs().sum(-1)
        adv = (exp.adv.double().abs() * exp.mask).sum(-1) / length.clamp(min=1)
        longest = length.argsort(descending=True, stable=True)[: max(len(length) // 4, 1)]
        yield (
            name,
            {
                "cosine": float(cos[0]),
                "cosine_se": standard_error(cos),
                "direction": float(bias[0]),
                "direction_se": standard_error(bias),
                "minus_first": float(cos[0] - first[0]),
                "minus_first_se": standard_error(cos - first),
                "with_first": same[0].with_first if len(seen) > 1 and same[0] is not seen[0][1] else 1.0,
                "norm": float(size * t.square[0].sqrt()),
                "noise_prompts": float(noises[0] / t.square[0]),
                "noise_prompts_se": standard_error(noises / t.square),
                "noise_tokens": same[0].tokens / float(t.square[0]),
                "noise_scale": Noise(float(signal(t)[0]), float(noises[0]), prompts).scale,
                "effective": effective_size(push),
                "stopped": stopped(slope, exp.adv, exp.mask),
                "largest": same[0].largest,
                "longest": float(push[longest].sum() / push.sum().clamp(min=1e-300)),
                "length": length_slope(torch.where(adv > 0, push / adv, 0), length),
            },
        )
