"""The media of rows: the arguments of a pack of the same sequences, put into rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.engine.prompt_media import PromptMedia, as_pack
from rft_fn.model.media_inputs import media_inputs, placeholders

__all__ = ["media_arguments", "positions_ahead"]


if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PER_TOKEN = ("position_ids", "mm_token_type_ids", "token_type_ids")


def media_arguments(
    lm: "PreTrainedModel", tokens: Tensor, seen: Tensor, media: Sequence[PromptMedia]
) -> dict[str, Any]:
    """Return the keyword arguments by which a model takes the media of rows [R, W], padded on either side.

    Positions [axes, R, W] are among them where they differ from text's. Empty for a text model.
    """
    if not placeholders(lm.config):
        return {}
    ids = [row[real].tolist() for row, real in zip(tokens, seen)]
    pack = tree.map(lambda x: x.to(lm.device), as_pack(ids, media))
    given = media_inputs(lm, pack)
    for name in _PER_TOKEN:
        if name in given:
            flat = given[name].squeeze(-2)  # [..., T] of [..., 1, T]
            given[name] = flat.new_zeros(*flat.shape[:-1], *seen.shape)
            given[name][..., seen] = flat
    return given


def positions_ahead(position: Tensor, seen: Tensor) -> Tensor:
    """Return [axes, R]: by how much a new token's position exceeds the number of tokens before it.

    `position` [axes, R, W] has text's axis first. On the others a token follows the largest one of its row.
    """
    after = position[1:].masked_fill(~seen, -1).amax((0, -1)) + 1
    more = torch.zeros_like(position[..., 0])
    more[1:] = after - seen.sum(-1)
    return more
