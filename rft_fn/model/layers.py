"""Changes to the layers of a model in place: frozen, without dropout, compiled, moved."""

import importlib.util
import inspect
import math
import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rft_fn.model import attention
from rft_fn.model.copies import Mover, mover_of
from rft_fn.model.parts import find
from rft_fn.model.quantize import whole
from rft_fn.model.reader import Reader

__all__ = [
    "TOWERS", "Residence", "Where", "blocks", "checkpointed", "compile_blocks", "disable_dropout",
    "freeze", "is_finite", "require_all_finite", "require_compiler", "require_finite",
]  # fmt: skip


# ---------- parts of a model that are not trained


TOWERS = "towers"


def freeze(module: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Freeze the parameters of `module` that one of the patterns matches, and return it.

    A pattern is a part of a parameter's path, or several with dots between them; `*` matches anything:
    "visual", "layers.0", "blocks.*.norm1". "towers" is all parts that see or hear, with what joins them to
    the text model. A tensor with two names, like a tied head, is frozen by either.

    Frozen parameters are in no `params` of `bind` or `init`, so they have no moments and are in no
    checkpoint; a saved model has them all. ValueError for a pattern that matches none, with names that are
    near, and if nothing would be left to train. The module is then as it was.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    frozen: list[nn.Parameter] = []
    for pattern in patterns:
        frozen += _matched(module, named, pattern)

    # Adapters may be the only ones that were left.
    closed = {id(p) for p in frozen}
    left = [name for name, p in named.items() if p.requires_grad and id(p) not in closed]
    if patterns and not left:
        raise ValueError(
            f"freeze: expected weights that are left to train, got {list(patterns)}: all of them"
        )
    for p in frozen:
        p.requires_grad_(False)
    return module


def _matched(module: nn.Module, named: Mapping[str, nn.Parameter], pattern: str) -> list[nn.Parameter]:
    """Return the parameters that a pattern matches. ValueError for none."""
    found = [p for name, p in named.items() if fnmatchcase(f".{name}.", f"*.{pattern}.*")]
    if pattern == TOWERS and not found:
        found = [p for tower in find(module).towers for p in tower.parameters()]
        if not found:
            raise ValueError(f"freeze: expected a model that sees or hears for 'towers', got {_kind(module)}")
    if not found:
        near = ", ".join(_near(pattern, named))
        raise ValueError(f"freeze: expected parts of {_kind(module)}, got {pattern!r}; it has {near}")
    return found


def _kind(module: nn.Module) -> str:
    return type(find(module).model).__name__


def _near(pattern: str, named: Mapping[str, Tensor]) -> list[str]:
    """Return parts of the parameters' paths that are spelled like a pattern; else the largest parts."""
    parts: dict[str, None] = {}
    largest: dict[str, None] = {}
    for name in named:
        path = name.split(".")[:-1]
        parts |= dict.fromkeys(part for part in path if not part.isdigit())
        largest[".".join(path[:2])] = None
    words = [word for word in pattern.split(".") if not word.isdigit()]
    return get_close_matches("".join(words[-1:]), parts, n=4) or sorted(largest)[:6]


# ---------- dropout off for good, also in layers that are checkpointed


class _EvalCheckpoint:
    """The checkpointing function of a layer that runs in evaluation mode.

    transformers checkpoints a layer only in training mode, and many layers read their mode for dropout. So
    the layer is in training mode when transformers looks, and not while it runs.
    """

    def __init__(self, layer: nn.Module, function: Callable[..., Any]):
        self.layer = layer
        self.function = function

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        def in_eval(*inputs: Any) -> Any:
            self.layer.training = False
            try:
                return forward(*inputs)
            finally:
                self.layer.training = True

        return self.function(in_eval, *args)


def checkpointed(module: nn.Module) -> list[Any]:
    """Return the checkpointed layers. ValueError for a model that checkpoints in another way."""

    def is_on(m: nn.Module) -> bool:
        return getattr(m, "gradient_checkpointing", False) and hasattr(m, "_gradient_checkpointing_func")

    on = [m for m in module.modules() if is_on(m)]
    if not on:
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in on if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"gradient_checkpointing: expected layers of transformers' GradientCheckpointingLayer, "
            f"{type(module).__name__} has none; load it without"
        )
    return layers


def disable_dropout(module: nn.Module) -> None:
    """Turn dropout off for good, also in checkpointed layers: log-probs are a function of (params, pack)."""
    module.eval()
    for layer in checkpointed(module):
        layer.training = True
        if not isinstance(layer._gradient_checkpointing_func, _EvalCheckpoint):
            layer._gradient_checkpointing_func = _EvalCheckpoint(layer, layer._gradient_checkpointing_func)


# ---------- the check of weights for NaN and inf, in one pass and without memory


def is_finite(x: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor inf."""
    x = whole(x).detach()
    if not x.is_floating_point() or x.is_meta or not x.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())  # NaN is in the minimum of what holds it


def require_finite(what: str, name: str, x: Tensor) -> None:
    """Raise ValueError that names a tensor with NaN or inf."""
    if not is_finite(x):
        raise ValueError(f"{what}: {name}: expected finite numbers, got NaN or inf")


def require_all_finite(what: str, pairs: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError that names the first tensor with NaN or inf; a device is waited for once."""
    floats = [x.detach() for _, x in pairs if x.is_floating_point() and x.numel()]
    largest = torch._foreach_norm(floats, math.inf) if floats else []  # NaN is the largest of what holds it
    if floats and not bool(torch.isfinite(torch.stack(list(largest))).all()):
        for name, x in pairs:
            require_finite(what, name, x)


# ---------- the repeated blocks of a model, and torch.compile of those that read text


GRAPHS = 64  # of one function, before torch gives up on it


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the children of each outermost list of two or more modules of one class with parameters."""
    found: list[nn.Module] = []
    for child in module.children():
        parts = list(child) if isinstance(child, nn.ModuleList) else []
        heavy = [part for part in parts if any(True for _ in part.parameters())]
        if len(heavy) > 1 and len({type(part) for part in heavy}) == 1:
            found += heavy
        else:
            found += blocks(child)
    return found


def compile_blocks(root: nn.Module, *, backend: str = "inductor") -> int:
    """Compile the forward of each decoder block of a bound model, in place; return their number.

    `root` is what `wrap_for_training` made, with its strategy's hooks if it is sharded. Blocks of one
    class share a graph with a symbolic number of tokens: a second length compiles at most once more,
    others not at all. Attention runs between graphs, because the boundaries of sequences differ from pack
    to pack. Hooks and gradient checkpointing stay outside of the graphs. Names of parameters do not
    change.

    ValueError for a module that has its own forward, for one without blocks, and for one with routers that
    report the balance of experts.
    """
    name = type(root).__name__
    if not isinstance(root, Reader):
        raise ValueError(
            f"compile_blocks: expected a language model of transformers, got {name}; "
            "compile a module with its own forward yourself"
        )
    if getattr(root, "balance", None) is not None:
        raise ValueError("aux: expected False with compile_blocks, got True, whose hooks come and go")
    found = blocks(root.parts.text)
    if not found:
        raise ValueError(f"compile_blocks: expected a list of decoder blocks in {name}, got none")

    # The graphs of all models of a class, with and without gradients, count for one function.
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS)

    attention.leave_graphs(root.parts.text)
    for block in found:
        if "rft_compiled" not in type(block).__dict__:
            block.__class__ = _compiled_class(type(block), backend)
    return len(found)


@cache
def _compiled_class(cls: type[nn.Module], backend: str) -> type[nn.Module]:
    """Return a subclass with a compiled forward: `copy.deepcopy` and hooks work as before."""
    # Some versions of transformers checkpoint inside forward, and wrap that of each subclass.
    plain = inspect.unwrap(cls.forward)
    compiled: Callable[..., Any] = torch.compile(plain, backend=backend)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mark_tokens(*args, *kwargs.values(), *(kwargs.get("position_embeddings") or ()))
        return compiled(self, *args, **kwargs)

    made: Any = type(f"Compiled{cls.__name__}", (cls,), {"forward": forward, "rft_compiled": True})
    return made


def mark_tokens(*inputs: Any) -> None:
    """Mark dimension 1 of the inputs [1, T, ...] of a block, the states first, as one that varies."""
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.dim() in (2, 3)]
    for x in tensors:
        if x.shape[1] == tensors[0].shape[1]:
            torch._dynamo.maybe_mark_dynamic(x, 1)


def require_compiler(device: torch.device) -> None:
    """Raise ValueError if torch.compile has no compiler for a device."""
    if device.type == "cuda":
        names = [os.environ.get("CC", ""), "gcc", "clang"]
        want = "a C compiler (gcc or clang, or CC), which triton needs"
        if importlib.util.find_spec("triton") is None:
            raise ValueError("compile_blocks: expected triton, got none; pip install triton")
    else:
        names = [os.environ.get("CXX", ""), "g++", "clang++"]
        want = "a C++ compiler (g++ or clang++, or CXX)"
    if not any(shutil.which(name) for name in names if name):
        raise ValueError(f"compile_blocks: expected {want}, got none; install one, or leave it out")


# ---------- where the weights of a bound model are, and their way between the device and the host


Where = Literal["device", "host"]


class Residence:
    """Where the weights of one bound model are, and the optimizer of one that is trained.

    Every parameter and buffer of the module moves, trained or not. The tensors stay the same objects, so a
    tree of them stays valid: whoever reads one gets its values on either side.
    """

    def __init__(self, root: nn.Module, module: nn.Module):
        self.root = root  # the module that the apply calls
        self.module = module  # that was bound
        origin = getattr(getattr(module, "config", None), "name_or_path", "")
        self.name = f"{type(module).__name__} {origin}".strip()
        self.on_host = False
        self.mover: Mover | None = None  # chosen by the device of the weights when anything first leaves it
        self.trained = False
        self.bound: weakref.ref[Any] | None = None  # the apply of a model that is trained
        self.opt: list[Tensor] = []  # the optimizer's tensors that move, of the newest state
        self.opt_on_host = False

    def require_device(self, what: str) -> None:
        """Raise ValueError while the weights are on the host; `what` is the argument with them."""
        if self.on_host:
            raise ValueError(
                f"{what}: expected the weights of {self.name} on the device, got them on the host; call "
                'st.place(apply, "device") first'
            )

    def move(self, where: Where) -> None:
        """Move the weights there; do nothing if they are there already.

        A move that fails on its way leaves a model that counts as on the host: moving it to the device
        again completes it.
        """
        if where not in ("device", "host"):
            raise ValueError(f"where: expected 'device' or 'host', got {where!r}")
        if where == "host" and not self.on_host:
            self._choose_mover()
            self.on_host = True
            if self.mover is not None:
                self._moved(self.apply, self.mover.to_host)
                _return_memory()
        if where == "device" and self.on_host:
            if self.mover is not None:
                self._moved(self.apply, self.mover.to_device)
            self.on_host = False

    def move_opt(self, where: Where) -> None:
        """Move the optimizer's tensors there; do nothing if they are there already."""
        if where == "host" and self.opt and not self.opt_on_host:
            self._choose_mover()
            self.opt_on_host = True
            if self.mover is not None:
                self._moved(self._apply_opt, self.mover.to_host)
                _return_memory()
        if where == "device" and self.opt_on_host:
            if self.mover is not None:
                self._moved(self._apply_opt, self.mover.to_device)
            self.opt_on_host = False

    def _choose_mover(self) -> None:
        self.mover = self.mover or mover_of(next(self.root.parameters()).device)

    def _moved(
        self, apply: Callable[[Callable[[Tensor], Tensor]], None], copy: Callable[..., Tensor]
    ) -> None:
        """Put copies in the places of tensors, and see that they are there, also where one fails."""
        assert self.mover is not None
        try:
            apply(copy)
        finally:
            self.mover.finish()

    def apply(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put `copy` of each parameter and buffer in its place."""
        # as Module.to does it: FSDP2 then registers the shards that it finds in the new memory
        self.root._apply(copy)

    def _apply_opt(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Put `copy` of each tensor of the optimizer in its place."""
        for x in self.opt:
            moved = copy(x)
            if is_traceable_wrapper_subclass(x):  # a DTensor, as Module.to does it
                torch.utils.swap_tensors(x, moved)
            else:
                x.data = moved


def _return_memory() -> None:
    """Give back what is free on the device, for engines, which take their memory there."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
