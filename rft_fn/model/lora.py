"""Low-rank adapters through peft: made, read from a folder, merged, and turned off."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn import check, confined, rng
from rft_fn.model.finite import require_all_finite, require_finite
from rft_fn.model.lora_targets import linear, not_taken_for_experts, target_paths, warn_of_left_out
from rft_fn.model.quantize import is_low, whole
from rft_fn.optim.updates import local_parts
from rft_fn.precision import wide
from rft_fn.types import Apply, Packed, TokenOut

__all__ = [
    "BELOW", "CONFIG", "Export", "adapted", "apply_lora_configuration", "home", "merged", "plain_name",
    "product", "read_adapter_config", "read_adapters", "require_plain_adapters", "require_plain_lora",
    "with_adapter", "without_adapters", "wrapped",
]  # fmt: skip


BUCKET = {"cuda": 1 << 28}  # bytes of weights that are checked for NaN and inf at once, by kind of device
BELOW = "base_model.model."  # in front of the name of every tensor that peft saves

# Fields of peft's config that leave adapters what `product` computes, whatever is in them. A field that is
# not here must be empty, or peft's default: it may make of adapters more than their weights.
_PLAIN = frozenset({
    # their origin, and which layers they are on
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    # their size and scale, which peft's layers have
    "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "fan_in_fan_out",
    # how A and B began (`init_lora_weights` is looked at apart), and options of what is refused by itself
    "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size",
    "megatron_core", "runtime_config",
})  # fmt: skip
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # of A and B; others change the base too


# ---------- new adapters


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
    "all-linear" every one of the model but the head; else names of layers or of parts that hold some, in
    which `*` matches anything. Several are a list, or one string with commas ("auto,visual.merger").
    `exclude` names those without adapters. Routed experts, and layers with a weight that a model reads
    without calling them, have none; a warning names them.

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

    # Which layers get adapters, and a warning for those that cannot.
    paths = not_taken_for_experts(module, target_paths(module, target_modules, exclude))
    warn_of_left_out(module)

    # peft matches the ends of paths: whatever else ends like one of ours is left out by name.
    others = [path for path in linear(module) if path not in paths]
    also = [path for path in others if any(path.endswith(f".{x}") for x in paths)]
    config: Any = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=paths,
        exclude_modules=also or None,
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

    # Draw them again: peft draws from the global generator, and on the meta device not at all.
    device = home(module)
    for name, layer in adapted(model):
        dtype = wide(layer.get_base_layer().weight.dtype)
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
    """Return the device of a module, or the one where it will be materialized."""
    for m in module.modules():
        if "rft_weights" in m.__dict__:
            return m.__dict__["rft_weights"].device
    return next(module.parameters()).device


def adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of every layer with adapters."""
    return [(name, m) for name, m in module.named_modules() if len(getattr(m, "lora_A", ()))]


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
    """Raise ValueError for a module with adapters of peft that are more than LoRA of linear layers."""
    for config in getattr(module, "peft_config", {}).values():
        require_plain_lora(type(module).__name__, vars(config))


# ---------- adapters merged


def product(layer: Any, base: Tensor, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Tensor:
    """Return base + sum of scale B A over adapters, in float32 at least, rounded once to its type."""
    out = base.to(wide(base.dtype))
    for adapter, a, b in pairs:
        step = layer.scaling[adapter] * (b.to(out) @ a.to(out))
        out = out + (step.T if layer.fan_in_fan_out else step)
    return out.to(base.dtype)


def plain_name(module: nn.Module, name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    if hasattr(module, "get_base_model"):
        name = name.removeprefix(BELOW)
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def merged(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge LoRA adapters into weights, by the plain model's names: base + scale B A."""
    out = dict(weights)
    for name, layer in adapted(module):
        pairs = []
        for adapter in layer.lora_A:
            a = out.pop(f"{name}.lora_A.{adapter}.weight")
            b = out.pop(f"{name}.lora_B.{adapter}.weight")
            if adapter in layer.active_adapters:
                pairs.append((adapter, a, b))
        base = f"{name}.base_layer.weight"
        out[base] = product(layer, out[base], pairs)
    return {plain_name(module, name): x for name, x in out.items()}


class Export(Iterator[tuple[str, Tensor]]):
    """The trained weights for an engine: (name, full tensor) pairs, once.

    For a module with adapters the names are those of the plain model, and an adapted layer's weight is its
    base weight plus scale B A; frozen weights are left out, or with `rest` at the end. These are copies,
    which no later update changes. `own` gives the same weights by the module's names, adapters too; they may
    be the parameters themselves. `full` puts one parameter together: if that takes all ranks, all must
    iterate. With `finite`, ValueError at a tensor with NaN or inf; a GPU holds a bucket of them, to be
    checked at once.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        module: nn.Module | None,
        full: Callable[[Tensor], Tensor],
        *,
        finite: bool = True,
        rest: bool = False,
    ):
        self.params = params
        self.module = module
        self.gathered = full
        self.finite = finite
        self._ready: deque[tuple[str, Tensor]] = deque()  # that were checked
        layers = {} if module is None else dict(adapted(module))
        self._pairs = self._merged(module, layers) if module is not None and layers else self._copies()
        self.rest = rest
        if rest:
            self._pairs = chain(self._pairs, self._frozen())

    def __next__(self) -> tuple[str, Tensor]:
        if not self._ready:
            self._ready.extend(self._read())
        return self._ready.popleft()

    def _read(self) -> list[tuple[str, Tensor]]:
        """Read the next weight and check it; on a device, where a check waits, a bucket of them at once."""
        name, x = next(self._pairs)
        pairs, size, most = [(name, x)], x.nbytes, BUCKET.get(x.device.type, 0)
        if not self.finite:
            return pairs
        if size >= most:
            require_finite("weights", name, x)
            return pairs
        for name, x in self._pairs:
            pairs.append((name, x))
            size += x.nbytes
            if size >= most:
                break
        require_all_finite("weights", pairs)
        return pairs

    @property
    def frozen(self) -> frozenset[str]:
        """Return names of the plain model's weights that are left out because nothing trains them."""
        return frozenset() if self.rest else frozenset(self._left_out())

    def _left_out(self) -> dict[str, Tensor]:
        """Return the weights that nothing trains, by the plain model's names."""
        module = self.module
        if module is None:
            return {}
        trained = {name.partition(".lora_")[0] for name in self.params if ".lora_" in name}
        merged_here = {f"{path}.base_layer.weight" for path in trained}
        sent = self.params.keys() | merged_here
        return {
            plain_name(module, name): p
            for name, p in module.named_parameters()
            if not (name in sent or ".lora_" in name or is_low(p))
        }

    @torch.no_grad()
    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._left_out().items():
            yield name, self.copied(p)

    def full(self, p: Tensor) -> Tensor:
        """Put a parameter together, in full precision."""
        return self.gathered(whole(p))

    def copied(self, p: Tensor) -> Tensor:
        """Put a parameter together in new memory: an update is in place."""
        x = self.full(p)
        if is_low(p):  # its numbers were unpacked
            return x
        (mine,) = local_parts([p])
        shared = x.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
        return x.clone() if shared else x

    @torch.no_grad()
    def own(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by the module's own names."""
        for name, p in self.params.items():
            yield name, self.full(p)

    @torch.no_grad()
    def _copies(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.params.items():
            yield name, self.copied(p)

    @torch.no_grad()
    def _merged(self, module: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        every = dict(module.named_parameters()) | dict(self.params)
        done: set[str] = set()
        for name in self.params:
            path = name.partition(".base_layer.")[0].partition(".lora_")[0]
            if path not in layers or name.endswith(".base_layer.bias"):
                yield plain_name(module, name), self.copied(every[name])
            elif path not in done:  # both of its matrices at once, at the first of them
                done.add(path)
                yield plain_name(module, f"{path}.weight"), self._one_merged(layers[path], path, every)

        # Frozen weights in low precision go too: an engine that is not quantised gets the same numbers.
        for name, p in module.named_parameters():
            if is_low(p) and name.partition(".base_layer.")[0] not in done:
                yield plain_name(module, name), self.copied(p)

    def _one_merged(self, layer: Any, path: str, every: Mapping[str, Tensor]) -> Tensor:
        """Return the weight of one layer with its active adapters in it."""
        read = self.full if layer.active_adapters else self.copied
        base = read(every[f"{path}.base_layer.weight"])
        pairs = []
        for adapter in layer.active_adapters:
            a = self.full(every[f"{path}.lora_A.{adapter}.weight"])
            b = self.full(every[f"{path}.lora_B.{adapter}.weight"])
            pairs.append((adapter, a, b))
        return product(layer, base, pairs)


# ---------- adapters turned off


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


# ---------- folders of adapters as peft saves them


CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_HEADS = ("score", "classifier")  # peft's own guesses at the name of a head; it saves both


@torch.no_grad()
def with_adapter(module: nn.Module, folder: str | Path, *, without: str = "") -> nn.Module:
    """Put the adapters that were saved in `folder` on `module`, to be trained further.

    `without` names a layer that was saved whole with the adapters, and is left out. ValueError for
    adapters that are more than LoRA of linear layers, and for tensors that are missing, unexpected or of
    another shape.
    """
    # Make adapters by the saved config, to be filled.
    path = Path(folder, _ADAPTER)
    saved = read_adapter_config(folder)
    stored = read_adapters(folder)
    if without:
        saved["task_type"] = None  # by which peft would look for that layer
        saved["modules_to_save"] = [x for x in saved.get("modules_to_save") or () if x not in _HEADS] or None
        stored = {name: x for name, x in stored.items() if name != f"{BELOW}{without}.weight"}
    model = _made(module, saved, folder)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if hasattr(head, "lora_A") and getattr(module.config, "tie_word_embeddings", False):
        raise ValueError(
            f"model: {path}: expected adapters of other layers, got some of the head, which is the embedding "
            "too (tie_word_embeddings): no engine could be given the merged weights"
        )

    # The names in the file are without that of the adapter.
    named = dict(model.named_parameters(remove_duplicate=False))
    # peft adds the base model's own weight where a head has adapters
    stored = {k: x for k, x in stored.items() if ".lora_" in k or k not in named or not _same(named[k], x)}
    own = {name.replace(".default.", "."): name for name in named if ".lora_" in name}
    both = own.keys() & stored.keys()
    wrong = [*(own.keys() ^ stored.keys())]
    wrong += [name for name in both if stored[name].shape != named[own[name]].shape]
    if wrong:
        raise ValueError(
            f"model: {path}: expected the {len(own)} tensors of its config and base model, missing, "
            f"unexpected or of another shape are {len(wrong)}: {', '.join(sorted(wrong)[:3])}"
        )
    for name, x in stored.items():
        require_finite(f"model: {path}", name, x)
        named[own[name]].copy_(x)
    return model


def _made(module: nn.Module, saved: dict[str, Any], folder: str | Path) -> nn.Module:
    """Put new adapters on `module` by a saved config. ValueError if peft makes no plain LoRA of it."""
    from peft import LoraConfig

    require_plain_lora(folder, saved)
    known = {field.name for field in fields(LoraConfig)}
    config = {key: x for key, x in saved.items() if key in known - {"runtime_config"}}
    config |= {"inference_mode": False, "lora_dropout": 0.0, "init_lora_weights": True}
    try:
        made = LoraConfig(**config)
        confined.call(f"model: {Path(folder, CONFIG)}", _match, made, [x for x, _ in module.named_modules()])
        return wrapped(module, made, 0)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model: {Path(folder, CONFIG)}: expected adapters that peft can make, got {reason}"
        ) from error


def _match(config: Any, names: Sequence[str]) -> None:
    """Match the regular expressions of a config with all names of modules, as peft will."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    for name in names:
        check_target_module_exists(config, name)
        for patterns in (config.rank_pattern, config.alpha_pattern):
            get_pattern_key(list(patterns), name)


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Return the config of a folder of adapters. ValueError for one that is no mapping in JSON."""
    path = Path(folder, CONFIG)
    try:
        found = check.parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"model: {path}: expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model: {path}: expected a mapping, got {type(found).__name__}")
    return found


def _same(own: Tensor, saved: Tensor) -> bool:
    return own.shape == saved.shape and (own.is_meta or torch.equal(own.to(saved.dtype).cpu(), saved.cpu()))


def read_adapters(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a folder of adapters, by their names in it. ValueError if not whole or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder, _ADAPTER)
    if not path.is_file():
        raise ValueError(f"model: {path.parent}: expected {_ADAPTER}, got none")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"model: {path}: expected a whole safetensors file, got {error}") from error
