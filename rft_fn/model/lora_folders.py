"""Folders of adapters as peft saves them."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import confined
from rft_fn.foreign_json import parse_json
from rft_fn.model.finite import require_finite
from rft_fn.model.lora import BELOW, require_plain_lora, wrapped

__all__ = ["CONFIG", "read_adapter_config", "read_adapters", "with_adapter"]


CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_HEADS = ("score", "classifier")  # peft's own guesses at the name of a head; it saves both


@torch.no_grad()
def with_adapter(module: nn.Module, folder: str | Path, *, without: str = "") -> nn.Module:
    """Put the adapters that were saved in `folder` on `module`, to be trained further.

    `without` names a layer that was saved whole with the adapters, and is left out. ValueError for
    adapters that are more than LoRA of linear layers and routed experts, and for tensors that are missing,
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
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if hasattr(head, "lora_A") and getattr(module.config, "tie_word_embeddings", False):
        raise ValueError(
            f"model: {path}: expected adapters of other layers, got some of the head, which is the embedding "
            "too (tie_word_embeddings): no engine could be given the merged weights"
        )

    # The names in the file are without that of the adapter.
    named = dict(model.named_parameters(remove_duplicate=False))
    # peft adds the base model's own weight where a head has adapters
    stored = {k: x for k, x in stored.items() if ".lora_" in k or k not in named or not _same(named[k], x)}
    own = {name.replace(".default.", "."): name for name in named if ".lora_" in name}
    both = own.keys() & stored.keys()
    wrong = [*(own.keys() ^ stored.keys())]
    wrong += [name for name in both if stored[name].shape != named[own[name]].shape]
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
    """Put new adapters on `module` by a saved config. ValueError if peft makes no plain LoRA of it."""
    from peft import LoraConfig

    require_plain_lora(folder, saved)
    known = {field.name for field in fields(LoraConfig)}
    config = {key: x for key, x in saved.items() if key in known - {"runtime_config"}}
    config |= {"inference_mode": False, "lora_dropout": 0.0, "init_lora_weights": True}
    try:
        made = LoraConfig(**config)
        names = [x for x, _ in module.named_modules()]
        if made.target_parameters:
            names += [x for x, _ in module.named_parameters()]
        confined.call(f"model: {Path(folder, CONFIG)}", _match, made, names)
        return wrapped(module, made, 0)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model: {Path(folder, CONFIG)}: expected adapters that peft can make, got {reason}"
        ) from error


def _match(config: Any, names: Sequence[str]) -> None:
    """Match the regular expressions of a config with names of modules and parameters, as peft will."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    for name in names:
        check_target_module_exists(config, name)
        for patterns in (config.rank_pattern, config.alpha_pattern):
            get_pattern_key(list(patterns), name)


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Return the config of a folder of adapters. ValueError for one that is no mapping in JSON."""
    path = Path(folder, CONFIG)
    try:
        found = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"model: {path}: expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model: {path}: expected a mapping, got {type(found).__name__}")
    return found


def _same(own: Tensor, saved: Tensor) -> bool:
    return own.shape == saved.shape and (own.is_meta or torch.equal(own.to(saved.dtype).cpu(), saved.cpu()))


def read_adapters(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a folder of adapters, by their names in it. ValueError if not whole or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder, _ADAPTER)
    if not path.is_file():
        raise ValueError(f"model: {path.parent}: expected {_ADAPTER}, got none")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"model: {path}: expected a whole safetensors file, got {error}") from error
