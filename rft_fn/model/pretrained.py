"""transformers' from_pretrained with one-line errors and a check for whole weights."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rft_fn import confined, modality
from rft_fn.model.finite import require_finite
from rft_fn.model.save import quiet

__all__ = [
    "Kind", "from_pretrained", "incomplete", "kind_of", "loaded", "require_held", "skeleton", "unreadable",
]  # fmt: skip


_SLACK = 2**24  # numbers that a config may ask for beyond its files


class Kind(NamedTuple):
    """The kind of a model: its config, and the auto class of transformers that makes it."""

    config: Any  # of the part that reads and writes text, where the model also speaks
    factory: Any
    is_part: bool  # whether there are more parts, which are left out


def kind_of(name: str, trust_remote_code: bool = False) -> Kind:
    """Return the kind of the language model of a folder or hub name."""
    import transformers

    whole = _config(name, trust_remote_code)
    config = modality.thinker(whole)
    config.name_or_path = whole.name_or_path
    factory = getattr(transformers, modality.auto_class(config))
    return Kind(config, factory, config is not whole)


def _config(name: str, trust_remote_code: bool) -> Any:
    """Read the config of a folder or hub name. ValueError for one that no model can be made of."""
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
        raise ValueError(f"model: {name}: architectures: expected a list of names, got {names!r}")

    # transformers would fetch the repository, and run what is in it
    for code in _repositories(config):
        raise ValueError(
            f"model: {name}: expected a config.json without code of other repositories, got {code!r} as "
            "_attn_implementation or _experts_implementation; remove it there"
        )
    return config


def _repositories(config: Any) -> list[str]:
    """Return the repositories that a config or one of its parts takes attention or experts from."""
    found = []
    for key in ("_attn_implementation", "_experts_implementation"):
        name = getattr(config, key, None)
        if isinstance(name, str) and "/" in name:
            found.append(name)
    for key in getattr(config, "sub_configs", {}):
        found += _repositories(getattr(config, key, None))
    return found


def from_pretrained(factory: Any, name: str, *, what: str = "model", **kwargs: Any) -> Any:
    """Call factory.from_pretrained(name, ...) without progress bars and remote code.

    `trust_remote_code` allows the code of the model's folder. ValueError in one line for whatever it
    refuses, with `what` in front of it.
    """
    from safetensors import SafetensorError

    # transformers raises whatever its readers do; a user needs the first line of it.
    kwargs = {"trust_remote_code": False} | kwargs
    try:
        with quiet():
            return factory.from_pretrained(name, **kwargs)
    except SafetensorError as error:
        raise unreadable(Path(name), error) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model: {name} runs Python code from its folder; if you trust it, load it with "
                "trust_remote_code=True"
            ) from error
        raise ValueError(f"{what}: could not load {name!r}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error, with the next one if it is only a heading."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]


def skeleton(config: Any, factory: Any, **options: Any) -> Any:
    """Make the model of a config with an auto class, without memory. ValueError in one line."""
    try:
        with torch.device("meta"):
            made = factory.from_config(config, **options)
    except Exception as error:
        raise ValueError(
            f"model: {config.name_or_path}: expected a config.json that a model can be made of, got "
            f"{type(error).__name__}: {_reason(error)}"
        ) from error
    return made.to("meta")  # tensors that a family makes of random numbers have memory even there


def require_held(name: str, config: Any, factory: Any, **options: Any) -> Any:
    """Return the skeleton of a folder's model. ValueError for one far larger than the folder's files.

    A number in config.json would take all memory before the tensors turn out to be of another shape.
    """
    from safetensors import SafetensorError, safe_open

    sizes = []
    for path in Path(name).glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                sizes += [math.prod(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118
        except SafetensorError as error:
            raise unreadable(Path(name), error) from error

    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if sizes and isinstance(layers, int) and layers > len(sizes):
        raise ValueError(
            f"model: {name}: num_hidden_layers: expected no more than the {len(sizes)} tensors of its files, "
            f"got {layers}"
        )
    made = skeleton(config, factory, **options)
    wanted = sum(p.numel() for p in made.parameters())
    low = getattr(config, "quantization_config", None)
    packed = low is not None  # several in each number of the files
    if packed and (patterns := _texts(low)):
        names = [key for key, _ in made.named_modules()]
        confined.call(f"model: {name}: quantization_config", _match, patterns, names)
    if sizes and not packed and wanted > 4 * sum(sizes) + _SLACK:
        raise ValueError(
            f"model: {name}: expected a config.json of about the {sum(sizes)} numbers in its files, got one "
            f"of {wanted}"
        )
    return made


def _texts(x: Any) -> list[str]:
    """Return the texts in a value of JSON, which may be regular expressions."""
    if isinstance(x, str):
        return [x]
    inside = [*x.keys(), *x.values()] if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
    return [text for each in inside for text in _texts(each)]


def _match(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        for name in names:
            with suppress(re.error):  # transformers will say it
                re.match(f"(?:{pattern})$", name)


def unreadable(folder: Path, error: Exception) -> ValueError:
    """Return the error for a folder with unreadable weights; it names the bad file."""
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
    """Load the model `name`, with all of its weights.

    ValueError for tensors that are missing, unexpected or of another shape, unless the model's own code
    explains them (a tied head, `_keys_to_ignore_*`), and for NaN or inf. Weights that the model's class
    does not train, such as sinusoids of positions, have no gradient.
    """
    trust = kwargs.get("trust_remote_code", False)
    config = kwargs.get("config") or _config(name, trust)
    asked = {key: kwargs[key] for key in ("dtype", "attn_implementation") if key in kwargs}
    made = require_held(name, config, factory, trust_remote_code=trust, **asked)
    module, info = from_pretrained(
        factory, name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
    )
    shapes = [f"{key} {list(file)} instead of {list(own)}" for key, file, own in info["mismatched_keys"]]
    incomplete(name, info["missing_keys"], info["unexpected_keys"], shapes)
    for key, p in module.named_parameters():
        require_finite(f"model: {name}", key, p)

    # from_pretrained replaces parameters, and forgets which of them the class froze
    fixed = {name for name, p in made.named_parameters() if not p.requires_grad}
    for name, p in module.named_parameters():
        if name in fixed:
            p.requires_grad_(False)
    return module


def incomplete(name: Any, missing: Any, unexpected: Any, shapes: Sequence[str]) -> None:
    """Raise ValueError for tensors that differ between a model and its files."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape than config.json's": shapes}
    parts = []
    for what, names in kinds.items():
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{what}: {', '.join(sorted(names)[:4])}{more}")
    if parts:
        raise ValueError(
            f"model: {name}: expected the tensors of a causal language model, {'; '.join(parts)}; "
            "if that is right, load it with transformers and save_pretrained it, to a folder that has these"
        )
