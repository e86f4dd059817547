"""The critic: the decoder of a causal language model with one number a token on top of it.

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
from rft_fn.model import attention, probe
from rft_fn.model.bind import disable_dropout, to_params_device
from rft_fn.model.load import load, usual_dtype
from rft_fn.model.lora import home, merged
from rft_fn.model.materialize import empty, narrow
from rft_fn.model.pretrained import loaded
from rft_fn.model.save import save
from rft_fn.model.text import decoder, inner, run
from rft_fn.types import Apply, Packed, TokenOut

__all__ = ["Critic", "explained_variance", "load_critic", "save_critic", "values"]

_HEAD = "value_head.safetensors"  # the file that makes a model folder a critic's


class Critic(probe.Reader):
    """V(state before `target[t]`) = head(hidden[t]) [T], from the hidden state of input t: label-aligned
    like log-probs, 0 outside mask.

    The head is linear, in float32 at least, and starts at 0, so V = 0 before the first update whatever the
    rewards' scale. Of `lm` only the decoder stays (with its adapters, if it has some): the head over the
    vocabulary is neither kept nor trained. Dropout is off for good. ValueError for a module whose decoder
    cannot be told from its head.
    """

    def __init__(self, lm: nn.Module):
        super().__init__()
        if not hasattr(inner(lm), "base_model"):
            raise ValueError(f"lm: expected a causal language model of transformers, got {type(lm).__name__}")
        self.decoder = decoder(lm)
        if getattr(self.decoder, "get_output_embeddings", lambda: None)() is not None:
            raise ValueError(f"lm: expected a model with a decoder of its own, got {type(lm).__name__}")
        narrow(lm, self.decoder)
        width = self.decoder.config.get_text_config().hidden_size
        wide = torch.promote_types(next(self.decoder.parameters()).dtype, torch.float32)
        self.head = nn.utils.skip_init(nn.Linear, width, 1, device=home(self.decoder), dtype=wide)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        disable_dropout(self.decoder)
        attention.turn_on(self.decoder)

    def train(self, mode: bool = True) -> "Critic":
        """Nothing: a value is a function of (params, pack), so dropout stays off."""
        return self

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """These weights, whole and by their names, as a folder for `load_critic`: the decoder as transformers
        does it (its AutoModel reads it), adapters multiplied into what they adapt, and the head beside it."""
        from safetensors.torch import save_file

        whole = merged(self, state_dict)
        self.decoder.save_pretrained(folder, state_dict=_part(whole, "decoder."))
        head = {name: x.contiguous() for name, x in _part(whole, "head.").items()}
        save_file(head, Path(folder) / _HEAD)

    def body(self) -> nn.Module:
        return self.decoder

    def read(self, pack: Packed, packs: attention.SequenceBounds | None) -> TokenOut:
        hidden = run(self.decoder, pack, packs, way=self.way).last_hidden_state[0]
        value = self.head(hidden.to(self.head.weight.dtype))[:, 0]
        return TokenOut(logp=torch.zeros_like(value), value=torch.where(pack.mask, value, 0))


def _part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with `prefix`, by what is left of them."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def load_critic(
    path_or_module: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradient_checkpointing: bool = False,
    meta: bool = False,
    **kwargs: Any,
) -> Critic:
    """A `Critic` of whatever `model.load` takes, with a head of zeros, or of a folder
    that `save_critic` wrote.

    A module is taken over, not copied: an actor's own would be trained by both. The other arguments are those
    of `model.load`. ValueError for a name or a module that is no language model.
    """
    folder, trained = path_or_module, None
    if not isinstance(folder, nn.Module) and (Path(folder) / _HEAD).is_file():
        from safetensors.torch import load_file
        from transformers import AutoModel

        trained = load_file(Path(folder) / _HEAD)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or usual_dtype(device)
        if meta:
            path_or_module = empty(str(folder), dtype=dtype, device=device, factory=AutoModel, **kwargs)
        else:
            path_or_module = loaded(AutoModel, str(folder), dtype=dtype, **kwargs)
        meta, kwargs = False, {}  # they are done
    options = {"dtype": dtype, "device": device, "gradient_checkpointing": gradient_checkpointing}
    critic = Critic(load(path_or_module, meta=meta, quantize="none", **options, **kwargs))
    if trained is not None:
        critic.head.load_state_dict(trained)
    return critic


@torch.no_grad()
def save_critic(folder: str | Path, critic: Critic, weights: Iterable[tuple[str, Tensor]] = ()) -> Path:
    """`critic`, with `weights` (as `Strategy.export` gives them) in the places
    of its parameters, as a folder for `load_critic`.

    ValueError for a weight that the critic does not have.
    """
    new = dict(weights)
    if unknown := sorted(set(new) - set(critic.state_dict())):
        raise ValueError(f"weights: expected names of the critic's parameters, got {unknown[:3]}")
    return save(folder, critic, None, new.items())


@torch.no_grad()
def values(apply: Apply, params: tree.Named, packs: Sequence[Packed]) -> list[Tensor]:
    """The values [T] of each pack, without gradient: the baseline of an advantage.
    `packing.unpack` makes them [B, S]."""
    moved = to_params_device(apply, params, packs)
    return [apply(params, x).value.to(b.tokens.device) for x, b in zip(moved, packs)]


def explained_variance(value: Tensor, ret: Tensor, mask: Tensor) -> float:
    """1 - Var(ret - value) / Var(ret) over mask: 1 is a perfect critic, 0 one that knows only the mean (or a
    return that does not vary), below 0 one that is worse than that."""
    check.shapes(value=(value, "..."), ret=(ret, "..."), mask=(mask, "..."))
    rest, whole = (x[mask].double().var(correction=0) for x in (ret - value, ret))
    return float(torch.where(whole > 0, 1 - rest / whole, 0))
