"""What a certificate of a loss holds: verdicts, the exact bias, and the dependence on the micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft_fn import packing, tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.testing.cases import ROWS, ExtraFn, Unit, case, log_probs, normal
from rft_fn.testing.causes import likeliest_cause
from rft_fn.testing.diagnosis import Verdict, verdicts
from rft_fn.testing.policy_losses import enumerated
from rft_fn.types import Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = [
    "BatchLoss", "Certificate", "LossBias", "certify", "loss_bias", "micro_batch_error", "of_trl", "of_verl",
    "token_loss",
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
    total = (b.w * loss).sum() + 0 * world.theta.sum()  # a gradient that is cut is 0
    got = -torch.autograd.grad(total, world.theta)[0].flatten()
    want = want.flatten()
    return LossBias(
        gap=gap,
        bias=float((got - want).norm() / want.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(got, want, dim=0)),
        norm_ratio=float(got.norm() / want.norm()),
    )


# ---------- losses of other libraries: a scalar of a padded batch, which holds its own means


# (log-probs [B, S], rows, the batch that they are cut from) -> what they add to the loss []
BatchLoss = Callable[[Tensor, Experience, Experience], Tensor]


def of_verl(
    fn: Callable[..., Any], config: Any, *, loss_agg_mode: str = "token-mean", informed: bool = True
) -> BatchLoss:
    """Adapt a policy loss of verl, such as POLICY_LOSS_REGISTRY["vanilla"], with its ActorConfig.

    As in verl's trainer the config is told the tokens and rows of the whole batch, and losses add up.
    Without `informed` it is not, and the losses of micro-batches are averaged by their rows.
    """

    def loss(logp: Tensor, part: Experience, batch: Experience) -> Tensor:
        config.global_batch_info.clear()
        if informed:
            config.global_batch_info.update(
                dp_size=1,
                batch_num_tokens=int(batch.mask.sum()),
                global_batch_size=len(batch.mask),
                loss_scale_factor=getattr(config, "loss_scale_factor", None),
            )
        total, _ = fn(part.old_logp, logp, part.adv, part.mask, loss_agg_mode, config)
        return total if informed else total * len(part.mask) / len(batch.mask)

    return loss


def of_trl(trainer: Any) -> BatchLoss:
    """Adapt a GRPOTrainer of TRL, or a class of yours with its `_compute_loss(model, inputs)`.

    The log-probs stand in for the model. Micro-batches are told the tokens of the whole batch and how many
    they are, as in TRL's loop; these attributes of the trainer are set.
    """

    def loss(logp: Tensor, part: Experience, batch: Experience) -> Tensor:
        steps = len(batch.mask) / len(part.mask)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = steps
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
        inputs = {
            "prompt_ids": part.tokens[:, :1],
            "prompt_mask": torch.ones_like(part.tokens[:, :1]),
            "completion_ids": part.tokens,
            "completion_mask": part.mask.long(),
            "advantages": part.adv,
            "old_per_token_logps": part.old_logp,
            "ref_per_token_logps": part.ref_logp,
            "num_items_in_batch": batch.mask.sum(),
        }
        return trainer._compute_loss(None, inputs)

    return loss


def token_loss(loss: BatchLoss, *, weight: WeightFn = token_mean) -> LossFn:
    """Return the losses of tokens that a loss of a batch is the `weight`ed sum of, by their slopes.

    Each is its log-prob times its slope, the gradient of the batch's loss less the weight, so every check of
    gradients applies to it; the rows of a pack are the batch. `weight` has the means of the library.
    """

    def losses(out: TokenOut, b: Packed) -> Tensor:
        at = (b.seq, packing.reset_position_ids(b.seq))
        shape = (b.num_seqs, int(at[1].max()) + 1)

        def rows(x: Tensor) -> Tensor:
            return x.new_zeros(shape).index_put(at, x)

        part = Experience(
            tokens=rows(b.tokens),
            mask=rows(b.mask),
            length=torch.full(shape[:1], shape[1]),
            old_logp=rows(b.old_logp),
            adv=rows(b.adv),
            w=rows(b.w),
            ref_logp=None if b.ref_logp is None else rows(b.ref_logp),
        )
        with torch.enable_grad():
            logp = rows(out.logp.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(loss(logp, part, part), logp)
        w = torch.where(part.mask, weight(part.mask), 1)
        if w.dtype == torch.float32:  # one over a whole number, but for rounding
            w = 1 / (1 / w.double()).round()
        return torch.where(part.mask, slope / w.to(slope), 0)[at] * out.logp

    return losses


def micro_batch_error(
    loss: BatchLoss, *, sizes: Sequence[int] = (1, 2, 4), seed: int = 0, empty: bool = False
) -> dict[int, float]:
    """Measure how far the gradient of micro-batches is from that of the whole batch, by their size.

    Eight rows of different lengths are cut into micro-batches of `size` rows, each as wide as its longest
    row, and their losses are added. The error is |sum - whole| / |whole|, of gradients with respect to
    log-probs; a loss that is safe has rounding errors. `empty` leaves the first two rows without a token in
    mask, as a filter of long responses does.
    """
    c = case(seed)
    last = torch.arange(c.exp.mask.shape[1]) == c.exp.length[:, None] - 1
    mask = c.exp.mask if empty else c.exp.mask | last & ~c.exp.mask.any(-1, keepdim=True)
    adv = normal(seed, "adv of the row", ROWS, 1) * mask
    batch = tree.replace(c.exp, mask=mask, adv=adv, extra=None, words=None)

    def gradient(size: int) -> Tensor:
        logp = log_probs(c.apply, c.params, batch).requires_grad_()
        total = torch.zeros(())
        for index in torch.arange(ROWS).split(size):
            part = packing.take(batch, index)
            width = int(part.length.max())
            part = tree.map(lambda x, n=width: x[:, :n] if x.dim() > 1 else x, part)
            total = total + loss(logp[index, :width], part, batch)
        return torch.autograd.grad(total, logp)[0]

    whole = gradient(ROWS)
    return {n: float((gradient(n) - whole).norm() / whole.norm()) for n in sizes}


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
    kl: float | None = None,
    entropy: float | None = None,
    chosen_falls: bool = False,
    seeds: Sequence[int] = (0, 1, 2),
    gaps: Sequence[float] = (0.0, 0.1, 0.5),
) -> Certificate:
    """Run all checks of a loss with several seeds, and compute its bias for samples off by each of `gaps`.

    Finite values come first, then partition, padding, packing, permutation and deleted masked tokens. Policy
    losses also have the on-policy identity, the sides of a clip and a bound. `kl` and `entropy` declare that
    the loss has +kl KL(pi, ref) and -entropy H in it: their signs and sizes are checked, and what is left is
    the policy loss. `on_policy=False` leaves the three checks of policy losses out, for a loss that learns no
    policy or has other terms; a KL or an entropy of the wrong sign is found there too. `low` and `high` are
    claims about the limits (see `check_sides`).

    `weight(mask [B, S]) -> w [B, S]` is the normaliser that the loss is used with. `extra(exp) -> {name:
    [B, S, ...]}` makes the data that it reads from `b.extra` (see `case`). `unit` consecutive rows belong
    together: 2 for losses of pairs, where rows 2i and 2i + 1 are sequences 2i and 2i + 1 of a pack; of
    listwise losses it is the number of rows of each list, such as (3, 1, 2, 2). Other units than 1 are no
    policy losses; pairs that read no advantage are chosen and rejected (see `check_pairs`), and
    `chosen_falls` declares that both may become less probable.

    A loss that raises fails, and the cause says where. ValueError for arguments that make no sense.
    """
    every: dict[str, Verdict] = {}
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
            kl=kl,
            entropy=entropy,
            chosen_falls=chosen_falls,
        )
        for v in found:
            if v.check not in every or (v.error and not every[v.check].error):
                every[v.check] = v
        cause = cause or likeliest_cause(loss_fn, found, weight=weight, extra=extra, seed=seed, unit=unit)
    bias = []
    unfit = {"raises", "scalar", "shape"} & {v.code for v in every.values()}
    if on_policy and unit == 1 and extra is None and not unfit:
        bias = [loss_bias(loss_fn, gap=gap) for gap in gaps]
    return Certificate(tuple(every.values()), cause, tuple(bias), tuple(seeds))
