"""Finds the fastest batching in which each row is as by itself, by trying a few random tokens.

Batching goes wrong where padding gets into a recurrent state, where a cache cannot be repeated for several
samples of a prompt, where the model does not return its cache, and where layers change after some number of
tokens and count them over the batch.
"""

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft_fn.engine.hf import cache_rows
from rft_fn.engine.hf.fixed_steps import FixedSteps
from rft_fn.engine.hf.fused_steps import can_fuse, draws_alike
from rft_fn.engine.hf.row_batch import CacheSupport, prefill
from rft_fn.engine.hf.row_media import media_arguments
from rft_fn.engine.hf.shared_prefix import can_replace
from rft_fn.engine.prompt_media import PromptMedia
from rft_fn.model.forward import rope_switch
from rft_fn.model.packed_attention import warn_once
from rft_fn.model.packing_probe import lowered, rounding, usual_tokens
from rft_fn.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["find_cache_support"]

LENGTHS = (5, 5, 3, 1)  # of the prompts that are tried: two of one length, and one of a single token
MORE = 8  # tokens that each is continued by
NEAR = 4  # thresholds of length: below some of the prompts, and crossed by the others
NO_CACHE = CacheSupport(rows=None)


@torch.no_grad()
def find_cache_support(
    lm: "PreTrainedModel", pad: int, *, fixed: bool | None = None, fused: bool = True
) -> CacheSupport:
    """Return the fastest CacheSupport under which every row is the same as by itself.

    In this order: padded, rows of one length, one row at a time, and without a cache, which always is
    correct. Warns once where it is not the first of these.

    Where a config names lengths after which layers change, each is tried once more with these lowered, on
    rows that lie on both sides of them.

    Each is tried with buffers before it is tried without: layers of a cache that hold only keys and values of
    all tokens are put into them, windows and states are left alone. Prompts may join only where the whole
    cache is in buffers, and samples share their prompt where attention can be ours. Steps of fixed shapes are
    tried if `fixed`, by default on every device but a CPU, which has no use for them; by fused kernels first
    where these run, unless `fused` is False. Where they are wrong for a model that they seem to be for, it is
    said once.
    """
    rows = _prompts(lm)
    want = torch.stack([_alone(lm, x) for x in rows])
    far = None
    with lowered(lm, NEAR) as has_thresholds:
        if has_thresholds:
            far = torch.stack([_alone(lm, x) for x in rows])
    for batching, note in _attempt(_with_cache, lm, pad, fixed, fused) or []:
        got = _attempt(_together, lm, batching, rows, pad)
        fits = got is not None and _same(got, want, lm.dtype)
        if fits and batching.fused and batching.shares:  # rows of short prompts share none
            got = _attempt(_together, lm, batching._replace(shares=False), rows, pad)
            fits = got is not None and _same(got, want, lm.dtype)
        if fits and batching.fused:
            fits = bool(_attempt(draws_alike, lm))
        if fits and far is not None:
            with lowered(lm, NEAR):
                switch = rope_switch(lm.config)
                got = _attempt(_together, lm, batching._replace(switch=switch), rows, pad)
            fits = got is not None and _same(got, far, lm.dtype)
        if fits:
            if note:
                warn_once(f"sampling: {type(lm).__name__} {note}")
            return batching
    warn_once(f"sampling: {type(lm).__name__} reads all tokens anew for each new one")
    return NO_CACHE


def _attempt(f: Callable[..., Any], *args: Any) -> Any:
    """Return f(*args), None where a model does not support it."""
    try:
        return f(*args)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return None


def _with_cache(
    lm: "PreTrainedModel", pad: int, fixed: bool | None, fused: bool
) -> list[tuple[CacheSupport, str]]:
    """Return `_plain`, before each the same with buffers, and with joins if they hold all of its cache."""
    plain = _plain(lm, pad)
    roomy = _attempt(prefill, lm, CacheSupport(rows={}, room=True), [[pad] * 3], [1], pad)
    cache = None if roomy is None else roomy.cache
    buffered = bool(cache_rows.buffered_layers(cache))
    outside = cache_rows.tensors(cache).keys() if buffered else set()
    on_cpu = lm.device.type == "cpu"
    replays = can_replace(lm) and (not on_cpu if fixed is None else fixed)
    sums_wide = not on_cpu or lm.dtype.itemsize > 2  # a CPU has no products of 16 bits with wide sums
    fuses = fused and replays and can_fuse(lm)
    unfused = "decodes without fused kernels, which are not right for it" if fuses else ""

    ways: list[tuple[CacheSupport, str]] = []
    for batching, note in plain:
        joins = buffered and batching.padded and not outside & (batching.rows or {}).keys()
        joining = batching._replace(room=True, joins=True)
        candidates = [  # (a way, whether the model is one for it), the fastest first
            (joining._replace(fixed=True, shares=True, fused=True), joins and fuses and sums_wide),
            (joining._replace(fixed=True, fused=True), joins and fuses),
            (joining._replace(fixed=True, shares=True), joins and replays and sums_wide),
            (joining._replace(fixed=True), joins and replays),
            (joining._replace(shares=True), joins and can_replace(lm) and on_cpu),
            (joining, joins),
            (batching._replace(room=True), buffered),
            (batching, True),
        ]
        ways += [(way, note or ("" if way.fused else unfused)) for way, possible in candidates if possible]
    return ways


def _plain(lm: "PreTrainedModel", pad: int) -> list[tuple[CacheSupport, str]]:
    """Return each CacheSupport that uses the model's cache, with its warning; none without a cache.

    Where a model has other rotary factors after some length, rows of one length reach it together.
    """

    def cache_of(batching: CacheSupport, prompts: list[list[int]]) -> Any:
        return prefill(lm, batching, prompts, [1] * len(prompts), pad).cache

    short = cache_of(CacheSupport(rows={}), [[pad] * 3])
    if short is None:
        return []

    # one row is always possible; several need to know where the rows are in the cache
    switch = rope_switch(lm.config)
    single = CacheSupport(rows={}, single=True, switch=switch), "gets one row at a time"
    long = _attempt(cache_of, CacheSupport(rows={}), [[pad] * 4] * 2)
    if long is None:
        return [single]
    rows = cache_rows.compare(short, long)
    even = CacheSupport(rows, switch=switch), "gets prompts of one length at a time"
    if switch is not None:
        return [even, single]
    lasting = cache_rows.constant(short, long, rows)
    padded = CacheSupport(rows, padded=True, grows=len(lasting) < len(rows)), ""

    # what padding adds to a state would pass for rounding in 16 bits: a row of padding must leave it at 0
    if lasting:
        nothing = _attempt(cache_of, padded[0], [[], [pad] * 3])
        states = cache_rows.tensors(nothing)
        if nothing is None or any(states[path].select(rows[path], 0).any() for path in lasting):
            return [even, single]
    return [padded, even, single]


def _prompts(lm: "PreTrainedModel") -> list[list[int]]:
    """Return a prompt of each of `LENGTHS`, with `MORE` tokens that continue it."""
    usual = usual_tokens(lm.config)
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(len(usual), (n + MORE,), generator=generator) for n in LENGTHS]
    return [usual[at].tolist() for at in draw]


def _alone(lm: "PreTrainedModel", row: list[int], most: int = MORE + 1) -> Tensor:
    """Return logits [MORE + 1, V] after a prompt and each later token, read as the trainer does.

    Up to a switch of rotary factors they come from a forward of the tokens up to there.
    """
    ids = torch.tensor([row], device=lm.device)
    media = PromptMedia(None, [t >= len(row) - MORE for t in range(len(row))])
    inputs = {"position_ids": torch.arange(len(row), device=lm.device)[None]}
    inputs |= media_arguments(lm, ids, torch.ones_like(ids, dtype=torch.bool), [media])
    logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
    switch = rope_switch(lm.config)
    if switch is not None and len(row) > switch:
        logits = torch.cat([_alone(lm, row[:switch], most=switch), logits[switch:]])
    return logits[-most:]


def _together(lm: "PreTrainedModel", batching: CacheSupport, rows: list[list[int]], pad: int) -> Tensor:
    """Return the same logits [P, MORE + 1, V] of all rows, in batches as they are sampled."""
    if batching.joins:
        return _joined(lm, batching, rows, pad)
    groups = [rows] if batching.padded else [list(group) for _, group in groupby(rows, key=len)]
    if batching.single:
        groups = [[row] for row in rows]
    return torch.cat([_read_on(lm, batching, group, pad) for group in groups])


def _read_on(lm: "PreTrainedModel", batching: CacheSupport, rows: list[list[int]], pad: int) -> Tensor:
    """Return the logits [P, MORE + 1, V] of one batch.

    It starts with two samples of each prompt, and the first of them is dropped on the way.
    """
    n = 1 if batching.single else 2
    device = lm.device
    more = torch.tensor([row[-MORE:] for row in rows], device=device).repeat_interleave(n, 0)
    kept = torch.arange(n - 1, len(more), n, device=device)

    # with all rows for a token, then with those that are kept
    batch = prefill(lm, batching, [row[:-MORE] for row in rows], [n] * len(rows), pad)
    logits = [batch.logits[kept]]
    batch.decode_step(lm, more[:, 0])
    logits.append(batch.logits[kept])
    batch.take(kept.tolist())
    for token in more[kept].T[1:]:
        batch.decode_step(lm, token)
        logits.append(batch.logits)
    return torch.stack(logits, 1)


def _joined(lm: "PreTrainedModel", batching: CacheSupport, rows: list[list[int]], pad: int) -> Tensor:
    """Return the same, where the longer prompts join the others after their first token.

    Samples of a prompt that share it are two, and the second leaves a token earlier.
    """
    n = 2 if batching.shares else 1
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    early, late = order[: len(rows) // 2], order[len(rows) // 2 :]
    first = [(i, j) for i in early for j in range(n)]
    batch = prefill(lm, batching, [rows[i][:-MORE] for i in early], [n] * len(early), pad)
    ends = torch.zeros(batch.logits.shape[-1], dtype=torch.bool, device=lm.device)
    steps = FixedSteps(
        lm, Sampling(), pad=pad, ends=ends, check_every=1, rows=n * len(rows), fused=batching.fused
    )
    live = first
    logits: dict[tuple[int, int], list[Tensor]] = {(i, j): [] for i in order for j in range(n)}
    while True:
        for row, x in zip(live, batch.logits):
            logits[row].append(x)

        # rows leave when they have been continued by all of their tokens
        kept = [k for k, (i, j) in enumerate(live) if len(logits[i, j]) <= MORE - j]
        if not kept:
            return torch.stack([torch.stack(logits[i, 0]) for i in range(len(rows))])
        if len(kept) < len(live):
            batch.take(kept)
            live = [live[k] for k in kept]
        at = [rows[i][-MORE - 1 + len(logits[i, j])] for i, j in live]
        token = torch.tensor(at, device=lm.device)
        if batching.fixed:
            steps.read(batch, token)
        else:
            batch.decode_step(lm, token)
        if live == first and len(logits[live[0]]) == 1:
            batch.join(prefill(lm, batching, [rows[i][:-MORE] for i in late], [n] * len(late), pad))
            live = [*first, *((i, j) for i in late for j in range(n))]


def _same(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits differ only by the rounding of a model of `dtype`; NaN equals NaN."""
    got = torch.nan_to_num(got.float(), posinf=0, neginf=0)
    want = torch.nan_to_num(want.float(), posinf=0, neginf=0)
    most = rounding(dtype, want.device)[1]
    if want.device.type == "cpu" and dtype not in (torch.float16, torch.bfloat16):
        # products of one size round alike here: 1e-6. Models that bound their time steps in only one of two
        # ways of reading are 1e-4 off
        most = 2e-5
    spread = (want - want.mean(-1, keepdim=True)).abs().mean()
    return bool((got - want).abs().mean() <= most * spread)
