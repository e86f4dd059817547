"""What a teacher reveals to a student: hidden states with a head, or the likeliest words.

A teacher's distributions over all words are its hidden states [T, D] and the weight of its head [V, D]: both
fit where logits [T, V] do not. The student compares them with its own inside its forward, some tokens at a
time, so that neither has [T, V] in memory. The student's temperature and top_p are what it is bound with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rft_fn import logprob
from rft_fn.loss.distill import Divergence, top_1_agreement, with_tail
from rft_fn.types import Packed

__all__ = [
    "HIDDEN", "LOGP", "WHICH", "WORDS", "Revealed", "Teacher", "TeacherHead", "as_bits", "compare", "reveal",
]  # fmt: skip

# extras of a pack
HIDDEN = "teacher_hidden"  # hidden states [T, D] of the teacher, or `as_bits` of them
WORDS = "teacher_words"  # or its likeliest words [T, K] i64
LOGP = "teacher_logp"  # with their log-probs [T, K], or `as_bits` of them
WHICH = "teacher_number"  # the number of the teacher of each token [T], where there are several

Over = Callable[..., Tensor]
"""(fn, rows, *data) -> fn(log-probs [R, V] of the tokens `rows`, *data) by chunks of them."""


@dataclass(frozen=True)
class TeacherHead:
    """The head of a teacher: logits are hidden weight^T + bias."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]


@dataclass(frozen=True)
class Teacher:
    """A teacher as the student's forward compares itself with it."""

    divergence: Divergence
    head: TeacherHead | None = None  # of its hidden states; None where it gives words
    temperature: float = 1.0  # of its hidden states; that of words is in their log-probs


@dataclass
class Revealed:
    """What a teacher is asked for while it scores, and its head afterwards."""

    top_k: int = 0  # likeliest words; 0 asks for hidden states
    heads: list[TeacherHead] = field(default_factory=list)

    @property
    def head(self) -> TeacherHead:
        """Return the head as it was in the block. ValueError before a score."""
        if not self.heads:
            raise ValueError("head: expected a score within model.revealed, got none")
        return self.heads[0]


def reveal(asked: Revealed, hidden: Tensor | None, head: Any, pack: Packed, over: Over) -> dict[str, Tensor]:
    """Return the fields of a teacher's TokenOut that are asked for; its head goes into `asked`.

    ValueError for hidden states where they do not give the distribution: `hidden` is None then.
    """
    if asked.top_k:
        rows = pack.mask.nonzero()[:, 0]
        found = over(partial(_likeliest, asked.top_k), rows)
        whole = found.new_zeros(len(pack.mask), found.shape[1]).index_copy(0, rows, found)
        words_logp, words = whole.chunk(2, -1)
        return {"words_logp": words_logp, "top_words": words.long()}
    if hidden is None:
        raise ValueError(
            "top_k: expected words of this teacher: with top_p, or a head that is more than one matrix, its "
            "hidden states do not give its distribution, got 0"
        )
    if not asked.heads:  # gathered here, where a model is sharded
        bias = None if head.bias is None else head.bias.detach().clone()
        asked.heads.append(TeacherHead(head.weight.detach().clone(), bias))
    return {"hidden": torch.where(pack.mask[:, None], hidden, 0)}


def _likeliest(k: int, logp: Tensor) -> Tensor:
    """Return log-probs and numbers of the k likeliest words, [R, V] -> [R, 2 k]; a float has them exactly."""
    top = logp.topk(min(k, logp.shape[-1]), -1)
    return torch.cat([top.values, top.indices.to(logp.dtype)], -1)


def compare(teachers: Sequence[Teacher], pack: Packed, over: Over) -> dict[str, Tensor]:
    """Return divergence and agreement [T] of a student, 0 outside mask; {} for a pack without a teacher's.

    With several teachers each token is compared with its own.
    """
    extra = pack.extra or {}
    if HIDDEN not in extra and WORDS not in extra:
        return {}
    found = []
    every = []
    for i, teacher in enumerate(teachers):
        of = pack.mask & (extra[WHICH] == i) if WHICH in extra else pack.mask
        rows = of.nonzero()[:, 0]
        if teacher.head is None:
            given = extra[WORDS][rows], _from_bits(extra[LOGP][rows])
            found.append(over(partial(_by_words, teacher), rows, *given))
        else:
            states = _from_bits(extra[HIDDEN][rows])[:, : teacher.head.weight.shape[1]]
            found.append(over(partial(_by_states, teacher, teacher.head), rows, states))
        every.append(rows)
    pair = torch.cat(found)
    whole = pair.new_zeros(len(pack.mask), 2).index_copy(0, torch.cat(every), pair)
    return {"divergence": whole[:, 0], "agreement": whole[:, 1].detach()}


_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {bits: dtype for dtype, bits in _BITS.items()}


def as_bits(x: Tensor) -> Tensor:
    """Return numbers as integers of the same bits.

    FSDP2 casts the floating-point numbers of a pack to the type of its forward.
    """
    x = x.float() if x.dtype not in _BITS else x
    return x.contiguous().view(_BITS[x.dtype])


def _from_bits(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.contiguous().view(_FLOATS[x.dtype])


def _by_states(teacher: Teacher, head: TeacherHead, logp: Tensor, states: Tensor) -> Tensor:
    """Return (divergence, agreement) over all words, [R, V] -> [R, 2].

    Heads of one tokenizer may be padded to different numbers of rows: the words that only one has are left
    out, and both are normalised again.
    """
    z = logprob.logits(states, head.weight.to(logp.device), head.bias)
    size = min(z.shape[-1], logp.shape[-1])
    theirs = (z[:, :size] / teacher.temperature).log_softmax(-1).to(logp.dtype)
    ours = logp if size == logp.shape[-1] else logp[:, :size].log_softmax(-1)
    return torch.stack([teacher.divergence(ours, theirs), top_1_agreement(ours, theirs)], -1)


def _by_words(teacher: Teacher, logp: Tensor, words: Tensor, theirs: Tensor) -> Tensor:
    """Return (divergence, agreement) over K words, the teacher's likeliest first, and the rest, [R, 2]."""
    ours = logp.gather(-1, words)
    both = with_tail(ours), with_tail(theirs.to(logp.dtype))
    agree = logp.argmax(-1) == words[:, 0]
    return torch.stack([teacher.divergence(*both), agree.to(logp.dtype)], -1)
