"""What samplers and teachers say: tokens, their log-probs, and the likeliest words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn.border.foreign_code import quoted
from rft_fn.border.values import entries, integers, numbers

__all__ = ["LEAST_LOGP", "MASS", "ROUNDING", "log_probs", "sample", "words"]


ROUNDING = 1e-3  # nats by which a log-prob may be above 0
LEAST_LOGP = -1e5  # nats; servers write -9999 for a word that cannot be
# what K words may have beyond 1, and two log-probs of one word may differ by: the rounding of bfloat16
MASS = 1e-2


def log_probs(name: str, xs: Any, count: int | None = None) -> list[float]:
    """Return a list of `count` log-probs: finite, and not above 0 by more than rounding."""
    return numbers(name, xs, count=count, low=LEAST_LOGP, high=ROUNDING)


def sample(tokens: Any, logp: Any, *, most: int, vocabulary: int) -> None:
    """Check one sample: 1 to `most` tokens of the vocabulary, each with its log-prob."""
    size = len(integers("tokens", tokens, low=0, high=vocabulary - 1))
    if not 0 < size <= most:
        raise ValueError(f"tokens: expected 1 to {most}, got {size}")
    log_probs("log-probs", logp, size)


def words(
    ids: Any, logp: Any, *, top_k: int, vocabulary: int, tokens: Sequence[int], own: Sequence[float]
) -> None:
    """Check the `top_k` likeliest words [T, K] at the places of `tokens` [T] with log-probs `own` [T].

    Words differ, are of the vocabulary, come in the order of their log-probs, and have no more than all of
    the probability. The token has the log-prob that it has among the words, else at most the least of them.
    """
    count = len(tokens)
    for at, (row, ps) in enumerate(zip(entries("words", ids, count), entries("words", logp, count))):
        integers(f"words[{at}]", row, count=top_k, low=0, high=vocabulary - 1)
        log_probs(f"words[{at}]: log-probs", ps, top_k)
    if not count:
        return

    # the rest in tensors: there may be millions of words
    word = torch.tensor(ids)
    p = torch.tensor(logp, dtype=torch.float64)
    token, theirs = torch.tensor(tokens), torch.tensor(own, dtype=torch.float64)
    same = word == token[:, None]
    least = torch.where(same.any(-1), (p * same).sum(-1), p[:, -1])
    mass = p.exp().sum(-1) + theirs.exp() * ~same.any(-1)
    ordered = word.sort(-1).values

    def refuse(wrong: Tensor, wanted: str, got: Tensor) -> None:
        """Raise ValueError for the first place that is wrong."""
        if len(places := wrong.nonzero()[:, 0]):
            at = int(places[0])
            raise ValueError(f"words[{at}]: expected {wanted}, got {quoted(got[at].tolist())}")

    refuse((ordered[:, 1:] == ordered[:, :-1]).any(-1), f"{top_k} words that differ", word)
    refuse((p[:, 1:] > p[:, :-1]).any(-1), "the likeliest first, by log-probs", p)
    refuse(mass > 1 + MASS, "a probability of at most 1 together", mass)
    refuse(same.any(-1) & ((theirs - least).abs() > MASS), "the log-prob that the token itself has", least)
    refuse(theirs > least + MASS, "no word that is likelier than these, for the token's log-prob", theirs)
