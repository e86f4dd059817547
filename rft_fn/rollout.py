"""Operations on rollouts: select, join, cut, continue, split and re-prompt rows.

All are pure, keep each row's tokens, mask and log-probs together, and carry media along. `group` says which
prompt a row is a response to; a list of your own prompts stays aligned with it as each docstring says.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check, rng, tree
from rft_fn.types import Media, Rollout, Sampling

__all__ = ["concat", "draw_rows", "extend", "observed", "prefixes", "split", "take", "with_prompts"]


def take(rollout: Rollout, index: Sequence[int] | Tensor) -> Rollout:
    """Take the rows `index`, in that order; a row may be taken more than once, and no row at all.

    `index` holds row numbers, or is a mask [B] bool. Groups keep their numbers: `rollout.group` still points
    into the list of prompts of the whole rollout. IndexError for a row that is not there.
    """
    rows = _row_numbers(rollout, index)
    at = torch.tensor(rows, dtype=torch.long)
    media = None if rollout.media is None else rollout.media.take(rows)
    plain = tree.replace(rollout, media=None)
    return tree.replace(tree.map(lambda x: x[at.to(x.device)], plain), media=media)


def _row_numbers(rollout: Rollout, index: Sequence[int] | Tensor) -> list[int]:
    """Return the numbers of the rows of an index or a mask."""
    size = len(rollout.tokens)
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        check.shapes(tokens=(rollout.tokens, "B S"), index=(index, "B"))
        return index.nonzero().flatten().tolist()
    rows = [int(i) for i in index]
    for i in rows:
        if not 0 <= i < size:
            raise IndexError(f"index: expected rows in [0, {size}), got {i}")
    return rows


def draw_rows(weight: Tensor, key: int, *, count: int | None = None) -> Tensor:
    """Draw rows with replacement, each with a probability in proportion to its weight, [B] -> [count] i64.

    `count` is B by default; `key` names the draw, and the rows are sorted, for `take`. PF-PPO (arXiv
    2409.06957) learns from responses whose rewards it trusts more, with advantages from before the draw:

        rows = draw_rows(reward.abs().flatten() ** 2, key)                       # verl's "pow"
        rows = draw_rows(reward_shaping.best_and_worst(reward).flatten(), key)   # the paper's best-worst

    ValueError for a weight below 0 or not finite, and if all are 0.
    """
    check.shapes(weight=(weight, "B"))
    chance = weight.double()
    if not bool(((chance >= 0) & chance.isfinite()).all()) or not bool(chance.sum() > 0):
        raise ValueError(f"weight: expected numbers >= 0 with a sum above 0, got {weight.tolist()[:8]}")
    size = len(chance) if count is None else count
    drawn = torch.rand(size, generator=rng.generator(key), dtype=torch.float64)
    total = chance.cpu().cumsum(0)
    found = torch.searchsorted(total, drawn * total[-1], right=True)
    return found.clamp(max=len(chance) - 1).sort().values


def observed(rollout: Rollout) -> Tensor:
    """Mark the tokens that an environment wrote, [B, S] bool: not sampled, after the first that was.

    Tool output and later turns of others, without the prompt. For ECHO: a model gives log-probs there too, of
    `tree.replace(rollout, mask=rollout.mask | observed(rollout))`; see `loss.with_observed`.
    """
    position = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)
    begun = rollout.mask.cumsum(-1) > 0
    return begun & ~rollout.mask & (position < rollout.length[:, None])


def without_truncated(rollout: Rollout) -> Rollout:
    """Return a rollout with the responses that were cut off taken out of its mask."""
    return tree.replace(rollout, mask=rollout.mask & ~rollout.truncated.unsqueeze(-1))


def concat(parts: Sequence[Rollout], *, prompts: Sequence[int] | None = None) -> Rollout:
    """Join the rows of all parts in order, padded to the longest, with groups renumbered.

    The groups of a part continue from the part before it, so that they point into the parts' prompts, one
    list after the other. `prompts` is how many prompts each part has; by default one more than its largest
    group. ValueError for no parts, another number of counts, a count that is too small, and for parts that
    were drawn from different distributions: one model is trained on all of them.
    """
    if not parts:
        raise ValueError("parts: expected one rollout or more, got none")
    least = [_prompts(part) for part in parts]
    counts = least if prompts is None else list(prompts)
    if len(counts) != len(parts):
        raise ValueError(f"prompts: expected {len(parts)} counts, one for each part, got {len(counts)}")
    for i, (count, needed) in enumerate(zip(counts, least)):
        if count < needed:
            raise ValueError(
                f"prompts[{i}]: expected at least {needed}, the groups of that part, got {count}"
            )

    size = max(part.tokens.shape[1] for part in parts)
    sampling = _common_sampling([part.sampling for part in parts])
    if any(part.temperature is not None for part in parts):
        parts = [tree.replace(part, temperature=_temperature(part, sampling)) for part in parts]
    routed = [part.routing for part in parts if part.routing is not None]
    if routed:
        parts = [tree.replace(part, routing=_routing_like(part, routed[0])) for part in parts]
    if any(part.kept is not None for part in parts):
        parts = [tree.replace(part, kept=x) for part, x in zip(parts, _kept_of_all(parts))]
    if any(part.versions is not None for part in parts):
        parts = [tree.replace(part, versions=token_versions(part)) for part in parts]
    plain, start = [], 0
    for part, count in zip(parts, counts):
        numbered = tree.replace(part, group=part.group + start, media=None, sampling=sampling)
        plain.append(tree.map(lambda x: _padded(x, size), numbered))
        start += count
    rows = [len(part.tokens) for part in parts]
    media = Media.concat([part.media for part in parts], rows)
    return tree.replace(tree.map(lambda *x: torch.cat(x), *plain), media=media)


def _common_sampling(samplings: Sequence[Sampling | None]) -> Sampling | None:
    """Return the first that is known; ValueError if another has another distribution."""
    known = [sampling for sampling in samplings if sampling is not None]
    for sampling in known:
        if sampling.distribution != known[0].distribution:
            raise ValueError(
                f"sampling: expected rollouts of one distribution, got {known[0].described} and "
                f"{sampling.described}; tree.replace(rollout, sampling=None) where that is meant"
            )
    return known[0] if known else None


def _temperature(rollout: Rollout, sampling: Sampling | None) -> Tensor:
    """Return the temperature of each row [B]; that of `sampling` where rows have none."""
    if rollout.temperature is not None:
        return rollout.temperature
    if sampling is None:
        raise ValueError(
            "sampling: expected that of the rows without temperatures, to be joined with rows that have "
            "them, got None"
        )
    return rollout.logp.new_full((len(rollout.tokens),), sampling.distribution[0])


def _prompts(rollout: Rollout) -> int:
    """Return the fewest prompts that the groups of a rollout can point into."""
    return int(rollout.group.max()) + 1 if len(rollout.group) else 0


def _padded(x: Tensor, size: int) -> Tensor:
    """Pad a field [B, S, ...] with 0 to `size` columns; leave a field [B] unchanged."""
    return F.pad(x, (*[0, 0] * (x.dim() - 2), 0, size - x.shape[1])) if x.dim() > 1 else x


def _routing_like(rollout: Rollout, like: Tensor) -> Tensor:
    """Return the routing [B, S, M, k] of a rollout; that of nothing where it has none."""
    if rollout.routing is not None:
        return rollout.routing
    return like.new_zeros(*rollout.tokens.shape, *like.shape[2:])


def known_routing(before: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Join the routing [..., S, M, k] of tokens with what a later forward of the same tokens has.

    The earlier one stays where there is one: by it the token after was sampled.
    """
    if before is None or after is None:
        return after if before is None else before
    return torch.where(before > 0, before, after)


def _kept_of_all(parts: Sequence[Rollout]) -> list[Tensor]:
    """Return the words that were left [B, S, W] of each part, of one width; not known where it has none."""
    given = [part.tokens.new_zeros(*part.tokens.shape, 0, dtype=torch.int32) for part in parts]
    given = [x if part.kept is None else part.kept for x, part in zip(given, parts)]
    width = max(x.shape[-1] for x in given)
    return [F.pad(x, (0, width - x.shape[-1])) for x in given]


def token_versions(rollout: Rollout) -> Tensor:
    """Return the version of the weights that sampled each token [B, S] i64, 0 outside mask."""
    if rollout.versions is not None:
        return rollout.versions
    return rollout.version.unsqueeze(-1) * rollout.mask


class Owner:
    """The media of one prompt, cut out of the batch's when they are first read."""

    def __init__(self, media: Media, row: int):
        self.batch = media
        self.row = row

    @cached_property
    def media(self) -> Mapping[str, Tensor]:
        """Return the tensors that have rows; ValueError where another process holds them."""
        own = self.batch.take([self.row])
        own.require_held()
        return {name: x for name, x in own.tensors.items() if len(x)}


class Prefix(list[int]):
    """The tokens of a prompt that sees or hears and of a response to it, to be continued.

    More token ids (`prefix + ids`) give a longer one. What the policy sampled is text whatever it says,
    so an engine is told which tokens these are.
    """

    def __init__(self, ids: Iterable[int], sampled: Iterable[bool], prompt: Any):
        """Take a `prompt` with the processor's tensors as its `media`, read when they are needed."""
        super().__init__(ids)
        self.sampled = list(sampled)  # of each token, whether the policy sampled it
        self.prompt = prompt

    @property
    def media(self) -> Mapping[str, Tensor]:
        """Return the processor's tensors of the prompt, the same object for all of its responses."""
        return self.prompt.media

    def __add__(self, more: list[int]) -> "Prefix":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Prefix([*self, *more], [*self.sampled, *[False] * len(more)], self.prompt)


def prefixes(rollout: Rollout, at: Sequence[int] | Tensor | None = None) -> list[list[int]]:
    """Return the first `at[b]` tokens of each row [B], to continue from; whole rows by default.

    A row with media gives a `Prefix`, a list that has them. ValueError unless 1 <= at[b] <= length[b].
    """
    length = rollout.length.tolist()
    ends = length if at is None else [int(n) for n in at]
    if len(ends) != len(length):
        raise ValueError(f"at: expected {len(length)} numbers, one for each row, got {len(ends)}")
    for b, (end, most) in enumerate(zip(ends, length)):
        if not 1 <= end <= most:
            raise ValueError(f"at[{b}]: expected 1 to {most}, the length of the row, got {end}")
    plain = [row[:end].tolist() for row, end in zip(rollout.tokens, ends)]
    if rollout.media is None:
        return plain

    # rows of one prompt share its media, which are cut out once
    of = rollout.media.of.tolist()
    owners = {owner: Owner(rollout.media, b) for b, owner in enumerate(of) if owner >= 0}
    found = list[list[int]](plain)
    for b, owner in enumerate(of):
        if owner >= 0:
            found[b] = Prefix(plain[b], rollout.mask[b, : ends[b]].tolist(), owners[owner])
    return found


def extend(before: Rollout, after: Rollout) -> Rollout:
    """Join each row of `after` with the row of `before` that it continues: both were sampled.

    `after.group[b]` is the row of `before` that row b continues: what an engine returns for
    `prefixes(before)`, and for prompts that add more tokens to those (an environment's answer). Up to the
    first token that `after` sampled, mask and log-probs come from `before`, from there on from `after`, and
    so does the routing of each token that `before` has read. The version of a row is the smaller of both;
    where they differ, `versions` has that of each token. Groups and media come from `before`.

    ValueError for a group that is no row of `before`, or a row that does not begin as its source does: with
    as many of its tokens as the prompt of that row has. ValueError for rollouts, or rows, of different
    distributions.
    """
    source = after.group.tolist()
    for b, row in enumerate(source):
        if not 0 <= row < len(before.tokens):
            raise ValueError(
                f"after.group[{b}]: expected a row of before, below {len(before.tokens)}, got {row}"
            )
    old = take(before, source)

    # the part of each row that came from its source
    position = torch.arange(after.tokens.shape[1], device=after.tokens.device)
    prompt = (after.mask.cumsum(-1) == 0) & (position < after.length[:, None])
    shared = torch.minimum(prompt.sum(-1), old.length)
    inherited = position < shared[:, None]

    sampling = _common_sampling([before.sampling, after.sampling])
    temperature = after.temperature
    if old.temperature is not None or temperature is not None:
        temperature, then = _temperature(after, sampling), _temperature(old, sampling)
        for b in (temperature != then).nonzero().flatten().tolist():
            raise ValueError(
                f"after: expected row {b} at temperature {float(then[b]):g}, as it began, got "
                f"{float(temperature[b]):g}"
            )

    # whatever is wider than the other is padding there
    size = after.tokens.shape[1]
    tokens, mask, logp = (_resized(x, size) for x in (old.tokens, old.mask, old.logp))
    routing = after.routing
    if old.routing is not None:
        inherits = _resized(old.routing, size) * inherited[..., None, None]
        routing = known_routing(inherits, after.routing)
    kept = None
    if old.kept is not None or after.kept is not None:
        left, new = _kept_of_all([old, after])
        kept = torch.where(inherited.unsqueeze(-1), _resized(left, size), new)
    wrong = ((tokens != after.tokens) & inherited).any(-1)
    for b in wrong.nonzero().flatten().tolist():
        raise ValueError(
            f"after: expected row {b} to begin with the first {int(shared[b])} tokens of row {source[b]} of "
            f"before, got other tokens"
        )
    return Rollout(
        tokens=after.tokens,
        mask=torch.where(inherited, mask, after.mask),
        logp=torch.where(inherited, logp, after.logp),
        length=after.length,
        truncated=after.truncated,
        group=old.group,
        version=torch.minimum(old.version, after.version),
        media=old.media,
        temperature=temperature,
        routing=routing,
        kept=kept,
        versions=_versions_of_both(old, after, inherited),
        sampling=sampling,
    )


def _versions_of_both(old: Rollout, after: Rollout, inherited: Tensor) -> Tensor | None:
    """Return the version of each token [B, S], of `old` where it is inherited; None where no row has two."""
    changed = (old.version != after.version).unsqueeze(-1) & after.mask & ~inherited
    if old.versions is None and after.versions is None and not bool(changed.any()):
        return None
    before = _resized(token_versions(old), inherited.shape[-1])
    return torch.where(inherited, before, token_versions(after))


def _resized(x: Tensor, size: int) -> Tensor:
    """Cut a field [B, S, ...] to `size` columns, or fill it up with 0."""
    return _padded(x[:, :size], size)


def split(rollout: Rollout, by: Sequence[Hashable] | Tensor) -> Mapping[Hashable, Rollout]:
    """Split the rows by their label `by[b]`, in the order in which labels first occur.

    Labels are numbers, texts or anything hashable: the source of a prompt, its level, whether it was solved.
    Groups keep their numbers, as in `take`. ValueError unless there is one label for each row.
    """
    labels = by.tolist() if isinstance(by, Tensor) else list(by)
    if len(labels) != len(rollout.tokens):
        raise ValueError(f"by: expected {len(rollout.tokens)} labels, one for each row, got {len(labels)}")
    rows: dict[Hashable, list[int]] = {}
    for b, label in enumerate(labels):
        rows.setdefault(label, []).append(b)
    return {label: take(rollout, index) for label, index in rows.items()}


def with_prompts(
    rollout: Rollout, prompts: Sequence[Any], *, group: Sequence[int] | Tensor | None = None
) -> Rollout:
    """Put the same responses after other prompts: row b after `prompts[group[b]]`.

    `prompts` are lists of token ids, or objects with `.ids` (and `.media`), as for an engine. `group` [B] is
    by default the rollout's, one prompt for each that was sampled from; range(B) gives each row its own. The
    result has this group, and the media of the new prompts. A response begins with its first sampled token
    and keeps its mask; a row without any is its prompt only.

    Version, `truncated` and log-probs stay as they were sampled, after the old prompts: `st.score` gives a
    model's after the new ones. Their `routing` and `kept` are left out, which were after the old prompts too.
    Sampled tokens have the same order in both, so numbers [B, S] of the result belong to rows of the old one
    as torch.zeros_like(old.logp).masked_scatter(old.mask, x[new.mask]). ValueError for a group that points to
    no prompt, a text, and a prompt without tokens.
    """
    at = rollout.group if group is None else torch.as_tensor(group)
    check.shapes(tokens=(rollout.tokens, "B S"), group=(at, "B"))
    wrong = at[(at < 0) | (at >= len(prompts))]
    if len(wrong):
        raise ValueError(f"group: expected numbers of {len(prompts)} prompts, from 0, got {int(wrong[0])}")
    new = [_ids(i, prompt) for i, prompt in enumerate(prompts)]
    begin = torch.where(rollout.mask.any(-1), rollout.mask.int().argmax(-1), rollout.length).tolist()

    tokens, mask, logp = [], [], []
    for b, (i, first, end) in enumerate(zip(at.tolist(), begin, rollout.length.tolist())):
        ids = rollout.tokens.new_tensor(new[i])
        tokens.append(torch.cat([ids, rollout.tokens[b, first:end]]))
        mask.append(torch.cat([torch.zeros_like(ids, dtype=torch.bool), rollout.mask[b, first:end]]))
        logp.append(F.pad(rollout.logp[b, first:end], (len(ids), 0)))
    size = max((len(row) for row in tokens), default=0)
    stacked = [
        torch.stack([F.pad(row, (0, size - len(row))) for row in rows]) if rows else old[:, :0]
        for rows, old in ((tokens, rollout.tokens), (mask, rollout.mask), (logp, rollout.logp))
    ]
    media = Media.of_prompts([getattr(prompt, "media", None) for prompt in prompts])
    versions = rollout.versions
    if versions is not None:
        versions = torch.zeros_like(stacked[0]).masked_scatter(stacked[1], versions[rollout.mask])
    return tree.replace(
        rollout,
        tokens=stacked[0],
        mask=stacked[1],
        logp=stacked[2],
        length=rollout.length.new_tensor([len(row) for row in tokens]),
        group=at.to(rollout.group),
        routing=None,
        kept=None,
        versions=versions,
        media=None if media is None else media.take(at.tolist()),
    )


def _ids(number: int, prompt: Any) -> list[int]:
    """Return the token ids of a prompt; ValueError for a text, and for none."""
    if isinstance(prompt, str):
        raise ValueError(f"prompts[{number}]: expected token ids, got text; encode it with the tokenizer")
    ids = list(getattr(prompt, "ids", prompt))
    if not ids:
        raise ValueError(f"prompts[{number}]: expected at least one token, got none")
    return ids
