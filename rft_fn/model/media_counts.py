"""The number of features that a model makes of each row of media."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn.model.parts import find

__all__ = ["expected_counts"]


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
