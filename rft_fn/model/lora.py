"""Low-rank adapters through peft."""

from collections.abc import Sequence

from torch import nn

__all__ = ["apply_lora_configuration", "linear_names"]

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
