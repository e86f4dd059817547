"""What losses are checked on: a tabular model, a small ragged batch in float64, and a few ways to cut it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import packing, rng, tree
from rft_fn.types import Apply, Experience, Packed, TokenOut
from rft_fn.weight import token_mean

__all__ = [
    "FIELDS", "LENGTH", "ROWS", "VOCAB", "Case", "Extra", "Weight", "by_unit", "case", "log_probs", "normal",
    "ragged", "reweigh", "tabular", "uniform", "whole",
]  # fmt: skip

VOCAB, ROWS, LENGTH = 7, 8, 12
FIELDS = ("old_logp", "ref_logp", "adv", "old_value", "ret")
Weight = Callable[[Tensor], Tensor]  # mask [B, S] -> w [B, S]
Extra = Callable[[Experience], dict[str, Tensor]]  # the batch -> name -> [B, S, ...]


class Case(NamedTuple):
    """A model and a batch for it, all float64: `total_and_grad(loss_fn, c.apply, c.params, packs)`."""

    apply: Apply
    params: tree.Named
    exp: Experience


def normal(seed: int, name: str, *shape: int) -> Tensor:
    """[*shape]: normal numbers in float64; another `name` gives others."""
    return torch.randn(shape, generator=rng.generator(rng.fold_in(seed, name)), dtype=torch.float64)


def uniform(seed: int, name: str, low: int, high: int, *shape: int) -> Tensor:
    """[*shape] i64: integers in [low, high)."""
    return torch.randint(low, high, shape, generator=rng.generator(rng.fold_in(seed, name)))


def tabular(seed: int = 0) -> tuple[Apply, tree.Named]:
    """(apply, params): logits = bigram[token] + position[pos], value = table[token]; 0 outside mask.

    The smallest model that notices a wrong token, a wrong target and a position that was not reset.
    """
    bigram, position = normal(seed, "bigram", VOCAB, VOCAB), normal(seed, "position", LENGTH, VOCAB)
    return _apply, tree.Named(bigram=bigram, position=position, value=normal(seed, "value", VOCAB))


def _apply(params: Any, b: Packed) -> TokenOut:
    logp = (params["bigram"][b.tokens] + params["position"][b.pos]).log_softmax(-1)
    chosen = logp.gather(-1, b.target.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    # products and no `where`: a NaN in the gradient of a masked token has to reach the parameters and be seen
    return TokenOut(logp=chosen * b.mask, entropy=entropy * b.mask, value=params["value"][b.tokens] * b.mask)


def ragged(seed: int) -> tuple[Tensor, Tensor]:
    """(mask [B, S], length [B]): holes where a tool spoke; row 0 is masked, the response of row 1 is empty,
    that of row 2 has one token; the other rows end with a token in mask, and row 3 also starts with one: a
    loss that reads over the boundary before it is seen."""
    prompt = uniform(seed, "prompt", 1, 4, ROWS)
    prompt[3] = 1
    length = prompt + uniform(seed, "length", 2, LENGTH - 2, ROWS)
    length[1], length[2] = prompt[1], prompt[2] + 1
    at, spoken = torch.arange(LENGTH), uniform(seed, "hole", 0, 4, ROWS, LENGTH) > 0
    mask = (at >= prompt[:, None]) & (at < length[:, None]) & spoken
    mask[torch.arange(2, ROWS), length[2:] - 1] = True
    mask[3, 1] = True
    mask[0] = False
    return mask, length


def case(seed: int = 0, *, weight: Weight = token_mean, extra: Extra | None = None) -> Case:
    """A random batch [8, 12] for the tabular model: ragged, with tool turns and rows without a token in mask.

    Every optional field is set; old and reference log-probs lie within about 1 nat of the model's.
    `extra(exp) -> {name: [B, S, ...]}` makes a loss's own data from the batch, e.g. `lambda exp: {"chosen":
    top_share(exp.adv, exp.mask, share=0.2).double()}`; without it `extra` is {"noise": [B, S, 2]}.
    ValueError for data of another shape.
    """
    apply, params = tabular(seed)
    mask, length = ragged(seed)
    fields = {name: torch.where(mask, normal(seed, name, ROWS, LENGTH), 0) for name in FIELDS}
    tokens = uniform(seed, "tokens", 0, VOCAB, ROWS, LENGTH)
    exp = Experience(tokens=tokens, mask=mask, length=length, w=_weigh(mask, weight), **fields)  # type: ignore[arg-type]
    logp = log_probs(apply, params, exp)
    near = {name: logp + 0.4 * fields[name] for name in ("old_logp", "ref_logp")}
    exp = tree.replace(exp, **near)
    own = {"noise": normal(seed, "noise", ROWS, LENGTH, 2) * mask.unsqueeze(-1)}
    if extra is not None:
        own = _own(extra, exp)
    return Case(apply, params, tree.replace(exp, extra=own))


def _own(extra: Extra, exp: Experience) -> dict[str, Tensor]:
    found = extra(exp)
    for name, x in found.items():
        if x.shape[:2] != exp.mask.shape:
            want = f"[B, S, ...] = [{ROWS}, {LENGTH}, ...]"
            raise ValueError(f"extra[{name!r}]: expected {want}, got {list(x.shape)}")
    return found


def whole(exp: Experience, unit: int = 1) -> list[Packed]:
    """All rows in one pack."""
    return [packing.pack(exp, range(exp.tokens.shape[0]), unit=unit)]


def by_unit(exp: Experience, unit: int = 1) -> list[Packed]:
    """A pack for each unit of rows."""
    return [packing.pack(exp, range(i, i + unit), unit=unit) for i in range(0, exp.tokens.shape[0], unit)]


def _weigh(mask: Tensor, weight: Weight) -> Tensor:
    w = weight(mask).double()
    if w.shape != mask.shape or not (w[~mask] == 0).all():
        raise AssertionError(f"weight: expected [B, S] = {list(mask.shape)} and 0 outside mask, got {w}")
    return w


def reweigh(exp: Experience, mask: Tensor, weight: Weight) -> Experience:
    """`exp` with another mask and the weights that go with it. AssertionError for weights that are not [B, S]
    or not 0 outside mask."""
    return tree.replace(exp, mask=mask, w=_weigh(mask, weight))


@torch.no_grad()
def log_probs(apply: Apply, params: Any, exp: Experience) -> Tensor:
    """[B, S]: log-probs of the model, 0 outside mask."""
    packs = whole(exp)
    return packing.unpack([apply(params, p).logp for p in packs], packs, exp.tokens)
