"""Other ways to log-probabilities from hidden states, where installed: name -> f(h, w, y) -> [T].

    pip install trl==1.16.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1      # in a separate environment

Each is called through the function that its own trainer calls; nothing here is tuned for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Variant = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return (h @ w.T).log_softmax(1).gather(1, y[:, None])[:, 0]


def library(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return -F.linear_cross_entropy(h, w, y, reduction="none")


def selective(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(h @ w.T, y)


def liger(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import fused_linear_ppo as module

    size = module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    return module._ChunkedSelectiveLogProbFunction.apply(h, w, y, None, 1.0, size)


def cut(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    impl = "torch_compile"
    if h.is_cuda:
        impl = "cce"  # kernels that need a GPU
    return -linear_cross_entropy(h, w, y, impl=impl, reduction="none")


def _has(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def variants() -> dict[str, Variant]:
    """Those that this environment has, by the name that the table shows."""
    found: dict[str, Variant] = {"compiled": torch.compile(naive)}
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = library
    if _has("trl.trainer.utils"):
        found["trl"] = selective
    if _has("liger_kernel.chunked_loss.fused_linear_ppo"):
        found["liger"] = liger
    if _has("cut_cross_entropy"):
        found["cce"] = cut
    return found
