"""Prompts with media as vLLM takes them after its own processor.

The trainer's processor has made tensors and expanded placeholders already. vLLM's, which would begin from raw
images and one placeholder for each, is left out: so both sides see the same numbers, and vLLM needs no
packages to read files.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.engine.prompt_media import Shown
from rft_fn.engine.requests import BadRequest
from rft_fn.engine.vllm.surroundings import part
from rft_fn.model.media import placeholders
from rft_fn.model.parts import expected_counts

__all__ = ["Fields", "check_family", "fields_of", "request"]

# where transformers 5 puts what stood beside the head before
NEW_NAMES = ("model.language_model.", "model.visual.", "model.audio_tower.", "model.vision_tower.")

Fields = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""How the tensors of some media are cut into items: vLLM's field of each name."""


def check_family(model: nn.Module) -> None:
    """Raise a ValueError for a model with media that vLLM cannot load.

    It lacks the model, cannot import it, or knows its weights by other names. `model` may be without weights.
    """
    name = type(model).__name__
    line = f"engine vllm: expected a model with media that vLLM can sample from, got {name}"
    found = part("model_executor.models").ModelRegistry.models.get(name)
    if found is None:
        raise ValueError(f"{line}, which it does not have; sample with --engine-type hf")
    try:
        own = found.load_model_cls()
    except ImportError as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{line}, whose module cannot be imported: {said}; sample with --engine-type hf"
        ) from None

    # vLLM reads the files, whose names are older, and later the trainer's names
    names = [own_name for own_name, _ in model.named_parameters()]
    renamed = next((x for x in names if x.startswith(NEW_NAMES)), None)
    if renamed and getattr(own, "hf_to_vllm_mapper", None) is None:
        raise ValueError(
            f"{line}, which has no place for {renamed}: it has no mapper for names of transformers 5; "
            "sample with --engine-type hf"
        )


def fields_of(config: Any) -> Fields:
    """The fields of the model of vLLM's config. ImportError where vLLM's own processor cannot be made."""
    processor = part("multimodal").MULTIMODAL_REGISTRY.create_processor(config)
    return lambda tensors: processor._get_mm_fields_config(tensors, {})


def request(
    model: Any, fields: Fields, ids: Sequence[int], shown: Shown | None, dtype: torch.dtype
) -> dict[str, Any]:
    """vLLM's input of one prompt; its tokens alone where it has no media.

    `model` may be without weights. BadRequest for tensors that vLLM's model does not take.
    """
    if shown is None or shown.tensors is None:
        return {"prompt_token_ids": list(ids)}
    tensors = {name: _typed(x, dtype) for name, x in shown.tensors.items()}
    taken = fields(tensors)
    lost = tensors.keys() - taken.keys()
    if lost:
        raise BadRequest(
            f"media: expected tensors that vLLM's {type(model).__name__} takes ({', '.join(sorted(taken))}), "
            f"got {', '.join(sorted(lost))}; sample with the hf engine"
        )
    items = part("multimodal.inputs").MultiModalKwargsItems.from_hf_inputs(tensors, taken)

    # one hash for each item: vLLM keeps what a tower has made of it, and the cache of a prefix, by them
    whole = _digest(tensors)
    hashes = {kind: [f"{whole}-{kind}-{i}" for i in range(len(own))] for kind, own in items.items()}
    ranges = {kind: _ranges(model, kind, len(own), ids, shown) for kind, own in items.items()}
    return part("inputs.engine").mm_input(list(ids), items, hashes, ranges)


def _typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_floating_point():
        return x.to(dtype)
    return x


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and numbers."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        found.update(x.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _ranges(model: Any, kind: str, items: int, ids: Sequence[int], shown: Shown) -> list[Any]:
    """The places of each of the items of a kind: from its first placeholder to its last."""
    tokens = {token for token, each in placeholders(model.config).items() if each == kind}
    at = [t for t, token in enumerate(ids) if token in tokens and not shown.sampled[t]]
    tensors = shown.tensors or {}
    counts = {name: [1] * items for name in tensors}
    sizes, _ = expected_counts(model, kind, tensors, counts, [len(at) // items] * items)
    if sum(sizes) != len(at):
        raise BadRequest(f"media: expected {sum(sizes)} {kind} placeholders for {items} items, got {len(at)}")
    return [_range(own) for own in _split(at, sizes)]


def _split(at: Sequence[int], sizes: Collection[int]) -> list[list[int]]:
    """The places of each item."""
    found, first = [], 0
    for size in sizes:
        found.append(list(at[first : first + size]))
        first += size
    return found


def _range(at: Sequence[int]) -> Any:
    """The range of one item; what stands between its placeholders (ends of rows, say) is no place."""
    make = part("multimodal.inputs").PlaceholderRange
    length = at[-1] + 1 - at[0]
    if length == len(at):
        return make(offset=at[0], length=length)
    places = torch.zeros(length, dtype=torch.bool)
    places[torch.tensor(at) - at[0]] = True
    return make(offset=at[0], length=length, is_embed=places)
