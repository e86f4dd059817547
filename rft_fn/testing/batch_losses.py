"""Losses of other libraries: a scalar of a padded batch, which holds its own mean."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_fn import packing, tree
from rft_fn.testing.cases import ROWS, case, log_probs, normal
from rft_fn.types import Experience, LossFn, Packed, TokenOut, WeightFn
from rft_fn.weight import token_mean

__all__ = ["BatchLoss", "micro_batch_error", "of_trl", "of_verl", "token_loss"]


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
