"""The repeated blocks of a model, and torch.compile of those that read text."""

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rft_fn.model import attention
from rft_fn.model.checkpointing import kind_of
from rft_fn.model.reader import Reader

__all__ = ["blocks", "compile_blocks", "require_compiler"]


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

    ValueError for a module that has its own forward, for one without blocks, for one with routers that
    report the balance of experts, and for blocks that keep more or less than their input.
    """
    name = type(root).__name__
    if not isinstance(root, Reader):
        raise ValueError(
            f"compile_blocks: expected a language model of transformers, got {name}; "
            "compile a module with its own forward yourself"
        )
    if root.balance is not None:
        raise ValueError("aux: expected False with compile_blocks, got True, whose hooks come and go")
    if (kind := kind_of(root)) not in (False, True):
        raise ValueError(
            f"gradient_checkpointing: expected False or True with compile_blocks, whose graphs are whole, "
            f"got {kind}"
        )
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
