"""Scalar reward models: a decoder with heads that score a sequence."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from rft_fn import check, scan, tree
from rft_fn.model import classifier
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.head_scale import Head
from rft_fn.model.heads import Headed, below, zeros
from rft_fn.model.lora_merged import merged
from rft_fn.types import Packed, TokenOut

__all__ = ["POOLS", "RewardModel", "named_heads", "running_mean", "softmax_share"]


POOLS = ("last", "mean", "attention")


class RewardModel(Headed):
    """Scores [T, H] of the sequence up to each input token, by H heads; 0 outside mask.

    The head h is linear in the hidden states, v[t] = head_h(hidden[t]), without a bias and in float32 at
    least. `pool` makes the scores of these, over the tokens s <= t of the same sequence:

        last        v[t]
        mean        the mean of v[s]
        attention   sum of softmax_s(query . hidden[s]) v[s]

    As heads are linear, that is the score of the pooled hidden states. Heads and query start at 0. A score is
    raw; `heads` have the calibration. `packing.scored` makes rows with the last token as an input. ValueError
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
        self.query = zeros(self.decoder, 1, bias=False) if pool == "attention" else None

    def with_calibration(self, heads: Sequence[Head]) -> "RewardModel":
        """Replace the heads' calibration in place; ValueError for other names."""
        own = [head.name for head in self.heads]
        given = [head.name for head in heads]
        if own != given:
            raise ValueError(f"heads: expected a calibration of {own}, got one of {given}")
        self.heads = tuple(heads)
        return self

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """Write these weights, whole and by their names, as a folder for `load_reward`.

        If transformers has a class for the decoder, and pooling is by the last token, the folder is one of
        that class. Else it is a decoder with the heads in a file of ours, and a warning says so. Names,
        pooling and calibration are in a file of ours either way.
        """
        Path(folder, self.file).unlink(missing_ok=True)  # of a model that was here before
        last = self.pool == "last"
        made = classifier.like(self.decoder, [head.name for head in self.heads]) if last else None
        if made is None:
            super().save_pretrained(folder, state_dict)
            why = f"heads on {type(self.decoder).__name__}" if last else f"pooling by {self.pool}"
            warnings.warn(
                f"reward model: {folder} is for model.load_reward alone: transformers has no "
                f"class with {why}",
                stacklevel=2,
            )
        else:
            whole = merged(self, state_dict)
            classifier.write(made, folder, below(whole, "decoder."), whole["score.weight"])
        saved = {"pool": self.pool, "heads": [asdict(head) for head in self.heads]}
        Path(folder, classifier.HEADS).write_text(json.dumps(saved, indent=1) + "\n")

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        hidden = self.hidden(pack, bounds).to(self.score.weight.dtype)
        layers = [self.score] if self.query is None else [self.score, self.query]
        score = torch.cat([layer(hidden) for layer in layers], -1)
        return TokenOut(logp=torch.zeros_like(hidden[:, 0]), score=score)

    def finish(self, out: TokenOut, pack: Packed) -> TokenOut:
        assert out.score is not None
        # The tokens of a sequence may have been read by several processes; only here are they together.
        score = out.score[:, : len(self.heads)]
        if self.pool == "mean":
            score = running_mean(score, 1 / (pack.pos + 1).double())
        elif self.pool == "attention":
            score = running_mean(score, softmax_share(out.score[:, -1], pack.seq))
        return tree.replace(out, score=torch.where(pack.mask[:, None], score, 0))


def running_mean(value: Tensor, share: Tensor) -> Tensor:
    """Return the weighted means [T, H] of value [T, H] over the tokens of a sequence up to each.

        mean[t] = (1 - share[t]) mean[t-1] + share[t] value[t]

    `share` [T] is the part of each token in the weight of all up to it, 1 for the first of a sequence. It
    is in float64, as the recurrence is: in float32 1 - share has two digits of the share of one token in
    1e5.
    """
    check.shapes(value=(value, "T H"), share=(share, "T"))
    kept = (1 - share).expand(value.shape[1], -1)
    mean = scan.linear_scan(kept, (share[:, None] * value).T, reverse=False).T
    return mean.to(value.dtype)


def softmax_share(logit: Tensor, seq: Tensor) -> Tensor:
    """Return exp(logit[t]) / sum of exp(logit[s]) over the tokens s <= t of the same sequence, [T].

    `seq` [T] is the sequence of each token, one after the other. However far logits lie apart, nothing
    overflows, and a token's share is only among those before it. In float64, see `running_mean`.
    """
    check.shapes(logit=(logit, "T"), seq=(seq, "T"))
    # After each round `total` is the log of the sum over twice as many tokens that end here.
    logit = logit.double()
    total = logit
    reach = 1
    while reach < len(logit):
        same = seq[reach:] == seq[:-reach]
        both = torch.logaddexp(total[reach:], total[:-reach])
        total = torch.cat([total[:reach], torch.where(same, both, total[reach:])])
        reach *= 2
    return (logit - total).exp()


def named_heads(heads: Sequence[str | Head]) -> tuple[Head, ...]:
    """Return heads by their names. ValueError for none, and for two with one name."""
    if isinstance(heads, str):
        raise ValueError(f"heads: expected a sequence of names, got the one string {heads!r}")
    made = [Head(head) if isinstance(head, str) else head for head in heads]
    names = [head.name for head in made]
    if not names:
        raise ValueError("heads: expected one or more, got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"heads: expected names that differ, got {twice[0]!r} twice")
    return tuple(made)
