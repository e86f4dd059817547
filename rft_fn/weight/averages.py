"""Averages as weights of tokens: means over tokens, sequences and units.

The total loss is `(w * loss).sum()`: the denominator is inside w. Each takes mask [B, S] bool and returns w
[B, S] of the default float type, 0 outside mask. B counts the rows that have a token in mask, so a row
without one changes nothing; a batch without any gives zeros.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rft_fn import check

__all__ = [
    "constant", "get_weight", "pair_mean", "seq_mean", "seq_sum", "token_mean", "unit_mean", "unit_sum",
]  # fmt: skip


def _counts(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mask as float [B, S], tokens per row [B, 1] >= 1, rows with a token [] >= 1)."""
    check.shapes(mask=(mask, "B S"))
    m = mask.to(torch.get_default_dtype())
    tokens = m.sum(-1, keepdim=True)
    return m, tokens.clamp(min=1), (tokens > 0).sum().clamp(min=1)


def token_mean(mask: Tensor) -> Tensor:
    """Return the weights of a mean over the tokens of the batch.

    The weight is 1 / tokens, so every token counts the same. DAPO, arXiv 2503.14476.
    """
    m, _, _ = _counts(mask)
    return m / m.sum().clamp(min=1)


def seq_mean(mask: Tensor) -> Tensor:
    """Return the weights of a mean over sequences of the mean over tokens.

    The weight is 1 / (B tokens of the row). GRPO, arXiv 2402.03300.
    """
    m, tokens, rows = _counts(mask)
    return m / (tokens * rows)


def seq_sum(mask: Tensor) -> Tensor:
    """Return the weights of a mean over sequences of the sum over tokens.

    The weight is 1 / B, as in the policy gradient theorem.
    """
    m, _, rows = _counts(mask)
    return m / rows


def pair_mean(mask: Tensor) -> Tensor:
    """Return the weights of a mean over pairs of a loss per pair.

    The loss is on each token of its pair, so the weight is 1 / (pairs tokens of the pair). Rows 2i and 2i + 1
    are a pair. One without a token in mask does not count. ValueError for an odd B.
    """
    if len(mask) % 2:
        raise ValueError(f"mask: expected an even number of rows, two per pair, got {len(mask)}")
    return unit_mean(mask, 2)


def unit_mean(mask: Tensor, unit: int | Sequence[int]) -> Tensor:
    """Return the weights of a mean over units of the mean over the tokens of each.

    A unit is `unit` rows that follow each other; its rows may also be given for each unit, such as ranked
    lists of any length. The weight is 1 / (units tokens of the unit). One without a token in mask does not
    count. ValueError for units that do not make up the rows.
    """
    m, tokens, units = _of_units(mask, unit)
    return m / (tokens.clamp(min=1) * units)


def unit_sum(mask: Tensor, unit: int | Sequence[int]) -> Tensor:
    """Return the weights of a mean over units of the sum over the tokens of each.

    The weight is 1 / units: for losses with terms that add up over a list (`loss.plackett_luce`). Units are
    as in `unit_mean`.
    """
    m, _, units = _of_units(mask, unit)
    return m / units


def _of_units(mask: Tensor, unit: int | Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mask as float [B, S], tokens of each row's unit [B, 1], units with a token [] >= 1)."""
    m, _, _ = _counts(mask)
    sizes = torch.tensor(check.units(unit, len(mask)), dtype=torch.long, device=mask.device)
    of = torch.repeat_interleave(torch.arange(len(sizes), device=mask.device), sizes)
    tokens = m.new_zeros(len(sizes)).index_add(0, of, m.sum(-1))
    return m, tokens[of, None], (tokens > 0).sum().clamp(min=1)


def constant(mask: Tensor, length: int) -> Tensor:
    """Return the weights of a sum over tokens divided by a constant.

    The weight is 1 / (B length). With a fixed `length`, such as the longest response, there is no bias by
    length. Dr. GRPO, arXiv 2503.20783. ValueError unless length > 0.
    """
    if length <= 0:
        raise ValueError(f"length: expected > 0 tokens, got {length}")
    m, _, rows = _counts(mask)
    return m / (rows * length)


_NORMALISERS = {"token_mean": token_mean, "seq_mean": seq_mean, "seq_sum": seq_sum}


def get_weight(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function from mask to w of a name: token_mean, seq_mean, seq_sum, or constant:LENGTH.

    ValueError that lists the names there are.
    """
    kind, _, length = name.partition(":")
    if kind == "constant" and length.isdecimal() and int(length):
        return partial(constant, length=int(length))
    if name not in _NORMALISERS:
        names = ", ".join(_NORMALISERS)
        raise ValueError(f"weight: expected one of {names}, constant:LENGTH, got {name!r}")
    return _NORMALISERS[name]
