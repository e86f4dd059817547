"""A decoder under heads of other numbers than logits: the common part of critic and reward model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rft_fn import check, tree
from rft_fn.model import attention
from rft_fn.model.bind import to_params_device
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.forward import POSITIONS, run
from rft_fn.model.layers import disable_dropout
from rft_fn.model.layers import freeze as frozen
from rft_fn.model.load import load, usual_device, usual_dtype
from rft_fn.model.lora import home, merged, require_plain_adapters
from rft_fn.model.materialize import keep_part, on_meta
from rft_fn.model.parts import find, text_config
from rft_fn.model.pretrained import loaded
from rft_fn.model.reader import Reader
from rft_fn.model.save import save
from rft_fn.precision import wide
from rft_fn.types import Apply, Packed, TokenOut

__all__ = [
    "Critic", "Headed", "below", "explained_variance", "headless", "load_critic", "save_critic",
    "save_headed", "saved_heads", "values", "zeros",
]  # fmt: skip


# ---------- a decoder under heads of other numbers than logits: the common part of critic and reward model


class Headed(Reader):
    """The decoder of a language model, for a head of a subclass.

    Of `lm` only the decoder stays (with its adapters, if it has some): the head over the vocabulary is
    neither kept nor trained. Dropout is off for good. ValueError for a module whose decoder cannot be told
    from its head.
    """

    file: str  # with the heads, in a folder with the decoder alone

    def __init__(self, lm: nn.Module):
        super().__init__()
        # Without a decoder apart from the head there are no hidden states to put another head on.
        require_plain_adapters(lm)
        found = find(lm)
        if not hasattr(found.model, "base_model"):
            raise ValueError(f"lm: expected a causal language model of transformers, got {type(lm).__name__}")
        if find(found.decoder).head is not None:
            raise ValueError(
                f"lm: expected a model whose decoder is apart from its head, got {type(lm).__name__}"
            )

        # The decoder is all that stays of the model.
        self.decoder: Any = found.decoder
        self.parts = replace(found, model=self.decoder, head=None)
        keep_part(lm, self.decoder)
        disable_dropout(self.decoder)
        attention.turn_on(self.decoder)

    def train(self, mode: bool = True) -> Self:
        """Nothing: the outputs are a function of (params, pack), so dropout stays off."""
        return self

    def hidden(self, pack: Packed, bounds: SequenceBounds | None) -> Tensor:
        """The hidden states [T, D] of a pack."""
        way = self.way or POSITIONS
        return run(self.decoder, pack, bounds, way=way, share=self.shared).last_hidden_state[0]

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """Write these weights, whole and by their names, as a decoder with the heads beside it.

        The decoder is written as transformers does it (its AutoModel reads it), adapters multiplied into what
        they adapt.
        """
        from safetensors.torch import save_file

        whole = merged(self, state_dict)
        self.decoder.save_pretrained(folder, state_dict=below(whole, "decoder."))
        heads = {name: x for name, x in whole.items() if not name.startswith("decoder.")}
        save_file(
            {name.removeprefix("head."): x.contiguous() for name, x in heads.items()},
            Path(folder) / self.file,
        )


def zeros(decoder: nn.Module, size: int, *, bias: bool) -> nn.Linear:
    """A head of `size` numbers, all 0, on the device of a decoder and in float32 at least."""
    width = text_config(decoder).hidden_size
    dtype = wide(next(decoder.parameters()).dtype)
    head = nn.Linear(width, size, bias=bias, device="meta", dtype=dtype).to_empty(device=home(decoder))
    for p in head.parameters():
        nn.init.zeros_(p)
    return head


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def saved_heads(folder: Any, file: str) -> dict[str, Tensor] | None:
    """The tensors of a file beside a decoder; None for a module, and for a folder without the file."""
    from safetensors.torch import load_file

    if isinstance(folder, nn.Module) or not Path(folder, file).is_file():
        return None
    return load_file(Path(folder, file))


def headless(
    factory: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    meta: bool,
    **kwargs: Any,
) -> nn.Module:
    """The model that an auto class of transformers reads from a folder without a head over the vocabulary.

    `model.load`, which would miss that head, takes the module as it is: with its weights, or with none yet.
    """
    device = usual_device(device)
    dtype = dtype or usual_dtype(device)
    if meta:
        return on_meta(str(folder), dtype=dtype, device=device, factory=factory, **kwargs)
    return loaded(factory, str(folder), dtype=dtype, **kwargs)


@torch.no_grad()
def save_headed(folder: str | Path, module: Headed, weights: Iterable[tuple[str, Tensor]]) -> Path:
    """Write a module with `weights` substituted for its parameters, in its own format.

    ValueError for a weight that it does not have.
    """
    new = dict(weights)
    unknown = sorted(set(new) - set(module.state_dict()))
    if unknown:
        raise ValueError(
            f"weights: expected names of the parameters of {type(module).__name__}, got {unknown[:3]}"
        )
    return save(folder, module, None, new.items())


# ---------- the critic: a decoder with a head of one number per token


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
