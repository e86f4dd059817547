"""Dynamic sampling: draw again until the batch is full of groups that have something to teach."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import reward_shaping, tree
from rft_fn.reward.rollout import Judged
from rft_fn.types import Media, Rollout

__all__ = ["Filled", "fill_groups"]

Draw = Callable[[int], tuple[Sequence[Any], Sequence[int]]]  # round -> (prompts, keys)
Collect = Callable[[Sequence[Any], Sequence[int]], tuple[Rollout, Judged]]


class Filled(NamedTuple):
    """A batch of n groups, and what it took."""

    prompts: list[Any]  # n
    rollout: Rollout  # of n groups, numbered 0 to n - 1
    judged: Judged
    rounds: int  # times drawn
    drawn: int  # groups drawn
    varied: int  # of them, groups whose rewards differ

    def metrics(self) -> dict[str, float]:
        """What to log: rounds, and the share of drawn groups whose rewards differ."""
        return {"sampling/rounds": float(self.rounds), "sampling/varied": self.varied / max(self.drawn, 1)}


class _Batch(NamedTuple):
    prompts: list[Any]
    rollout: Rollout
    judged: Judged


def _wide(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[1])) if x.dim() == 2 else x


def _media(parts: Sequence[Media | None]) -> Media | None:
    some = [m for m in parts if m is not None]
    if not some:
        return None
    join = lambda field, name: torch.cat([getattr(m, field)[name] for m in some])  # noqa: E731
    names = list(some[0].tensors)
    return Media(tensors={n: join("tensors", n) for n in names}, rows={n: join("rows", n) for n in names})


def _concat(parts: Sequence[_Batch]) -> _Batch:
    """The groups of all parts in order, padded to the longest and numbered through."""
    size = max(p.rollout.tokens.shape[1] for p in parts)
    plain = [tree.map(lambda x: _wide(x, size), tree.replace(p.rollout, media=None)) for p in parts]
    offset = 0
    for i, p in enumerate(parts):
        plain[i] = tree.replace(plain[i], group=plain[i].group + offset)
        offset += len(p.prompts)
    rollout = tree.map(lambda *x: torch.cat(x), *plain)
    rollout = tree.replace(rollout, media=_media([p.rollout.media for p in parts]))
    names = parts[0].judged.parts
    judged = Judged(
        reward=torch.cat([p.judged.reward for p in parts]),
        parts={name: torch.cat([p.judged.parts[name] for p in parts]) for name in names},
        texts=[t for p in parts for t in p.judged.texts],
    )
    return _Batch([x for p in parts for x in p.prompts], rollout, judged)


def _select(batch: _Batch, groups: Sequence[int]) -> _Batch:
    """Those groups, in that order, numbered from 0."""
    size = batch.judged.reward.shape[1]
    index = torch.tensor(list(groups), dtype=torch.long)
    rows = (index[:, None] * size + torch.arange(size)).flatten()
    plain = tree.map(lambda x: x[rows.to(x.device)], tree.replace(batch.rollout, media=None))
    media = None if batch.rollout.media is None else batch.rollout.media.take(rows.tolist())
    number = torch.arange(len(groups)).repeat_interleave(size).to(plain.group)
    rollout = tree.replace(plain, media=media, group=number)
    parts = {name: part[index] for name, part in batch.judged.parts.items()}
    texts = [batch.judged.texts[i] for i in rows.tolist()]
    judged = Judged(reward=batch.judged.reward[index], parts=parts, texts=texts)
    return _Batch([batch.prompts[i] for i in groups], rollout, judged)


def fill_groups(collect: Collect, draw: Draw, n: int, *, rounds: int = 1) -> Filled:
    """n groups whose rewards differ, from as many rounds of drawing and sampling as it takes, at most
    `rounds`.

    draw(round) -> (prompts, keys); collect(prompts, keys) -> (Rollout, Judged), the global batch with its
    groups in order. The first n groups with variance are taken in the order in which they were drawn; if the
    bound is reached before there are n, the first of the others fill the batch (their advantages are 0, so
    only the shapes need them). DAPO's dynamic sampling, arXiv 2503.14476. `rounds` = 1 takes what comes. A
    function of its draws alone, so a resumed run does the same. ValueError unless rounds >= 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected >= 1, got {rounds}")
    parts, varied = [], 0
    for i in range(rounds):
        prompts, keys = draw(i)
        parts.append(_Batch(list(prompts), *collect(prompts, keys)))
        varied += int(reward_shaping.varied(parts[-1].judged.reward).sum())
        if varied >= n:
            break
    drawn = sum(len(p.prompts) for p in parts)
    if len(parts) == 1 and drawn == n:
        return Filled(*parts[0], 1, drawn, varied)
    batch = _concat(parts)
    teaches = reward_shaping.varied(batch.judged.reward).tolist()
    order = sorted(range(drawn), key=lambda g: (not teaches[g], g))[:n]
    return Filled(*_select(batch, order), len(parts), drawn, varied)
