"""Prompts with media, as all engines take them: read, checked, and put into a rollout."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn.engine.requests import BadPrompt, token_ids
from rft_fn.model.media_inputs import media_inputs, placeholders
from rft_fn.rollout import prefixes
from rft_fn.types import Media, Packed, Rollout

__all__ = [
    "Sent", "Shown", "as_pack", "check", "of_rows", "shown", "tensors", "text", "text_alone", "to_send",
]  # fmt: skip


class Shown(NamedTuple):
    """What a model sees and hears of one prompt."""

    tensors: Mapping[str, Tensor] | None  # by the processor's names; None for a prompt without media
    sampled: list[bool]  # of each of its tokens, whether the policy sampled it: that is text whatever it says


def shown(
    prompts: Sequence[Any], ids: Sequence[Sequence[int]], start: Sequence[int] | None = None
) -> list[Shown]:
    """The media of each prompt.

    An attribute `sampled` says which of its tokens the policy has sampled (see `rollout.Prefix`). Without it
    they are the last `start` ones, of the prompt's first row. BadPrompt for media that cannot be read.
    """
    spent = [0] * len(prompts)
    if start is not None and prompts:
        n = len(start) // len(prompts)
        spent = [int(x) for x in start[::n]]
    found = []
    for i, (prompt, own, k) in enumerate(zip(prompts, ids, spent, strict=True)):
        sampled = getattr(prompt, "sampled", None)
        if sampled is None:
            sampled = [t >= len(own) - k for t in range(len(own))]
        found.append(Shown(_read(i, prompt), list(sampled)))
    return found


def _read(number: int, prompt: Any) -> Mapping[str, Tensor] | None:
    """The media of the prompt of that number. BadPrompt where they cannot be read after all."""
    try:
        return getattr(prompt, "media", None) or None
    except (ValueError, OSError) as error:
        raise BadPrompt(number, "media that can be read", " ".join(str(error).split())) from None


def check(lm: Any, ids: Sequence[Sequence[int]], shown: Sequence[Shown]) -> None:
    """BadPrompt for media that a model has no place for, and for placeholders without media.

    Both are counted where the model has a rule for it. `lm` may be without weights.
    """
    places = placeholders(lm.config)
    for i, (own, media) in enumerate(zip(ids, shown, strict=True)):
        if media.tensors is not None:
            _check_media(lm, i, own, media, places)
        else:
            _check_text(i, own, places)


def _check_text(number: int, ids: Sequence[int], places: Mapping[int, str]) -> None:
    """BadPrompt for a placeholder in a prompt without media, of which a model would make something."""
    found = next((token for token in ids if token in places), None)
    if found is not None:
        raise BadPrompt(number, "text alone without media", f"{places[found]} placeholder {found}")


def _check_media(lm: Any, number: int, ids: Sequence[int], media: Shown, places: Mapping[int, str]) -> None:
    """BadPrompt unless a prompt has placeholders for its media, and none beside them."""
    assert media.tensors is not None
    names = ", ".join(media.tensors)
    if not places:
        raise BadPrompt(number, "text alone for a text model", f"media ({names})")
    if not any(token in places for token in ids):
        raise BadPrompt(number, f"placeholders for its media ({names})", "none")
    try:
        media_inputs(lm, as_pack([ids], [media]))
    except ValueError as error:
        found = str(error).removeprefix("media: sequence 0 of the pack: ")
        raise BadPrompt(number, "the placeholders of its media", f"others ({found})") from None


def as_pack(ids: Sequence[Sequence[int]], shown: Sequence[Shown]) -> Packed:
    """Prompts one after the other, as inputs of a model: labels and weights are none."""
    size = [len(own) for own in ids]
    flat = [token for own in ids for token in own]
    tokens = torch.tensor(flat, dtype=torch.long)
    sampled = torch.tensor([mark for own in shown for mark in own.sampled], dtype=torch.bool)
    position = torch.cat([torch.arange(n) for n in size])
    none = torch.zeros(len(flat))
    return Packed(
        tokens=tokens,
        target=tokens.roll(-1),
        pos=position,
        seq=torch.arange(len(size)).repeat_interleave(torch.tensor(size)),
        # of a label: where the token behind an input was sampled
        mask=sampled.roll(-1) & (position.roll(-1) > 0),
        old_logp=none,
        adv=none,
        w=none,
        media=Media.of_prompts(tensors(shown)),
        num_seqs=len(size),
    )


def text_alone(prompts: Sequence[Any], tokenizer: Any, name: str) -> list[list[int]]:
    """The token ids of prompts for servers that get tokens alone. BadPrompt for the first one with media."""
    for i, prompt in enumerate(prompts):
        own = _read(i, prompt)
        if own is not None:
            advice = f"; {name} servers get tokens alone, sample with hf or vllm"
            raise BadPrompt(i, "text alone", f"media ({', '.join(own)})", advice)
    return token_ids(prompts, tokenizer)


def text(ids: Sequence[Sequence[int]]) -> list[Shown]:
    """Of prompts without media, none of which was sampled."""
    return [Shown(None, [False] * len(own)) for own in ids]


def of_rows(rollout: Rollout, read: Tensor) -> list[Shown]:
    """Of the first `read[b]` tokens of each row. ValueError for media that another process holds."""
    rows = prefixes(rollout, read)
    return [
        Shown(getattr(row, "media", None), rollout.mask[b, : len(row)].tolist()) for b, row in enumerate(rows)
    ]


def tensors(shown: Sequence[Shown]) -> list[Mapping[str, Tensor] | None]:
    """The tensors of each prompt, None for one without media."""
    return [media.tensors for media in shown]


class Sent(NamedTuple):
    """A prompt with media as it travels to another process."""

    ids: list[int]
    media: Mapping[str, Tensor]
    sampled: list[bool] | None  # None: the request's `start` says it


def to_send(prompts: Sequence[Any]) -> list[Any]:
    """The prompts without what engines do not read: token ids alone, or a `Sent` for one with media.

    Prompts that share their media share them here too, so that pickle writes them once. BadPrompt for media
    that cannot be read.
    """
    copies: dict[int, tuple[Any, Mapping[str, Tensor]]] = {}
    found = []
    for i, prompt in enumerate(prompts):
        ids = getattr(prompt, "ids", prompt)
        own = _read(i, prompt)
        if own is not None:
            # a view would take all of the memory that it looks into with it
            if id(own) not in copies:
                copies[id(own)] = own, {name: x.clone() for name, x in own.items()}
            ids = Sent(list(ids), copies[id(own)][1], getattr(prompt, "sampled", None))
        found.append(ids)
    return found
