"""Low-rank adapters through peft."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["apply_lora_configuration", "linear_names", "merged"]

_FROZEN_PARTS = ("lm_head", "visual", "vision_tower", "audio_tower", "merger", "multi_modal_projector")


def linear_names(module: nn.Module, exclude: Sequence[str] = _FROZEN_PARTS) -> list[str]:
    """The last names of all Linear layers, without the head and the towers of other modalities."""
    names = (n for n, m in module.named_modules() if isinstance(m, nn.Linear))
    return sorted({n.rsplit(".", 1)[-1] for n in names if not any(part in n.split(".") for part in exclude)})


def apply_lora_configuration(
    module: nn.Module,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "auto",
) -> nn.Module:
    """`module` with LoRA adapters (arXiv 2106.09685) of rank `rank`, scaled by alpha
    / rank; only they are trainable.

    `target_modules="auto"` takes every Linear of the language model, never the head. ValueError for a rank
    below 1, for a name that the module does not have, and for dropout, which would make log-probs random.
    """
    from peft import LoraConfig, get_peft_model

    if rank < 1:
        raise ValueError(f"rank: expected >= 1, got {rank}")
    if dropout:
        raise ValueError(
            f"dropout: expected 0, got {dropout}: log-probs of the trainer and the sampler would differ"
        )
    known = linear_names(module)
    names = known if target_modules == "auto" else list(target_modules)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"target_modules: expected some of {known}, got {unknown}")
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, task_type="CAUSAL_LM"
    )
    return get_peft_model(module, config)


@torch.no_grad()
def merged(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole weights of a module with LoRA layers, by the names of the plain one: each base weight plus
    scale B A. Of a module without any they come back as they are."""
    out = dict(weights)
    for name, layer in module.named_modules():
        for adapter in getattr(layer, "lora_A", ()):
            a, b = (out.pop(f"{name}.lora_{x}.{adapter}.weight") for x in "AB")
            base = out[f"{name}.base_layer.weight"]
            step = layer.scaling[adapter] * (b.to(base.device).float() @ a.to(base.device).float())
            out[f"{name}.base_layer.weight"] = (
                base.to(torch.promote_types(base.dtype, torch.float32)) + step
            ).to(base.dtype)
    root = "base_model.model." if hasattr(module, "get_base_model") else ""
    return {name.removeprefix(root).replace(".base_layer.", "."): x for name, x in out.items()}
