"""Property checks of losses, weights and estimators, for ours and for yours: one call each.

    testing.check_all(my_loss)                   # my_loss(out: TokenOut, b: Packed) -> [T], or ([T], metrics)
    testing.check_kl_gradient(my_kl)             # my_kl(logp [*], ref_logp [*]) -> [*]
    testing.check_deletion_invariance(my_gae)    # my_gae(reward, value, discount, mask=mask) -> (adv, ret)

Each raises AssertionError that says what was varied and by how much the result moved. They run on `case`, a
tabular model and a small ragged batch in float64: what a right loss leaves is rounding, and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import metric, packing, rng, tree
from rft_fn.types import Apply, Experience, LossFn, Packed, TokenOut
from rft_fn.weight import token_mean

__all__ = [
    "Case", "case", "check_all", "check_deletion_invariance", "check_finite", "check_kl_gradient",
    "check_on_policy_identity", "check_packing_invariance", "check_padding_invariance",
    "check_partition_invariance", "check_permutation_invariance", "tabular", "total_and_grad",
]  # fmt: skip

VOCAB, ROWS, LENGTH = 7, 8, 12
_FIELDS = ("old_logp", "ref_logp", "adv", "old_value", "ret")
Weight = Callable[[Tensor], Tensor]  # mask [B, S] -> w [B, S]


class Case(NamedTuple):
    """A model and a batch for it, all float64: `total_and_grad(loss_fn, c.apply, c.params, packs)`."""

    apply: Apply
    params: tree.Named
    exp: Experience


def _normal(seed: int, name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng.generator(rng.fold_in(seed, name)), dtype=torch.float64)


def _uniform(seed: int, name: str, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=rng.generator(rng.fold_in(seed, name)))


def tabular(seed: int = 0) -> tuple[Apply, tree.Named]:
    """(apply, params): logits = bigram[token] + position[pos], value = table[token]; 0 outside mask.

    The smallest model that notices a wrong token, a wrong target and a position that was not reset.
    """
    bigram, position = _normal(seed, "bigram", VOCAB, VOCAB), _normal(seed, "position", LENGTH, VOCAB)
    return _apply, tree.Named(bigram=bigram, position=position, value=_normal(seed, "value", VOCAB))


def _apply(params: Any, b: Packed) -> TokenOut:
    logp = (params["bigram"][b.tokens] + params["position"][b.pos]).log_softmax(-1)
    chosen = logp.gather(-1, b.target.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    # products and no `where`: a NaN in the gradient of a masked token has to reach the parameters and be seen
    return TokenOut(logp=chosen * b.mask, entropy=entropy * b.mask, value=params["value"][b.tokens] * b.mask)


def _ragged(seed: int) -> tuple[Tensor, Tensor]:
    """(mask [B, S], length [B]): holes where a tool spoke; row 0 is masked, the response of row 1 is empty,
    that of row 2 has one token; the other rows end with a token in mask."""
    prompt = _uniform(seed, "prompt", 1, 4, ROWS)
    length = prompt + _uniform(seed, "length", 2, LENGTH - 2, ROWS)
    length[1], length[2] = prompt[1], prompt[2] + 1
    at, spoken = torch.arange(LENGTH), _uniform(seed, "hole", 0, 4, ROWS, LENGTH) > 0
    mask = (at >= prompt[:, None]) & (at < length[:, None]) & spoken
    mask[torch.arange(2, ROWS), length[2:] - 1] = True
    mask[0] = False
    return mask, length


def case(seed: int = 0, *, weight: Weight = token_mean) -> Case:
    """A random batch [8, 12] for the tabular model: ragged, with tool turns and rows without a token in mask.

    Every optional field is set; old and reference log-probs lie within about 1 nat of the model's.
    """
    apply, params = tabular(seed)
    mask, length = _ragged(seed)
    fields = {name: torch.where(mask, _normal(seed, name, ROWS, LENGTH), 0) for name in _FIELDS}
    tokens = _uniform(seed, "tokens", 0, VOCAB, ROWS, LENGTH)
    exp = Experience(tokens=tokens, mask=mask, length=length, w=_weigh(mask, weight), **fields)  # type: ignore[arg-type]
    logp = _score(apply, params, exp)
    near = {name: logp + 0.4 * fields[name] for name in ("old_logp", "ref_logp")}
    return Case(apply, params, tree.replace(exp, **near))


def _whole(exp: Experience) -> list[Packed]:
    return [packing.pack(exp, range(exp.tokens.shape[0]))]


def _rows(exp: Experience) -> list[Packed]:
    return [packing.pack(exp, [i]) for i in range(exp.tokens.shape[0])]


def _weigh(mask: Tensor, weight: Weight) -> Tensor:
    w = weight(mask).double()
    if w.shape != mask.shape or not (w[~mask] == 0).all():
        raise AssertionError(f"weight: expected [B, S] = {list(mask.shape)} and 0 outside mask, got {w}")
    return w


def _reweigh(exp: Experience, mask: Tensor, weight: Weight) -> Experience:
    return tree.replace(exp, mask=mask, w=_weigh(mask, weight))


@torch.no_grad()
def _score(apply: Apply, params: Any, exp: Experience) -> Tensor:
    """[B, S]: log-probs of the model, 0 outside mask."""
    packs = _whole(exp)
    return packing.unpack([apply(params, p).logp for p in packs], packs, exp.tokens)


class _Run(NamedTuple):
    total: Tensor  # []
    scale: (
        Tensor  # [] sum of |w loss|: what the error of the total is relative to, as a total may cancel to 0
    )
    grads: Any
    metrics: dict[str, float]


def _tokens(loss_fn: LossFn, out: TokenOut, b: Packed) -> tuple[Tensor, dict]:
    got = loss_fn(out, b)
    x, metrics = got if isinstance(got, tuple) else (got, {})
    if x.shape != b.target.shape:
        want, got = list(b.target.shape), list(x.shape)
        raise AssertionError(
            f"loss: expected one number a token, [T] = {want}, got {got}; averages belong in w"
        )
    return x, metrics


def _run(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> _Run:
    leaf = tree.map(lambda p: p.detach().clone().requires_grad_(), params)
    terms, metrics = [], {}
    for b in packs:
        x, m = _tokens(loss_fn, apply(leaf, b), b)
        terms.append(b.w * x)
        metrics = metric.merge(metrics, m)
    flat = torch.cat(terms)
    if not flat.requires_grad:
        raise AssertionError("loss: it has no gradient; is it detached, or built by torch.tensor(...)?")
    grads = torch.autograd.grad(flat.sum(), tree.leaves(leaf), materialize_grads=True)
    total, scale = flat.detach().sum(), flat.detach().abs().sum()
    return _Run(total, scale, tree.unflatten_like(params, list(grads)), metric.results(metrics))


def total_and_grad(loss_fn: LossFn, apply: Apply, params: Any, packs: Sequence[Packed]) -> tuple[Tensor, Any]:
    """([], like params): the sum over packs of (w loss).sum() and its gradient, as a train step has it.

    AssertionError when the loss is not one number a token, or has no gradient.
    """
    run = _run(loss_fn, apply, params, packs)
    return run.total, run.grads


def _flat(grads: Any) -> Tensor:
    return torch.cat([x.flatten() for x in tree.leaves(grads)])


def _errors(want: _Run, got: _Run) -> dict[str, float]:
    """What differs -> by how much, relative to: sum of |w loss|, the largest gradient, max(1, |metric|)."""
    errors = {"total": float((want.total - got.total).abs() / want.scale.clamp(min=1e-300))}
    scale = _flat(want.grads).abs().max().clamp(min=1e-300)
    pairs = zip(tree.leaves_with_path(want.grads), tree.leaves(got.grads))
    errors |= {f"gradient of {path}": float((x - y).abs().max() / scale) for (path, x), y in pairs}
    for name in want.metrics.keys() | got.metrics.keys():
        x, y = (run.metrics.get(name, float("nan")) for run in (want, got))
        errors[f"metric {name}"] = 0.0 if x == y else abs(x - y) / max(1.0, abs(x))
    return errors


def _assert_same(varied: str, want: _Run, got: _Run, rtol: float) -> None:
    bad = {name: e for name, e in _errors(want, got).items() if not e <= rtol}  # so that NaN is bad too
    if bad:
        totals = f"the total loss {want.total:.6g} became {got.total:.6g}"
        change = ", ".join(f"{name} by {e:.2g}" for name, e in sorted(bad.items()))
        raise AssertionError(f"{varied}: {totals}; relative change of {change} (allowed {rtol:g})")


def _cuts(exp: Experience, seed: int) -> dict[str, list[Packed]]:
    """Names -> packs of the same rows, cut in every way that a run may cut them."""
    cuts = {"one row a micro-batch": _rows(exp)}
    order = torch.randperm(ROWS, generator=rng.generator(rng.fold_in(seed, "cut"))).tolist()
    for n in (2, 3):
        cuts[f"{n} random micro-batches"] = [packing.pack(exp, sorted(order[i::n])) for i in range(n)]
        parts = packing.minibatches(exp, n, rng.fold_in(seed, n))
        cuts[f"{n} minibatches that keep their w"] = [p for part in parts for p in _whole(part)]
    for budget in (LENGTH, 2 * LENGTH, ROWS * LENGTH):
        for world in (1, 2, 5):
            shards = packing.shard(exp, budget, world)
            cuts[f"packs of {budget} tokens on {world} ranks"] = [p for rank in shards for p in rank]
    return cuts


def check_partition_invariance(
    loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0, rtol: float = 1e-12
) -> None:
    """Every cut of the batch (micro-batches, packs, ranks, minibatches) has one total, gradient, metrics."""
    apply, params, exp = case(seed, weight=weight)
    want = _run(loss_fn, apply, params, _whole(exp))
    for name, packs in _cuts(exp, seed).items():
        _assert_same(f"{name} instead of one pack", want, _run(loss_fn, apply, params, packs), rtol)


def _widen(exp: Experience, extra: int, weight: Weight, seed: int) -> Experience:
    """`exp` with more columns, garbage tokens in its padding and NaN in every field outside mask."""
    wide = lambda x: torch.cat([x, x.new_zeros(ROWS, extra)], -1)  # noqa: E731
    mask, pad = wide(exp.mask), torch.arange(LENGTH + extra) >= exp.length[:, None]
    garbage = _uniform(seed, "garbage", 0, VOCAB, ROWS, LENGTH + extra)
    fields = {name: torch.where(mask, wide(getattr(exp, name)), torch.nan) for name in _FIELDS}
    padded = tree.replace(exp, tokens=torch.where(pad, garbage, wide(exp.tokens)), **fields)
    return _reweigh(padded, mask, weight)


def _tail(b: Packed, extra: int) -> Packed:
    """`b` with one more sequence, of masked tokens, as packs of a fixed size have it."""
    longer = tree.map(lambda x: torch.cat([x, x.new_zeros(extra)]), b)
    seq = torch.cat([b.seq, torch.full((extra,), b.num_seqs)])
    return tree.replace(longer, seq=seq, pos=packing.reset_position_ids(seq), num_seqs=b.num_seqs + 1)


def check_padding_invariance(
    loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0, rtol: float = 1e-12
) -> None:
    """Padding, NaN in every field outside mask, and masked tokens at the end of packs change nothing."""
    apply, params, exp = case(seed, weight=weight)
    want = _run(loss_fn, apply, params, _whole(exp))
    for extra in (1, LENGTH - 1):
        padded = _whole(_widen(exp, extra, weight, seed))
        _assert_same(f"{extra} more columns of padding", want, _run(loss_fn, apply, params, padded), rtol)
        tail = [_tail(p, extra) for p in _whole(exp)]
        _assert_same(f"{extra} masked tokens after a pack", want, _run(loss_fn, apply, params, tail), rtol)


@torch.no_grad()
def _table(loss_fn: LossFn, c: Case, packs: Sequence[Packed]) -> Tensor:
    """[B, S]: the loss of each token in mask."""
    x = [torch.where(p.mask, _tokens(loss_fn, c.apply(c.params, p), p)[0], 0) for p in packs]
    return packing.unpack(x, packs, c.exp.tokens)


def check_packing_invariance(
    loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0, rtol: float = 1e-12
) -> None:
    """A token's loss is the same whatever shares its pack, in any order: sequences do not see each other."""
    c = case(seed, weight=weight)
    alone = _table(loss_fn, c, _rows(c.exp))
    ways = {"all rows in one pack": _whole(c.exp)}
    ways["all rows backwards in one pack"] = [packing.pack(c.exp, range(ROWS)[::-1])]
    ways |= {f"packs of {n} tokens": packing.shard(c.exp, n)[0] for n in (LENGTH, 3 * LENGTH)}
    for name, packs in ways.items():
        error = (_table(loss_fn, c, packs) - alone).abs()
        row, at = divmod(int(error.nan_to_num(nan=torch.inf).argmax()), LENGTH)
        if not error[row, at] <= rtol * max(1.0, float(alone.abs().max())):
            raise AssertionError(
                f"{name} instead of each row alone: the loss of row {row}, token {at} changed by "
                f"{error[row, at]:.2g} from {alone[row, at]:.6g}; a neighbour leaks in"
            )


def check_permutation_invariance(
    loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0, rtol: float = 1e-12
) -> None:
    """The order of the rows of the batch changes neither the total nor the gradient."""
    apply, params, exp = case(seed, weight=weight)
    want = _run(loss_fn, apply, params, _whole(exp))
    for n in range(3):
        order = torch.randperm(ROWS, generator=rng.generator(rng.fold_in(seed, "rows", n)))
        moved = packing.take(exp, order)
        got = _run(loss_fn, apply, params, _whole(_reweigh(moved, moved.mask, weight)))
        _assert_same(f"rows in the order {order.tolist()}", want, got, rtol)


def _gap(got: Tensor, want: Tensor) -> str:
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=0)
    norm = got.norm() / want.norm().clamp(min=1e-300)
    return f"off by at most {(got - want).abs().max():.2g} (cosine {cosine:.4f}, norm ratio {norm:.4f})"


def check_on_policy_identity(
    loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0, per_sequence: bool = False
) -> None:
    """At logp == old_logp the gradient is that of -adv logp. For policy losses without a KL or entropy term.

    `per_sequence`: one advantage for all tokens of a row, for losses with one ratio a sequence (GSPO).
    """
    apply, params, exp = case(seed, weight=weight)
    adv = _normal(seed, "adv of the row", ROWS, 1) * exp.mask if per_sequence else exp.adv
    packs = _whole(tree.replace(exp, adv=adv, old_logp=_score(apply, params, exp)))
    got = _flat(_run(loss_fn, apply, params, packs).grads)
    want = _flat(_run(lambda out, b: -b.adv * out.logp, apply, params, packs).grads)
    if not (got - want).abs().max() <= 1e-12 * want.abs().max():
        raise AssertionError(f"logp == old_logp: the gradient is not that of -adv * logp: {_gap(got, want)}")


def check_kl_gradient(
    kl_fn: Callable[[Tensor, Tensor], Tensor], *, atol: float = 1e-12, vocab: int = 5, seed: int = 0
) -> None:
    """E_pi[grad kl_fn(logp, ref_logp)], by enumeration of a small vocabulary, is the gradient of KL(pi, ref).

    That is what `kl_fn` does as a loss term on samples of the policy. k1 gives 0, k3 that of KL(ref, pi).
    """
    z = _normal(seed, "policy", vocab).requires_grad_()
    logp, ref = z.log_softmax(-1), _normal(seed, "reference", vocab).log_softmax(-1)
    p = logp.exp()
    (want,) = torch.autograd.grad((p * (logp - ref)).sum(), z, retain_graph=True)
    (got,) = torch.autograd.grad((p.detach() * kl_fn(logp, ref)).sum(), z, materialize_grads=True)
    if not (got - want).abs().max() <= atol:
        raise AssertionError(f"the expected gradient is not that of KL(pi, ref): {_gap(got, want)}")


def _assert_deleted(name: str, row: int, whole: Tensor, m: Tensor, short: Tensor, atol: float) -> None:
    if not (whole[~m] == 0).all():
        raise AssertionError(f"{name} of row {row}: expected 0 outside mask, got {whole[~m].tolist()}")
    error = (whole[m] - short).abs()
    if not (error <= atol).all():
        raise AssertionError(
            f"{name} of row {row} changed by {error.max():.2g} when its {int((~m).sum())} masked tokens were "
            f"deleted: {whole[m].tolist()} with them, {short.tolist()} without"
        )


def check_deletion_invariance(
    gae_fn: Callable[..., tuple[Tensor, Tensor]], *, seed: int = 0, atol: float = 1e-12
) -> None:
    """`gae_fn(reward, value, discount, mask=mask) -> (adv, ret)`, all [B, S]: masked tokens (tool output,
    padding) are passed over: deleting them first gives the same numbers on the others, and they get 0."""
    mask, _ = _ragged(seed)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    data = [_normal(seed, name, ROWS, LENGTH) for name in ("reward", "state value")]
    data.append(torch.where(last, 0.0, 0.9).double())
    results = gae_fn(*data, mask=mask)
    for row, m in enumerate(mask):
        short = gae_fn(*(x[row, m][None] for x in data), mask=m[m][None])
        for name, whole, part in zip(("adv", "ret"), results, short):
            _assert_deleted(name, row, whole[row], m, part[0], atol)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


def _apart(c: Case, shift: float) -> tuple[Apply, Experience]:
    """A log-ratio of `shift` nats to old and reference. The smaller probability shrinks: none exceeds 1."""
    far = (_score(c.apply, c.params, c.exp) - max(shift, 0.0)) * c.exp.mask

    def apply(params: Any, b: Packed) -> TokenOut:
        out = c.apply(params, b)
        return tree.replace(out, logp=(out.logp + min(shift, 0.0)) * b.mask)

    return apply, tree.replace(c.exp, old_logp=far, ref_logp=far)


def _assert_finite(varied: str, run: _Run) -> None:
    bad = [] if run.total.isfinite() else [f"the total is {run.total:g}"]
    for path, g in tree.leaves_with_path(run.grads):
        count = int((~g.isfinite()).sum())
        bad += [f"{count} of {g.numel()} entries of the gradient of {path} are not finite"] if count else []
    if bad:
        raise AssertionError(f"{varied}: {'; '.join(bad)}")


def _silent(exp: Experience, weight: Weight) -> dict[str, list[Packed]]:
    nothing = _reweigh(exp, torch.zeros_like(exp.mask), weight)
    packs = {"masked rows": [packing.pack(exp, [0, 1])], "a batch of masked rows": _whole(nothing)}
    return packs | {"an empty pack": [packing.pack(exp, [])]}


def check_finite(loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0) -> None:
    """Finite value, gradient at log-ratios of 0, +-50 in float64 and float32; exactly 0 for masked rows."""
    c = case(seed, weight=weight)
    for dtype in (torch.float64, torch.float32):
        for shift in (0.0, 50.0, -50.0):
            apply, exp = _apart(c, shift)
            run = _run(loss_fn, apply, _cast(c.params, dtype), _whole(_cast(exp, dtype)))
            _assert_finite(f"log-ratio {shift:+g} in {dtype}", run)
    for name, packs in _silent(c.exp, weight).items():
        run = _run(loss_fn, c.apply, c.params, packs)
        _assert_finite(name, run)
        top = _flat(run.grads).abs().max()
        if run.total != 0 or top != 0:
            raise AssertionError(f"{name}: expected loss and gradient 0, got {run.total:.2g} and {top:.2g}")


def check_all(
    loss_fn: LossFn, *, weight: Weight = token_mean, seed: int = 0, on_policy: bool = False
) -> None:
    """All of the above that a loss has to pass; `on_policy` adds the identity of policy losses."""
    checks = [check_partition_invariance, check_padding_invariance, check_packing_invariance]
    checks += [check_permutation_invariance, check_finite]
    for check in checks + [check_on_policy_identity] * on_policy:
        check(loss_fn, weight=weight, seed=seed)
