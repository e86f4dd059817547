"""Folders of low-rank adapters as peft saves them: read, and put into a module."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.finite import require_finite
from rft_fn.model.lora import BELOW, wrapped

__all__ = ["read_adapters", "with_adapter"]

_ADAPTER = "adapter_model.safetensors"
_HEADS = ("score", "classifier")  # peft's own guesses at the name of a head, both of which it saves
_UNKNOWN = ("use_dora", "modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices")


@torch.no_grad()
def with_adapter(module: nn.Module, folder: str | Path, *, without: str = "") -> nn.Module:
    """`module` with the adapters that were saved in `folder`, to be trained further.

    `without` names a layer that was saved whole beside the adapters, and is left out.

    ValueError for adapters that are more than LoRA of linear layers, and for tensors that are missing,
    unexpected or of another shape.
    """
    from peft import PeftConfig

    # Make adapters by the saved config, to be filled.
    path = Path(folder, _ADAPTER)
    config: Any = PeftConfig.from_pretrained(str(folder))
    stored = read_adapters(folder)
    if without:
        config.task_type = None  # by which peft would look for that layer
        config.modules_to_save = [x for x in config.modules_to_save or () if x not in _HEADS] or None
        stored = {name: x for name, x in stored.items() if name != f"{BELOW}{without}.weight"}
    _require_plain_lora(config, folder)
    config.inference_mode = False
    config.lora_dropout = 0.0
    model = wrapped(module, config, 0)

    # The names in the file are without that of the adapter.
    named = dict(model.named_parameters())
    own = {name.replace(".default.", "."): name for name in named if ".lora_" in name}
    wrong = sorted(own.keys() ^ stored.keys())
    for name in own.keys() & stored.keys():
        if stored[name].shape != named[own[name]].shape:
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"model: {path}: expected the {len(own)} tensors of its config and base model, missing, "
            f"unexpected or of another shape are {len(wrong)}: {', '.join(sorted(wrong)[:3])}"
        )
    for name, x in stored.items():
        require_finite(f"model: {path}", name, x)
        named[own[name]].copy_(x)
    return model


def _require_plain_lora(config: Any, folder: str | Path) -> None:
    """ValueError for the config of adapters that are more than LoRA of linear layers."""
    from peft import LoraConfig

    odd = [name for name in _UNKNOWN if getattr(config, name, None)]
    if type(config) is LoraConfig and not odd and config.bias == "none":
        return
    what = ", ".join(odd) or f"{config.peft_type} with bias {getattr(config, 'bias', None)!r}"
    raise ValueError(f"model: {folder}: expected plain LoRA adapters, got {what}; merge them first")


def read_adapters(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a folder of adapters, by the names that peft saved them under.

    ValueError for a folder without them, and for a file that is not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder, _ADAPTER)
    if not path.is_file():
        raise ValueError(f"model: {path.parent}: expected {_ADAPTER}, got none")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"model: {path}: expected a whole safetensors file, got {error}") from error
