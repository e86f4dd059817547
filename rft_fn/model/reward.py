"""Scalar reward models: a decoder with heads, each of which scores a sequence.

rm = model.load_reward("tiny", new=True, heads=("helpful", "format"))
apply, state = strategy.init(rm, tx)                               # bind takes it as it is
rows = packing.scored(ids)                                         # with the last token as an input
score = strategy.score(apply, state.params, rows, budget, fields=("score",)).score
model.final_scores(score, rows.mask)                               # [B, 2]
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rft_fn import check, scan, tree
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.calibration import Head
from rft_fn.model.headed import Headed, zeros
from rft_fn.types import Packed, TokenOut

__all__ = ["POOLS", "RewardModel", "prefix_mean"]

POOLS = ("last", "mean", "attention")


class RewardModel(Headed):
    """Scores [T, H] of the sequence up to each input token, by H heads; 0 outside mask.

    The head h is linear in the hidden states, v[t] = head_h(hidden[t]), without a bias and in float32 at
    least. `pool` makes the scores of these, over the tokens s <= t of the same sequence:

        last        v[t]
        mean        the mean of v[s]
        attention   sum of softmax_s(query . hidden[s]) v[s]

    As heads are linear, that is the score of the pooled hidden states. Heads and query start at 0. A score is
    raw; `heads` have the calibration. `packing.scored` makes rows whose last token is an input. ValueError
    for an unknown pool, no heads, and two heads with one name.
    """

    file = "reward_head.safetensors"

    def __init__(self, lm: nn.Module, *, heads: Sequence[str | Head] = ("score",), pool: str = "last"):
        if pool not in POOLS:
            raise ValueError(f"pool: expected one of {', '.join(POOLS)}, got {pool!r}")
        super().__init__(lm)
        self.heads = named_heads(heads)
        self.pool = pool
        self.score = zeros(self.decoder, len(self.heads), bias=False)
        self.query: nn.Linear | None = None
        if pool == "attention":
            self.query = zeros(self.decoder, 1, bias=False)

    def with_calibration(self, heads: Sequence[Head]) -> "RewardModel":
        """This model with the calibration of its heads replaced; ValueError for other names."""
        own = [head.name for head in self.heads]
        given = [head.name for head in heads]
        if own != given:
            raise ValueError(f"heads: expected a calibration of {own}, got one of {given}")
        self.heads = tuple(heads)
        return self

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        hidden = self.hidden(pack, bounds).to(self.score.weight.dtype)
        columns = [self.score(hidden)]
        if self.query is not None:
            columns.append(self.query(hidden))
        return TokenOut(logp=torch.zeros_like(hidden[:, 0]), score=torch.cat(columns, -1))

    def finish(self, out: TokenOut, pack: Packed) -> TokenOut:
        assert out.score is not None
        # The tokens of a sequence may have been read by several processes; only here are they together.
        score = out.score[:, : len(self.heads)]
        if self.pool == "mean":
            score = prefix_mean(score, torch.zeros_like(score[:, 0]), pack.seq)
        elif self.pool == "attention":
            score = prefix_mean(score, out.score[:, -1], pack.seq)
        return tree.replace(out, score=torch.where(pack.mask[:, None], score, 0))


def prefix_mean(value: Tensor, logit: Tensor, seq: Tensor) -> Tensor:
    """The means [T, H] of value [T, H] over the tokens up to each of the same sequence.

    Weights are softmax(logit [T]) over these tokens, so of equal logits it is the plain mean. `seq` [T] is
    the sequence of each token, one after the other. With L[t] = log sum_{s <= t} exp(logit[s]),

        mean[t] = exp(L[t-1] - L[t]) mean[t-1] + exp(logit[t] - L[t]) value[t]

    whose factors are at most 1, however far logits lie apart.
    """
    check.shapes(value=(value, "T H"), logit=(logit, "T"), seq=(seq, "T"))
    sizes = torch.unique_consecutive(seq, return_counts=True)[1].tolist()
    total = torch.cat([x.logcumsumexp(0) for x in logit.split(sizes)])

    # Nothing of the sequence before reaches a first token.
    first = seq != seq.roll(1)
    first[:1] = True
    kept = torch.where(first, -torch.inf, total.roll(1) - total).exp()
    new = (logit - total).exp()[:, None] * value
    return scan.linear_scan(kept.expand(new.shape[1], -1), new.T, reverse=False).T


def named_heads(heads: Sequence[str | Head]) -> tuple[Head, ...]:
    """Heads by their names, or as they are. ValueError for none, and for two with one name."""
    if isinstance(heads, str):
        raise ValueError(f"heads: expected a sequence of names, got the one string {heads!r}")
    made = []
    for head in heads:
        if isinstance(head, str):
            head = Head(head)
        made.append(head)
    names = [head.name for head in made]
    if not names:
        raise ValueError("heads: expected one or more, got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"heads: expected names that differ, got {twice[0]!r} twice")
    return tuple(made)
