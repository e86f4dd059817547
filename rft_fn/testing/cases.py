"""The batch that losses are checked on, a tabular model and ragged rows in float64; and runs on it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import check, metric, packing, rng, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.types import Apply, Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "FIELDS", "LENGTH", "ROWS", "VOCAB", "Case", "ExtraFn", "Failure", "Run", "Unit", "apart", "assert_same",
    "by_unit", "case", "flat", "gap", "log_probs", "normal", "packed", "ragged", "reweigh", "rows_of", "run",
    "tabular", "token_losses", "total_and_grad", "uniform", "whole",
]  # fmt: skip


# ---------- the batch that losses are checked on: a tabular model and ragged rows in float64, and its cuts


Unit = int | Sequence[int]  # rows that belong together, of every unit or of each
ExtraFn = Callable[[Experience], dict[str, Tensor]]  # name -> data [B, S, ...] of a batch for a custom loss

VOCAB = 7
ROWS = 8
LENGTH = 12
FIELDS = ("old_logp", "ref_logp", "adv", "old_value", "ret")


class Case(NamedTuple):
    """A model and a batch for it, in float64: `total_and_grad(loss_fn, c.apply, c.params, packs)`."""

    apply: Apply
    params: tree.Named
    exp: Experience


def normal(seed: int, name: str, *shape: int) -> Tensor:
    """Draw normal numbers in float64, other ones for every `name`."""
    return torch.randn(shape, generator=rng.generator(rng.fold_in(seed, name)), dtype=torch.float64)


def uniform(seed: int, name: str, low: int, high: int, *shape: int) -> Tensor:
    """Draw integers in [low, high), i64."""
    return torch.randint(low, high, shape, generator=rng.generator(rng.fold_in(seed, name)))


def tabular(seed: int = 0) -> tuple[Apply, tree.Named]:
    """Return the (apply, params) of a tabular model.

    It is the smallest that notices a wrong token, target or position:

        logits = bigram[token] + position[pos],    value = table[token],    score = [value, -value]

    Its outputs are 0 outside mask.
    """
    bigram = normal(seed, "bigram", VOCAB, VOCAB)
    position = normal(seed, "position", LENGTH, VOCAB)
    return _apply, tree.Named(bigram=bigram, position=position, value=normal(seed, "value", VOCAB))


def _apply(params: Any, b: Packed) -> TokenOut:
    logp = (params["bigram"][b.tokens] + params["position"][b.pos]).log_softmax(-1)
    chosen = logp.gather(-1, b.target.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    # products and no `where`: a NaN in the gradient of a masked token must reach the parameters and be seen
    value = params["value"][b.tokens] * b.mask
    words_logp = None if b.words is None else logp.gather(-1, b.words) * b.mask.unsqueeze(-1)
    return TokenOut(
        logp=chosen * b.mask,
        entropy=entropy * b.mask,
        sum_p2=logp.exp().square().sum(-1) * b.mask,
        value=value,
        score=torch.stack([value, -value], -1),
        words_logp=words_logp,
    )


def ragged(seed: int) -> tuple[Tensor, Tensor]:
    """Return (mask [B, S], length [B]) of ragged rows.

    The rows have tool turns and other edge cases. Row 0 has no
    token in mask, the response of row 1 is empty, that of row 2 has one token. The other rows end with a
    token in mask, and row 3 also starts with one, to catch a loss that reads over the boundary before it.
    """
    prompt = uniform(seed, "prompt", 1, 4, ROWS)
    prompt[3] = 1
    length = prompt + uniform(seed, "length", 2, LENGTH - 2, ROWS)
    length[1] = prompt[1]
    length[2] = prompt[2] + 1
    at = torch.arange(LENGTH)
    spoken = uniform(seed, "hole", 0, 4, ROWS, LENGTH) > 0
    mask = (at >= prompt[:, None]) & (at < length[:, None]) & spoken
    mask[torch.arange(2, ROWS), length[2:] - 1] = True
    mask[3, 1] = True
    mask[0] = False
    return mask, length


def case(seed: int = 0, *, weight: WeightFn = token_mean, extra: ExtraFn | None = None) -> Case:
    """Return a random ragged batch [8, 12] for the tabular model.

    It has tool turns, rows without a token in mask, and every optional field; old and reference log-probs
    lie within about 1 nat of the model's. `extra(exp) -> {name: [B, S, ...]}` makes data for a loss from
    the batch, for example `lambda exp: {"chosen": top_share(exp.adv, exp.mask, share=0.2).double()}`; a
    number a row [B] is put on each of its tokens. By default `extra` is {"noise": [B, S, 2]}. ValueError for
    data of another shape.
    """
    apply, params = tabular(seed)
    mask, length = ragged(seed)
    fields: dict[str, Any] = {name: torch.where(mask, normal(seed, name, ROWS, LENGTH), 0) for name in FIELDS}
    tokens = uniform(seed, "tokens", 0, VOCAB, ROWS, LENGTH)
    words = uniform(seed, "words", 0, VOCAB, ROWS, LENGTH, 2)
    exp = Experience(tokens=tokens, mask=mask, length=length, w=_weigh(mask, weight), words=words, **fields)

    # far from the model's log-probs every ratio would be clipped
    logp = log_probs(apply, params, exp)
    exp = tree.replace(
        exp, old_logp=logp + 0.4 * fields["old_logp"], ref_logp=logp + 0.4 * fields["ref_logp"]
    )

    noise = normal(seed, "noise", ROWS, LENGTH, 2) * mask.unsqueeze(-1)
    data = {"noise": noise} if extra is None else extra(exp)
    data = {name: x[:, None] * mask if x.shape == (ROWS,) else x for name, x in data.items()}
    for name, x in data.items():
        if x.shape[:2] != mask.shape:
            want = f"[B, S, ...] = [{ROWS}, {LENGTH}, ...]"
            raise ValueError(f"extra[{name!r}]: expected {want}, got {list(x.shape)}")
    return Case(apply, params, tree.replace(exp, extra=data))


def whole(exp: Experience, unit: Unit = 1) -> list[Packed]:
    """Pack all rows together."""
    return [packing.pack(exp, range(exp.tokens.shape[0]), unit=unit)]


def rows_of(unit: Unit, count: int = ROWS) -> list[list[int]]:
    """Return the rows of each unit of `count` rows."""
    sizes = check.units(unit, count)
    return [packing.members_of(sizes, [u]) for u in range(len(sizes))]


def packed(exp: Experience, rows: Sequence[int], unit: Unit) -> Packed:
    """Pack whole units of a batch together."""
    return packing.pack(exp, rows, unit=packing.units_of(unit, rows))


def by_unit(exp: Experience, unit: Unit = 1) -> list[Packed]:
    """Pack each unit of rows by itself."""
    return [packed(exp, rows, unit) for rows in rows_of(unit, exp.tokens.shape[0])]


def _weigh(mask: Tensor, weight: WeightFn) -> Tensor:
    w = weight(mask).double()
    if w.shape != mask.shape or not (w[~mask] == 0).all():
        raise AssertionError(f"weight: expected [B, S] = {list(mask.shape)} and 0 outside mask, got {w}")
    return w


def reweigh(exp: Experience, mask: Tensor, weight: WeightFn) -> Experience:
    """Replace the mask of a batch, and its weights accordingly.

    AssertionError for weights that are not [B, S] or not 0 outside mask.
    """
    return tree.replace(exp, mask=mask, w=_weigh(mask, weight))


@torch.no_grad()
def log_probs(apply: Apply, params: Any, exp: Experience) -> Tensor:
    """Log-probs of the model [B, S], 0 outside mask."""
    packs = whole(exp)
    return packing.unpack([apply(params, p).logp for p in packs], packs, exp.tokens)


def apart(c: Case, logp: Tensor, shift: Tensor) -> tuple[Apply, Experience]:
    """Shift the log-ratios to old and reference policy to `shift` [B, S] nats.

    The smaller probability shrinks, so that none exceeds 1. `logp` [B, S] has the model's log-probs.
    """
    far = logp - shift.clamp(min=0)
    lower = shift.clamp(max=0)

    def apply(params: Any, b: Packed) -> TokenOut:
        out = c.apply(params, b)
        down = lower[torch.tensor(b.rows)[b.seq], b.pos + 1].to(out.logp.dtype)
        return tree.replace(out, logp=out.logp + down)

    return apply, tree.replace(c.exp, old_logp=far, ref_logp=far)


# ---------- runs of a loss as in a train step, and their comparison


class Failure(AssertionError):
    """A failed check, with a code for how it failed, from which the cause is found."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Run(NamedTuple):
    """The results of a loss on a batch."""

    total: Tensor  # []
    scale: Tensor  # [] sum of |w loss|, to compare totals by: they may cancel to 0
    grads: Any
    metrics: dict[str, float]


def _fields(x: TokenOut | Packed) -> dict[str, Tensor]:
    """Return name -> tensor of a record, those of `extra` by their own names."""
    named = {**vars(x), **(x.extra or {} if isinstance(x, Packed) else {})}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def token_losses(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, dict]:
    """Return (loss [T], metrics) of a pack; Failure unless it is one number per token.

    Failure too for a loss that changes its arguments in place.
    """
    before = {name: x._version for name, x in (_fields(out) | _fields(b)).items()}
    x, metrics = evaluate(loss_fn, out, b)
    metric.merge({}, metrics)  # raises for a value that is no metric
    written = [name for name, y in (_fields(out) | _fields(b)).items() if y._version != before.get(name)]
    if written:
        raise Failure(
            "written", f"loss: it changes {', '.join(written)} in place; write x * y, not x.mul_(y)"
        )
    if x.shape != b.target.shape:
        few = x.numel() < b.target.numel()
        raise Failure(
            "scalar" if few else "shape",
            f"loss: expected one number per token, [T] = {list(b.target.shape)}, got {list(x.shape)}; "
            + ("averages belong in w" if few else "bring it to [T]"),
        )
    return x, metrics


def run(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> Run:
    """Return the total of (w loss).sum() over packs, its gradient and the metrics."""
    leaf = tree.map(lambda p: p.detach().clone().requires_grad_(), params)
    terms = []
    metrics = {}
    for b in packs:
        x, m = token_losses(loss_fn, apply(leaf, b), b)
        terms.append(b.w * x)
        metrics = metric.merge(metrics, m)
    all_terms = torch.cat(terms)
    if not all_terms.requires_grad:
        raise Failure("cut", "loss: it has no gradient; is it detached, or built by torch.tensor(...)?")
    grads = torch.autograd.grad(all_terms.sum(), tree.leaves(leaf), materialize_grads=True)
    values = all_terms.detach()
    like_params = tree.unflatten_like(params, list(grads))
    return Run(values.sum(), values.abs().sum(), like_params, metric.results(metrics))


def total_and_grad(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> tuple[Tensor, Any]:
    """Return (total [], gradient like params) of (w loss).sum() over packs, as in a train step.

    AssertionError if the loss is not one number per token, or has no gradient.
    """
    result = run(loss_fn, apply, params, packs)
    return result.total, result.grads


def flat(grads: Any) -> Tensor:
    """Join all gradients to one vector."""
    return torch.cat([x.flatten() for x in tree.leaves(grads)])


def gap(got: Tensor, want: Tensor) -> str:
    """Describe the error of a gradient [P] in size and direction."""
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=0)
    norm = got.norm() / want.norm().clamp(min=1e-300)
    return f"off by at most {(got - want).abs().max():.2g} (cosine {cosine:.4f}, norm ratio {norm:.4f})"


def _errors(want: Run, got: Run) -> dict[str, float]:
    """Return name -> relative error.

    The scales are the sum of |w loss|, the largest gradient, and max(1, |metric|).
    """
    errors = {"total": float((want.total - got.total).abs() / want.scale.clamp(min=1e-300))}
    scale = flat(want.grads).abs().max().clamp(min=1e-300)
    pairs = zip(tree.leaves_with_path(want.grads), tree.leaves(got.grads))
    errors |= {f"gradient of {path}": float((x - y).abs().max() / scale) for (path, x), y in pairs}
    for name in want.metrics.keys() | got.metrics.keys():
        x = want.metrics.get(name, math.nan)
        y = got.metrics.get(name, math.nan)
        # the difference of two infinities is NaN
        errors[f"metric {name}"] = abs(x - y) / max(1.0, abs(x)) if x != y else 0.0
    return errors


def assert_same(varied: str, want: Run, got: Run, rtol: float) -> None:
    """Assert that two runs are equal, to `rtol`; the message names what was `varied` and changed."""
    bad = {name: e for name, e in _errors(want, got).items() if not e <= rtol}  # NaN is bad too
    if bad:
        totals = f"the total loss {want.total:.6g} became {got.total:.6g}"
        change = ", ".join(f"{name} by {e:.2g}" for name, e in sorted(bad.items()))
        raise AssertionError(f"{varied}: {totals}; relative change of {change} (allowed {rtol:g})")
