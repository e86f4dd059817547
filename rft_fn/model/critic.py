"""The critic: a decoder with a head of one number per token.

critic = model.load_critic("tiny")
value_apply, critic_state = strategy.init(critic, tx)      # bind takes it as it is
values = model.values(value_apply, critic_state.params, packs)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import check, tree
from rft_fn.model.bind import to_params_device
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.freeze import freeze as frozen
from rft_fn.model.headed import Headed, headless, save_headed, saved_heads, zeros
from rft_fn.model.load import load
from rft_fn.types import Apply, Packed, TokenOut

__all__ = ["Critic", "explained_variance", "load_critic", "save_critic", "values"]


class Critic(Headed):
    """V(state before `target[t]`) = head(hidden[t]) [T], label-aligned like log-probs, 0 outside mask.

    `hidden[t]` is the hidden state of input t. The head is linear, in float32 at least, and starts at 0, so
    V = 0 before the first update whatever the rewards' scale. ValueError for a module whose decoder cannot be
    told from its head.
    """

    file = "value_head.safetensors"

    def __init__(self, lm: nn.Module):
        super().__init__(lm)
        self.head = zeros(self.decoder, 1, bias=True)

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        value = self.head(self.hidden(pack, bounds).to(self.head.weight.dtype))[:, 0]
        return TokenOut(logp=torch.zeros_like(value), value=torch.where(pack.mask, value, 0))


def load_critic(
    path_or_module: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradient_checkpointing: bool = False,
    meta: bool = False,
    freeze: Sequence[str] = (),
    **kwargs: Any,
) -> Critic:
    """A `Critic` of whatever `model.load` takes, or of a folder that `save_critic` wrote.

    Its head is zeros, or as it was saved. A module is taken over, not copied: an actor's own would be trained
    by both. `freeze` names parts of the decoder that are not trained; the other arguments are those of
    `model.load`. ValueError for a name or a module that is no
    language model.
    """
    from transformers import AutoModel

    # A folder with a trained head holds a decoder alone.
    how: dict[str, Any] = {"dtype": dtype, "device": device}
    trained = saved_heads(path_or_module, Critic.file)
    if trained is None:
        how |= {"meta": meta, **kwargs}
    else:
        path_or_module = headless(AutoModel, str(path_or_module), **how, meta=meta, **kwargs)

    lm = load(path_or_module, gradient_checkpointing=gradient_checkpointing, quantize="none", **how)
    critic = Critic(lm)
    if trained is not None:
        critic.head.load_state_dict(trained)
    frozen(critic, freeze)
    return critic


def save_critic(folder: str | Path, critic: Critic, weights: Iterable[tuple[str, Tensor]] = ()) -> Path:
    """Write `critic`, with `weights` substituted for its parameters, as a folder for `load_critic`.

    `weights` are as `Strategy.export` gives them. ValueError for one that the critic does not have.
    """
    return save_headed(folder, critic, weights)


@torch.no_grad()
def values(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Tensor]:
    """The values [T] of each pack, without gradient: the baseline of an advantage.

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
    """1 - Var(ret - value) / Var(ret) over mask.

    1 is a perfect critic, 0 one that knows only the mean (or a return that does not vary), below 0 one that
    is worse than that.
    """
    check.shapes(value=(value, "..."), ret=(ret, "..."), mask=(mask, "..."))
    rest = (ret - value)[mask].double().var(correction=0)
    whole = ret[mask].double().var(correction=0)
    return float(torch.where(whole > 0, 1 - rest / whole, 0))
