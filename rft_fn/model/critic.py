"""The critic: a decoder with a head of one number per token.

critic = model.load_critic("tiny")
value_apply, critic_state = strategy.init(critic, tx)      # bind takes it as it is
values = model.values(value_apply, critic_state.params, packs)
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import check, tree
from rft_fn.model import attention
from rft_fn.model.bind import to_params_device
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.dropout import disable_dropout
from rft_fn.model.freeze import freeze as frozen
from rft_fn.model.load import load, usual_device, usual_dtype
from rft_fn.model.lora import home, merged
from rft_fn.model.materialize import keep_part, on_meta
from rft_fn.model.parts import find, text_config
from rft_fn.model.pretrained import loaded
from rft_fn.model.reader import Reader
from rft_fn.model.save import save
from rft_fn.model.text import POSITIONS, run
from rft_fn.precision import wide
from rft_fn.types import Apply, Packed, TokenOut

__all__ = ["Critic", "explained_variance", "load_critic", "save_critic", "values"]

_HEAD = "value_head.safetensors"  # the file that makes a model folder a critic's


class Critic(Reader):
    """V(state before `target[t]`) = head(hidden[t]) [T], label-aligned like log-probs, 0 outside mask.

    `hidden[t]` is the hidden state of input t. The head is linear, in float32 at least, and starts at 0, so
    V = 0 before the first update whatever the rewards' scale. Of `lm` only the decoder stays (with its
    adapters, if it has some): the head over the vocabulary is neither kept nor trained. Dropout is off for
    good. ValueError for a module whose decoder cannot be told from its head.
    """

    def __init__(self, lm: nn.Module):
        super().__init__()
        # Without a decoder apart from the head there are no hidden states to put another head on.
        found = find(lm)
        if not hasattr(found.model, "base_model"):
            raise ValueError(f"lm: expected a causal language model of transformers, got {type(lm).__name__}")
        if find(found.decoder).head is not None:
            raise ValueError(
                f"lm: expected a model whose decoder is apart from its head, got {type(lm).__name__}"
            )

        # The decoder is all that the critic has of the model.
        self.decoder: Any = found.decoder
        self.parts = replace(found, model=self.decoder, head=None)
        keep_part(lm, self.decoder)

        self.head = _head(self.decoder)
        disable_dropout(self.decoder)
        attention.turn_on(self.decoder)

    def train(self, mode: bool = True) -> "Critic":
        """Nothing: a value is a function of (params, pack), so dropout stays off."""
        return self

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """Write these weights, whole and by their names, as a folder for `load_critic`.

        The decoder is written as transformers does it (its AutoModel reads it), adapters multiplied into what
        they adapt, and the head beside it.
        """
        from safetensors.torch import save_file

        whole = merged(self, state_dict)
        self.decoder.save_pretrained(folder, state_dict=_part(whole, "decoder."))
        head = {name: x.contiguous() for name, x in _part(whole, "head.").items()}
        save_file(head, Path(folder) / _HEAD)

    def read(self, pack: Packed, bounds: SequenceBounds | None) -> TokenOut:
        hidden = run(self.decoder, pack, bounds, way=self.way or POSITIONS).last_hidden_state[0]
        value = self.head(hidden.to(self.head.weight.dtype))[:, 0]
        return TokenOut(logp=torch.zeros_like(value), value=torch.where(pack.mask, value, 0))


def _head(decoder: nn.Module) -> nn.Linear:
    """A head of zeros on the device of a decoder, in float32 at least."""
    width = text_config(decoder).hidden_size
    dtype = wide(next(decoder.parameters()).dtype)
    head = nn.Linear(width, 1, device="meta", dtype=dtype).to_empty(device=home(decoder))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


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
    folder = path_or_module
    trained: dict[str, Tensor] | None = None
    if not isinstance(folder, nn.Module) and (Path(folder) / _HEAD).is_file():
        from safetensors.torch import load_file
        from transformers import AutoModel

        # The folder holds a decoder without a head over the vocabulary, which `load` would miss.
        trained = load_file(Path(folder) / _HEAD)
        device = usual_device(device)
        dtype = dtype or usual_dtype(device)
        if meta:
            path_or_module = on_meta(str(folder), dtype=dtype, device=device, factory=AutoModel, **kwargs)
        else:
            path_or_module = loaded(AutoModel, str(folder), dtype=dtype, **kwargs)
        # The module has its weights, or none yet: either way `load` takes it as it is.
        meta = False
        kwargs = {}

    lm = load(
        path_or_module,
        dtype=dtype,
        device=device,
        gradient_checkpointing=gradient_checkpointing,
        meta=meta,
        quantize="none",
        **kwargs,
    )
    critic = Critic(lm)
    if trained is not None:
        critic.head.load_state_dict(trained)
    frozen(critic, freeze)
    return critic


@torch.no_grad()
def save_critic(folder: str | Path, critic: Critic, weights: Iterable[tuple[str, Tensor]] = ()) -> Path:
    """Write `critic`, with `weights` substituted for its parameters, as a folder for `load_critic`.

    `weights` are as `Strategy.export` gives them. ValueError for one that the critic does not have.
    """
    new = dict(weights)
    unknown = sorted(set(new) - set(critic.state_dict()))
    if unknown:
        raise ValueError(f"weights: expected names of the critic's parameters, got {unknown[:3]}")
    return save(folder, critic, None, new.items())


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
