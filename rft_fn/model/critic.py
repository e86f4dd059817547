"""The critic: a decoder with a head of one number per token."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rft_fn import check, tree
from rft_fn.model.bind import to_params_device
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.heads import Headed, zeros
from rft_fn.types import Apply, Packed, TokenOut

__all__ = ["Critic", "explained_variance", "values"]


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
