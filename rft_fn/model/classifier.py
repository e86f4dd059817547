"""Transformers' classes for sequence classification, the form in which reward models are shared.

Such a class is a decoder and `score`, a matrix on the hidden state of the last token.
"""

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.parts import outside_layers, text_config
from rft_fn.model.quantize import is_plain

__all__ = [
    "HEADS", "SUFFIX", "class_name", "head_of", "labels", "like", "pad_alike", "usual_labels",
    "warn_of_padding", "write",
]  # fmt: skip

HEADS = "reward_heads.json"  # names, calibration and pooling, in each folder that we write
SUFFIX = "ForSequenceClassification"
_SCORE = "score.weight"


def class_name(config: Any) -> str | None:
    """Return the class for sequence classification that a config names; None if it names another."""
    names = getattr(config, "architectures", None) or []
    return next((name for name in names if name.endswith(SUFFIX)), None)


def head_of(lm: Any) -> nn.Linear | None:
    """Return the head of a model for sequence classification, or None. ValueError unless one matrix."""
    name = type(lm).__name__
    if not name.endswith(SUFFIX):
        return None
    head = getattr(lm, "score", None)
    if not is_plain(head) or head.bias is not None:
        raise ValueError(
            f"reward model: expected a decoder with a head `score` of one matrix, got {name}, whose head is "
            "another"
        )
    return head


def usual_labels(count: int) -> list[str]:
    """Return the names of labels that nobody named."""
    return ["score"] if count == 1 else [f"LABEL_{i}" for i in range(count)]


def labels(config: Any) -> list[str]:
    """Return the names of a config's labels; a single one without a name is the score."""
    names = [config.id2label[i] for i in range(config.num_labels)]
    return ["score"] if names == ["LABEL_0"] else names


def like(decoder: Any, names: Sequence[str]) -> Any:
    """Return the sequence classifier over such a decoder, without memory; None if there is none."""
    from transformers.models.auto import modeling_auto as auto

    kind: Any = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(decoder.config), None)
    if kind is None:
        return None
    config = copy.deepcopy(decoder.config)
    config._attn_implementation = "eager"  # a name of ours is not for its class to check
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    text = config.get_text_config()
    if text.pad_token_id in _ends(text):
        text.pad_token_id = _other_padding(text)
    with torch.device("meta"):
        made = kind(config).to(next(decoder.parameters()).dtype)

    # It may be an encoder's class, or have a head of more layers.
    names_inside = [outside_layers(name) for name in decoder.state_dict() if ".lora_" not in name]
    own = {f"{made.base_model_prefix}.{name}" for name in names_inside} | {_SCORE}
    width = text_config(decoder).hidden_size
    if set(made.state_dict()) != own or made.score.weight.shape != (len(names), width):
        return None
    return made


def write(made: Any, folder: str | Path, decoder: Mapping[str, Tensor], score: Tensor) -> None:
    """Write the weights of a decoder and its head as the folder of a model that `like` made."""
    tensors = {f"{made.base_model_prefix}.{name}": x for name, x in decoder.items()}
    made.save_pretrained(folder, state_dict={**tensors, _SCORE: score})


# ---------- padding

# A class of transformers scores the rightmost token that is not padding. If padding also ends a text, that is
# the token before the end.


def _ends(config: Any) -> set[int]:
    """Return the ids of the tokens that end a text, by a config."""
    found = getattr(config, "eos_token_id", None)
    if found is None:
        return set()
    return set(found) if isinstance(found, (list, tuple)) else {found}


def _other_padding(config: Any) -> int:
    """Return a token that no text ends with: the first of a text, else the last of the vocabulary."""
    ends = _ends(config)
    first = getattr(config, "bos_token_id", None)
    if first is not None and first not in ends:
        return first
    return next(i for i in reversed(range(config.vocab_size)) if i not in ends)


def warn_of_padding(name: str, config: Any) -> None:
    """Warn of a class with padding that ends texts, so that it scores another token than this library."""
    text = config.get_text_config()
    if text.pad_token_id in _ends(text):
        warnings.warn(
            f"reward model: {name}: expected a pad_token_id that ends no text, got {text.pad_token_id}, "
            "which is also its eos_token_id: transformers scores the token before the end of a text, here "
            "the last one is scored; leave the end token out for the same scores, save_reward writes "
            "another padding",
            stacklevel=4,
        )


def pad_alike(folder: str | Path, tokenizer: Any) -> None:
    """Make tokenizer and config of a written classifier pad with one token, which ends no text."""
    from transformers import AutoConfig

    path = Path(folder, "config.json")
    if not path.is_file() or class_name(SimpleNamespace(**json.loads(path.read_text()))) is None:
        return
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer.pad_token_id in {None, tokenizer.eos_token_id, *_ends(text)}:
        tokenizer = copy.deepcopy(tokenizer)
        own = text.pad_token_id
        own = _other_padding(text) if own in {None, tokenizer.eos_token_id} else own
        if own < len(tokenizer):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(own)
        else:  # the model has more words than the tokenizer: one of them gets a name
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        tokenizer.save_pretrained(folder)
    if text.pad_token_id != tokenizer.pad_token_id:
        text.pad_token_id = tokenizer.pad_token_id
        config.save_pretrained(folder)
