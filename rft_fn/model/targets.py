"""Which layers get low-rank adapters, and which weights cannot have any."""

import inspect
import re
from collections.abc import Sequence
from functools import cache

from torch import nn

from rft_fn.model import attention

__all__ = ["linear", "not_taken_for_experts", "say_left_out", "target_paths"]

_TOWERS = {
    "audio_encoder", "audio_model", "audio_tower", "connector", "image_tower", "merger",
    "multi_modal_projector", "speech_encoder", "vision_encoder", "vision_model", "vision_tower", "visual",
}  # fmt: skip
_HEADS = {"classifier", "embed_out", "lm_head", "score", "v_head", "value_head"}


def linear(module: nn.Module) -> list[str]:
    """Paths of all linear layers but the head over the vocabulary. GPT-2's Conv1D is one; a family's own kind
    of linear layer, which a router may be, gives more than a product and is none."""
    from transformers.pytorch_utils import Conv1D

    head = getattr(module, "get_output_embeddings", lambda: None)()
    return [
        name
        for name, m in module.named_modules()
        if isinstance(m, (nn.Linear, Conv1D)) and m is not head
        if not type(m).__module__.startswith("transformers.models.")
    ]


def _of_text(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Those of the paths that lead into the text model: no head, and no part that sees or hears."""
    decoder = getattr(module, "get_decoder", lambda: module)()
    root = next((n for n, m in module.named_modules() if m is decoder and n), "")
    inside = [p for p in paths if not root or p.startswith(f"{root}.")]
    return [p for p in inside if not set(p.split(".")) & (_TOWERS | _HEADS)]


def _read_by_owner(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Those of the paths whose weight their owner reads, instead of calling the layer: adapters would be
    passed by. Mixers of states hand their output projection to a fused kernel."""
    found = []
    for path in paths:
        owner, _, name = path.rpartition(".")
        kind = type(module.get_submodule(owner))
        if kind.__module__.startswith("transformers.models.") and name in _weights_read(kind):
            found.append(path)
    return found


@cache
def _weights_read(kind: type) -> frozenset[str]:
    """Names of the layers whose weight, and not just its type, a class of modules reads by itself."""
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.)", inspect.getsource(kind)))


def _experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of routed experts, all of a layer in one parameter [E, out, in], by name."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {
        f"{path}.{name}": p
        for path, m in module.named_modules()
        for name, p in m.named_parameters(recurse=False)
        if p.dim() == 3 and "expert" in path.lower() and not isinstance(m, convolution)
    }


def not_taken_for_experts(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """The paths less those that peft takes for the routed experts, which had such names in older files:
    shared experts, and the dense layers of such a model. One line says so."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=list(paths))
    convert_peft_config_for_transformers(config, module, None)
    kept = [path for path in paths if path in (config.target_modules or ())]
    names = sorted({path.rpartition(".")[2] for path in set(paths) - set(kept)})
    if names:
        attention.warn_once(
            f"lora: no adapters on {', '.join(names)} ({len(paths) - len(kept)} layers), which peft takes "
            "for the routed experts"
        )
    return kept


def _shared(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Those of the paths whose weight is another layer's too: two adapters would be merged into it."""
    owners: dict[int, list[str]] = {}
    for path in paths:
        owners.setdefault(id(getattr(module.get_submodule(path), "weight", path)), []).append(path)
    return [path for same in owners.values() if len(same) > 1 for path in same]


def say_left_out(module: nn.Module) -> None:
    """One line for each kind of weight that no adapter can have."""
    shared = _shared(module, linear(module))
    if shared:
        names = sorted({name.rpartition(".")[2] for name in shared})
        attention.warn_once(
            f"lora: no adapters on {', '.join(names)} ({len(shared)} layers), which share their weights with "
            "other layers"
        )
    experts, read = _experts(module), _read_by_owner(module, _of_text(module, linear(module)))
    if experts:
        share = sum(p.numel() for p in experts.values()) / sum(p.numel() for p in module.parameters())
        names = sorted({name.rpartition(".")[2] for name in experts})
        attention.warn_once(
            f"lora: no adapters on routed experts ({', '.join(names)}: {len(experts)} tensors, {share:.0%} "
            "of all weights), which stay as they are"
        )
    if read:
        names = sorted({name.rpartition(".")[2] for name in read})
        attention.warn_once(
            f"lora: no adapters on {', '.join(names)} ({len(read)} layers), whose weights "
            f"{type(module).__name__} reads without calling them"
        )


def _matches(path: str, name: str) -> bool:
    """Whether `name` is a whole path, the end of one, or one of the parts that it leads through."""
    return f".{name}." in f".{path}."


def target_paths(
    module: nn.Module, target_modules: str | Sequence[str], exclude: Sequence[str] = ()
) -> list[str]:
    """The full paths of the layers that get adapters; see `apply_lora_configuration`."""
    every = linear(module)
    closed = {*_read_by_owner(module, every), *_shared(module, every)}
    every = [p for p in every if p not in closed]
    text = _of_text(module, every)
    if target_modules == "auto":
        chosen = text
    elif target_modules == "all-linear":
        chosen = every
    else:
        names = target_modules
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        known = sorted({p.rsplit(".", 1)[-1] for p in text})
        unknown = [name for name in names if not any(_matches(p, name) for p in every)]
        if unknown or not names:
            raise ValueError(f"target_modules: expected auto, all-linear or some of {known}, got {unknown}")
        # a name that the text model has is meant there; a tower is adapted only by a path that leads there
        inside = [p for p in text if any(_matches(p, name) for name in names)]
        outside = [name for name in names if not any(_matches(p, name) for p in text)]
        chosen = inside + [p for p in every if any(_matches(p, name) for name in outside)]
    unknown = [name for name in exclude if not any(_matches(p, name) for p in every)]
    if unknown:
        raise ValueError(f"exclude: expected parts of the paths of linear layers, got {unknown}")
    chosen = [p for p in chosen if not any(_matches(p, name) for name in exclude)]
    if not chosen:
        raise ValueError(f"target_modules: expected one linear layer or more, got none of {len(every)}")
    return chosen
