"""The parts of a model of transformers: decoder, text model, towers, head."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.bounds import SequenceAxis
from rft_fn.model.quantize import is_plain

__all__ = [
    "Parts", "cut_before", "expected_counts", "find", "inside_adapters", "path_of", "text_config",
    "text_model",
]  # fmt: skip


# ---------- the inputs of a text model


_LAST = ("attention_mask", "cache_position", "position_ids", "visual_pos_masks")  # [..., T]
_FEATURES = "deepstack_visual_embeds"  # of some layers, [tokens in visual_pos_masks, D]


def cut_before(text: nn.Module) -> None:
    """Slice the inputs of a text model to this rank's tokens (sequence parallelism)."""
    text.register_forward_pre_hook(_cut, with_kwargs=True)


def _cut(text: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Return the arguments of one forward; ValueError for an unknown one that has all tokens."""
    bounds = inputs.get("rft_bounds")
    if bounds is None or bounds.whole is None:
        return None
    size = bounds.whole.tokens.shape[0]
    each = size // bounds.sequence.size
    start = bounds.sequence.rank * each
    kept = dict(inputs)
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            continue
        if name == "inputs_embeds":
            kept[name] = x[:, start : start + each]
        elif name in _LAST and x.dim() < 4:
            kept[name] = x[..., start : start + each]
        elif size in x.shape:
            _refuse(text, name)
    if isinstance(inputs.get("attention_mask"), dict):
        _refuse(text, "attention_mask")
    if args:
        _refuse(text, "positional arguments")

    # features of visual tokens are told apart only by their number
    if inputs.get(_FEATURES) is not None:
        visual = inputs["visual_pos_masks"]
        first = int(visual[..., :start].sum())
        last = int(visual[..., : start + each].sum())
        kept[_FEATURES] = [x[first:last] for x in inputs[_FEATURES]]
    return args, kept


def _refuse(text: nn.Module, name: str) -> None:
    model = type(text).__name__
    raise ValueError(f"sp_size: expected 1 for {model} with media: it takes {name} of all tokens")


# ---------- the parts of a model of transformers: decoder, text model, towers, head


_TEXT = ("language_model", "text_model")
_TOWERS = {
    "audio_encoder", "audio_model", "audio_tower", "connector", "image_tower", "merger",
    "multi_modal_projector", "speech_encoder", "vision_encoder", "vision_model", "vision_tower", "visual",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The parts of one model: no part is a copy.

    The `text` of a model that only reads is the decoder or inside of it, and there are no towers.
    """

    model: Any  # the model of transformers, inside its adapters if it has some
    decoder: Any  # the part whose output is the hidden states [1, T, D]; adapters stay inside
    text: Any  # the part of the decoder that reads embedded tokens
    towers: tuple[nn.Module, ...]  # the parts that see or hear, and what joins them to the text model
    head: Any  # the layer that makes logits of hidden states, or None
    sequence: SequenceAxis | None = None  # over which the tokens of a pack are split

    @property
    def has_linear_head(self) -> bool:
        """Return whether the head is one matrix, without adapters on it, apart from the decoder."""
        return is_plain(self.head) and self.decoder is not self.model


def find(module: nn.Module) -> Parts:
    """Return the parts of a model, with or without adapters; a `Reader` (see `reader`) keeps its own.

    A module that is not from transformers is its own decoder and has no head; its text model is the part
    called language_model or text_model, else the module itself.
    """
    known = getattr(module, "parts", None)
    if isinstance(known, Parts):
        return known
    model = inside_adapters(module)
    decoder = _decoder(model)
    text = _text(model, decoder)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return Parts(model, decoder, text, _towers(model, decoder, text), head)


def inside_adapters(module: Any) -> Any:
    """Return the model of transformers inside of peft's, or the module itself."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def text_config(module: nn.Module) -> Any:
    """Return the config of a model's text model, which may be nested in the model's."""
    return inside_adapters(module).config.get_text_config()


def text_model(root: nn.Module) -> nn.Module:
    """Return the text model of a model that sees or hears, else the module itself."""
    parts = find(root)
    return parts.text if parts.towers else root


def path_of(part: nn.Module, module: nn.Module) -> str:
    """Return the name of a part inside a module; "" for the module itself, and for a part outside."""
    return next((name for name, m in module.named_modules() if m is part), "")


def _decoder(model: Any) -> Any:
    base = getattr(model, "base_model", model)
    if base is not model:
        return base
    # The name that a class gives is not always that of the attribute (Llama 4): take the one model inside.
    inside = [m for m in model.children() if hasattr(m, "base_model")]
    return inside[0] if len(inside) == 1 else model


def _text(model: Any, decoder: Any) -> Any:
    for name, m in decoder.named_modules():
        if name.rpartition(".")[2] in _TEXT:
            return m
    # A family may have its own rule. It answers with the whole model where it knows of no part.
    if hasattr(model, "get_decoder"):
        found = model.get_decoder()
        if any(m is found for m in decoder.modules()):
            return found
    return decoder


def _towers(model: Any, decoder: Any, text: Any) -> tuple[nn.Module, ...]:
    """Return the parts next to the text model on the way to it, or by the usual names of towers."""
    path = path_of(text, decoder).split(".")
    if path[-1] not in _TEXT:
        return tuple(m for name, m in model.named_modules() if name.rpartition(".")[2] in _TOWERS)
    found = []
    parent = decoder
    for step in path:
        found += [m for name, m in parent.named_children() if name != step]
        parent = parent.get_submodule(step)
    return tuple(m for m in found if any(True for _ in m.parameters()))


# ---------- the number of features that a model makes of each row of media


_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_MASKS = ("feature_attention_mask", "input_features_mask")


def expected_counts(
    model: Any,
    kind: str,
    tensors: Mapping[str, Tensor],
    counts: Mapping[str, Sequence[int]],
    found: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Return (features of each sequence, media of each) of "image", "video" or "audio".

    `tensors` have the rows of all sequences, `counts` their numbers of each sequence, `found` the numbers
    of placeholders. Sizes are read if the model has a rule for them. If nothing else comes with them, rows
    of one tensor have equally many features: as many as most sequences have placeholders for a row. Of
    other rows only it is known that there are some; the model itself compares the sums of a pack.
    """
    names = [name for name, rows in counts.items() if kind_of(name) == kind and any(rows)]
    if not names:
        return [0] * len(found), [0] * len(found)
    # Of an image there may be many patches, but one size.
    media = [min(rows) for rows in zip(*(counts[name] for name in names))]
    sizes = _by_size(model, kind, tensors)
    if sizes is not None:
        name, each = sizes
        return [int(x.sum()) for x in each.split(list(counts[name]))], media

    # Another tensor may make some rows smaller; the mask of pixels does not.
    others = [name for name in names if name != "pixel_attention_mask"]
    ratios = Counter(got / n for got, n in zip(found, media) if got and n)
    if len(others) > 1 or not ratios:
        wanted = [max(got, 1) for got in found]
        return [want * bool(n) for want, n in zip(wanted, media)], media
    most = max(ratios.values())
    usual = min(ratio for ratio, times in ratios.items() if times == most)
    return [max(round(usual), 1) * n for n in media], media


def kind_of(name: str) -> str:
    """Return "image", "video" or "audio", by the processor's name of a tensor."""
    if "video" in name or "second" in name:
        return "video"
    if name.startswith(("audio", "feature", "input")):
        return "audio"
    return "image"


def _by_size(model: Any, kind: str, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """Return (the name of the rows, features [rows]); None if the model has no rule for them."""
    grid = _GRIDS.get(kind, "")
    side = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None)
    if grid in tensors and side:
        return grid, tensors[grid].cpu().prod(-1) // side**2
    if kind != "audio":
        return None
    for name in _MASKS:
        for tower in find(model).towers:
            rule = getattr(tower, "_get_feat_extract_output_lengths", None)
            if name in tensors and rule is not None:
                lengths = rule(tensors[name].cpu().sum(-1))
                if isinstance(lengths, tuple):  # of what goes into the last layer, and of what leaves it
                    lengths = lengths[-1]
                return name, torch.as_tensor(lengths)
    return None
