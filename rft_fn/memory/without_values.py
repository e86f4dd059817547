"""Models on the meta device, where tensors have shapes and no values: answers to those who read some."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from rft_fn.model import attention, checkpointing, inputs_on_host
from rft_fn.model.parts import find

__all__ = ["Answers", "Constants", "Values", "put_into", "wait_on_host"]


_MOST = 2**24  # elements of a tensor with values that are computed
_EQUAL = (torch.ops.aten.eq.Scalar, torch.ops.aten.ne.Scalar)
_INDEXED = (
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
)  # fmt: skip


class Answers(TorchDispatchMode):
    """Answers for the meta device, for a pack of one sequence without padding.

    Models with states ask whether their mask is all ones: yes. On the meta device the products of all
    experts at once exist only in bfloat16: here they have a shape in any type. If a model reads how many
    tokens each expert has (JetMoE), the choices of all tokens are shared out evenly.
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
            parts = len(args[0])
            even = [(self.choices + i) // parts for i in range(parts)]
            return torch.tensor(even, dtype=args[0].dtype, device="cpu")
        return func(*args, **kwargs)


def _is_list(x: Tensor, options: dict[str, Any]) -> bool:
    """Return whether a copy would read whole numbers [E] of the meta device."""
    if not x.is_meta or x.dim() != 1:
        return False
    if x.is_floating_point() or x.dtype == torch.bool:
        return False
    to = options.get("device")
    return to is not None and torch.device(to).type == "cpu"


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the shape of a product; `offs` cuts the rows of a, the columns of b, or the summed dim."""
    shape = [*a.shape[:-1], b.shape[-1]]
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif a.dim() == 3 and b.dim() == 2:
        shape = shape[1:]
    return a.new_empty(shape)


class Values(TorchDispatchMode):
    """Keeps the values of some tensors of the meta device on the CPU, and computes with them.

    Models that see or hear read the sizes of images and the places of tokens. A tensor that is made only
    of such tensors has its values too; whatever is made of a tensor without has none. A storage of the
    meta device has a twin on the CPU, so that views and changes in place are those of the twin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def on_meta(self, x: Tensor) -> Tensor:
        """Return a tensor of the meta device with the values of `x`."""
        out = torch.empty_like(x, device="meta")
        with _disable_current_modes():
            self._keep(out, x)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        with _disable_current_modes():
            blind = any(self._value(x) is None for x in tensors)
        if blind and func in _EQUAL and args[0].is_floating_point():
            return self._compared(func, args)
        if blind:
            return self._shaped(func, args, kwargs)
        if not any(x.is_meta for x in tensors) and torch.device("meta") not in leaves:
            return func(*args, **kwargs)

        # With all values, unless they are too many.
        out = None
        if not _depends_on_values(func):
            to_cpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
            if not to_cpu:
                out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.numel() > _MOST:
                return out
        with _disable_current_modes():
            real_args, real_kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
            if _on_meta(real_kwargs):
                real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
            found = func(*real_args, **real_kwargs)
        return self._paired(out, found, kwargs)

    def _paired(self, out: Any, found: Any, kwargs: Mapping[str, Any]) -> Any:
        """Pair what an operation gives on the meta device with the values that it gave on the CPU."""
        if not any(isinstance(x, Tensor) for x in tree_leaves(found)):
            return found  # a number that was read
        if out is None and kwargs.get("device") is not None:
            return found  # a copy for the CPU
        if out is None:
            out = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), found)
        with _disable_current_modes():
            for meta, real in zip(tree_leaves(out), tree_leaves(found)):
                if isinstance(meta, Tensor) and meta.untyped_storage() not in self.twins:
                    self._keep(meta, real)
        return out

    def _keep(self, meta: Tensor, real: Tensor) -> None:
        """Give a tensor of the meta device a twin with the values of `real`."""
        storage = meta.untyped_storage()
        twin = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        self.twins[storage] = twin
        value = self._value(meta)
        assert value is not None
        value.copy_(real)

    def _value(self, x: Tensor) -> Tensor | None:
        """Return the values of a tensor, None if they are not known."""
        if not x.is_meta:
            return x
        twin = self.twins.get(x.untyped_storage())
        if twin is None:
            return None
        value = torch.empty(0, dtype=x.dtype)
        return value.set_(twin, x.storage_offset(), x.shape, x.stride())

    def _compared(self, func: Any, args: Any) -> Tensor:
        """Compare with one number, unequal to all that has no value: images are no padding."""
        out = func(*args)
        if out.numel() <= _MOST:
            with _disable_current_modes():
                self._keep(out, torch.full(out.shape, func is not _EQUAL[0]))
        return out

    def _shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation without values; its result may have as many rows as a mask has places."""

        def empty(x: Tensor) -> Tensor:
            return x if x.is_meta else torch.empty_like(x, device="meta")

        with _disable_current_modes():
            if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
                kwargs = {name: x for name, x in kwargs.items() if name != "device"}  # it stays without
            if func is torch.ops.aten.masked_select.default:
                func = torch.ops.aten.index.Tensor
                args = (args[0], [args[1].expand(args[0].shape)])
            if func in _INDEXED:
                args = (args[0], self._places(args[1]), *args[2:])
            args, kwargs = tree_map_only(Tensor, empty, (args, kwargs))

        # What is written to has no values any more.
        for given, argument in zip(args, func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.twins.pop(given.untyped_storage(), None)
        # All places of a mask without values count, for instance of images that are not padding.
        with config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            return func(*args, **kwargs)

    def _places(self, index: Sequence[Any]) -> list[Any]:
        """Return the indices of an indexing, a mask with values as the places where it is true."""
        found: list[Any] = []
        for x in index:
            is_mask = isinstance(x, Tensor) and x.dtype == torch.bool
            value = self._value(x) if is_mask else None
            found += [x] if value is None else value.nonzero().unbind(1)
        return found


class Constants(TorchFunctionMode):
    """Gives tensors that are made of numbers for the meta device their values, in `values`."""

    def __init__(self, values: Values):
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.new_tensor and args[0].is_meta:
            func = torch.tensor
            args = args[1:]
            kwargs = {"device": torch.device("meta"), **kwargs}
        if func not in (torch.tensor, torch.as_tensor) or not _on_meta(kwargs):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": torch.device("cpu")})
        return self.values.on_meta(made)


def _depends_on_values(func: Any) -> bool:
    """Return whether the shape or the kind of an operation's result depends on values."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _on_meta(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


# ---------- attention on the meta device that keeps what flash attention keeps, and computes nothing


NAME = "rft_estimate"  # in transformers' table of attention functions
TOWER = "rft_estimate_tower"
MASKED = "rft_estimate_masked"


def put_into(lm: nn.Module, *, kind: str) -> None:
    """Have attention without scores [T, T] save what flash attention saves on such a device."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if attention.unfit_model(lm) is None:
        AttentionInterface.register(NAME, _flash_like(loop=kind == "cpu"))
        attention.use(lm, "eager" if attention.keeps_scores(lm) else NAME)

    # all parts of a model that sees or hears: on the meta device sdpa would keep all scores; a text model
    # inside of one that takes no boundaries has its [T, T] mask
    parts = find(lm)
    if not parts.towers:
        return
    AttentionInterface.register(TOWER, _flash_like(loop=False))
    AttentionInterface.register(MASKED, _flash_like(loop=False))
    AttentionMaskInterface.register(MASKED, sdpa_mask)
    if getattr(parts.text, "_supports_attention_backend", False):
        _rename(parts.text, MASKED)
    for tower in parts.towers:
        _rename(tower, TOWER)


def _rename(part: nn.Module, name: str) -> None:
    """Make a part that is on sdpa look up its attention by another name."""
    for m in part.modules():
        config: Any = getattr(m, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = name


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


def _flash_like(*, loop: bool) -> Callable:
    """Return an attention function of transformers: three of [1, H, T, D] -> ([1, T, H, D], None)."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple:
        out: Any = _Attention.apply(*(x.transpose(1, 2) for x in (query, key, value)), loop)
        return out, None

    return attention


# ---------- inputs of checkpointed blocks that are on the host, and take no memory of the device


class _Away(inputs_on_host.Moved):
    """An input of a block of which only the shape is left, until it is back."""

    def __init__(self, live: Any, x: Tensor, before: Any):
        self.live = live
        super().__init__(x, before)

    def send(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        # torch's allocator of pinned memory hands out powers of two
        self.live.host += 1 << max(x.numel() * x.element_size() - 1, 0).bit_length()

    def fetch(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def wait(self, x: Tensor) -> None:
        pass


def wait_on_host(root: nn.Module, live: Any) -> None:
    """Have the inputs of blocks that go to the host counted in `live.host` instead of on the device."""
    for function in checkpointing.on_host(root):
        function.moved = partial(_Away, live)
