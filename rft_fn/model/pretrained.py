"""transformers' from_pretrained with one-line errors and a check for whole weights."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rft_fn import modality
from rft_fn.model.finite import require_finite
from rft_fn.model.save import quiet

__all__ = ["Kind", "from_pretrained", "incomplete", "kind_of", "loaded", "unreadable"]


class Kind(NamedTuple):
    """The kind of a model: its config, and the auto class of transformers that makes it."""

    config: Any  # of the part that reads and writes text, where the model also speaks
    factory: Any
    is_part: bool  # whether there are more parts, which are left out


def kind_of(name: str, trust_remote_code: bool = False) -> Kind:
    """The kind of the language model of a folder or hub name."""
    import transformers
    from transformers import AutoConfig

    whole = from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    config = modality.thinker(whole)
    config.name_or_path = whole.name_or_path
    factory = getattr(transformers, modality.auto_class(config))
    return Kind(config, factory, config is not whole)


def from_pretrained(factory: Any, name: str, *, what: str = "model", **kwargs: Any) -> Any:
    """factory.from_pretrained(name, ...) without progress bars and remote code.

    `trust_remote_code` allows the code of the model's folder. ValueError in one line for whatever it refuses,
    with `what` in front of it.
    """
    from safetensors import SafetensorError

    # transformers raises whatever its readers do; a user needs the first line of it.
    kwargs = {"trust_remote_code": False} | kwargs
    try:
        with quiet():
            return factory.from_pretrained(name, **kwargs)
    except SafetensorError as error:
        raise unreadable(Path(name), error) from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model: {name} runs Python code from its folder; if you trust it, load it with "
                "trust_remote_code=True"
            ) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{what}: could not load {name!r}: {lines[0]}") from error


def unreadable(folder: Path, error: Exception) -> ValueError:
    """The error for a folder with unreadable weights; names the bad file."""
    from safetensors import SafetensorError, safe_open

    bad = folder
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            bad = file
            break
    return ValueError(f"model: {bad}: expected a whole safetensors file, got {error}")


def loaded(factory: Any, name: str, **kwargs: Any) -> nn.Module:
    """The model `name`, with all of its weights.

    ValueError for tensors that are missing, unexpected or of another shape, unless the model's own code
    explains them (a tied head, `_keys_to_ignore_*`), and for NaN or inf. Weights that the model's class does
    not train, such as sinusoids of positions, have no gradient.
    """
    module, info = from_pretrained(
        factory, name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
    )
    shapes = [f"{key} {list(file)} instead of {list(own)}" for key, file, own in info["mismatched_keys"]]
    incomplete(name, info["missing_keys"], info["unexpected_keys"], shapes)
    for key, p in module.named_parameters():
        require_finite(f"model: {name}", key, p)
    _keep_frozen(module)
    return module


def _keep_frozen(module: Any) -> None:
    """Freeze the parameters that the class of a model freezes when it is made.

    from_pretrained replaces parameters, and forgets which of them were frozen.
    """
    with torch.device("meta"):
        made = type(module)(copy.deepcopy(module.config))
    fixed = {name for name, p in made.named_parameters() if not p.requires_grad}
    for name, p in module.named_parameters():
        if name in fixed:
            p.requires_grad_(False)


def incomplete(name: Any, missing: Any, unexpected: Any, shapes: Sequence[str]) -> None:
    """ValueError for tensors that differ between a model and its files."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape than config.json's": shapes}
    parts = []
    for what, names in kinds.items():
        if names:
            part = f"{what}: {', '.join(sorted(names)[:4])}"
            if len(names) > 4:
                part += f" and {len(names) - 4} more"
            parts.append(part)
    if parts:
        raise ValueError(
            f"model: {name}: expected the tensors of a causal language model, {'; '.join(parts)}; "
            "if that is right, load it with transformers and save_pretrained it, to a folder that has these"
        )
