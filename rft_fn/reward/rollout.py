"""From a rollout to rewards: decode the responses, score them, arrange them by group."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rft_fn import tree
from rft_fn.reward.combine import Score
from rft_fn.types import Rollout

__all__ = ["Judged", "judge", "means", "responses"]

_REMEDY = "judge each rollout with its own prompts, before its rows are joined to others or moved"


class Judged(NamedTuple):
    """A scored rollout."""

    reward: Tensor  # [N, G]
    parts: dict[str, Tensor]  # name -> [N, G], before its weight
    texts: list[str]  # B responses


def responses(rollout: Rollout, tokenizer: Any) -> list[str]:
    """The text of each response, B of them: the tokens in mask, without special tokens. Never the prompt."""
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollout.tokens, rollout.mask)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def judge(
    score: Score, rollout: Rollout, prompts: Sequence[Any], tokenizer: Any, *, part: slice = slice(None)
) -> Judged:
    """The rewards of a rollout, by group: reward[i, j] is that of row i G + j.

    `prompts` are the N `data.Prompt`s behind the rollout, and `rollout.group` says which rows are whose: the
    G rows of prompt 0 first, then those of prompt 1, and so on. So `reward.view(-1)` and `texts` are in the
    order of the rollout's rows, which is what an advantage [N, G] spread over the rows needs. With `part`
    only the groups prompts[part] are judged.

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
    texts = responses(tree.replace(rollout, tokens=rollout.tokens[rows], mask=rollout.mask[rows]), tokenizer)

    # one value a response in each column; the names are those of all prompts, whatever part is judged
    owners = [prompts[i] for i in chosen for _ in range(size)]
    names = dict.fromkeys(name for p in prompts for name in p.columns)
    columns = {name: [p.columns.get(name) for p in owners] for name in names}
    scored = score([p.text for p in owners], texts, columns)
    shape = (len(chosen), size)
    return Judged(scored.total.view(shape), {k: v.view(shape) for k, v in scored.parts.items()}, texts)


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
    """{prefix/mean: ..., prefix/PART: ...}: the mean reward, and that
    of every component before its weight."""
    parts = {f"{prefix}/{name}": part.double().mean().item() for name, part in judged.parts.items()}
    return {f"{prefix}/mean": judged.reward.double().mean().item()} | parts
