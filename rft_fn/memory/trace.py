"""Traces one step of a model on the meta device, and counts its bytes.

Tensors have shapes there and no memory. The step is the model's own forward and backward, so everything that
an architecture keeps for its backward is counted, whatever the architecture. Only attention is a stand-in: it
keeps the same tensors as flash attention (no [T, T]).
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft_fn import logprob, optim, tree
from rft_fn import model as model_lib
from rft_fn.memory.layout import Groups
from rft_fn.model import attention, reader
from rft_fn.model.parts import find
from rft_fn.model.reader import Reader
from rft_fn.types import Packed, Sampling, Transform

__all__ = ["Live", "Step", "dtype_of", "nbytes", "on_meta", "step", "update"]

NAME = "rft_estimate"  # in transformers' table of attention functions


def nbytes(*tensors: Tensor) -> int:
    """The size of tensors [bytes]."""
    return sum(x.numel() * x.element_size() for x in tensors)


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors, `now` and at the `peak`.

    Only tensors that are made while it is on count; `known` tensors, and those that share memory with them,
    are not counted.
    """

    def __init__(self, known: Sequence[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
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


class _Answers(TorchDispatchMode):
    """Answers for the meta device, for a pack of one sequence without padding.

    Models with states ask whether their mask is all ones: yes. On the meta device the products of all experts
    at once exist in bfloat16 alone: here they have a shape in any type. Where a model reads how many tokens
    each expert has (JetMoE), the choices of all tokens are shared out evenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choices = 0  # of experts, by all tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # is the mask all ones?
        if func is torch.ops.aten._local_scalar_dense.default:
            asked = args[0]
            if asked.is_meta and asked.dtype == torch.bool:
                return True

        # products of all experts
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return _grouped(*args[:3], **kwargs)

        # a one for each choice of a token is scattered, then their sums by expert are read
        if func is torch.ops.aten.scatter.value:
            self.choices = args[2].numel()
        if func is torch.ops.aten._to_copy.default and _is_list(args[0], kwargs):
            return _even(self.choices, args[0])
        return func(*args, **kwargs)


def _is_list(x: Tensor, options: dict[str, Any]) -> bool:
    """Whether a copy would read whole numbers [E] of the meta device."""
    if not x.is_meta or x.dim() != 1:
        return False
    if x.is_floating_point() or x.dtype == torch.bool:
        return False
    to = options.get("device")
    return to is not None and torch.device(to).type == "cpu"


def _even(total: int, like: Tensor) -> Tensor:
    """[E] whole numbers that add up to `total`, as equal as possible."""
    parts = len(like)
    return torch.tensor([(total + i) // parts for i in range(parts)], dtype=like.dtype, device="cpu")


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of a grouped product.

    `offs` cuts the rows of a, the columns of b, or the dim that both are summed over.
    """
    shape = [*a.shape[:-1], b.shape[-1]]
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif a.dim() == 3 and b.dim() == 2:
        shape = shape[1:]
    return a.new_empty(shape)


class Step(NamedTuple):
    """Bytes that one pack of T tokens adds to parameters, gradients and optimizer."""

    activations: int  # when the decoder is done: tensors for its backward
    head: int  # more, while the head runs: logits or the workspace without them, and the head's own gradient
    backward: int  # more than both at the backward's peak: gradients of the pack before they are summed


def dtype_of(p: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type of a parameter that is cast to `dtype`, which leaves whole numbers alone."""
    if dtype is None or not p.is_floating_point():
        return p.dtype
    return dtype


def on_meta(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module without memory, in `dtype` if one is given."""

    def empty(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            return x.to("meta")
        return nn.Parameter(torch.empty(x.shape, device="meta", dtype=dtype_of(x, dtype)), x.requires_grad)

    memo: dict[int, Any] = {id(x): empty(x) for x in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, memo)


class _Attention(torch.autograd.Function):
    """Shapes of flash attention.

    It keeps its inputs, its output and one float32 number per row. With `loop` it also keeps the copies of
    one call per sequence.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, loop: bool) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        kept = [q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32)]
        if not loop:
            ctx.save_for_backward(*kept)
            return out
        # q, k, v and the output are copied where many sequences have one length, else not: half of that
        ctx.save_for_backward(*kept, torch.empty_like(q), torch.empty_like(k))
        return out.clone()  # the outputs of all sequences are joined

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _stand_in(loop: bool) -> Callable:
    """An attention function of transformers: three of [1, H, T, D] -> ([1, T, H, D], None)."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple:
        out: Any = _Attention.apply(*(x.transpose(1, 2) for x in (query, key, value)), loop)
        return out, None

    return attention


def _pack(tokens: int) -> Packed:
    """A pack of one sequence, all of it responses, without memory."""
    ids = torch.zeros(tokens, dtype=torch.long, device="meta")
    number = torch.zeros(tokens, device="meta")
    mask = torch.ones(tokens, dtype=torch.bool, device="meta")
    same: dict[str, Any] = {"tokens": ids, "target": ids, "pos": ids, "seq": ids, "mask": mask}
    return Packed(**same, old_logp=number, adv=number, w=number, num_seqs=1)


def _decoder(root: nn.Module) -> nn.Module | None:
    """The part of a root that gives the last hidden states."""
    if isinstance(root, Reader):
        return root.parts.decoder
    return None


def _root(module: nn.Module, *, kind: str, tokens: int, fused: bool, chunk_size: int) -> nn.Module:
    """The module as it is trained, with the stand-in for attention.

    Attention that keeps scores [T, T] stays.
    """
    from transformers import AttentionInterface

    # the workspace that suits the device, which is not the meta device
    if kind == "cpu" and not chunk_size:
        chunk_size = max(int(logprob.default_workspace_mb(kind) * 2**20 / 4 / tokens), 1)
    options: dict[str, Any] = {"fused": fused, "chunk_size": chunk_size, "sampling": Sampling()}
    root = model_lib.wrap_for_training(module, entropy=True, **options)

    # a model whose attention keeps the scores is counted as it is, with its [T, T] mask
    lm = find(root).model
    if attention.unfit_model(lm) is None:
        AttentionInterface.register(NAME, _stand_in(kind == "cpu"))
        name = NAME
        if attention.keeps_scores(lm):
            name = "eager"
        attention.use(lm, name)

    # packs are taken as usual: without values nothing can be compared
    with _Answers():
        reader.assume(root)
    return root


class _Reduced:
    """Parameters whose gradients are reduced together, to a `shard`-th, once all are there."""

    def __init__(self, params: Sequence[nn.Parameter], shard: int, live: Live):
        self.params = [p for p in params if p.requires_grad]
        self.shard, self.live = shard, live
        self.waiting = {id(p) for p in self.params}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p: Tensor) -> None:
        """The gradient of p is there."""
        self.waiting.discard(id(p))
        if self.waiting:
            return
        for q in self.params:
            if q.grad is not None:
                self.live.add(nbytes(q.grad) // self.shard)
            q.grad = None


class _Phases:
    """Notes what is live after the decoder, and the peak of the head."""

    def __init__(self, live: Live):
        self.live = live
        self.activations: int | None = None
        self.head: int | None = None

    def decoder_done(self, module: nn.Module, inputs: Any, out: Any) -> None:
        """A forward hook of the decoder: the head's peak is counted from here."""
        self.activations = self.live.peak = self.live.now
        hidden = out.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(self.head_done)

    def head_done(self, grad: Tensor) -> None:
        """A backward hook of the hidden states: the gradient has come through the head."""
        if self.head is None:
            self.head = self.live.peak

    def forward_done(self) -> None:
        """Without a decoder the activations are those of the whole forward."""
        if self.activations is None:
            self.activations = self.live.now

    def step(self) -> Step:
        """The phases of a step that is over."""
        activations = self.activations or 0
        head = self.live.peak
        if self.head is not None:
            head = self.head
        head = max(head, activations)
        return Step(activations, head - activations, max(self.live.peak - head, 0))


def step(
    module: nn.Module,
    tokens: int,
    *,
    kind: str,
    fused: bool = True,
    chunk_size: int = 0,
    groups: Groups | None = None,
    shard: int = 1,
) -> Step:
    """Bytes of forward and backward of a pack of `tokens`.

    The module is on the meta device, and consumed. kind: "cpu" or "cuda", on which attention and the head's
    workspace differ. groups(root) are the parameters whose gradients are reduced together, to a `shard`-th.
    An error that the module raises on the meta device (mostly because it reads a value) passes through.
    """
    root = _root(module, kind=kind, tokens=tokens, fused=fused, chunk_size=chunk_size)
    pack = _pack(tokens)
    live = Live([*root.parameters(), *root.buffers(), *tree.leaves(pack)])
    if groups is not None:
        for group in groups(root):
            _Reduced(group, shard, live)  # their hooks keep it

    phases = _Phases(live)
    part = _decoder(root)
    if part is not None:
        part.register_forward_hook(phases.decoder_done)

    # a loss that depends on every output, as those with an entropy bonus or a value do
    with live, _Answers():
        out = root(pack)
        total = sum(x.sum() for x in (out.logp, out.entropy, out.value) if x is not None)
        phases.forward_done()
        if isinstance(total, Tensor) and total.requires_grad:
            torch.autograd.backward(total)
    return phases.step()


def update(tx: Transform, opt: Any, params: tree.Named, grads: tree.Named) -> int:
    """The peak of an update beside its arguments, on the meta device [bytes]."""
    live = Live([x for x in tree.leaves((opt, params, grads)) if isinstance(x, Tensor)])
    with torch.no_grad(), live:
        updates, _ = tx.update(grads, opt, params)
        optim.apply_updates(params, updates)
    return live.peak
