"""Decoders under heads of other numbers than logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from rft_fn.model import attention
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.dropout import disable_dropout
from rft_fn.model.forward import POSITIONS, run
from rft_fn.model.lora import home, require_plain_adapters
from rft_fn.model.lora_merged import merged
from rft_fn.model.materialize import keep_part
from rft_fn.model.parts import find, text_config
from rft_fn.model.reader import Reader
from rft_fn.precision import wide
from rft_fn.types import Packed

__all__ = ["Headed", "below", "zeros"]


class Headed(Reader):
    """The decoder of a language model, for a head of a subclass.

    Only the decoder of `lm` stays (with its adapters, if it has some): the head over the vocabulary is
    neither kept nor trained. Dropout is off for good. ValueError for a module with a decoder that cannot
    be told from its head.
    """

    file: str  # with the heads, in a folder with the decoder

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
        """Do nothing: the outputs are a function of (params, pack), so dropout stays off."""
        return self

    def hidden(self, pack: Packed, bounds: SequenceBounds | None) -> Tensor:
        """Return the hidden states [T, D] of a pack."""
        mode = self.mode or POSITIONS
        return run(self.decoder, pack, bounds, mode=mode, share=self.shared).last_hidden_state[0]

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """Write these weights, whole and by their names, as a decoder with the heads in a file of ours.

        The decoder is written as transformers does it (its AutoModel reads it), adapters multiplied into
        what they adapt.
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
    """Make a head of `size` numbers, all 0, on the device of a decoder and in float32 at least."""
    width = text_config(decoder).hidden_size
    dtype = wide(next(decoder.parameters()).dtype)
    head = nn.Linear(width, size, bias=bias, device="meta", dtype=dtype).to_empty(device=home(decoder))
    for p in head.parameters():
        nn.init.zeros_(p)
    return head


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights under `prefix`, by their names without it."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
