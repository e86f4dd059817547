"""One step of a model on the meta device, where tensors have shapes and no memory: the bytes it would hold.

The step is the model's own forward and backward, so whatever an architecture keeps for its backward is
counted, and nothing has to be known of it. Only attention is a stand-in, that keeps what flash attention
keeps (no [T, T]).
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft_fn import model as model_lib
from rft_fn import optim, tree
from rft_fn.types import Packed, Sampling, Transform

__all__ = ["Live", "Step", "nbytes", "on_meta", "step", "update"]

NAME = "rft_estimate"  # in transformers' table of attention functions


def nbytes(*tensors: Tensor) -> int:
    """What tensors take [bytes]."""
    return sum(x.numel() * x.element_size() for x in tensors)


class Live(TorchDispatchMode):
    """The bytes of all tensors that were made while it is on and are still there, `now` and at the `peak`.
    `known` tensors, and what shares memory with them, are not counted."""

    def __init__(self, known: Sequence[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(x.untyped_storage() for x in known)

    def add(self, size: int) -> None:
        """Count `size` more bytes (or fewer)."""
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
    """What the meta device cannot say, of a pack that is one sequence, without padding.

    Models with states ask whether their mask is all ones: yes. The products of all experts at once exist for
    the meta device in bfloat16 alone: here they have a shape in any type. A list of how many tokens each
    expert has (JetMoE's) shares the marks made last, one for each choice of a token, evenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            asked = args[0]
            if asked.is_meta and asked.dtype == torch.bool:
                return True
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return _grouped(*args[:3], **kwargs)
        if func is torch.ops.aten.scatter.value:
            self.marks = args[2].numel()
        if func is torch.ops.aten._to_copy.default and _is_list(args[0], kwargs):
            return _even(self.marks, args[0])
        return func(*args, **kwargs)


def _is_list(x: Tensor, options: dict[str, Any]) -> bool:
    """Whether whole numbers [E] of the meta device are to be read."""
    to = options.get("device")
    whole = not x.is_floating_point() and x.dtype != torch.bool
    return x.is_meta and x.dim() == 1 and whole and to is not None and torch.device(to).type == "cpu"


def _even(total: int, like: Tensor) -> Tensor:
    """[E] whole numbers with that sum, as equal as they can be."""
    parts = len(like)
    return torch.tensor([(total + i) // parts for i in range(parts)], dtype=like.dtype, device="cpu")


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of a product by groups: rows of a, columns of b, or what both sum over, are cut at `offs`."""
    shape = [*a.shape[:-1], b.shape[-1]]
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif a.dim() == 3 and b.dim() == 2:
        shape = shape[1:]
    return a.new_empty(shape)


class Step(NamedTuple):
    """What one pack of T tokens adds to parameters, gradients and optimizer [bytes]."""

    activations: int  # when the decoder is done: what its backward needs
    head: int  # more, while the head runs: logits or the workspace without them, and the head's own gradient
    backward: int  # more than both at the backward's peak: gradients of the pack before they are summed


def on_meta(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module without memory, in another type if one is given. The module is left alone."""

    def empty(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            return x.to("meta")
        wide = dtype if dtype and x.is_floating_point() else x.dtype
        return nn.Parameter(torch.empty(x.shape, device="meta", dtype=wide), x.requires_grad)

    memo: dict[int, Any] = {id(x): empty(x) for x in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, memo)


class _Attention(torch.autograd.Function):
    """Shapes of flash attention: keeps its inputs, its output and one float32 number a row; with `loop` also
    what one call for each sequence adds."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, loop: bool) -> Tensor:  # type: ignore[override]
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        # q, k, v and the output are copied where many sequences have one length, else not: half of that
        copies = (torch.empty_like(q), torch.empty_like(k)) if loop else ()
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), *copies)
        return out.clone() if loop else out  # the outputs of all sequences are joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None


def _stand_in(loop: bool) -> Callable:
    """An attention function of transformers: query [1, H, T, D] and so on -> ([1, T, H, D], None)."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple:
        out: Any = _Attention.apply(*(x.transpose(1, 2) for x in (query, key, value)), loop)
        return out, None

    return attention


def _pack(tokens: int) -> Packed:
    ids = torch.zeros(tokens, dtype=torch.long, device="meta")
    number = torch.zeros(tokens, device="meta")
    mask = torch.ones(tokens, dtype=torch.bool, device="meta")
    same: dict[str, Any] = {"tokens": ids, "target": ids, "pos": ids, "seq": ids, "mask": mask}
    return Packed(**same, old_logp=number, adv=number, w=number, num_seqs=1)


def _rooted(module: nn.Module, *, kind: str, tokens: int, fused: bool, chunk_size: int) -> nn.Module:
    """The module as it is trained, with the stand-in for attention where the real one keeps no [T, T]."""
    from transformers import AttentionInterface

    from rft_fn.model import attention, reader
    from rft_fn.model.parts import find
    from rft_fn.logprob import default_workspace_mb

    if kind == "cpu" and not chunk_size:  # what suits the device, which the meta device is not
        chunk_size = max(int(default_workspace_mb("cpu") * 2**20 / 4 / tokens), 1)
    options: dict[str, Any] = {"fused": fused, "chunk_size": chunk_size, "sampling": Sampling()}
    root = model_lib.wrap_for_training(module, entropy=True, **options)
    lm = find(root).model
    if attention.unfit_model(lm) is None:
        AttentionInterface.register(NAME, _stand_in(kind == "cpu"))
        name = NAME
        if attention.keeps_scores(lm):
            name = "eager"  # a [T, T] mask is counted as it is
        attention.use(lm, name)
    with _Answers():
        reader.assume(root)
    return root


def _free_when_whole(groups: Sequence[Sequence[nn.Parameter]], shard: int, live: Live) -> None:
    """As a sharded model does it: when a group has all of its gradients, only a `shard`-th of them stays."""
    for group in groups:
        waiting = {id(p) for p in group if p.requires_grad}

        def arrived(p: Tensor, group: Any = group, waiting: set[int] = waiting) -> None:
            waiting.discard(id(p))
            if not waiting:
                for q in group:
                    if q.grad is not None:
                        live.add(nbytes(q.grad) // shard)
                    q.grad = None

        for p in group:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(arrived)


def step(
    module: nn.Module,
    tokens: int,
    *,
    kind: str,
    fused: bool = True,
    chunk_size: int = 0,
    groups: Callable[[nn.Module], Sequence[Sequence[nn.Parameter]]] | None = None,
    shard: int = 1,
) -> Step:
    """What forward and backward of a pack of `tokens` hold, of a module on the meta device that is consumed.

    kind: "cpu" or "cuda", on which attention and the head's workspace differ. groups(root) are the parameters
    whose gradients are reduced together, to a `shard`-th. Whatever the module raises on the meta device
    (mostly because it reads a value) goes through.
    """
    root = _rooted(module, kind=kind, tokens=tokens, fused=fused, chunk_size=chunk_size)
    pack = _pack(tokens)
    marks: dict[str, int] = {}
    live = Live([*root.parameters(), *root.buffers(), *tree.leaves(pack)])
    if groups is not None:
        _free_when_whole(groups(root), shard, live)

    def decoder_done(_: Any, __: Any, out: Any) -> None:
        marks["activations"] = live.peak = live.now
        hidden = out.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(head_done)

    def head_done(_: Tensor) -> None:
        marks.setdefault("head", live.peak)

    part = _decoder(root)
    handle = part.register_forward_hook(decoder_done) if part is not None else None
    with live, _Answers():
        out = root(pack)
        total = sum(x.sum() for x in (out.logp, out.entropy, out.value) if x is not None)
        marks.setdefault("activations", live.now)
        if isinstance(total, Tensor) and total.requires_grad:
            torch.autograd.backward(total)
    if handle is not None:
        handle.remove()
    head = max(marks.get("head", live.peak), marks["activations"])
    return Step(marks["activations"], head - marks["activations"], max(live.peak - head, 0))


def _decoder(root: nn.Module) -> nn.Module | None:
    from rft_fn.model.reader import Reader

    if isinstance(root, Reader):
        return root.parts.decoder
    return None


def update(tx: Transform, opt: Any, params: tree.Named, grads: tree.Named) -> int:
    """What an update holds at its peak beside its arguments, which are on the meta device [bytes]."""
    live = Live([x for x in tree.leaves((opt, params, grads)) if isinstance(x, Tensor)])
    with torch.no_grad(), live:
        updates, _ = tx.update(grads, opt, params)
        optim.apply_updates(params, updates)
    return live.peak
