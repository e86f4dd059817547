"""The inputs of models that see or hear: tensors of media, types of tokens, and positions.

A placeholder is a token that the model replaces by a feature of an image, a video or an audio. The forward
of a model tells which keywords it takes, its config which tokens are placeholders, and `_FAMILIES` the rest.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rft_fn.model.media_counts import expected_counts
from rft_fn.model.parts import find, inside_adapters
from rft_fn.model.placeholders import TYPES, placeholders, token_types
from rft_fn.types import Packed

__all__ = ["described", "media_inputs", "positions"]


# Names of one thing: the time between two frames of a video that the model sees, in seconds.
_SECONDS = ("second_per_grid_ts", "video_second_per_grid", "second_per_grids")


class _Family(NamedTuple):
    """What a family needs that neither its forward nor its config tells."""

    leading: bool = False  # tensors of images take one dimension more, of sequences
    # Types of tokens tell the prompt (0), which sees itself both ways, from the rest; positions start at 1.
    prefix: bool = False


_FAMILIES = {
    "idefics2": _Family(leading=True),
    "idefics3": _Family(leading=True),
    "paligemma": _Family(prefix=True),
    "smolvlm": _Family(leading=True),
}


def _family(model: Any) -> _Family:
    return _FAMILIES.get(model.config.model_type, _Family())


@torch.no_grad()
def positions(lm: nn.Module, ids: Tensor, media: Mapping[str, Tensor] | None) -> Tensor:
    """Return the positions [axes, T] of one sequence, by the model's own rule.

    `media` are the rows that the sequence owns. Three axes (time, height, width) if the model has them,
    else one. The rule takes every placeholder among `ids` [T] for media.
    """
    owner = _rule_of(lm)
    if owner is None:
        return torch.arange(ids.shape[0], device=ids.device)[None]

    # On the CPU, for the rule looks at each token in turn.
    own = ids.cpu()[None]
    small = _small(media or {})
    given = small | {
        "attention_mask": torch.ones_like(own),
        "mm_token_type_ids": token_types(own, placeholders(inside_adapters(lm).config)),
    }
    for name in _SECONDS:
        if name in small:
            given |= dict.fromkeys(_SECONDS, small[name])
    if "feature_attention_mask" in small:
        given["audio_seqlens"] = small["feature_attention_mask"].sum(-1)

    takes = inspect.signature(owner.get_rope_index).parameters
    found, _ = owner.get_rope_index(own, **{name: x for name, x in given.items() if name in takes})
    return found[:, 0].to(ids.device)


def _small(media: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sizes and times of media, which rules of positions read, on the CPU; no pixels."""
    found = {}
    for name, x in media.items():
        counts = name in _SECONDS or not x.is_floating_point()
        if x.shape[0] and x.dim() <= 2 and (counts or name == "feature_attention_mask"):
            found[name] = x.cpu()
    return found


def _rule_of(lm: nn.Module) -> Any:
    """Return the part of a model that knows the positions of media; None if it takes those of text."""
    return next((m for m in lm.modules() if hasattr(m, "get_rope_index")), None)


class _Sequences(NamedTuple):
    """The sequences of a pack, without its padding, and the media of each."""

    ids: list[Tensor]  # K x [T_k]
    sampled: list[Tensor]  # K x [T_k] bool, of the policy
    tensors: dict[str, Tensor]  # rows of all sequences, in their order
    counts: dict[str, list[int]]  # name -> K numbers of rows

    def media(self, k: int) -> dict[str, Tensor]:
        """Return the rows of sequence k."""
        return {name: x.split(self.counts[name])[k] for name, x in self.tensors.items()}


def media_inputs(lm: nn.Module, pack: Packed, *, blind: bool = False) -> dict[str, Any]:
    """Return the keyword arguments with which a model that sees or hears takes the media of a pack.

    The tensors that the pack has rows of, types of tokens, and positions [1 + axes, 1, T], the first of
    them those of text. Most models need none for a pack without media. With `blind` the pack has
    placeholders without media, for which there are types and axes all the same. ValueError for a sequence
    with other placeholders than media, and for tensors that the model does not take.
    """
    model = inside_adapters(lm)
    places = placeholders(model.config)
    sequences = _sequences(pack)
    takes = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = dict(_tensors(model, sequences, takes))
    if not blind:
        _check_counts(model, sequences, places)
    if _family(model).prefix:
        suffix = [sampled.cumsum(0).clamp(max=1) for sampled in sequences.sampled]
        inputs["token_type_ids"] = _padded(torch.cat(suffix), pack, value=1)[None]
        inputs["position_ids"] = pack.pos[None] + 1
    if not inputs and not blind:
        return inputs

    # A token that the policy sampled is text, whatever it says.
    read = [_read(ids, sampled, places) for ids, sampled in zip(sequences.ids, sequences.sampled)]
    types = _padded(torch.cat([token_types(ids, places) for ids in read]), pack)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes:
            inputs.setdefault(name, types[None])
    if _rule_of(model) is None:
        return inputs
    if blind:
        read = [torch.zeros_like(ids) for ids in read]
    axes = _padded(torch.cat(_axes(model, read, sequences), -1), pack)
    inputs["position_ids"] = torch.cat([pack.pos[None], axes])[:, None]
    return inputs


def _axes(model: Any, read: list[Tensor], sequences: _Sequences) -> list[Tensor]:
    """Return the positions [axes, T_k] of each sequence, computed once for sequences that are alike."""
    known: dict[str, Tensor] = {}
    own = []
    for k, ids in enumerate(read):
        # Samples of one prompt differ in what was sampled, which is 0 here; the rule reads sizes, no pixels.
        small = _small(sequences.media(k))
        key = (ids.tolist(), {name: x.tolist() for name, x in small.items()})
        if repr(key) not in known:
            known[repr(key)] = positions(model, ids, small)
        own.append(known[repr(key)])
    return own


def _tensors(model: Any, sequences: _Sequences, takes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a pack by the names that a model takes. ValueError for others."""
    found = {}
    for name, x in sequences.tensors.items():
        if not x.shape[0]:
            continue
        if name not in takes and (name not in _SECONDS or _rule_of(model) is None):
            raise ValueError(f"media: expected tensors that {type(model).__name__} takes, got {name}")
        if name in takes:
            x = x.to(_dtype(model)) if x.is_floating_point() else x
            found[name] = x[None] if _family(model).leading else x

    # How many images each sequence has decides how they are cut.
    if "batch_num_images" in takes and "image_sizes" in found:
        owned = [n for n in sequences.counts["image_sizes"] if n]
        found["batch_num_images"] = torch.tensor(owned, device=found["image_sizes"].device)
    return found


def _sequences(pack: Packed) -> _Sequences:
    # On the CPU, where each token is looked at in turn. Only padding is at 0 inside of a sequence; a row that
    # the pack borrows counts as padding elsewhere, but the model must see its media.
    tokens, seq, pos, mask = (x.cpu() for x in (pack.tokens, pack.seq, pack.pos, pack.mask))
    first = torch.ones_like(mask)
    first[1:] = seq[1:] != seq[:-1]
    size = int((first | (pos > 0)).sum())
    tokens, seq, pos, mask = tokens[:size], seq[:size], pos[:size], mask[:size]
    sizes = torch.bincount(seq, minlength=pack.num_seqs).tolist()
    # The mask is about targets, so an input was sampled where the one before it is in the mask.
    sampled = torch.cat([mask.new_zeros(1), mask[:-1]]) & (pos > 0)
    media = pack.media
    tensors: dict[str, Tensor] = {} if media is None else media.sequences()
    counts = {} if media is None else {name: media.count(name).tolist() for name in tensors}
    return _Sequences(list(tokens.split(sizes)), list(sampled.split(sizes)), tensors, counts)


def _read(ids: Tensor, sampled: Tensor, places: Mapping[int, str]) -> Tensor:
    """Return the tokens of a sequence, 0 if sampled; a prompt that is trained (with placeholders) whole."""
    if bool((sampled & (token_types(ids, places) > 0)).any()):
        return ids
    return torch.where(sampled, 0, ids)


def _padded(x: Tensor, pack: Packed, value: int = 0) -> Tensor:
    """Pad x of all sequences with `value`, on the device of the pack."""
    return pad(x, (0, len(pack.tokens) - x.shape[-1]), value=value).to(pack.tokens.device)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the type in which the towers of a model compute; weights of few bits have none."""
    for part in (*find(model).towers, model):
        for p in part.parameters():
            if p.is_floating_point():
                return p.dtype
    return torch.get_default_dtype()


def _check_counts(model: Any, sequences: _Sequences, places: Mapping[int, str]) -> None:
    """Raise ValueError for a sequence with more or fewer placeholders than features of media."""
    types = [token_types(ids, places) for ids in sequences.ids]
    for kind, number in TYPES.items():
        found = [int((each == number).sum()) for each in types]
        wanted, rows = expected_counts(model, kind, sequences.tensors, sequences.counts, found)
        for k, (got, want) in enumerate(zip(found, wanted)):
            if got == want:
                continue
            sampled = int(((types[k] == number) & sequences.sampled[k]).sum())
            token = next((i for i, each in places.items() if each == kind), None)
            raise ValueError(
                f"media: sequence {k} of the pack: expected {want} {kind} placeholders (token {token}) "
                f"for its {rows[k]} {kind}s, got {got}, {sampled} of them sampled"
            )


def described(lm: nn.Module, pack: Packed) -> str:
    """Return the placeholders and the media of each sequence of a pack, in words."""
    model = inside_adapters(lm)
    sequences = _sequences(pack)
    types = [token_types(ids, placeholders(model.config)) for ids in sequences.ids]
    words = []
    for kind, number in TYPES.items():
        found = [int((each == number).sum()) for each in types]
        rows = expected_counts(model, kind, sequences.tensors, sequences.counts, found)[1]
        for k, (got, n) in enumerate(zip(found, rows)):
            if got or n:
                words.append(f"sequence {k} of the pack: {got} {kind} placeholders for {n} {kind}s")
    return ", ".join(words)
