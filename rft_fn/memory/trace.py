"""Traces one step of a model on the meta device, and counts its bytes.

Tensors have shapes there and no memory. The step is the model's own forward and backward, so everything that
an architecture keeps for its backward is counted. Only attention is replaced: it keeps the same tensors as
flash attention (no [T, T]).

Why not torch's `FakeTensorMode` with `torch.distributed._tools.MemTracker`: tried with torch 2.13 on the
models of tests/memory, with this attention and an answer to `nonzero` put in. Dense models in float32 have
the same peak (1.00 to 1.08 of the allocator's, both), and models with states a nearer one (1.00 to 1.08, here
1.00 to 1.37). But it fails where parameters are frozen (LoRA) and for 7 of 14 families, all with experts;
FSDP2 it follows only on processes that run, ZeRO not; packs with media read values, which fake tensors have
not. And of this room it would replace `Live` alone, 30 lines.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft_fn import logprob, optim, tree
from rft_fn.memory import without_values
from rft_fn.memory.backend_layout import Groups
from rft_fn.memory.media_example import Example
from rft_fn.memory.without_values import Answers, Constants, Values
from rft_fn.model import quantize, reader
from rft_fn.model.bind import wrap_for_training
from rft_fn.model.parts import find
from rft_fn.model.reader import Reader
from rft_fn.types import Media, Packed, Sampling, Transform

__all__ = ["Live", "Step", "dtype_of", "nbytes", "on_meta", "step", "update"]


def nbytes(*tensors: Tensor) -> int:
    """Return the size of tensors [bytes]."""
    return sum(x.numel() * x.element_size() for x in tensors)


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors, `now` and at the `peak`.

    Only tensors that are made while it is on count, without `known` tensors and those that share memory
    with them. `host` are bytes that the step has put into memory of the host.
    """

    def __init__(self, known: Sequence[Tensor] = ()):
        super().__init__()
        self.now = self.peak = self.host = 0
        self._seen = weakref.WeakSet(x.untyped_storage() for x in known)

    def add(self, size: int) -> None:
        """Count `size` more bytes, or fewer if it is negative."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self.add(storage.nbytes())
                    weakref.finalize(storage, self.add, -storage.nbytes())
        return out


class Step(NamedTuple):
    """Bytes that one pack of T tokens adds to parameters, gradients and optimizer."""

    activations: int  # when the decoder is done: tensors for its backward
    head: int  # more, while the head runs: logits or the workspace without them, and the head's own gradient
    backward: int  # more than both at the backward's peak: gradients of the pack before they are summed
    host: int = 0  # of host memory: inputs of blocks that wait there


def dtype_of(p: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of a parameter that is cast to `dtype`, which leaves whole numbers unchanged."""
    if dtype is None or not p.is_floating_point():
        return p.dtype
    return dtype


def on_meta(module: nn.Module, dtype: torch.dtype | None = None, *, low: bool = False) -> nn.Module:
    """Copy a module without memory, in `dtype` if one is given; with `low` it shares quantised weights."""

    def empty(x: Tensor) -> Tensor:
        if low and quantize.is_low(x):
            return x
        if not isinstance(x, nn.Parameter):
            return x.to("meta")
        return nn.Parameter(torch.empty(x.shape, device="meta", dtype=dtype_of(x, dtype)), x.requires_grad)

    memo: dict[int, Any] = {id(x): empty(x) for x in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, memo)


def _pack(tokens: int, example: Example | None = None) -> Packed:
    """Return a pack of one sequence, all of it responses, or as many examples as fit."""
    read: list[int] = []
    media = None
    if example is not None:
        read, rows = example.repeated(example.copies(tokens))
        media = Media.of_prompts([rows])
    ids = torch.tensor(read + [0] * (tokens - len(read)))
    number = torch.zeros(len(ids))
    return Packed(
        tokens=ids,
        target=ids,
        pos=torch.arange(len(ids)),
        seq=torch.zeros_like(ids),
        mask=torch.ones_like(ids, dtype=torch.bool),
        old_logp=number,
        adv=number,
        w=number,
        media=media,
        num_seqs=1,
    )


class _Reduced:
    """Parameters with gradients that are reduced together, to a `shard`-th, once all are there.

    With `in_place` they are added to the sums there, and take no memory of their own.
    """

    def __init__(self, params: Sequence[nn.Parameter], shard: int, live: Live, *, in_place: bool):
        self.params = [p for p in params if p.requires_grad]
        self.shard, self.live, self.in_place = shard, live, in_place
        self.waiting = {id(p) for p in self.params}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p: Tensor) -> None:
        """Note that the gradient of p is there."""
        self.waiting.discard(id(p))
        if self.waiting:
            return
        for q in self.params:
            if q.grad is not None and not self.in_place:
                self.live.add(nbytes(q.grad) // self.shard)
            q.grad = None


class _Phases:
    """Notes what is live after the decoder, and the peak of the head."""

    def __init__(self, live: Live):
        self.live = live
        self.activations: int | None = None
        self.head: int | None = None

    def decoder_done(self, module: nn.Module, inputs: Any, out: Any) -> None:
        """Count the head's peak from here: a forward hook of the decoder."""
        self.activations = self.live.peak = self.live.now
        hidden = out.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(self.head_done)

    def head_done(self, grad: Tensor) -> None:
        """Note the peak of the head: a backward hook of the hidden states."""
        if self.head is None:
            self.head = self.live.peak

    def forward_done(self) -> None:
        """Take the activations of the whole forward, without a decoder."""
        if self.activations is None:
            self.activations = self.live.now

    def step(self) -> Step:
        """Return the phases of a step that is over."""
        activations = self.activations or 0
        head = max(self.live.peak if self.head is None else self.head, activations)
        return Step(activations, head - activations, max(self.live.peak - head, 0), self.live.host)


def _prepare(
    module: nn.Module, tokens: int, example: Example | None, kind: str, fused: bool, chunk_size: int
) -> tuple[nn.Module, Packed, Values, Live]:
    """Return (the module as it is trained, a full pack, its values, a counter that knows both)."""
    # the workspace that suits the device, which is not the meta device
    if kind == "cpu" and not chunk_size:
        chunk_size = max(int(logprob.default_workspace_mb(kind) * 2**20 / 4 / tokens), 1)
    root = wrap_for_training(module, entropy=True, fused=fused, chunk_size=chunk_size, sampling=Sampling())
    without_values.put_into(find(root).model, kind=kind)

    # packs are taken as usual: without values nothing can be compared
    with Answers():
        reader.assume_packing(root)

    # a model that sees or hears reads where media are: whole numbers have values on the meta device
    values = Values()
    reads = bool(find(root).towers)

    def moved(x: Tensor) -> Tensor:
        known = reads and not x.is_floating_point() and not x.is_meta
        return values.on_meta(x) if known else x.to("meta")

    pack = tree.map(moved, _pack(tokens, example))
    live = Live([*root.parameters(), *root.buffers(), *tree.leaves(pack)])
    if kind != "cpu":
        without_values.wait_on_host(root, live)
    return root, pack, values, live


def step(
    module: nn.Module,
    tokens: int,
    *,
    kind: str,
    fused: bool = True,
    chunk_size: int = 0,
    groups: Groups | None = None,
    shard: int = 1,
    in_place: bool = False,
    example: Example | None = None,
) -> Step:
    """Return the bytes of forward and backward of a pack of `tokens`.

    The module is on the meta device, and consumed. kind: "cpu" or "cuda", on which attention and the head's
    workspace differ. `example` fills the pack, else it is text. groups(root) are the parameters with
    gradients that are reduced together, to a `shard`-th, and with `in_place` added to sums at once. An error
    that the module raises on the meta device (mostly because it reads a value) passes through.
    """
    root, pack, values, live = _prepare(module, tokens, example, kind, fused, chunk_size)
    alone = [[p] for p in root.parameters() if in_place]
    for group in alone if groups is None else groups(root):
        _Reduced(group, shard, live, in_place=in_place)  # their hooks keep it

    phases = _Phases(live)
    if isinstance(root, Reader):
        root.parts.decoder.register_forward_hook(phases.decoder_done)

    # a loss that depends on every output, as those with an entropy bonus or a value do
    with live, Answers(), values, Constants(values):
        out = root(pack)
        total = sum(x.sum() for x in (out.logp, out.entropy, out.value, out.score) if x is not None)
        phases.forward_done()
        if isinstance(total, Tensor) and total.requires_grad:
            torch.autograd.backward(total)
    return phases.step()


def forward(
    module: nn.Module,
    tokens: int,
    *,
    kind: str,
    fused: bool = True,
    chunk_size: int = 0,
    example: Example | None = None,
) -> int:
    """Return the peak of a forward without gradients [bytes]; arguments and module as for `step`."""
    root, pack, values, live = _prepare(module, tokens, example, kind, fused, chunk_size)
    with torch.no_grad(), live, Answers(), values, Constants(values):
        root(pack)
    return live.peak


def update(tx: Transform, opt: Any, params: tree.Named, grads: tree.Named) -> int:
    """Return the peak of an update, without its arguments, on the meta device [bytes]."""
    live = Live([x for x in tree.leaves((opt, params, grads)) if isinstance(x, Tensor)])
    with torch.no_grad(), live:
        updates, _ = tx.update(grads, opt, params)
        optim.apply_updates(params, updates)
    return live.peak
