"""What a loss does to each token: its gradient with respect to log-probs, for any LossFn."""

import torch
from torch import Tensor

from rft_fn import tree
from rft_fn.loss.evaluate import evaluate
from rft_fn.types import LossFn, Packed, TokenOut

__all__ = ["token_gradient", "without_gradient"]


def token_gradient(loss_fn: LossFn, out: TokenOut, b: Packed) -> Tensor:
    """The gradient of a pack's loss with respect to the log-prob of each token, [T].

        g_t = d sum_u w_u loss_u / d logp_t

    A step of gradient descent makes tokens with g < 0 more probable. Only log-probs are differentiated: other
    outputs of the model count as constants. It needs no backward pass through a model, and is 0 for a loss
    that does not read log-probs.
    """
    with torch.enable_grad():
        logp = out.logp.detach().requires_grad_()
        loss, _ = evaluate(loss_fn, tree.replace(out, logp=logp), b)
        total = (b.w * loss).sum()
        if not total.requires_grad:
            return torch.zeros_like(out.logp)
        (found,) = torch.autograd.grad(total, logp, materialize_grads=True)
    return found


def without_gradient(gradient: Tensor, adv: Tensor, w: Tensor) -> Tensor:
    """Whether a loss leaves a token alone although it has an advantage and a weight, [*] bool.

    For clipped losses these are the tokens that are clipped.
    """
    return (gradient == 0) & (adv != 0) & (w != 0)
