"""Reads and checks prompts with media, for all engines, and puts them into a rollout."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn.engine.requests import BadPrompt, token_ids
from rft_fn.model.media_inputs import media_inputs, placeholders
from rft_fn.rollout import Prefix, prefixes
from rft_fn.types import Media, Packed, Rollout

__all__ = [
    "PromptMedia", "Sent", "as_pack", "check", "of_rows", "read", "tensors", "text", "text_ids", "to_send",
]  # fmt: skip


class PromptMedia(NamedTuple):
    """The media of one prompt, and which of its tokens are text."""

    tensors: Mapping[str, Tensor] | None  # by the processor's names; None for a prompt without media
    sampled: list[bool]  # of each token, whether the policy sampled it: that is text whatever it says


def read(
    prompts: Sequence[Any], ids: Sequence[Sequence[int]], start: Sequence[int] | None = None
) -> list[PromptMedia]:
    """Read the media of each prompt.

    An attribute `sampled` says which of its tokens the policy has sampled (see `rollout.Prefix`). Without it
    they are the last `start` ones, of the prompt's first row. BadPrompt for media that cannot be read.
    """
    spent = [0] * len(prompts)
    if start is not None and prompts:
        spent = [int(x) for x in start[:: len(start) // len(prompts)]]
    media = []
    for i, (prompt, tokens, k) in enumerate(zip(prompts, ids, spent, strict=True)):
        sampled = getattr(prompt, "sampled", None)
        if sampled is None:
            sampled = [t >= len(tokens) - k for t in range(len(tokens))]
        media.append(PromptMedia(_tensors_of(i, prompt), list(sampled)))
    return media


def _tensors_of(number: int, prompt: Any) -> Mapping[str, Tensor] | None:
    """Return the media of the prompt of that number. BadPrompt where they cannot be read after all."""
    try:
        return getattr(prompt, "media", None) or None
    except (ValueError, OSError) as error:
        raise BadPrompt(number, "media that can be read", " ".join(str(error).split())) from None


def check(lm: Any, ids: Sequence[Sequence[int]], media: Sequence[PromptMedia]) -> None:
    """Raise BadPrompt for media that a model has no place for, and for placeholders without media.

    Both are counted where the model has a rule for it. `lm` may be without weights.
    """
    places = placeholders(lm.config)
    for i, (tokens, given) in enumerate(zip(ids, media, strict=True)):
        if given.tensors is None:
            placed = next((token for token in tokens if token in places), None)
            if placed is not None:
                raise BadPrompt(i, "text alone without media", f"{places[placed]} placeholder {placed}")
            continue
        names = ", ".join(given.tensors)
        if not places:
            raise BadPrompt(i, "text alone for a text model", f"media ({names})")
        if not any(token in places for token in tokens):
            raise BadPrompt(i, f"placeholders for its media ({names})", "none")
        try:
            media_inputs(lm, as_pack([tokens], [given]))
        except ValueError as error:
            reason = str(error).removeprefix("media: sequence 0 of the pack: ")
            raise BadPrompt(i, "the placeholders of its media", f"others ({reason})") from None


def as_pack(ids: Sequence[Sequence[int]], media: Sequence[PromptMedia]) -> Packed:
    """Pack prompts one after the other, as inputs of a model without labels and weights."""
    size = [len(prompt) for prompt in ids]
    flat = [token for prompt in ids for token in prompt]
    tokens = torch.tensor(flat, dtype=torch.long)
    sampled = torch.tensor([mark for x in media for mark in x.sampled], dtype=torch.bool)
    position = torch.cat([torch.arange(n) for n in size])
    none = torch.zeros(len(flat))
    return Packed(
        tokens=tokens,
        target=tokens.roll(-1),
        pos=position,
        seq=torch.arange(len(size)).repeat_interleave(torch.tensor(size)),
        # of a label: where the token after an input was sampled
        mask=sampled.roll(-1) & (position.roll(-1) > 0),
        old_logp=none,
        adv=none,
        w=none,
        media=Media.of_prompts(tensors(media)),
        num_seqs=len(size),
    )


def text_ids(prompts: Sequence[Any], tokenizer: Any, name: str) -> list[list[int]]:
    """Return the token ids of prompts for servers that get only tokens. BadPrompt for one with media."""
    for i, prompt in enumerate(prompts):
        media = _tensors_of(i, prompt)
        if media is not None:
            advice = f"; {name} servers get tokens alone, sample with hf or vllm"
            raise BadPrompt(i, "text alone", f"media ({', '.join(media)})", advice)
    return token_ids(prompts, tokenizer)


def text(ids: Sequence[Sequence[int]]) -> list[PromptMedia]:
    """Return the records of prompts without media, in which nothing was sampled."""
    return [PromptMedia(None, [False] * len(prompt)) for prompt in ids]


def of_rows(rollout: Rollout, read: Tensor) -> list[PromptMedia]:
    """Return the media of the first `read[b]` tokens of each row. ValueError if another process has them."""
    return [
        PromptMedia(row.media if isinstance(row, Prefix) else None, rollout.mask[b, : len(row)].tolist())
        for b, row in enumerate(prefixes(rollout, read))
    ]


def tensors(media: Sequence[PromptMedia]) -> list[Mapping[str, Tensor] | None]:
    """Return the tensors of each prompt, None for one without media."""
    return [x.tensors for x in media]


class Sent(NamedTuple):
    """A prompt with media as it travels to another process."""

    ids: list[int]
    media: Mapping[str, Tensor]
    sampled: list[bool] | None  # None: the request's `start` says it


def to_send(prompts: Sequence[Any]) -> list[Any]:
    """Return prompts without what engines do not read: token ids, or a `Sent` for one with media.

    Prompts that share their media share them here too, so that pickle writes them once. BadPrompt for media
    that cannot be read.
    """
    copies: dict[int, tuple[Any, Mapping[str, Tensor]]] = {}
    sent = []
    for i, prompt in enumerate(prompts):
        ids = getattr(prompt, "ids", prompt)
        media = _tensors_of(i, prompt)
        if media is not None:
            # a view would take all of the memory that it looks into with it
            if id(media) not in copies:
                copies[id(media)] = media, {name: x.clone() for name, x in media.items()}
            ids = Sent(list(ids), copies[id(media)][1], getattr(prompt, "sampled", None))
        sent.append(ids)
    return sent
