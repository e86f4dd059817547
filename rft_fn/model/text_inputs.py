"""The inputs of a text model, cut where a pack begins."""

from typing import Any

from torch import Tensor, nn

__all__ = ["cut_before"]


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
