"""Rows of given lengths through trainer and engine, and how far the two differ at each depth."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import check, rng, tree
from rft_fn.collect.inference_engine import inference_engine_status
from rft_fn.engine import gather_and_generate
from rft_fn.types import Apply, Engine, Rollout, Sampling, Strategy

__all__ = ["Depth", "depths", "gaps_of", "random_prompts"]

SHORTEST = 64  # tokens below the first depth


class Depth(NamedTuple):
    """How far log-probs of tokens between two positions differ, in nats per token."""

    first: int  # position of the first token, from 0
    last: int
    tokens: int
    mean: float
    p99: float
    max: float


def random_prompts(words: Sequence[int], lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return a prompt of each length, of words drawn from `words`."""
    known = torch.tensor(words)
    draws = (rng.generator(rng.fold_in(seed, "prompt", i)) for i in range(len(lengths)))
    return [known[torch.randint(len(known), (n,), generator=g)].tolist() for n, g in zip(lengths, draws)]


def gaps_of(
    engine: Engine,
    st: Strategy,
    apply: Apply,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new: int,
    seed: int = 0,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return (|gap|, mask) [B, S] of `new` tokens that an engine samples, and of what it scores.

    The gap is the engine's log-prob of a token minus the trainer's, of the model's softmax and with the same
    weights. All tokens but the first of a row are scored; None where the engine scores none.
    """
    sampling = Sampling(max_new=new)
    keys = [rng.fold_in(seed, "row", i) for i in range(len(prompts))]
    rollout = gather_and_generate(engine, st, list(prompts), keys, n=1, sampling=sampling)
    places = torch.arange(rollout.tokens.shape[1])
    every = tree.replace(rollout, mask=(places > 0) & (places < rollout.length[:, None]))
    budget = int(rollout.length.max())
    trainer = st.score(apply, params, every, budget).logp
    sampled = (trainer - rollout.logp).abs() * rollout.mask, rollout.mask
    scored = _scored(engine, every)
    return sampled, None if scored is None else ((trainer - scored).abs() * every.mask, every.mask)


def _scored(engine: Engine, rollout: Rollout) -> Tensor | None:
    """Return the engine's log-probs of given tokens; None where it refuses to give them, and lives on."""
    try:
        return engine.score(rollout)
    except ValueError:
        if inference_engine_status(engine) == "dead":
            raise
        return None


def depths(*batches: tuple[Tensor, Tensor]) -> list[Depth]:
    """Return the gaps of the tokens in mask at positions below 64, 128, 256 and so on.

    Each batch is (|gap|, mask), both [B, S]. ValueError for shapes that differ. A depth without a token is
    left out.
    """
    for gap, mask in batches:
        check.shapes(gap=(gap, "B S"), mask=(mask, "B S"))
    gaps = torch.cat([gap[mask] for gap, mask in batches]).double()
    position = torch.cat([mask.nonzero()[:, 1] for _, mask in batches])
    found, low, high = [], 0, SHORTEST
    while bool((position >= low).any()):
        x = gaps[(position >= low) & (position < high)]
        if len(x):
            p99 = x.kthvalue(max(round(0.99 * len(x)), 1)).values
            found.append(Depth(low, high - 1, len(x), float(x.mean()), float(p99), float(x.max())))
        low, high = high, 2 * high
    return found
