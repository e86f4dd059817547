"""Estimates the memory of each rank of a run before it starts.

A module is traced on the meta device; its backend's `Layout` tells what each process keeps of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import tree
from rft_fn.memory import trace
from rft_fn.memory.example import Example
from rft_fn.memory.layout import Layout
from rft_fn.model import quantize
from rft_fn.model.parts import find
from rft_fn.types import Transform

__all__ = ["Estimate", "Model", "Sampler", "estimate"]

T = TypeVar("T")
Model = tuple[nn.Module, Transform | None]  # None: it only scores


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Parameters, gradients and the optimizer's state last as long as the run (the gradients from the first pack
    to the update); the rest is working memory of one phase each.
    """

    parameters: int
    gradients: int  # sums over packs
    optimizer: int  # moments, averages, master weights
    activations: int  # of one pack, when the decoder is done
    head: int  # at its peak, beside the activations: logits, or the workspace instead of them
    backward: int  # at its peak, beside both: the gradients of one pack
    gathered: int  # whole blocks of sharded parameters, copies in bfloat16, and buffers of their gradients
    update: int  # temporary tensors of the optimizer's arithmetic
    engine: int  # its own weights and cache
    host: int  # of host memory, where something was moved there
    awake: bool  # whether the engine's weights are on the device while the trainer works
    media: int = 0  # images and sounds of a pack; on a CPU, whose memory is the host's, of a step too
    unknown: tuple[str, ...] = ()  # parts that could not be computed, and why: they are not counted

    @property
    def training(self) -> int:
        """The peak of forward and backward."""
        work = self.activations + self.head + self.backward + self.gathered + self.media
        return self._always + self.gradients + work

    @property
    def updating(self) -> int:
        """The peak of an update."""
        return self._always + self.gradients + self.update

    @property
    def sampling(self) -> int:
        """The peak while the engine samples."""
        return self.parameters + self.optimizer + self.engine

    @property
    def total(self) -> int:
        """The peak of all phases."""
        return max(self.training, self.updating, self.sampling)

    @property
    def _always(self) -> int:
        always = self.parameters + self.optimizer
        if self.awake:
            always += self.engine
        return always


@dataclass(frozen=True)
class Sampler:
    """An engine in the trainer's process, with a copy of the first model's weights."""

    batch: int  # sequences sampled at a time
    length: int = 0  # tokens of the longest; 0 leaves out the cache
    sleeps: bool = True  # its weights leave the device while the trainer works


class _Held(NamedTuple):
    """Bytes of one model that last from step to step, and of its update."""

    parameters: int
    gradients: int
    optimizer: int
    update: int


class _Work(NamedTuple):
    """Bytes of one model's forward and backward beside those."""

    activations: int = 0
    head: int = 0
    backward: int = 0
    gathered: int = 0


def _shard(p: Tensor, n: int, dtype: torch.dtype | None) -> Tensor:
    """The largest of n shards of a parameter along its first dim, without memory."""
    shape = list(p.shape)
    if shape:
        shape[0] = -(-shape[0] // n)
    return torch.empty(shape, dtype=trace.dtype_of(p, dtype), device="meta")


def _shards(named: dict[str, nn.Parameter], n: int, dtype: torch.dtype | None) -> tree.Named:
    return tree.Named((name, _shard(p, n, dtype)) for name, p in named.items())


def _sums(layout: Layout, trained: dict[str, nn.Parameter], n: int) -> tree.Named:
    """Sums of gradients, sharded over n, without memory."""
    sums = tree.Named()
    for name, p in trained.items():
        shard = _shard(p, n, layout.kept)
        sums[name] = shard.to(layout.sum_dtype(shard.dtype))
    return sums


def _try(name: str, f: Callable[[], T], default: T, unknown: list[str]) -> T:
    """f(), or the default and a line in `unknown`.

    Custom models and transforms may read values, which the meta device has not; an estimate must not stop a
    run.
    """
    try:
        return f()
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        unknown.append(f"{name}: {lines[0]}")
        return default


def _parameters(layout: Layout, module: nn.Module) -> int:
    """The parameters of a model [bytes]."""
    total = 0
    for p in module.parameters():
        kept = layout.frozen
        if p.requires_grad:
            kept = layout.kept
        if quantize.is_low(p):
            total += quantize.nbytes(p)
        else:
            total += trace.nbytes(_shard(p, layout.parameters, kept))
    return total


def _held(layout: Layout, module: nn.Module, tx: Transform | None, unknown: list[str]) -> _Held:
    """Bytes of a model that last, and of its update."""
    parameters = _parameters(layout, module)
    if tx is None:
        return _Held(parameters, 0, 0, 0)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = _sums(layout, trained, layout.gradients)

    # the optimizer's state is what its own `init` makes of parameters without memory
    params = _shards(trained, layout.optimizer, layout.stepped)
    wrapped = layout.wrap_optimizer(tx, params)
    opt = _try("optimizer", lambda: wrapped.init(params), None, unknown)
    optimizer = trace.nbytes(*(x for x in tree.leaves(opt) if isinstance(x, Tensor)))
    if layout.flat_copy:
        optimizer += trace.nbytes(*params.values())

    # a rank steps with the part of the gradients that belongs to its part of the optimizer
    stepped = _sums(layout, trained, layout.optimizer)
    update = _try("update", lambda: trace.update(wrapped, opt, params, stepped), 0, unknown)
    return _Held(parameters, trace.nbytes(*gradients.values()), optimizer, update)


def _gathered(layout: Layout, module: nn.Module) -> int:
    """Whole parameters that exist while they are used, and buffers of their gradients [bytes]."""
    if layout.cast_copy:
        return sum(trace.dtype_of(p, layout.computed).itemsize * p.numel() for p in module.parameters())
    if not layout.gathered or layout.groups is None:
        return 0
    whole: list[int] = []
    reduced: list[int] = []
    for group in layout.groups(module):
        whole.append(sum(trace.dtype_of(p, layout.computed).itemsize * p.numel() for p in group))
        reduced.append(sum(layout.sum_dtype(p.dtype).itemsize * p.numel() for p in group if p.requires_grad))
    # those of the root from its forward to the end; one block in use while the next one is on its way
    return whole[-1] + 2 * max(whole[:-1], default=0) + max(reduced[:-1], default=0)


def _work(layout: Layout, module: nn.Module, tokens: int, kind: str, options: dict[str, Any]) -> _Work:
    """Bytes of forward and backward of a pack of `tokens`."""

    def step(tokens: int, **more: Any) -> trace.Step:
        copy = trace.on_meta(module, layout.computed)
        how = {"kind": kind, "groups": layout.groups, "shard": layout.gradients, **options, **more}
        return trace.step(copy, tokens, **how)

    gathered = _gathered(layout, module)
    if layout.sequence == 1:
        return _Work(*step(tokens), gathered=gathered)

    # each process has its part of the tokens, and all towers
    part = step(-(-tokens // layout.sequence), example=None)
    work = _Work(*part, gathered=gathered)
    if options.get("example") is None:
        return work
    towers = max(step(tokens).activations - step(tokens, example=None).activations, 0)
    return work._replace(activations=part.activations + towers)


def _works(
    layout: Layout,
    module: nn.Module,
    tokens: int,
    kind: str,
    options: dict[str, Any],
    example: Example | None,
    unknown: list[str],
) -> _Work:
    """`_work` of packs full of an example, for a model that reads media; else, or where it fails, of text."""
    name = f"activations of {type(module).__name__}"
    if example is not None and find(module).towers:
        full = partial(_work, layout, module, tokens, kind, options | {"example": example})
        found = _try(f"{name} with media", full, None, unknown)
        if found is not None:
            return found
    return _try(name, partial(_work, layout, module, tokens, kind, options), _Work(), unknown)


def _itemsize(kind: str) -> int:
    """Bytes per number of an engine: bfloat16 on a GPU, float32 on a CPU."""
    if kind == "cuda":
        return 2
    return 4


def _weights(module: nn.Module, kind: str) -> int:
    """The weights of an engine of this process, in full precision [bytes]."""
    total = 0
    for p in module.parameters():
        size = p.element_size()
        if p.is_floating_point() or quantize.is_low(p):
            size = _itemsize(kind)
        total += quantize.count(p) * size
    return total


def _cache(module: nn.Module, kind: str, sampler: Sampler) -> int:
    """The keys and values of the sequences that an engine samples [bytes]."""
    if not sampler.length or not hasattr(module, "config"):
        return 0
    config: Any = module.config
    text = config.get_text_config()
    length = min(sampler.length, getattr(text, "max_position_embeddings", sampler.length))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width  # keys and values
    return _itemsize(kind) * token * length * sampler.batch


def estimate(
    layout: Layout,
    *models: Model,
    budget: int,
    kind: str = "cuda",
    fused: bool = True,
    chunk_size: int = 0,
    sampler: Sampler | None = None,
    example: Example | None = None,
) -> Estimate:
    """Memory of one process with these models and their optimizers.

    The optimizer of a model that only scores is None. A pack has `budget` tokens, and all of them count as
    responses; a model that takes one sequence at a time has at most that. kind: "cuda" or "cpu". `fused` and
    `chunk_size` are those of the log-probs. `sampler` copies the first model. Packs are full of `example`, a
    prompt with media, for models that read it; without one of text. A part that cannot run without
    values leaves a line in `unknown`. The modules may be on the meta device; they are left alone. ValueError
    without a model or tokens.
    """
    if not models or budget < 1:
        raise ValueError(f"models, budget: expected at least one of each, got {len(models)} and {budget}")
    unknown: list[str] = []
    held = [_held(layout, module, tx, unknown) for module, tx in models]

    # models work one after the other: the largest counts
    work = _Work()
    for module in [module for module, tx in models if tx is not None]:
        options = {"fused": fused, "chunk_size": chunk_size}
        found = _works(layout, module, budget, kind, options, example, unknown)
        work = max(work, found, key=sum)

    engine = 0
    if sampler is not None:
        first = models[0][0]
        engine = _weights(first, kind)
        engine += _try("cache of the engine", partial(_cache, first, kind, sampler), 0, unknown)
    out = Estimate(
        parameters=sum(x.parameters for x in held),
        gradients=max(x.gradients for x in held),  # one model's after the other's
        optimizer=sum(x.optimizer for x in held),
        **work._asdict(),
        update=max(x.update for x in held),
        engine=engine,
        host=0,
        awake=engine > 0 and _stays(sampler, kind),
        media=_media(example, budget, kind),
        unknown=tuple(unknown),
    )
    if kind == "cpu":
        return out
    if example is not None:
        out = replace(out, host=example.prompts * example.nbytes)
    return _moved(layout, out)


def _media(example: Example | None, budget: int, kind: str) -> int:
    """The media on the device [bytes]: those of a pack, on a CPU those of a step too."""
    if example is None:
        return 0
    count = example.copies(budget)
    if kind == "cpu":
        count += example.prompts
    return count * example.nbytes


def _stays(sampler: Sampler | None, kind: str) -> bool:
    """Whether the engine's weights never leave the device, as on a CPU."""
    return sampler is not None and (kind == "cpu" or not sampler.sleeps)


def _moved(layout: Layout, x: Estimate) -> Estimate:
    """The estimate with what lives in host memory counted there."""
    host = x.host + sum(getattr(x, name) for name in layout.on_host)
    if not x.awake:
        host += x.engine
    sizes = dict.fromkeys(layout.on_host, 0)
    if layout.copied_for_update:
        host += x.parameters + x.gradients
        sizes["update"] = x.gradients  # the updates, as they come back
    return replace(x, host=host, **sizes)
