"""From a rollout to rewards: decode the responses, score them, arrange them by group."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rft_fn.reward.combine import Score
from rft_fn.types import Rollout

__all__ = ["Judged", "judge", "means", "responses"]


class Judged(NamedTuple):
    """A scored rollout."""

    reward: Tensor  # [N, G]
    parts: dict[str, Tensor]  # name -> [N, G], before its weight
    texts: list[str]  # B responses


def responses(rollout: Rollout, tokenizer: Any) -> list[str]:
    """The text of each response, B of them: the tokens in mask, without special tokens. Never the prompt."""
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollout.tokens, rollout.mask)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def judge(score: Score, rollout: Rollout, prompts: Sequence[Any], tokenizer: Any) -> Judged:
    """Score every response of a rollout. `prompts` are the N `data.Prompt`s behind
    it, in the order of `rollout.group`. ValueError unless every prompt has as many responses."""
    if len(rollout.tokens) % len(prompts):
        raise ValueError(
            f"rollout: expected a multiple of the {len(prompts)} prompts, got {len(rollout.tokens)} rows"
        )
    rows = [prompts[g] for g in rollout.group.tolist()]
    columns: Mapping[str, list] = {name: [p.columns.get(name) for p in rows] for name in prompts[0].columns}
    texts = responses(rollout, tokenizer)
    scored = score([p.text for p in rows], texts, columns)
    shape = (len(prompts), -1)
    return Judged(scored.total.view(shape), {k: v.view(shape) for k, v in scored.parts.items()}, texts)


def means(judged: Judged, prefix: str) -> dict[str, float]:
    """{prefix/mean: ..., prefix/PART: ...}: the mean reward, and that
    of every component before its weight."""
    parts = {f"{prefix}/{name}": part.double().mean().item() for name, part in judged.parts.items()}
    return {f"{prefix}/mean": judged.reward.double().mean().item()} | parts
