"""How rows are given to a model such that each is what it is alone: found with a few random tokens.

The fastest way that is right is taken. What makes a way wrong: padding that gets into a recurrent state, a
state that cannot be repeated for several samples of a prompt, or that the model does not hand out.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.engine import state as states
from rft_fn.engine.batch import Way, start
from rft_fn.model.attention import warn_once
from rft_fn.model.probe import rounding, usual_tokens

__all__ = ["way_of"]

LENGTHS = (5, 5, 3, 1)  # of the prompts that are tried: two of one length, and one of a single token
MORE = 8  # tokens that each is continued by
ANEW = Way(rows=None)


@torch.no_grad()
def way_of(lm: nn.Module, pad: int) -> Way:
    """The way in which rows are right: padded with a state, of one length, one at a time, or all tokens anew
    for each new one, which always is. A warning once where it is not the first."""
    rows = _prompts(lm)
    want = torch.stack([_alone(lm, x) for x in rows])
    for way, what in _tried(_with_state, lm, pad) or []:
        got = _tried(_together, lm, way, rows, pad)
        if got is not None and _same(got, want, lm.dtype):
            if what:
                warn_once(f"sampling: {type(lm).__name__} {what}")
            return way
    warn_once(f"sampling: {type(lm).__name__} reads all tokens anew for each new one")
    return ANEW


def _tried(f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), None where a model does not take it."""
    try:
        return f(*args)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return None


def _with_state(lm: nn.Module, pad: int) -> list[tuple[Way, str]]:
    """The ways that use the state of a model, and what is said of each; none if it hands out no state."""
    short = start(lm, Way(rows={}), [[pad] * 3], 1, pad).state
    if short is None:
        return []
    single = Way(rows={}, single=True), "gets one row at a time"
    long = _tried(lambda: start(lm, Way(rows={}), [[pad] * 4] * 2, 1, pad).state)
    if long is None:
        return [single]
    rows = states.compare(short, long)
    even = Way(rows), "gets prompts of one length at a time"
    lasting = states.constant(short, long, rows)
    padded = Way(rows, padded=True, grows=len(lasting) < len(rows)), ""
    # Whatever padding adds to a state would pass for rounding in 16 bits: a row of nothing but padding has
    # to leave it at zero.
    if lasting:
        nothing = _tried(lambda: start(lm, padded[0], [[], [pad] * 3], 1, pad).state)
        found = states.tensors(nothing)
        if nothing is None or any(found[path].select(rows[path], 0).any() for path in lasting):
            return [even, single]
    return [padded, even, single]


def _prompts(lm: nn.Module) -> list[list[int]]:
    """A prompt of each of `LENGTHS`, with `MORE` tokens that it is continued by."""
    usual = usual_tokens(lm.config.get_text_config())
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(len(usual), (n + MORE,), generator=generator) for n in LENGTHS]
    return [usual[at].tolist() for at in draw]


def _alone(lm: nn.Module, row: list[int]) -> Tensor:
    """[MORE + 1, V]: the logits after a prompt and after each token behind it, read as the trainer does."""
    ids = torch.tensor([row], device=lm.device)
    position = torch.arange(len(row), device=lm.device)[None]
    out = lm(input_ids=ids, position_ids=position, attention_mask=torch.ones_like(ids), use_cache=False)
    return out.logits[0, -MORE - 1 :]


def _together(lm: nn.Module, way: Way, rows: list[list[int]], pad: int) -> Tensor:
    """The same of all rows [P, MORE + 1, V], in batches as they are sampled: repeated, read on, and some of
    them dropped."""
    groups = [rows]
    if not way.padded:
        groups = [list(group) for _, group in groupby(rows, key=len)]
    if way.single:
        groups = [[row] for row in rows]
    return torch.cat([_read_on(lm, way, group, pad) for group in groups])


def _read_on(lm: nn.Module, way: Way, rows: list[list[int]], pad: int) -> Tensor:
    """[P, MORE + 1, V] of one batch: the first of two samples of each prompt is dropped on the way."""
    n = 1 if way.single else 2
    device = lm.device
    more = torch.tensor([row[-MORE:] for row in rows], device=device).repeat_interleave(n, 0)
    kept = torch.arange(n - 1, len(more), n, device=device)
    batch = start(lm, way, [row[:-MORE] for row in rows], n, pad)
    logits = [batch.logits[kept]]
    batch.append(lm, more[:, 0])
    logits.append(batch.logits[kept])
    batch.take(kept)
    for token in more[kept].T[1:]:
        batch.append(lm, token)
        logits.append(batch.logits)
    return torch.stack(logits, 1)


def _same(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits differ by the rounding of a model of `dtype` only; NaN equals NaN."""
    got, want = (torch.nan_to_num(x.float(), posinf=0, neginf=0) for x in (got, want))
    most = rounding(dtype, want.device)[1]
    if want.device.type == "cpu" and dtype not in (torch.float16, torch.bfloat16):
        # products of one size round alike here: 1e-6. Models that bound their time steps in only one of two
        # ways of reading are 1e-4 off
        most = 2e-5
    spread = (want - want.mean(-1, keepdim=True)).abs().mean()
    return bool((got - want).abs().mean() <= most * spread)
