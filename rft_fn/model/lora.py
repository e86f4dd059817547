"""Low-rank adapters through peft: made, loaded to be trained further, merged for an engine, turned off."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import rng
from rft_fn.model.finite import require_finite
from rft_fn.model.quantize import is_low, whole
from rft_fn.model.targets import linear, not_taken_for_experts, say_left_out, target_paths
from rft_fn.types import Apply, Packed, TokenOut

__all__ = ["Export", "apply_lora_configuration", "home", "merged", "with_adapter", "without_adapters"]

_ADAPTER = "adapter_model.safetensors"


# ------------------------------------------------------------------------------------------------- made


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
    """`module` with trainable LoRA adapters of rank `rank`, scaled by alpha / rank (arXiv 2106.09685).

    `target_modules`: "auto" is every linear layer of the text model, never the head, never a part that sees
    or hears; "all-linear" every one of the model but the head; else names, or one string of names with
    commas. Routed experts, and layers whose weight a model reads without calling them, have none: one line
    says so. `exclude` names layers, or parts that hold some, without adapters. B starts at 0; A is drawn from
    `seed` and the layer's name, so it is the same on every process, and with `load(meta=True)` too.
    ValueError for a rank below 1, for a module that has adapters already, for names that it does not have,
    and for dropout, which would make log-probs random.
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
    paths = not_taken_for_experts(module, target_paths(module, target_modules, exclude))
    say_left_out(module)
    # peft matches the ends of paths: what else ends like one of ours is left out by name
    also = [p for p in linear(module) if p not in paths and any(p.endswith(f".{x}") for x in paths)]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=paths,
        exclude_modules=also or None,
        task_type="CAUSAL_LM",
    )
    return _wrapped(module, config, seed)


@torch.no_grad()
def _wrapped(module: nn.Module, config: Any, seed: int) -> nn.Module:
    """`module` inside peft, its adapters in memory (also where it has none itself) and drawn from `seed`."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out")  # Conv1D keeps its weight transposed
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks for it
        model = get_peft_model(module, config)
    device = home(module)
    for name, layer in _adapted(model):
        wide = torch.promote_types(layer.get_base_layer().weight.dtype, torch.float32)
        for adapter in layer.active_adapters:
            a, b = (layer.lora_A[adapter], layer.lora_B[adapter])
            bound = 1 / math.sqrt(a.in_features)  # as peft draws it
            g = rng.generator(rng.fold_in(seed, "lora", name, adapter))
            start = torch.rand(a.weight.shape, generator=g, dtype=torch.float64) * 2 * bound - bound
            a.weight = nn.Parameter(start.to(device, wide))
            b.weight = nn.Parameter(torch.zeros(b.weight.shape, device=device, dtype=wide))
    return model


def home(module: nn.Module) -> torch.device:
    """Where a module lies, or where it will once it is materialized."""
    source = [m.__dict__["rft_weights"] for m in module.modules() if "rft_weights" in m.__dict__]
    return source[0].device if source else next(module.parameters()).device


def _adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of every layer with adapters."""
    return [(name, m) for name, m in module.named_modules() if len(getattr(m, "lora_A", ()))]


@torch.no_grad()
def with_adapter(module: nn.Module, folder: str | Path) -> nn.Module:
    """`module` with the adapters that were saved in `folder`, to be trained further.

    ValueError for adapters that are more than LoRA of linear layers, and for tensors that are missing,
    unexpected or of another shape.
    """
    from peft import LoraConfig, PeftConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config, path = PeftConfig.from_pretrained(str(folder)), Path(folder, _ADAPTER)
    odd = ["use_dora", "modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices"]
    odd = [name for name in odd if getattr(config, name, None)]
    if type(config) is not LoraConfig or odd or config.bias != "none":
        what = ", ".join(odd) or f"{config.peft_type} with bias {getattr(config, 'bias', None)!r}"
        raise ValueError(f"model: {folder}: expected plain LoRA adapters, got {what}; merge them first")
    if not path.is_file():
        raise ValueError(f"model: {folder}: expected {_ADAPTER}, got none")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"model: {path}: expected a whole safetensors file, got {error}") from error
    config.inference_mode = False
    config.lora_dropout = 0.0
    model = _wrapped(module, config, 0)
    named = dict(model.named_parameters())
    own = {n.replace(".default.", "."): n for n in named if ".lora_" in n}
    shapes = {n: list(named[full].shape) for n, full in own.items()}
    wrong = [n for n in own.keys() & stored.keys() if list(stored[n].shape) != shapes[n]]
    wrong += sorted(own.keys() ^ stored.keys())
    if wrong:
        raise ValueError(
            f"model: {path}: expected the {len(own)} tensors of its config and base model, missing, "
            f"unexpected or of another shape are {len(wrong)}: {', '.join(sorted(wrong)[:3])}"
        )
    for name, x in stored.items():
        require_finite(f"model: {path}", name, x)
        named[own[name]].copy_(x)
    return model


# ------------------------------------------------------------------------------------------------ merged


def _product(layer: Any, base: Tensor, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Tensor:
    """base + sum of scale B A over adapters, in float32 at least, rounded once to the type of `base`."""
    out = base.to(torch.promote_types(base.dtype, torch.float32))
    for adapter, a, b in pairs:
        step = layer.scaling[adapter] * (b.to(out) @ a.to(out))
        out = out + (step.T if layer.fan_in_fan_out else step)
    return out.to(base.dtype)


def _plain(module: nn.Module, name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    root = "base_model.model." if hasattr(module, "get_base_model") else ""
    return name.removeprefix(root).replace(".base_layer.", ".")


@torch.no_grad()
def merged(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole weights of a module with LoRA layers, by the names of the plain one: each base weight plus
    scale B A. Of a module without any they come back as they are."""
    out = dict(weights)
    for name, layer in _adapted(module):
        pairs = [
            (x, out.pop(f"{name}.lora_A.{x}.weight"), out.pop(f"{name}.lora_B.{x}.weight"))
            for x in layer.lora_A
        ]
        active = [pair for pair in pairs if pair[0] in layer.active_adapters]
        out[f"{name}.base_layer.weight"] = _product(layer, out[f"{name}.base_layer.weight"], active)
    return {_plain(module, name): x for name, x in out.items()}


class Export(Iterator[tuple[str, Tensor]]):
    """The trained weights as an engine takes them: (name, full tensor), one at a time, once.

    Of a module with adapters the names are those of the plain model, and an adapted layer's weight is its
    base weight plus scale B A; what is not trained is left out. `own` gives the same weights as the module
    has them, adapters by their own names. `full` puts one parameter together: where that takes all ranks,
    all have to iterate. With `finite`, ValueError at a tensor with NaN or inf.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        module: nn.Module | None,
        full: Callable[[Tensor], Tensor],
        *,
        finite: bool = True,
    ):
        self.params, self.module, self.gathered, self.finite = params, module, full, finite
        layers = [] if module is None else _adapted(module)
        self._found = self._merged(dict(layers)) if layers else self.own()

    def __next__(self) -> tuple[str, Tensor]:
        name, x = next(self._found)
        if self.finite:
            require_finite("weights", name, x)
        return name, x

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the plain model's weights that are left out because nothing trains them."""
        module = self.module
        if module is None:
            return frozenset()
        trained = {name.partition(".lora_")[0] for name in self.params if ".lora_" in name}
        merged_here = {f"{path}.base_layer.weight" for path in trained}
        left_out = []
        for name, p in module.named_parameters():
            sent = name in self.params or name in merged_here or ".lora_" in name or is_low(p)
            if not sent:
                left_out.append(_plain(module, name))
        return frozenset(left_out)

    def full(self, p: Tensor) -> Tensor:
        """A parameter put together, in full precision."""
        return self.gathered(whole(p))

    @torch.no_grad()
    def own(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by the module's own names."""
        for name, p in self.params.items():
            yield name, self.full(p)

    @torch.no_grad()
    def _merged(self, layers: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        module, done = self.module, set()
        assert module is not None
        every = dict(module.named_parameters()) | dict(self.params)
        for name in self.params:
            path = name.partition(".base_layer.")[0].partition(".lora_")[0]
            if path not in layers or name.endswith(".base_layer.bias"):
                yield _plain(module, name), self.full(every[name])
            elif path not in done:  # both of its matrices at once, at the first of them
                done.add(path)
                layer = layers[path]
                base = self.full(every[f"{path}.base_layer.weight"])
                pairs = []
                for x in layer.active_adapters:
                    a, b = (self.full(every[f"{path}.lora_{m}.{x}.weight"]) for m in "AB")
                    pairs.append((x, a, b))
                yield _plain(module, f"{path}.weight"), _product(layer, base, pairs)
        for name, p in module.named_parameters():  # an engine that is not quantised gets the same numbers
            if is_low(p) and name.partition(".base_layer.")[0] not in done:
                yield _plain(module, name), self.full(p)


# ---------------------------------------------------------------------------------------------- turned off


def without_adapters(module: nn.Module, apply: Apply) -> Apply:
    """`apply` of a module with its adapters off: the model before LoRA, without a second copy of it.

    The reference of a KL: `score(without_adapters(module, apply), state.params, packs)`. Never with a
    gradient. Works for the `apply` of every strategy. ValueError for a module without adapters.
    """
    layers = [layer for _, layer in _adapted(module)]
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

    return plain
