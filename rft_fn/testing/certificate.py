"""What a certificate of a loss holds: verdicts, the exact bias, and the dependence on the micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import packing, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.testing.cases import ROWS, ExtraFn, Unit, case, log_probs, normal
from rft_fn.testing.diagnosis import Verdict, likeliest_cause, verdicts
from rft_fn.testing.policy_losses import enumerated
from rft_fn.types import Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "BatchLoss", "Certificate", "LossBias", "certify", "loss_bias", "micro_batch_error", "of_trl", "of_verl",
]  # fmt: skip


# ---------- the bias of a loss as an estimator of the policy gradient, by enumeration


class LossBias(NamedTuple):
    """The expected gradient of a loss compared with that of E[R], sampled by a policy `gap` nats away."""

    gap: float  # deviation of the logits of the policy that sampled
    bias: float  # |E[gradient] - gradient of E[R]| / |gradient of E[R]|
    cosine: float
    norm_ratio: float


def loss_bias(
    loss_fn: LossFn, *, gap: float = 0.0, length: int = 3, vocab: int = 3, seed: int = 0
) -> LossBias:
    """Compute the exact bias of a loss on samples of another policy.

    The vocab^length sequences x of a tabular policy q are a batch, each with the weight q(x) on its tokens,
    a random reward R and the advantage R - E_q[R]. A loss that is the policy gradient on-policy has no bias
    at a gap of 0; what a clip or a ratio of single tokens leaves out appears at larger ones. The batch is the
    expectation, so a loss that depends on its pack has the bias of this pack.
    """
    world = enumerated(length, vocab, seed, gap)
    rows, steps = world.logp.shape
    p, q = world.old_logp.sum(-1).exp(), world.logp.sum(-1).exp()
    (want,) = torch.autograd.grad((p * world.reward).sum(), world.theta, retain_graph=True)
    adv = world.reward - (q * world.reward).sum() / q.sum()

    def flat(x: Tensor) -> Tensor:
        return x.expand(rows, steps).flatten()

    tokens = torch.zeros(rows * steps, dtype=torch.long)
    b = Packed(
        tokens=tokens,
        target=tokens,
        pos=flat(torch.arange(steps)[None]),
        seq=flat(torch.arange(rows)[:, None]),
        mask=torch.ones(rows * steps, dtype=torch.bool),
        old_logp=flat(world.logp),
        adv=flat(adv[:, None]),
        w=flat(q[:, None]),
        ref_logp=flat(world.old_logp.detach()),
        num_seqs=rows,
        rows=tuple(range(rows)),
    )
    out = TokenOut(logp=flat(world.old_logp), entropy=flat(world.entropy))
    loss, _ = evaluate(loss_fn, out, b)
    (got,) = torch.autograd.grad((b.w * loss).sum(), world.theta, materialize_grads=True)
    got = -got.flatten()
    want = want.flatten()
    return LossBias(
        gap=gap,
        bias=float((got - want).norm() / want.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(got, want, dim=0)),
        norm_ratio=float(got.norm() / want.norm()),
    )


# ---------- losses of other libraries: a scalar of a padded batch, which holds its own means


# (log-probs [B, S], a batch) -> loss []
BatchLoss = Callable[[Tensor, Experience], Tensor]


def of_verl(fn: Callable[..., Any], **options: Any) -> BatchLoss:
    """Adapt a policy loss of verl's form: its batch is old_log_prob, log_prob, advantages, response_mask."""

    def loss(logp: Tensor, exp: Experience) -> Tensor:
        result = fn(
            old_log_prob=exp.old_logp,
            log_prob=logp,
            advantages=exp.adv,
            response_mask=exp.mask.to(logp.dtype),
            **options,
        )
        return result[0] if isinstance(result, tuple) else result

    return loss


def of_trl(fn: Callable[..., Tensor], **options: Any) -> BatchLoss:
    """Adapt a loss of TRL's form: per_token_logps, and a dictionary with one advantage a row."""

    def loss(logp: Tensor, exp: Experience) -> Tensor:
        inputs = {
            "completion_mask": exp.mask.to(logp.dtype),
            "advantages": exp.adv.sum(-1) / exp.mask.sum(-1).clamp(min=1),
            "old_per_token_logps": exp.old_logp,
            "ref_per_token_logps": exp.ref_logp,
        }
        return fn(logp, inputs, **options)

    return loss


def micro_batch_error(
    loss: BatchLoss, *, sizes: Sequence[int] = (1, 2, 4), seed: int = 0
) -> dict[int, float]:
    """Measure how far the gradient of micro-batches is from that of the whole batch, by their size.

    Eight rows of different lengths are cut into micro-batches of `size` rows, and the mean of their losses is
    taken, as gradient accumulation does. The error is |mean - whole| / |whole|, of gradients with respect to
    log-probs; a loss that is safe has rounding errors.
    """
    c = case(seed)
    row = normal(seed, "adv of the row", ROWS, 1)
    batch = tree.replace(c.exp, adv=row * c.exp.mask, extra=None, words=None)

    def gradient(parts: list[list[int]]) -> Tensor:
        logp = log_probs(c.apply, c.params, c.exp).requires_grad_()
        terms = [loss(logp[rows], packing.take(batch, rows)) for rows in map(torch.tensor, parts)]
        (found,) = torch.autograd.grad(torch.stack(terms).mean(), logp)
        return found

    whole = gradient([list(range(ROWS))])
    cut = {n: gradient([list(range(i, i + n)) for i in range(0, ROWS, n)]) for n in sizes}
    return {n: float((x - whole).norm() / whole.norm()) for n, x in cut.items()}


# ---------- all of it


class Certificate(NamedTuple):
    """What was checked of a loss, and the result."""

    verdicts: tuple[Verdict, ...]  # of all seeds, a failure if one of them fails
    cause: str  # "" if nothing failed
    bias: tuple[LossBias, ...]  # none of losses that are no policy losses
    seeds: tuple[int, ...]


def certify(
    loss_fn: LossFn,
    *,
    weight: WeightFn = token_mean,
    extra: ExtraFn | None = None,
    unit: Unit = 1,
    on_policy: bool = True,
    low: float | None = None,
    high: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    gaps: Sequence[float] = (0.0, 0.1, 0.5),
) -> Certificate:
    """Run all checks of a loss with several seeds, and compute its bias; arguments as of `check_all`."""
    errors: dict[str, str] = {}
    cause = ""
    for seed in seeds:
        found = verdicts(
            loss_fn,
            weight=weight,
            extra=extra,
            seed=seed,
            unit=unit,
            on_policy=on_policy,
            low=low,
            high=high,
        )
        for name, error in found:
            errors[name] = errors.get(name) or error
        cause = cause or likeliest_cause(loss_fn, found, weight=weight, extra=extra, seed=seed, unit=unit)
    bias = []
    if on_policy and unit == 1 and extra is None and "one number per token" not in "".join(errors.values()):
        bias = [loss_bias(loss_fn, gap=gap) for gap in gaps]
    every = tuple(Verdict(name, error) for name, error in errors.items())
    return Certificate(every, cause, tuple(bias), tuple(seeds))
