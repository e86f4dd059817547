"""The number of features that a model makes of each row of media."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn.model.parts import find

__all__ = ["expected_counts"]

# The tensors that tell how large an image, a video or an audio is, else those that hold it.
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_SIZES = {
    "image": ("image_sizes", "spatial_shapes", "target_sizes", "image_grids"),
    "video": ("image_sizes_videos", "target_sizes_videos", "video_grids"),
    "audio": ("audio_embed_sizes",),
}
_MASKS = ("feature_attention_mask", "input_features_mask")
_HELD = {
    "image": ("pixel_values", "image_pixel_values"),
    "video": ("pixel_values_videos",),
    "audio": ("input_features", "input_values", "audio_input_features"),
}


def expected_counts(
    model: Any,
    kind: str,
    tensors: Mapping[str, Tensor],
    counts: Mapping[str, Sequence[int]],
    found: Sequence[int],
) -> tuple[list[int], list[int]]:
    """(features of each sequence, rows of media of each) of "image", "video" or "audio".

    `tensors` have the rows of all sequences, `counts` their numbers of each sequence, `found` the numbers of
    placeholders. Sizes are read where the model has a rule for them. Rows of one size have equally many
    features: as many as most sequences have placeholders for a row. Of other rows only it is known that
    there are some; the model itself compares the sums of a pack.
    """
    rows = _rows(kind, counts, len(found))
    sizes = _by_size(model, kind, tensors)
    if sizes is not None:
        name, each = sizes
        return [int(x.sum()) for x in each.split(list(counts[name]))], rows

    # Without sizes each row is worth the same.
    some = [k for k, n in enumerate(rows) if n]
    varies = any(counts.get(name) and any(counts[name]) for name in _SIZES[kind])
    if varies or not some:
        wanted = [max(got, 1) for got in found]
        return [want * bool(n) for want, n in zip(wanted, rows)], rows
    ratios = sorted(found[k] / rows[k] for k in some)
    usual = max(round(ratios[len(ratios) // 2]), 1)
    return [usual * n for n in rows], rows


def _rows(kind: str, counts: Mapping[str, Sequence[int]], size: int) -> list[int]:
    """The rows of media of each sequence."""
    names = (_GRIDS.get(kind, ""), *_SIZES[kind], *_HELD[kind])
    for name in names:
        if name in counts:
            return list(counts[name])
    return [0] * size


def _by_size(model: Any, kind: str, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """(the name of the rows, the features [rows] of each), None where the model has no rule for them."""
    grid = _GRIDS.get(kind, "")
    merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None)
    if grid in tensors and merge:
        return grid, tensors[grid].cpu().prod(-1) // merge**2
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
