"""The processors of models that see or hear."""

import json
from pathlib import Path
from typing import Any

from rft_fn.model.builtin import resolve
from rft_fn.model.load import base_folder
from rft_fn.model.patches import MARK, ChunkProcessor, PatchProcessor
from rft_fn.model.pretrained import from_pretrained
from rft_fn.model.save import quiet

__all__ = ["load_processor"]

_TOWERS = ("vision_config", "audio_config", "thinker_config")


def load_processor(name: str | Path) -> Any:
    """The processor of a model that sees or hears; None for one of text alone.

    Names are those that `load` takes. Models of Qwen's VL families have one without torchvision, and without
    video files; SmolVLM has one of images alone without torchvision and num2words. ValueError where the model
    has towers and its folder no processor that can be loaded.
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
    if type(found).__name__ == "VoxtralProcessor":
        return ChunkProcessor(found)
    if hasattr(found, "image_processor") or hasattr(found, "feature_extractor"):
        return found
    without_torchvision = _WITHOUT_TORCHVISION.get(config.get("model_type", ""))
    if without_torchvision is not None and _has_images(folder):
        return without_torchvision(folder)
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


def _has_images(folder: str) -> bool:
    """Whether a folder tells how its images are processed."""
    return any(Path(folder, name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def _smolvlm(folder: str) -> Any:
    """SmolVLM's processor of images alone: they stand in the text as those of Idefics3 do."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = from_pretrained(AutoTokenizer, folder, what="tokenizer")
    images = SmolVLMImageProcessorPil.from_pretrained(folder)
    how = {}
    about = Path(folder, "processor_config.json")
    if about.is_file() and "image_seq_len" in (found := json.loads(about.read_text())):
        how["image_seq_len"] = found["image_seq_len"]
    return Idefics3Processor(images, tokenizer, chat_template=tokenizer.chat_template, **how)


_WITHOUT_TORCHVISION = {"smolvlm": _smolvlm} | dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), PatchProcessor.from_pretrained
)
"""model_type -> what makes a processor of a folder where the one of transformers needs torchvision."""
