"""Folders of low-rank adapters as peft saves them: read, and put into a module."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model.freeze import require_finite
from rft_fn.model.lora import BELOW, require_plain_lora, wrapped

__all__ = ["CONFIG", "read_adapter_config", "read_adapters", "with_adapter"]

CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_HEADS = ("score", "classifier")  # peft's own guesses at the name of a head, both of which it saves


@torch.no_grad()
def with_adapter(module: nn.Module, folder: str | Path, *, without: str = "") -> nn.Module:
    """`module` with the adapters that were saved in `folder`, to be trained further.

    `without` names a layer that was saved whole beside the adapters, and is left out.

    ValueError for adapters that are more than LoRA of linear layers, and for tensors that are missing,
    unexpected or of another shape.
    """
    # Make adapters by the saved config, to be filled.
    path = Path(folder, _ADAPTER)
    saved = read_adapter_config(folder)
    stored = read_adapters(folder)
    if without:
        saved["task_type"] = None  # by which peft would look for that layer
        saved["modules_to_save"] = [x for x in saved.get("modules_to_save") or () if x not in _HEADS] or None
        stored = {name: x for name, x in stored.items() if name != f"{BELOW}{without}.weight"}
    model = _made(module, saved, folder)

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


def _made(module: nn.Module, saved: dict[str, Any], folder: str | Path) -> nn.Module:
    """`module` with new adapters by a saved config. ValueError for one that peft makes no plain LoRA of."""
    from peft import LoraConfig

    require_plain_lora(folder, saved)
    known = {field.name for field in fields(LoraConfig)}
    config = {key: x for key, x in saved.items() if key in known - {"runtime_config"}}
    config |= {"inference_mode": False, "lora_dropout": 0.0, "init_lora_weights": True}
    try:
        return wrapped(module, LoraConfig(**config), 0)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model: {Path(folder, CONFIG)}: expected adapters that peft can make, got {reason}"
        ) from error


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """The config of a folder of adapters. ValueError for one that is no mapping in JSON."""
    path = Path(folder, CONFIG)
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model: {path}: expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model: {path}: expected a mapping, got {type(found).__name__}")
    return found


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
