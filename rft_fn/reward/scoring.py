"""Turn a rollout into rewards [N, G]: decode, score, arrange by group."""

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from rft_fn import rng
from rft_fn.data.prompts import Prompt
from rft_fn.reward.combine import components_of
from rft_fn.reward.joint import Joint
from rft_fn.reward.media_records import media_records
from rft_fn.reward.reward_record import taken
from rft_fn.reward.signature import Judged, Score, Scored, TrainerState, as_messages
from rft_fn.types import Rollout

__all__ = ["concat", "judge", "judge_rows", "means", "responses", "select"]


_REMEDY = "judge each rollout with its own prompts, before its rows are joined to others or moved"


def responses(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Return the texts of the B responses: the tokens in mask, without prompt and special tokens."""
    ids = _response_ids(rollout, range(len(rollout.tokens)))
    if not ids:
        return []  # no list of responses would be read as one response without tokens
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def _response_ids(rollout: Rollout, rows: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each response."""
    mask = rollout.mask[list(rows)]
    ends = list(accumulate(mask.sum(-1).tolist(), initial=0))
    ids = rollout.tokens[list(rows)][mask].tolist()
    return [ids[start:end] for start, end in pairwise(ends)]


def judge(
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    part: slice = slice(None),
    state: TrainerState | None = None,
    seed: int = 0,
    joint: Joint | None = None,
) -> Judged:
    """Return the rewards of a rollout [N, G]: reward[i, j] of row i G + j.

    `prompts` are the N prompts of the rollout, and `rollout.group` tells which one each row answers: the G
    rows of prompt 0 first, then prompt 1, and so on. So `reward.view(-1)` and `texts` are in the order of the
    rollout's rows, as an advantage [N, G] that is spread over the rows needs it. With `part` only the groups
    prompts[part] are judged.

    A prompt that was made of messages is given to the rewards as messages, and its responses too. `state` is
    their `trainer_state`; their `keys` are drawn from `seed`, the step, the prompt and the place of the
    response in its group. Joint rewards are computed here, for the whole rollout, unless `joint` has them.

    ValueError for rows in another order (nothing is reordered: `reward` could then not be spread over the
    rows), for groups of different sizes, for more or fewer groups than prompts, and for prompts without text
    and columns.
    """
    # the rows of the groups that are judged
    _check_prompts(prompts)
    size = _group_size(rollout.group, len(prompts))
    chosen = range(len(prompts))[part]
    rows = range(chosen.start * size, chosen.stop * size)

    given = _Batch(rollout, prompts, tokenizer, state, seed)
    asked = _asked(score, given, list(rows), joint)
    scored = _checked(score, score(asked.prompts, asked.completions, asked.columns, **asked.further))
    return Judged(
        reward=_by_group(scored.total, size),
        parts={name: _by_group(x, size) for name, x in scored.parts.items()},
        texts=asked.texts,
        metrics={name: _by_group(x, size) for name, x in scored.metrics.items()},
        extra=scored.extra,
    )


class _Batch(NamedTuple):
    """A rollout to be judged, and where the run is."""

    rollout: Rollout
    prompts: Sequence[Prompt]
    tokenizer: Any
    state: TrainerState | None
    seed: int


class _Asked(NamedTuple):
    """What a score is asked about B responses."""

    prompts: list[Any]  # in the form of the data: texts, or messages
    completions: list[Any]
    columns: dict[str, list[Any]]
    further: dict[str, Any]  # the arguments of `Score` that it takes besides
    texts: list[str]  # of the responses


def _asked(score: Score, batch: _Batch, rows: Sequence[int], joint: Joint | None) -> _Asked:
    """Return what a score is asked about some rows of a rollout. ValueError for what is none."""
    # the responses, and the prompt of each; columns have the names of all prompts, whichever are judged
    prompts = batch.prompts
    owners = batch.rollout.group[list(rows)].tolist()
    ids = _response_ids(batch.rollout, rows)
    texts = batch.tokenizer.batch_decode(ids, skip_special_tokens=True)
    names = _keys([p.columns for p in prompts])
    columns = {name: [prompts[i].columns.get(name) for i in owners] for name in names}

    # in the form of the data: texts, or messages
    asked: list[Any] = []
    answered: list[Any] = []
    for i, text in zip(owners, texts, strict=True):
        messages = prompts[i].messages
        asked.append(prompts[i].text if messages is None else list(messages))
        answered.append(text if messages is None else as_messages(text, "assistant"))

    joint = joint or Joint(score, batch.rollout, prompts, batch.tokenizer)
    given = {
        **_further(score, batch, owners),
        "completion_ids": ids,
        "truncated": batch.rollout.truncated[list(rows)].tolist(),
        "known": joint.of_rows(rows),
    }
    further = taken(score, given) if callable(score) else {}
    if not _takes(score, asked, answered, columns, further):
        _checked(score, None)
    return _Asked(asked, answered, columns, further, texts)


def _checked(score: Score, scored: object) -> Scored:
    """Return the rewards that a score has given. ValueError for anything else."""
    if isinstance(scored, Scored):
        return scored
    name = getattr(score, "__name__", type(score).__name__)
    raise ValueError(
        "score: expected a Score, such as reward.weighted(mine=(fn, 1.0)) makes of reward functions, got "
        f"{name}, which is none by itself"
    )


def _takes(score: Any, asked: Any, answered: Any, columns: Any, further: Mapping[str, Any]) -> bool:
    """Return whether a score can be called with these, as far as its signature is known."""
    if not callable(score):
        return False
    try:
        inspect.signature(score).bind(asked, answered, columns, **further)
    except TypeError:
        return False
    except ValueError:  # a builtin without one
        return True
    return True


def _further(score: Score, batch: _Batch, owners: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of rewards that are about prompts, one for each response."""
    distinct = dict.fromkeys(owners)
    decoded = {i: batch.tokenizer.decode(batch.prompts[i].ids) for i in distinct}

    # a key of the seed, the step, the prompt and the response's place among the prompt's
    step = (batch.state or TrainerState()).global_step
    seen: Counter[int] = Counter()
    keys = []
    for i in owners:
        keys.append(rng.fold_in(batch.seed, "reward", step, batch.prompts[i].index, seen[i]))
        seen[i] += 1
    given: dict[str, Any] = {
        "trainer_state": batch.state,
        "prompt_texts": [decoded[i] for i in owners],
        "prompt_ids": [list(batch.prompts[i].ids) for i in owners],
        "groups": list(owners),
        "keys": keys,
    }

    # files are read for a reward that wants them
    if any(reward.media for reward, _ in components_of(score).values()):
        media = {i: media_records(batch.prompts[i].sources) for i in distinct}
        given["media"] = [media[i] for i in owners]
    return given


def _by_group(x: Tensor, size: int) -> Tensor:
    """Reshape [B] to [N, G] for groups of `size` consecutive rows."""
    return rearrange(x, "(n g) -> n g", g=size)


def _keys(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all mappings, each once, in order."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _check_prompts(prompts: Sequence[Any]) -> None:
    """Raise ValueError for anything but prompts with text and columns."""
    for p in prompts:
        if not (hasattr(p, "text") and hasattr(p, "columns")):
            raise ValueError(
                f"prompts: expected data.Prompt with text and columns, got {type(p).__name__}; token ids "
                "alone mean nothing to a reward: make prompts with rft_fn.data.from_rows or from_task"
            )


def _group_size(group: Tensor, count: int) -> int:
    """Return G, for `count` groups of G consecutive rows each.

    `group` [B] is the prompt of each row. ValueError names the first group or row that breaks the order.
    """
    if not count:
        raise ValueError("prompts: expected at least one, got none")

    # every row belongs to a prompt
    rows = group.tolist()
    sizes = [0] * count
    for row, g in enumerate(rows):
        if not 0 <= g < count:
            raise ValueError(
                f"rollout.group: expected 0 to {count - 1} for {count} prompts, got {g} in row {row}; "
                f"{_REMEDY}"
            )
        sizes[g] += 1

    # every prompt has as many rows
    for g, size in enumerate(sizes):
        if size != sizes[0] or not size:
            raise ValueError(
                f"rollout.group: expected as many rows of each of {count} groups, got {sizes[0]} of group 0 "
                f"and {size} of group {g}; {_REMEDY}"
            )

    # and they are grouped, in the order of the prompts
    for row, g in enumerate(rows):
        if g != row // sizes[0]:
            raise ValueError(
                f"rollout.group: expected the rows of group {row // sizes[0]} together, {sizes[0]} of them, "
                f"got group {g} in row {row}; {_REMEDY}"
            )
    return sizes[0]


def judge_rows(
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    state: TrainerState | None = None,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    joint: Joint | None = None,
) -> Tensor:
    """Return the reward of each row [B]: rows in any order, groups of any size.

    `rollout.group[b]` is the prompt, out of `prompts`, that row b answers. With `rows` only those are judged.
    Without rows there are no rewards, and nothing is called. Otherwise as `judge`. `advantage.grpo_by` and
    its relatives take the result. ValueError for a group that is no prompt, and for prompts without text and
    columns.
    """
    _check_prompts(prompts)
    owners = rollout.group.tolist()
    for row, g in enumerate(owners):
        if not 0 <= g < len(prompts):
            raise ValueError(
                f"rollout.group: expected numbers of {len(prompts)} prompts, got {g} in row {row}"
            )
    if rows is None:
        rows = range(len(owners))
    if not rows:
        return torch.zeros(0)
    given = _Batch(rollout, prompts, tokenizer, state, seed)
    asked = _asked(score, given, rows, joint)
    return _checked(score, score(asked.prompts, asked.completions, asked.columns, **asked.further)).total


def concat(parts: Sequence[Judged]) -> Judged:
    """Join the groups of all parts, in order; a missing metric is NaN, a missing text None."""
    # every metric and every text has an entry for each part
    texts: list[str] = []
    metrics: dict[str, list[Tensor]] = {name: [] for name in _keys([x.metrics for x in parts])}
    extra: dict[str, list[Any]] = {name: [] for name in _keys([x.extra for x in parts])}
    for x in parts:
        texts += x.texts
        absent = torch.full_like(x.reward, math.nan)
        for name, columns in metrics.items():
            columns.append(x.metrics.get(name, absent))
        for name, values in extra.items():
            values += x.extra.get(name, [None] * len(x.texts))

    return Judged(
        reward=torch.cat([x.reward for x in parts]),
        parts={name: torch.cat([x.parts[name] for x in parts]) for name in parts[0].parts},
        texts=texts,
        metrics={name: torch.cat(columns) for name, columns in metrics.items()},
        extra=extra,
    )


def select(judged: Judged, groups: Sequence[int]) -> Judged:
    """Select groups, in that order."""
    index = torch.tensor(list(groups), dtype=torch.long)
    size = judged.reward.shape[1]
    rows = _by_group(torch.arange(judged.reward.numel()), size)[index].flatten().tolist()
    return Judged(
        reward=judged.reward[index],
        parts={name: x[index] for name, x in judged.parts.items()},
        texts=[judged.texts[i] for i in rows],
        metrics={name: x[index] for name, x in judged.metrics.items()},
        extra={name: [values[i] for i in rows] for name, values in judged.extra.items()},
    )


def means(judged: Judged, prefix: str) -> dict[str, float]:
    """Return the mean reward, and the means of its parts before their weights, to log.

    {prefix/mean, prefix/PART, prefix/PART/NAME for further numbers}, over the responses that have them; and
    prefix/PART/skipped, the share of responses that a part does not apply to, where there are any.
    """
    values = {f"{prefix}/mean": judged.reward.double().mean().item()}
    values |= _means(judged.parts, prefix)
    for name, x in judged.parts.items():
        if x.isnan().any():
            values[f"{prefix}/{name}/skipped"] = x.isnan().double().mean().item()
    return values | _means(judged.metrics, prefix)


def _means(values: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    """Return the means over the responses that have a number; a column without any has none."""
    logged = {}
    for name, x in values.items():
        if not x.isnan().all():
            logged[f"{prefix}/{name}"] = x.double().nanmean().item()
    return logged
