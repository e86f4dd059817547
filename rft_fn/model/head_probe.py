"""A probe of a model's head: whether it is one matrix times the last hidden states."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rft_fn.model.parts import Parts

__all__ = ["plain_head", "same_tensor", "same_value"]


Seen = tuple[Tensor, int]  # a tensor, and how often it had been written to when it was seen


def same_value(a: Tensor, b: Tensor, version: int) -> bool:
    """Return whether a and b, in the type of a, are equal to the bit; NaN equals itself."""
    if a.shape != b.shape:
        return False
    return bool(((a == b.to(a.dtype)) | (a.isnan() & b.isnan())).all())


def same_tensor(a: Tensor, b: Tensor, version: int) -> bool:
    """Return whether a is b or a view of it, unwritten since `version` of b."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and b._version == version


def plain_head(
    parts: Parts, inputs: dict[str, Any], equal: Callable[[Tensor, Tensor, int], bool]
) -> tuple[Tensor, bool]:
    """Return (hidden states [T, D], whether logits are the head's output of them).

    `inputs` are those of one sequence. `equal` is `same_value`, or `same_tensor` on the meta device, where
    there are no values.
    """
    hidden: list[Seen] = []
    entered: list[Seen] = []
    left: list[Seen] = []

    def seen(x: Tensor) -> Seen:
        x = x.clone() if equal is same_value else x  # later writes must not change it
        return x, x._version

    def after_decoder(_: Any, __: Any, out: Any) -> None:
        hidden.append(seen(out.last_hidden_state))

    def after_head(_: Any, taken: tuple, out: Tensor) -> None:
        entered.append(seen(taken[0]))
        left.append(seen(out))

    # Note what leaves the decoder, what enters the head and what leaves it, in one forward.
    handles = [
        parts.decoder.register_forward_hook(after_decoder),
        parts.head.register_forward_hook(after_head),
    ]
    try:
        logits = parts.model(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()

    # No hidden state was seen of a model that calls a part of its decoder.
    if not hidden:
        hidden.append(seen(parts.decoder(**inputs).last_hidden_state))
        if equal is same_tensor and entered:  # the second call made another tensor
            hidden = entered

    # Plain: the head got these states, and its output is the logits.
    states = hidden[-1][0][0]
    if not left:
        return states, False
    plain = equal(entered[-1][0], *hidden[-1]) and equal(logits, *left[-1])
    return states, plain
