"""From a rollout to rewards: decode the responses, score them, arrange them by group."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.reward.combine import Score
from rft_fn.reward.convention import TrainerState, as_messages, taken
from rft_fn.types import Rollout

__all__ = ["Judged", "concat", "judge", "judge_rows", "means", "responses", "select"]

_REMEDY = "judge each rollout with its own prompts, before its rows are joined to others or moved"


class Judged(NamedTuple):
    """A scored rollout."""

    reward: Tensor  # [N, G]
    parts: dict[str, Tensor]  # name -> [N, G], before its weight; NaN where a part does not apply
    texts: list[str]  # B responses
    # PART/NAME -> [N, G]: further numbers, NaN where there is none; PART/NAME -> B: values to be read
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  never written to
    extra: dict[str, list[Any]] = {}  # noqa: RUF012


def responses(rollout: Rollout, tokenizer: Any) -> list[str]:
    """The text of each response, B of them: the tokens in mask, without special tokens. Never the prompt."""
    return tokenizer.batch_decode(_ids(rollout), skip_special_tokens=True)


def _ids(rollout: Rollout, rows: slice = slice(None)) -> list[list[int]]:
    """The tokens of each response."""
    pairs = zip(rollout.tokens[rows], rollout.mask[rows], strict=True)
    return [tokens[mask].tolist() for tokens, mask in pairs]


def judge(
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    part: slice = slice(None),
    state: TrainerState | None = None,
) -> Judged:
    """The rewards of a rollout, by group: reward[i, j] is that of row i G + j.

    `prompts` are the N `data.Prompt`s behind the rollout, and `rollout.group` says which rows are whose: the
    G rows of prompt 0 first, then those of prompt 1, and so on. So `reward.view(-1)` and `texts` are in the
    order of the rollout's rows, which is what an advantage [N, G] spread over the rows needs. With `part`
    only the groups prompts[part] are judged.

    A prompt that was made of messages is given to the rewards as messages, and its responses too. `state` is
    their `trainer_state`.

    ValueError for rows in another order (nothing is reordered: `reward` could then not be spread over the
    rows), for groups of different sizes, for more or fewer groups than prompts, and for prompts without text
    and columns.
    """
    for p in prompts:
        if not (hasattr(p, "text") and hasattr(p, "columns")):
            raise ValueError(
                f"prompts: expected data.Prompt with text and columns, got {type(p).__name__}; token ids "
                "alone say nothing to a reward: make prompts with rft_fn.data.from_rows or from_task"
            )
    size = _group_size(rollout.group, len(prompts))
    chosen = range(len(prompts))[part]
    rows = slice(chosen.start * size, chosen.stop * size)
    ids = _ids(rollout, rows)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)

    # one value a response in each column; the names are those of all prompts, whatever part is judged
    owners = [prompts[i] for i in chosen for _ in range(size)]
    names = dict.fromkeys(name for p in prompts for name in p.columns)
    columns = {name: [p.columns.get(name) for p in owners] for name in names}

    # in the form of the data
    asked = [p.text if p.messages is None else list(p.messages) for p in owners]
    forms = zip(owners, texts, strict=True)
    answered = [t if p.messages is None else as_messages(t, "assistant") for p, t in forms]
    read = [tokenizer.decode(prompts[i].ids) for i in chosen]
    given = {"completion_ids": ids, "trainer_state": state}
    given["prompt_texts"] = [t for t in read for _ in range(size)]
    scored = score(asked, answered, columns, **taken(score, given))

    shape = (len(chosen), size)
    parts = {name: x.view(shape) for name, x in scored.parts.items()}
    metrics = {name: x.view(shape) for name, x in scored.metrics.items()}
    return Judged(scored.total.view(shape), parts, texts, metrics, scored.extra)


def judge_rows(
    score: Score,
    rollout: Rollout,
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    state: TrainerState | None = None,
) -> Tensor:
    """The reward of each row [B]: rows in any order, groups of any size.

    `rollout.group[b]` is the prompt, out of `prompts`, that row b answers. Otherwise as `judge`.
    """
    alone = tree.replace(rollout, group=torch.arange(len(rollout.group)))
    owners = [prompts[g] for g in rollout.group.tolist()]
    return judge(score, alone, owners, tokenizer, state=state).reward.flatten()


def concat(parts: Sequence[Judged]) -> Judged:
    """The groups of all parts, in order. A metric that a part does not have is NaN there, a text None."""
    names = dict.fromkeys(name for x in parts for name in x.metrics)
    extras = dict.fromkeys(name for x in parts for name in x.extra)
    absent = [torch.full_like(x.reward, math.nan) for x in parts]
    pairs = list(zip(parts, absent, strict=True))
    return Judged(
        reward=torch.cat([x.reward for x in parts]),
        parts={name: torch.cat([x.parts[name] for x in parts]) for name in parts[0].parts},
        texts=[text for x in parts for text in x.texts],
        metrics={name: torch.cat([x.metrics.get(name, none) for x, none in pairs]) for name in names},
        extra={name: [v for x in parts for v in x.extra.get(name, [None] * len(x.texts))] for name in extras},
    )


def select(judged: Judged, groups: Sequence[int]) -> Judged:
    """Those groups, in that order."""
    size = judged.reward.shape[1]
    index = torch.tensor(list(groups), dtype=torch.long)
    rows = [g * size + i for g in groups for i in range(size)]
    return Judged(
        reward=judged.reward[index],
        parts={name: x[index] for name, x in judged.parts.items()},
        texts=[judged.texts[i] for i in rows],
        metrics={name: x[index] for name, x in judged.metrics.items()},
        extra={name: [values[i] for i in rows] for name, values in judged.extra.items()},
    )


def _group_size(group: Tensor, count: int) -> int:
    """G of `count` groups of G rows, one after the other. ValueError that names the group which is not so."""
    if not count:
        raise ValueError("prompts: expected at least one, got none")
    rows = group.tolist()
    for row, g in enumerate(rows):
        if not 0 <= g < count:
            raise ValueError(
                f"rollout.group: expected 0 to {count - 1} for {count} prompts, got {g} in row {row}; "
                f"{_REMEDY}"
            )
    sizes = [0] * count
    for g in rows:
        sizes[g] += 1
    for g, size in enumerate(sizes):
        if size != sizes[0] or not size:
            raise ValueError(
                f"rollout.group: expected as many rows of each of {count} groups, got {sizes[0]} of group 0 "
                f"and {size} of group {g}; {_REMEDY}"
            )
    for row, g in enumerate(rows):
        if g != row // sizes[0]:
            raise ValueError(
                f"rollout.group: expected the rows of group {row // sizes[0]} together, {sizes[0]} of them, "
                f"got group {g} in row {row}; {_REMEDY}"
            )
    return sizes[0]


def means(judged: Judged, prefix: str) -> dict[str, float]:
    """The mean reward, and those of its parts before their weights, to log.

    {prefix/mean, prefix/PART, prefix/PART/NAME for further numbers}, over the responses that have them; and
    prefix/PART/skipped, the share of responses that a part does not apply to, where there are any.
    """
    found = {f"{prefix}/mean": judged.reward.double().mean().item()}
    found |= _means(judged.parts, prefix)
    for name, x in judged.parts.items():
        if x.isnan().any():
            found[f"{prefix}/{name}/skipped"] = x.isnan().double().mean().item()
    return found | _means(judged.metrics, prefix)


def _means(values: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    """The means over the responses that have a number."""
    there = {name: x for name, x in values.items() if not x.isnan().all()}
    return {f"{prefix}/{name}": x.double().nanmean().item() for name, x in there.items()}
