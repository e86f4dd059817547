"""The processors of models that see or hear."""

import json
from pathlib import Path
from typing import Any

from rft_fn.model.builtin import resolve
from rft_fn.model.load import base_folder
from rft_fn.model.patches import MARK, PatchProcessor
from rft_fn.model.save import quiet

__all__ = ["load_processor"]

_TOWERS = ("vision_config", "audio_config", "thinker_config")
_OF_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def load_processor(name: str | Path) -> Any:
    """The processor of a model that sees or hears; None for one of text alone.

    Names are those that `load` takes. Models of Qwen's VL families have one without torchvision, and without
    video files. ValueError where the model has towers and its folder no processor that can be loaded.
    """
    from transformers import AutoProcessor

    folder = base_folder(resolve(str(name)))
    if Path(folder, MARK).is_file():
        return PatchProcessor.from_pretrained(folder)
    config = _config(folder)
    towers = [tower for tower in _TOWERS if tower in config]
    if not towers:
        return None
    try:
        with quiet():
            found = AutoProcessor.from_pretrained(folder)
    except Exception as error:  # a missing package, a missing file, or a broken one
        found = None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = lines[0]
    else:
        why = f"AutoProcessor gives {type(found).__name__} alone"
    if hasattr(found, "image_processor") or hasattr(found, "feature_extractor"):
        return found
    if config.get("model_type") in _OF_PATCHES and Path(folder, "preprocessor_config.json").is_file():
        return PatchProcessor.from_pretrained(folder)
    raise ValueError(
        f"model: {folder} has {', '.join(towers)}, but no processor for what it sees or hears: {why}; "
        "its preprocessor_config.json may be missing, or pip install torchvision helps"
    )


def _config(folder: str) -> dict[str, Any]:
    """The config of a model as it is stored; {} where there is none."""
    from transformers.utils import cached_file

    found = cached_file(folder, "config.json", _raise_exceptions_for_missing_entries=False)
    if found is None:
        return {}
    try:
        return json.loads(Path(found).read_text())
    except ValueError as error:
        raise ValueError(f"model: {found}: expected JSON, got {error}") from error
