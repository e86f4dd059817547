"""Low-rank adapters of routed experts as products of groups: W_e x + scale B_e (A_e x) for expert e.

peft's layer around them (ParamWrapper) adds B A to the weights of all experts in each forward, and gets a
gradient of that size. Names, files and switches are peft's here too; only the forward is another.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["compute_in_groups", "products_of", "require_known_weights", "step_of", "takes_weight"]


def products_of(experts: Any) -> tuple[str, ...]:
    """Return the names of the weights [E, out, in] that adapters can be on; () for other modules.

    These are the experts that transformers computes in one of several ways, by its ExpertsInterface.
    """
    if not (hasattr(experts, "has_gate") and hasattr(experts, "is_transposed")):
        return ()
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def takes_weight(layer: Any) -> bool:
    """Return whether a layer of peft adapts a parameter of the module inside it, not a linear layer."""
    return hasattr(layer, "parameter_name") and hasattr(layer, "lora_A")


def require_known_weights(module: nn.Module) -> None:
    """Raise ValueError for adapters of parameters that are no weights of routed experts."""
    for layer in [m for m in module.modules() if takes_weight(m)]:
        held: Any = layer
        inside = held.get_base_layer()
        if held.parameter_name not in products_of(inside):
            raise ValueError(
                "target_parameters: expected weights of routed experts that transformers computes in groups, "
                f"got {held.parameter_name} of {type(inside).__name__}"
            )
        if not hasattr(held, "_did_swap_in_out_features"):
            raise ValueError(
                "target_parameters: expected peft >= 0.19 for adapters of routed experts, got one with "
                "another order of their dimensions; pip install -U peft"
            )


def step_of(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return B A of all experts, in the order of dimensions of their weight [E, out, in] or [E, in, out]."""
    step = _b_of(b, layer.num_experts) @ _a_of(a, layer.num_experts)
    return step.mT if layer.get_base_layer().is_transposed else step


def _a_of(weight: Tensor, experts: int) -> Tensor:
    """Return A [E, r, in] of peft's [E r, in]."""
    return weight.view(experts, -1, weight.shape[-1])


def _b_of(weight: Tensor, experts: int) -> Tensor:
    """Return B [E, out, r] of peft's [out, r E]."""
    return weight.view(weight.shape[0], -1, experts).permute(2, 0, 1)


def compute_in_groups(module: nn.Module) -> None:
    """Have adapters of routed experts computed in groups, in place.

    Only classes change, as with `routing.follow`: parameters, names and hooks stay. ValueError as of
    `require_known_weights`.
    """
    require_known_weights(module)
    for layer in [m for m in module.modules() if takes_weight(m) and not hasattr(m, "rft_grouped")]:
        held: Any = layer
        experts = held.get_base_layer()
        held.__class__ = _passing_class(type(held))
        for factors, kind in ((held.lora_A, _FactorA), (held.lora_B, _FactorB)):
            for factor in factors.values():
                factor.__class__ = kind
        if "rft_adapters" not in vars(experts):
            experts.rft_adapters = {}  # a dictionary: they are no parts of what they are around
            experts.__class__ = _adapted_class(type(experts))
        experts.rft_adapters[held.parameter_name] = held


# ---------- products of rows that are sorted by expert


def _product(rows: Tensor, weight: Tensor, ends: Tensor, sizes: list[int] | None) -> Tensor:
    """Return each row [S, in] times the weight [E, in, out] of its expert.

    The rows of an expert end before `ends` [E]; with `sizes` they are computed one expert after the other,
    else by torch's product of groups, or what transformers has in its place.
    """
    if sizes is None:
        from transformers.integrations.moe import _grouped_mm

        return _grouped_mm(rows, weight, ends)
    return torch.cat([x @ w for x, w in zip(rows.to(weight.dtype).split(sizes), weight)])


class _FactorA(nn.Linear):
    """A of all experts. FSDP2 and ZeRO 3 gather it around its own forward, so it computes in there."""

    def forward(self, input: Tensor, ends: Any = None, sizes: Any = None) -> Tensor:
        a = _a_of(self.weight, len(ends))
        if sizes is None:  # torch's product wants rows of whole 16 bytes
            a = nn.functional.pad(a, (0, 0, 0, -a.shape[1] % (16 // a.element_size())))
        return _product(input, a.mT, ends, sizes)


class _FactorB(nn.Linear):
    """B of all experts, for rows of the rank, perhaps padded."""

    def forward(self, input: Tensor, ends: Any = None, sizes: Any = None) -> Tensor:
        b = _b_of(self.weight, len(ends))
        b = nn.functional.pad(b, (0, input.shape[-1] - b.shape[-1])).contiguous()
        return _product(input, b.mT, ends, sizes)


@cache
def _passing_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of peft's layer that leaves its adapters to the experts inside it."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "rft_grouped": True})  # peft looks at the name


@cache
def _adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of experts that has adapters; without active ones its forward is the class's own."""
    plain = cls.forward

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        active = {
            name: layer
            for name, layer in self.rft_adapters.items()
            if layer.active_adapters and not (layer.disable_adapters or layer.merged)
        }
        if not active:
            return plain(self, hidden_states, top_k_index, top_k_weights)
        return _mixture(self, active, hidden_states, top_k_index, top_k_weights)

    return type(f"Adapted{cls.__name__}", (cls,), {"forward": forward})


def _mixture(
    experts: Any, layers: Mapping[str, Any], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Return the sum over k of weights [T, k] times expert index [T, k] of hidden [T, D]."""
    count, k = experts.num_experts, index.shape[-1]
    chosen, order = index.reshape(-1).sort()
    numbers = torch.arange(count, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    one_by_one = getattr(experts.config, "_experts_implementation", None) in (None, "eager")
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist() if one_by_one else None

    def linear(name: str, rows: Tensor) -> Tensor:
        weight = getattr(experts, name)
        out = _product(rows, weight if experts.is_transposed else weight.mT, ends, sizes)
        if experts.has_bias:
            out = out + getattr(experts, f"{name}_bias")[chosen]
        layer: Any = layers.get(name)
        for adapter in layer.active_adapters if layer else ():
            low = layer.lora_A[adapter](rows, ends, sizes) * layer.scaling[adapter]
            out = (out + layer.lora_B[adapter](low, ends, sizes)).to(out.dtype)
        return out

    up, down = products_of(experts)
    inner = linear(up, hidden[order // k])
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = linear(down, inner)
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    out = out * weights.reshape(-1)[order, None]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return out[places].view(len(hidden), k, -1).sum(1).to(hidden.dtype)
