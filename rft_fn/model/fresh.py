"""Models with fresh weights, of a config that keywords change, such as a small student."""

from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from torch import nn

from rft_fn.model.pretrained import kind_of

__all__ = ["changes_of", "fresh"]

# what `from_pretrained` takes beside the parameters that it names
_TAKEN = frozenset({
    "adapter_kwargs", "attn_implementation", "device_map", "dtype", "experts_implementation", "gguf_file",
    "key_mapping", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "proxies",
    "quantization_config", "state_dict", "subfolder", "torch_dtype", "tp_plan", "tp_size", "use_kernels",
    "variant",
})  # fmt: skip


def changes_of(name: str, given: Mapping[str, Any], *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the keywords that change fields of a model's config; the others are `from_pretrained`'s.

    ValueError for a keyword that is neither. A model with files of Python may take any.
    """
    if not given:
        return {}
    from transformers import PreTrainedModel

    taken = _TAKEN | set(signature(PreTrainedModel.from_pretrained).parameters)
    fields = set(kind_of(name, trust_remote_code).config.to_dict()) - taken
    for key, x in given.items():
        if key not in fields | taken and not trust_remote_code:
            near = get_close_matches(key, fields | taken, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{key}: expected a field of the model's config, got {x!r}{hint}")
    return {key: x for key, x in given.items() if key in fields}


def fresh(
    name: str,
    changes: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> nn.Module:
    """Return a model of a changed config, with weights drawn by torch's generator.

    ValueError for numbers that make no model.
    """
    made = kind_of(name, trust_remote_code)
    fields = made.config.to_dict()
    # the kinds of layers are listed one by one; another number of layers has the family's own list
    if "num_hidden_layers" in changes:
        fields.pop("layer_types", None)
    try:
        config = type(made.config).from_dict({**fields, **changes})
        module = made.factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # of transformers, of any type
        said = " ".join(str(error).split())
        text = ", ".join(f"{key}={x!r}" for key, x in changes.items())
        raise ValueError(f"{next(iter(changes))}: expected a config of {name}, got {text}: {said}") from error
    return module.to(device).eval()
