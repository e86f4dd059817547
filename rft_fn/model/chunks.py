"""A processor of audio in chunks of one length, beside text that holds its places."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ChunkProcessor"]

_FRAMES = 8  # of the spectrogram that are a token: the tower's stride of 2, and four in a row


class ChunkProcessor:
    """Audio of any length as Voxtral wants it: chunks of 30 s, the last one filled up with silence.

    It is called as other processors of transformers are, while VoxtralProcessor itself takes audio only with
    messages, by a tokenizer of another package.
    """

    in_chunks = True
    """Whether audio may be longer than what the feature extractor reads at a time."""

    def __init__(self, whole: Any):
        """`whole` is a VoxtralProcessor, whose tokenizer has a chat template."""
        self.whole = whole
        self.feature_extractor = whole.feature_extractor
        self.tokenizer = whole.tokenizer
        self.audio_token = whole.audio_token

    def __call__(
        self,
        text: Sequence[str],
        audio: Sequence[Any] | None = None,
        *,
        sampling_rate: int | None = None,
        return_tensors: str = "pt",
        add_special_tokens: bool = False,
    ) -> dict[str, Tensor]:
        """input_ids [1, n] of one text, and input_features [chunks, mels, frames] of its audio.

        Each place is widened to the tokens of its audio: frames / 8 for each chunk.
        """
        (written,) = text
        found: dict[str, Tensor] = {}
        if audio:
            chunks = [self._chunks(samples, sampling_rate, return_tensors) for samples in audio]
            found["input_features"] = torch.cat(chunks)
            written = self._widened(written, [len(x) * (x.shape[-1] // _FRAMES) for x in chunks])
        ids = self.tokenizer.encode(written, add_special_tokens=add_special_tokens)
        return {"input_ids": torch.tensor([ids]), **found}

    def _chunks(self, samples: Any, rate: int | None, tensors: str) -> Tensor:
        """The spectrogram [chunks, mels, frames] of one audio."""
        extractor = self.feature_extractor
        how = {"sampling_rate": rate, "return_tensors": tensors}
        fill = {"padding": True, "truncation": False, "pad_to_multiple_of": extractor.n_samples}
        made = extractor(samples, **how, **fill)["input_features"]
        return made.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)

    def _widened(self, text: str, counts: Sequence[int]) -> str:
        """The text with each place as often as its audio has tokens."""
        parts = text.split(self.audio_token)
        if len(parts) != len(counts) + 1:
            raise ValueError(f"expected {len(counts)} places {self.audio_token}, got {len(parts) - 1}")
        return parts[0] + "".join(self.audio_token * n + part for n, part in zip(counts, parts[1:]))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the processor as transformers does, with its tokenizer."""
        self.whole.save_pretrained(folder)
