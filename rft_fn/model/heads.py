"""Decoders under heads of other numbers than logits: critics and reward models."""

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rft_fn import check, scan, tree
from rft_fn.model import attention, classifier
from rft_fn.model.bind import to_params_device
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.dropout import disable_dropout
from rft_fn.model.forward import POSITIONS, run
from rft_fn.model.lora import home, merged, require_plain_adapters
from rft_fn.model.materialize import keep_part
from rft_fn.model.parts import find, text_config
from rft_fn.model.reader import Reader
from rft_fn.precision import wide
from rft_fn.types import Apply, Packed, TokenOut

__all__ = [
    "POOLS", "Critic", "Head", "Headed", "RewardModel", "calibrated", "explained_variance", "final_scores",
    "named_heads", "running_mean", "softmax_share", "standardized", "tempered", "values",
]  # fmt: skip


class Headed(Reader):
    """The decoder of a language model, for a head of a subclass.

    Only the decoder of `lm` stays (with its adapters, if it has some): the head over the vocabulary is
    neither kept nor trained. Dropout is off for good. ValueError for a module with a decoder that cannot
    be told from its head.
    """

    file: str  # with the heads, in a folder with the decoder

    def __init__(self, lm: nn.Module):
        super().__init__()
        # Without a decoder apart from the head there are no hidden states to put another head on.
        require_plain_adapters(lm)
        found = find(lm)
        if not hasattr(found.model, "base_model"):
            raise ValueError(f"lm: expected a causal language model of transformers, got {type(lm).__name__}")
        if find(found.decoder).head is not None:
            raise ValueError(
                f"lm: expected a model whose decoder is apart from its head, got {type(lm).__name__}"
            )

        # The decoder is all that stays of the model.
        self.decoder: Any = found.decoder
        self.parts = replace(found, model=self.decoder, head=None)
        keep_part(lm, self.decoder)
        disable_dropout(self.decoder)
        attention.turn_on(self.decoder)

    def train(self, mode: bool = True) -> Self:
        """Do nothing: the outputs are a function of (params, pack), so dropout stays off."""
        return self

    def hidden(self, pack: Packed, bounds: SequenceBounds | None) -> Tensor:
        """Return the hidden states [T, D] of a pack."""
        mode = self.mode or POSITIONS
        return run(self.decoder, pack, bounds, mode=mode, share=self.shared).last_hidden_state[0]

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """Write these weights, whole and by their names, as a decoder with the heads in a file of ours.

        The decoder is written as transformers does it (its AutoModel reads it), adapters multiplied into
        what they adapt.
        """
        from safetensors.torch import save_file

        whole = merged(self, state_dict)
        self.decoder.save_pretrained(folder, state_dict=below(whole, "decoder."))
        heads = {name: x for name, x in whole.items() if not name.startswith("decoder.")}
        save_file(
            {name.removeprefix("head."): x.contiguous() for name, x in heads.items()},
            Path(folder) / self.file,
        )


def zeros(decoder: nn.Module, size: int, *, bias: bool) -> nn.Linear:
    """Make a head of `size` numbers, all 0, on the device of a decoder and in float32 at least."""
    width = text_config(decoder).hidden_size
    dtype = wide(next(decoder.parameters()).dtype)
    head = nn.Linear(width, size, bias=bias, device="meta", dtype=dtype).to_empty(device=home(decoder))
    for p in head.parameters():
        nn.init.zeros_(p)
    return head


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights below `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


# ---------- the critic: a decoder with a head of one number per token


class Critic(Headed):
    """V(state before `target[t]`) = head(hidden[t]) [T], label-aligned like log-probs, 0 outside mask.

    `hidden[t]` is the hidden state of input t. The head is linear, in float32 at least, and starts at 0,
    so V = 0 before the first update whatever the rewards' scale. ValueError for a module with a decoder
    that cannot be told from its head.
    """

    file = "value_head.safetensors"

    def __init__(self, lm: nn.Module):
        super().__init__(lm)
        self.head = zeros(self.decoder, 1, bias=True)

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        value = self.head(self.hidden(pack, bounds).to(self.head.weight.dtype))[:, 0]
        return TokenOut(logp=torch.zeros_like(value), value=torch.where(pack.mask, value, 0))


@torch.no_grad()
def values(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Tensor]:
    """Return the values [T] of each pack, without gradient: the baseline of an advantage.

    `packing.unpack` makes them [B, S]. ValueError for the apply of a model that gives none.
    """
    out = []
    for pack, moved in zip(packs, to_params_device(apply, params, packs)):
        value = apply(params, moved).value
        if value is None:
            raise ValueError("apply: expected a critic's, got one whose outputs have no value")
        out.append(value.to(pack.tokens.device))
    return out


def explained_variance(value: Tensor, ret: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(ret - value) / Var(ret) over mask.

    1 is a perfect critic, 0 one that knows only the mean (or a return that does not vary), below 0 one
    that is worse than that.
    """
    check.shapes(value=(value, "..."), ret=(ret, "..."), mask=(mask, "..."))
    rest = (ret - value)[mask].double().var(correction=0)
    whole = ret[mask].double().var(correction=0)
    return float(torch.where(whole > 0, 1 - rest / whole, 0))


# ---------- the heads of a reward model, and what makes their scores comparable


@dataclass(frozen=True)
class Head:
    """One dimension that a reward model scores, and its calibration.

    The calibrated score is (score - shift) / scale. ValueError for a scale that is not positive, and for
    numbers that are not finite.
    """

    name: str
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("head: expected a name, got ''")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"head: {self.name}: expected a positive scale, got {self.scale}")
        if not math.isfinite(self.shift):
            raise ValueError(f"head: {self.name}: expected a finite shift, got {self.shift}")


def final_scores(score: Tensor, mask: Tensor) -> Tensor:
    """Return the scores of whole rows: score [B, S, H] at the last token in mask [B, S] -> [B, H].

    `score` is `st.score(..., fields=("score",)).score` of the experience that `packing.scored` makes,
    `mask` that experience's. ValueError for a row without a token in mask.
    """
    check.shapes(score=(score, "B S H"), mask=(mask, "B S"))
    empty = (~mask.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"mask: expected a token of each row, got none in rows {empty[:3]}")
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return score[torch.arange(len(score), device=score.device), last]


def calibrated(score: Tensor, heads: Sequence[Head]) -> Tensor:
    """Return (score - shift) / scale of each head: [..., H] -> [..., H]."""
    _check(score, heads)
    shift = score.new_tensor([head.shift for head in heads])
    scale = score.new_tensor([head.scale for head in heads])
    return (score - shift) / scale


def standardized(score: Tensor, heads: Sequence[Head]) -> tuple[Head, ...]:
    """Calibrate heads by held-out rows [N, H]: scores of mean 0 and standard deviation 1.

    ValueError for fewer than two rows, for a head that scores all alike, and for NaN or inf.
    """
    _check(score, heads)
    _check_finite(score, heads)
    if len(score) < 2:
        raise ValueError(f"score: expected two rows or more to calibrate heads, got {len(score)}")
    spread, mean = torch.std_mean(score.double(), 0)
    found = []
    for head, shift, scale in zip(heads, mean.tolist(), spread.tolist()):
        if not scale > 0:
            raise ValueError(f"score: {head.name}: expected scores that differ, got {shift} for all rows")
        found.append(replace(head, shift=shift, scale=scale))
    return tuple(found)


def tempered(chosen: Tensor, rejected: Tensor, heads: Sequence[Head]) -> tuple[Head, ...]:
    """Calibrate heads by held-out pairs [N, H]: differences of scores are logits of a preference.

    The scale of each head is the temperature T > 0 with the least cross-entropy of sigmoid((chosen -
    rejected) / T) to the label (N + 1) / (N + 2), as in Platt (1999): with the label 1, pairs that are all
    in order would have T = 0. The shift is the mean of both sides. ValueError for a head that orders the
    pairs no better than chance, and for NaN or inf.
    """
    _check(chosen, heads)
    check.shapes(chosen=(chosen, "N H"), rejected=(rejected, "N H"))
    _check_finite(torch.cat([chosen, rejected]), heads)
    shift = torch.cat([chosen, rejected]).double().mean(0).tolist()
    found = []
    for h, head in enumerate(heads):
        scale = _temperature(head.name, (chosen[:, h] - rejected[:, h]).double())
        found.append(replace(head, shift=shift[h], scale=scale))
    return tuple(found)


def _temperature(name: str, margin: Tensor) -> float:
    """Solve d/d(1/T) of the cross-entropy of margins [N] = 0 for T; it is convex in 1/T."""
    label = (len(margin) + 1) / (len(margin) + 2)
    size = margin.abs().mean()
    if not margin.mean() * (label - 0.5) > 0:
        raise ValueError(
            f"score: {name}: expected pairs with a higher score for the chosen side on average, got a mean "
            f"difference of {float(margin.mean()):.3g}"
        )

    # In units of the mean margin the root lies far inside of these limits.
    low, high = -30.0, 30.0
    for _ in range(80):
        middle = (low + high) / 2
        slope = (margin * (torch.sigmoid(margin / size * math.exp(middle)) - label)).sum()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return float(size) / math.exp(low)


def _check(score: Tensor, heads: Sequence[Head]) -> None:
    if score.shape[-1] != len(heads):
        names = [head.name for head in heads]
        raise ValueError(f"score: expected [..., {len(heads)}] for heads {names}, got {list(score.shape)}")


def _check_finite(score: Tensor, heads: Sequence[Head]) -> None:
    for head, column in zip(heads, score.T):
        if not column.isfinite().all():
            raise ValueError(f"score: {head.name}: expected finite scores, got NaN or inf")


# ---------- scalar reward models: a decoder with heads that score a sequence


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
