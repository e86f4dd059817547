"""Merges adapters that come alone into the model of this engine, from the base weights in its files."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn.engine.adapters_alone import pairs
from rft_fn.engine.engine_config import EngineConfig
from rft_fn.engine.server_protocol import stored_tensors
from rft_fn.model.lora_alone import add_to
from rft_fn.model.lora_folders import CONFIG
from rft_fn.model.weight_files import Stored

__all__ = ["base_files", "merge"]


def base_files(config: EngineConfig, model: str | nn.Module) -> Stored | None:
    """Return the files of a model whose adapters come alone; None where whole weights are to come.

    By itself an engine takes adapters only in another process: in that of the trainer a push of whole weights
    is the same merge, and a copy. ValueError where they are asked for, and the model is none of files.
    """
    asked = config.adapters == "alone"
    if not config.lora_rank or not (asked or (config.adapters == "auto" and config.process)):
        return None
    name = model_lib.resolve(model) if isinstance(model, str) else ""
    if not name or Path(name, CONFIG).is_file():
        if asked:
            got = "a folder of adapters" if name else "a module"
            raise ValueError(f"engine_adapters alone: expected the name of a whole base model, got {got}")
        return None
    skeleton: nn.Module = model_lib.load(name, meta=True)
    return getattr(skeleton, "rft_weights").stored  # noqa: B009  (no field of a module)


@torch.no_grad()
def merge(lm: nn.Module, base: Stored, tensors: Mapping[str, Tensor]) -> None:
    """Put base + B A in the place of each adapted layer's weight."""
    from transformers.pytorch_utils import Conv1D

    layers = {f"{path}.weight": both for path, both in pairs(tensors).items()}
    for name, x in stored_tensors(base, layers):
        layer = lm.get_submodule(name.removesuffix(".weight"))
        place = lm.get_parameter(name)
        a, b = (matrix.to(place.device) for matrix in layers[name])
        place.copy_(add_to(x.to(place.device), a, b, transposed=isinstance(layer, Conv1D)))
