"""Requests to an engine, and the rollout that answers them: shared by all engines."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import repeat
from torch import nn

from rft_fn.types import Rollout, Sampling

__all__ = ["BadRequest", "Response", "assemble", "check", "end_tokens", "token_ids"]


class BadRequest(ValueError):
    """A request that an engine refuses before it has done anything."""


class Response(NamedTuple):
    """One sampled response."""

    tokens: list[int]
    logp: list[float]  # of each token
    ended: bool  # by an end token or a stop text; False where max_new cut it off


def token_ids(prompts: Sequence[Any]) -> list[list[int]]:
    """The token ids of each prompt: of a list itself, of an object its `.ids`."""
    return [list(getattr(p, "ids", p)) for p in prompts]


def check(
    prompts: Sequence[Sequence[int]], keys: Sequence[int], n: int, sampling: Sampling, window: int | None
) -> None:
    """BadRequest unless there is a key for each prompt and every response fits behind its prompt.

    `window` is the most tokens that the model reads, None without a limit.
    """
    if not prompts or len(prompts) != len(keys) or n < 1:
        raise BadRequest(
            f"prompts: expected one or more, a key for each, n >= 1; got {len(prompts)}, {len(keys)}, {n}"
        )

    # one bad prompt is named by its number; a response that does not fit would be cut off in silence
    for i, prompt in enumerate(prompts):
        if any(isinstance(token, str) for token in prompt):
            raise BadRequest(
                f"prompts: expected token ids, got text in prompt {i}; encode it with the tokenizer"
            )
        if not prompt:
            raise BadRequest(f"prompts: expected at least one token, got none in prompt {i}")
        if window and len(prompt) + sampling.max_new > window:
            raise BadRequest(
                f"prompts: expected prompt + max_new <= the model's window of {window} tokens, got "
                f"{len(prompt)} + {sampling.max_new} in prompt {i}; lower max_new, or "
                "drop long prompts (max_prompt)"
            )


def assemble(
    prompts: Sequence[Sequence[int]], responses: Sequence[Response], *, pad: int, version: int
) -> Rollout:
    """The Rollout [B, S] of B = N G responses, the G responses to each of N prompts side by side."""
    count = len(prompts)
    group = repeat(torch.arange(count), "n -> (n g)", g=len(responses) // count)
    owners = [prompts[i] for i in group.tolist()]
    length = torch.tensor([len(p) + len(r.tokens) for p, r in zip(owners, responses, strict=True)])

    # right-padded; log-probs stay 0 on prompts and padding
    tokens = torch.full((len(responses), int(length.max())), pad)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logp = torch.zeros(tokens.shape)
    for b, (prompt, response) in enumerate(zip(owners, responses, strict=True)):
        sampled = slice(len(prompt), len(prompt) + len(response.tokens))
        tokens[b, : sampled.start] = torch.tensor(prompt)
        tokens[b, sampled] = torch.tensor(response.tokens)
        mask[b, sampled] = True
        logp[b, sampled] = torch.tensor(response.logp)

    return Rollout(
        tokens=tokens,
        mask=mask,
        logp=logp,
        length=length,
        truncated=torch.tensor([not response.ended for response in responses]),
        group=group,
        version=torch.full((len(responses),), version),
    )


def end_tokens(lm: nn.Module, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's, and those of the model's generation config.

    Chat models name several there.
    """
    named = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    ends = [tokenizer.eos_token_id]
    if isinstance(named, (list, tuple)):
        ends += named
    else:
        ends.append(named)
    return frozenset(token for token in ends if token is not None)
