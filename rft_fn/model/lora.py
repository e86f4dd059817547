"""Low-rank adapters through peft: made anew, and turned off."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from rft_fn import rng
from rft_fn.model.lora_experts import require_known_weights, takes_weight
from rft_fn.model.lora_targets import find_targets, linear, not_taken_for_experts, warn_of_left_out
from rft_fn.precision import wide
from rft_fn.types import Apply, Packed, TokenOut

__all__ = [
    "BELOW",
    "BUCKET",
    "active",
    "adapted",
    "adapted_name",
    "apply_lora_configuration",
    "home",
    "require_plain_adapters",
    "require_plain_lora",
    "without_adapters",
    "wrapped",
]


BUCKET = {"cuda": 1 << 28}  # bytes of weights that are checked for NaN and inf at once, by kind of device
BELOW = "base_model.model."  # in front of the name of every tensor that peft saves

# Fields of peft's config that leave adapters what `product` computes, whatever is in them. A field that is
# not here must be empty, or peft's default: it may make of adapters more than their weights.
_PLAIN = frozenset({
    # their origin, and which layers they are on
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern",
    # their size and scale, which peft's layers have
    "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "fan_in_fan_out",
    # how A and B began (`init_lora_weights` is looked at apart), and options of what is refused by itself
    "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size",
    "megatron_core", "runtime_config",
})  # fmt: skip
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # of A and B; others change the base too


def apply_lora_configuration(
    module: nn.Module,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "auto",
    *,
    exclude: Sequence[str] = (),
    seed: int = 0,
) -> nn.Module:
    """Put new trainable LoRA adapters (arXiv 2106.09685) on `module`, and return it.

    They have rank `rank` and are scaled by alpha / rank. `target_modules`: "auto" is every linear layer of
    the text model, never the head, never a part that sees or hears; "towers" every one of these parts;
    "all-linear" every one of the model but the head; "experts" the weights of routed experts in the text
    model, each expert of them with an A and a B of its own; else names of layers, of weights of routed
    experts, or of parts that hold some, in which `*` matches anything. Several are a list, or one string
    with commas ("auto,experts", "auto,visual.merger"). `exclude` names those without adapters. Routed
    experts that nothing names, and layers with a weight that a model reads without calling them, have
    none; a warning names them.

    B starts at 0; A is drawn from `seed` and the layer's name, so it is the same on every process, and
    with `load(meta=True)` too. ValueError for a rank below 1, for a module that has adapters already, for
    names that it does not have, and for dropout, which would make log-probs random.
    """
    from peft import LoraConfig

    if rank < 1:
        raise ValueError(f"rank: expected >= 1, got {rank}")
    if hasattr(module, "peft_config"):
        raise ValueError(
            f"rank: expected no new adapters for a model that has some, got {rank}; leave it out "
            "(lora_rank 0) to train those further, or export the model with its adapters merged"
        )
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha: expected a number > 0, got {alpha}")
    if dropout:
        raise ValueError(
            f"dropout: expected 0, got {dropout}: log-probs of the trainer and the sampler would differ"
        )

    # Which weights get adapters, and a warning for those that do not.
    targets = find_targets(module, target_modules, exclude)
    paths = not_taken_for_experts(module, targets.layers)
    warn_of_left_out(module, targets.experts)

    # peft matches the ends of paths: whatever else ends like one of ours is left out by name.
    others = [path for path in linear(module) if path not in paths]
    also = [path for path in others if any(path.endswith(f".{x}") for x in paths)]
    config: Any = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=paths,
        exclude_modules=also or None,
        target_parameters=targets.experts or None,
        task_type="CAUSAL_LM",
    )
    return wrapped(module, config, seed)


@torch.no_grad()
def wrapped(module: Any, config: Any, seed: int) -> nn.Module:
    """Put `module` inside peft, with adapters drawn from `seed`, which have memory even if it has none."""
    from peft import get_peft_model

    # peft puts the adapters in; two of its warnings are about usual models.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out")  # Conv1D keeps its weight transposed
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks for it
        model: Any = get_peft_model(module, config)

    require_known_weights(model)

    # Draw them again: peft draws from the global generator, and on the meta device not at all.
    device = home(module)
    for name, layer in adapted(model):
        held = layer.get_param() if takes_weight(layer) else layer.get_base_layer().weight
        dtype = wide(held.dtype)
        for adapter in layer.active_adapters:
            if not 0 < layer.scaling[adapter] < math.inf:
                raise ValueError(f"alpha: expected a number > 0, got {layer.lora_alpha[adapter]}")
            a = layer.lora_A[adapter]
            b = layer.lora_B[adapter]
            bound = 1 / math.sqrt(a.in_features)  # as peft draws it
            g = rng.generator(rng.fold_in(seed, "lora", name, adapter))
            start = torch.rand(a.weight.shape, generator=g, dtype=torch.float64) * 2 * bound - bound
            a.weight = nn.Parameter(start.to(device, dtype))
            b.weight = nn.Parameter(torch.zeros(b.weight.shape, device=device, dtype=dtype))
    return model


def home(module: nn.Module) -> torch.device:
    """Return the device of a module, or the device where it will be materialized."""
    for m in module.modules():
        if "rft_weights" in m.__dict__:
            return m.__dict__["rft_weights"].device
    return next(module.parameters()).device


def adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of every layer with adapters."""
    return [(name, m) for name, m in module.named_modules() if len(getattr(m, "lora_A", ()))]


def active(layer: Any) -> list[str]:
    """Return the names of the adapters of a layer that it computes with."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def adapted_name(path: str, layer: Any) -> str:
    """Return the name of the parameter that the adapters of a layer at `path` change."""
    if not takes_weight(layer):
        return f"{path}.base_layer.weight"
    name = layer.parameter_name
    while hasattr(layer, "base_layer"):  # there is one around another for each adapted parameter of a module
        path, layer = f"{path}.base_layer", layer.base_layer
    return f"{path}.{name}"


def require_plain_lora(name: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError for fields of a config, perhaps of a newer peft's file, that mean more than LoRA."""
    from peft import LoraConfig

    usual = {field.name: field.default for field in fields(LoraConfig)}
    odd = [key for key, x in config.items() if key not in _PLAIN and x and x != usual.get(key)]
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        odd.append(f"init_lora_weights {start!r}")
    if config.get("peft_type") != "LORA":
        odd = [f"peft_type {config.get('peft_type')}"]
    if odd:
        raise ValueError(
            f"model: {name}: expected plain LoRA adapters, got {', '.join(odd)}; merge them first"
        )


def require_plain_adapters(module: Any) -> None:
    """Raise ValueError for a module with adapters of peft that are more than LoRA of layers and experts."""
    for config in getattr(module, "peft_config", {}).values():
        require_plain_lora(type(module).__name__, vars(config))
    require_known_weights(module)


def without_adapters(module: nn.Module, apply: Apply) -> Apply:
    """Return `apply` with adapters off: the model before LoRA, without a second copy.

    It serves as the reference of a KL: `score(without_adapters(module, apply), state.params, packs)`, and
    never has a gradient. Works for the `apply` of every strategy. ValueError for a module without
    adapters.
    """
    layers = [layer for _, layer in adapted(module)]
    if not layers:
        raise ValueError(f"module: expected one with adapters, got {type(module).__name__} without any")

    @torch.no_grad()
    def plain(params: Any, pack: Packed) -> TokenOut:
        for layer in layers:  # peft's own switch changes requires_grad too, which sharded modules rely on
            layer._disable_adapters = True
        try:
            return apply(params, pack)
        finally:
            for layer in layers:
                layer._disable_adapters = False

    plain.__wrapped__ = apply  # type: ignore[attr-defined]  # where `Strategy.score` finds the weights
    return plain
