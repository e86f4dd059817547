"""Estimates the memory of each rank of a run before it starts.

A module is traced on the meta device; the `Layout` of its backend tells what each process keeps of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rft_fn import precision, tree
from rft_fn.memory import trace
from rft_fn.memory.backend_layout import Layout
from rft_fn.memory.media_example import Example
from rft_fn.memory.phases import Asked, Estimate, Models
from rft_fn.model import quantize
from rft_fn.model.parts import find
from rft_fn.model.quantize import is_plain
from rft_fn.types import Transform

__all__ = ["Model", "Sampler", "attempt", "estimate", "size_of", "stays", "weights_of"]


# ---------- the memory of engines in the trainer's process, by the models that they copy


T = TypeVar("T")


@dataclass(frozen=True)
class Sampler:
    """An engine in the trainer's process, with its own copy of a model's weights unless they are lent."""

    batch: int  # sequences sampled at a time
    length: int = 0  # tokens of the longest; 0 leaves out the cache
    sleeps: bool = True  # its weights leave the device while the trainer works
    packs: bool = False  # its large weights are a second time in memory, where `model.linear` packs them
    lent: bool = False  # it samples from the trained weights themselves


def attempt(name: str, f: Callable[[], T], default: T, unknown: list[str]) -> T:
    """Return f(); if it needs values, which the meta device has not, the default and a line in `unknown`."""
    try:
        return f()
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        unknown.append(f"{name}: {lines[0]}")
        return default


def _itemsize(kind: str) -> int:
    """Return the bytes per number of an engine: bfloat16 on a GPU, float32 on a CPU."""
    return 2 if kind == "cuda" else 4


def weights_of(module: nn.Module, kind: str, *, lent: bool = False) -> int:
    """Return the weights of an engine of this process, in full precision [bytes].

    With `lent` those that are trained are not its own.
    """
    total = 0
    for p in module.parameters():
        if lent and p.requires_grad:
            continue
        full = p.is_floating_point() or quantize.is_low(p)
        total += quantize.count(p) * (_itemsize(kind) if full else p.element_size())
    return total


def _cache(module: nn.Module, kind: str, sampler: Sampler) -> int:
    """Return the keys and values of the sequences that an engine samples [bytes]."""
    if not sampler.length or not hasattr(module, "config"):
        return 0
    config: Any = module.config
    text = config.get_text_config()
    length = min(sampler.length, getattr(text, "max_position_embeddings", sampler.length))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width  # keys and values
    return _itemsize(kind) * token * length * sampler.batch


def _packs(module: nn.Module, kind: str) -> int:
    """Return the second copies of an engine's weights, in oneDNN's order [bytes]."""
    from rft_kernels import products

    if kind != "cpu":
        return 0
    least = products.packing().elements
    # the engine's own layers are in full precision, whatever the trainer has
    weights = [(layer, layer._parameters.get("weight")) for layer in module.modules()]
    linear = [w for layer, w in weights if w is not None and (is_plain(layer) or quantize.is_low(w))]
    return _itemsize(kind) * sum(n for n in map(quantize.count, linear) if n >= least)


def stays(samplers: Sequence[Sampler | None], kind: str) -> bool:
    """Return whether the weights of engines never leave the device, as on a CPU."""
    found = [sampler for sampler in samplers if sampler is not None]
    return any(kind == "cpu" or not sampler.sleeps for sampler in found)


def size_of(module: nn.Module, kind: str, sampler: Sampler, unknown: list[str]) -> int:
    """Return the weights and the cache of an engine, and its packs [bytes]."""
    packs = _packs(module, kind) if sampler.packs else 0
    cache = attempt("cache of the engine", partial(_cache, module, kind, sampler), 0, unknown)
    return weights_of(module, kind, lent=sampler.lent) + packs + cache


# ---------- estimates the memory of each rank of a run before it starts


Model = tuple[nn.Module, Transform | None]  # None: it only scores


class _Held(NamedTuple):
    """Bytes of one model that last from step to step, and of its update."""

    parameters: int
    gradients: int
    optimizer: int
    update: int


class _Work(NamedTuple):
    """Bytes of one model's forward and backward, without those."""

    activations: int = 0
    head: int = 0
    backward: int = 0
    gathered: int = 0
    host: int = 0  # of host memory


def _of_step(x: trace.Step, gathered: int) -> _Work:
    return _Work(x.activations, x.head, x.backward, gathered, x.host)


def _on_device(x: _Work) -> int:
    return sum(x) - x.host


def _shard(p: Tensor, n: int, dtype: torch.dtype | None) -> Tensor:
    """Return the largest of n shards of a parameter along its first dim, without memory."""
    shape = list(p.shape)
    if shape:
        shape[0] = -(-shape[0] // n)
    return torch.empty(shape, dtype=trace.dtype_of(p, dtype), device="meta")


def _sums(layout: Layout, trained: dict[str, nn.Parameter], n: int) -> tree.Named:
    """Return sums of gradients, sharded over n, without memory."""
    sums = tree.Named()
    for name, p in trained.items():
        shard = _shard(p, n, layout.kept)
        sums[name] = shard.to(layout.sum_dtype(shard.dtype))
    return sums


def _parameters(layout: Layout, module: nn.Module) -> int:
    """Return the parameters of a model [bytes]."""
    total = 0
    for p in module.parameters():
        kept = layout.kept if p.requires_grad else layout.frozen
        if quantize.is_low(p):
            total += quantize.nbytes(p)
        else:
            total += trace.nbytes(_shard(p, layout.parameters, kept))
    return total


def _held(layout: Layout, module: nn.Module, tx: Transform | None, unknown: list[str]) -> _Held:
    """Return the bytes of a model that last, and of its update."""
    parameters = _parameters(layout, module)
    if tx is None:
        return _Held(parameters, 0, 0, 0)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = _sums(layout, trained, layout.gradients)

    # the optimizer's state is what its own `init` makes of parameters without memory
    params = tree.Named((name, _shard(p, layout.optimizer, layout.stepped)) for name, p in trained.items())
    wrapped = layout.wrap_optimizer(tx, params)
    opt = attempt("optimizer", lambda: wrapped.init(params), None, unknown)
    optimizer = trace.nbytes(*(x for x in tree.leaves(opt) if isinstance(x, Tensor)))
    if layout.flat_copy:
        optimizer += trace.nbytes(*params.values())

    # a rank steps with the part of the gradients that belongs to its part of the optimizer
    stepped = _sums(layout, trained, layout.optimizer)
    update = attempt("update", lambda: trace.update(wrapped, opt, params, stepped), 0, unknown)
    if layout.flat_copy:
        update += trace.nbytes(*params.values())  # the denominators of torch's AdamW
    return _Held(parameters, trace.nbytes(*gradients.values()), optimizer, update)


@dataclass(frozen=True)
class _Tracer:
    """Traces packs of `budget` tokens of models that are laid out alike."""

    layout: Layout
    budget: int
    kind: str
    fused: bool
    chunk_size: int
    unknown: list[str]

    def work(self, module: nn.Module, example: Example | None) -> _Work:
        """Return the bytes of forward and backward of a pack full of an example, or else of text."""
        name = f"activations of {type(module).__name__}"
        if example is not None and find(module).towers:
            work = partial(self._work, module, example)
            with_media = attempt(f"{name} with media", work, None, self.unknown)
            if with_media is not None:
                return with_media
        return attempt(name, partial(self._work, module, None), _Work(), self.unknown)

    def _work(self, module: nn.Module, example: Example | None) -> _Work:
        gathered = self._gathered(module)
        if self.layout.sequence == 1:
            return _of_step(self._step(module, self.budget, example), gathered)

        # each process has its part of the tokens, and all towers
        part = self._step(module, -(-self.budget // self.layout.sequence), None)
        if example is None:
            return _of_step(part, gathered)
        with_media = self._step(module, self.budget, example).activations
        towers = max(with_media - self._step(module, self.budget, None).activations, 0)
        return _of_step(part._replace(activations=part.activations + towers), gathered)

    def _step(self, module: nn.Module, tokens: int, example: Example | None) -> trace.Step:
        kept = {trace.dtype_of(p, self.layout.kept) for p in module.parameters() if p.requires_grad}
        return trace.step(
            trace.on_meta(module, self.layout.computed),
            tokens,
            kind=self.kind,
            fused=self.fused,
            chunk_size=self.chunk_size,
            groups=self.layout.groups,
            shard=self.layout.gradients,
            in_place=self.layout.in_place and kept == {*map(precision.wide, kept)},
            example=example,
        )

    def forward(self, module: nn.Module, example: Example | None) -> int:
        """Return the bytes of a forward without a backward of a pack, without the parameters."""
        name = type(module).__name__
        if any(line.startswith(f"activations of {name}: ") for line in self.unknown):
            return 0

        def peak() -> int:
            return trace.forward(
                trace.on_meta(module, self.layout.computed),
                -(-self.budget // self.layout.sequence),
                kind=self.kind,
                fused=self.fused,
                chunk_size=self.chunk_size,
                example=example if find(module).towers else None,
            )

        return attempt(f"forward of {name}", peak, 0, self.unknown) + self._gathered(module)

    def _gathered(self, module: nn.Module) -> int:
        """Return the whole parameters that exist while used, and buffers of their gradients [bytes]."""
        layout = self.layout

        def size(params: Iterable[nn.Parameter]) -> int:
            return sum(trace.dtype_of(p, layout.computed).itemsize * p.numel() for p in params)

        if layout.cast_copy:
            return size(module.parameters())
        if not layout.gathered or layout.groups is None:
            return 0
        whole: list[int] = []
        reduced: list[int] = []
        for group in layout.groups(module):
            whole.append(size(group))
            trained = [p for p in group if p.requires_grad]
            reduced.append(sum(layout.sum_dtype(p.dtype).itemsize * p.numel() for p in trained))
        # the root's from its forward to the end; one block in use while the next one is on its way
        return whole[-1] + 2 * max(whole[:-1], default=0) + max(reduced[:-1], default=0)


def estimate(
    layout: Layout,
    *models: Model,
    budget: int,
    kind: str = "cuda",
    fused: bool = True,
    chunk_size: int = 0,
    sampler: Sampler | None = None,
    example: Example | None = None,
    rewards: Sequence[nn.Module] = (),
    judges: Sequence[tuple[nn.Module, Sampler]] = (),
    placed: bool = False,
) -> Estimate:
    """Estimate the memory of one process with these models and their optimizers.

    The optimizer of a model that only scores is None. A pack has `budget` tokens, and all of them count as
    responses; a model that takes one sequence at a time has at most that. kind: "cuda" or "cpu". `fused` and
    `chunk_size` are those of the log-probs. `sampler` is an engine of the first model. Packs are full of
    `example`, a prompt with media, for models that read it; without one of text. `rewards` are scalar reward
    models, and `judges` generative ones, each with an engine. With `placed` a model is on the device only in
    the phases that use it. A part that cannot run without values leaves a line in `unknown`. The modules may
    be on the meta device; they do not change. ValueError without a model or tokens.
    """
    if not models or budget < 1:
        raise ValueError(f"models, budget: expected at least one of each, got {len(models)} and {budget}")
    unknown: list[str] = []
    tracer = _Tracer(layout, budget, kind, fused, chunk_size, unknown)
    held = [_held(layout, module, tx, unknown) for module, tx in models]

    # models work one after the other: the largest counts
    trained = [module for module, tx in models if tx is not None]
    work = max([_Work(), *(tracer.work(module, example) for module in trained)], key=_on_device)
    asked = [Asked("rewards", _class(x), _parameters(layout, x), tracer.forward(x, example)) for x in rewards]
    asked += [Asked("judges", _class(x), size_of(x, kind, judge, unknown)) for x, judge in judges]

    # an engine, with the weights that it is given
    first = models[0][0]
    engine = 0 if sampler is None else size_of(first, kind, sampler, unknown)
    delivered = 0 if sampler is None else weights_of(first, kind, lent=sampler.lent)

    # a forward without a backward is more than a training step only for a model that is not trained
    scorers = {id(module): module for module, _ in models if placed or module not in trained}
    scored = max((tracer.forward(module, example) for module in scorers.values()), default=0)

    # the media of a pack are on the device; on a CPU the media of a step are in the same memory
    in_step = 0 if example is None else example.prompts * example.nbytes
    in_pack = 0 if example is None else example.copies(budget) * example.nbytes
    out = Estimate(
        parameters=sum(x.parameters for x in held),
        gradients=max(x.gradients for x in held),  # one model's after the other's
        optimizer=sum(x.optimizer for x in held),
        activations=work.activations,
        head=work.head,
        backward=work.backward,
        gathered=work.gathered,
        update=max(x.update for x in held),
        engine=engine,
        host=0 if kind == "cpu" else in_step + work.host,
        awake=stays([sampler, *(judge for _, judge in judges)], kind),
        media=in_pack + in_step if kind == "cpu" else in_pack,
        unknown=tuple(unknown),
        frozen=sum(x.parameters for x, (_, tx) in zip(held, models) if tx is None),
        policy=held[0].parameters,
        rewards=sum(x.held for x in asked if x.kind == "rewards"),
        judges=sum(x.held for x in asked if x.kind == "judges"),
        delivered=delivered,
        scored=scored,
        asked=tuple(asked),
        placed=placed,
        models=Models(
            policy=(_class(first),),
            trained=tuple(map(_class, trained)),
            frozen=tuple(_class(module) for module, tx in models if tx is None),
            rewards=tuple(map(_class, rewards)),
            judges=tuple(_class(module) for module, _ in judges),
            engine=() if sampler is None else ("engine",),
        ),
    )
    return out if kind == "cpu" else _moved(layout, out)


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _moved(layout: Layout, x: Estimate) -> Estimate:
    """Return the estimate with what lives in host memory counted there."""
    resting = set(layout.on_host)
    sizes: dict[str, Any] = dict.fromkeys(layout.on_host, 0)
    if "parameters" in resting:  # of all models
        resting |= {"rewards"}
        sizes |= dict.fromkeys(("frozen", "policy", "rewards"), 0)
        # also while a reward model works; a judge has its own engine
        sizes["asked"] = tuple(a if a.kind == "judges" else a._replace(held=0) for a in x.asked)
    if x.placed:  # all of them rest there in some phase
        resting |= {"parameters", "optimizer", "rewards"}
    if not x.awake:
        resting |= {"engine", "judges"}
    host = x.host + sum(getattr(x, name) for name in resting)
    if layout.copied_for_update:
        host += x.parameters + x.gradients
        sizes["update"] = x.gradients  # the updates, as they come back
    return replace(x, host=host, **sizes)
