"""Optimizers as values, in the manner of optax.

A `Transform` is `init`, `update` and `spec`. `update(grads, state, params) -> (updates, state)` returns
what is to be added to the parameters, so transforms compose with `chain`; `apply_updates` adds in place.
Gradients and states are donated: their memory may be reused. `spec` describes the transform as plain data,
for backends that bring their optimizer along.
"""

from rft_fn.optim.adamw import AdamState, Decays, Schedule, adamw, constant
from rft_fn.optim.averages_and_masters import EmaState, MasterState, ema, master_weights
from rft_fn.optim.clipping import clip_by_global_norm, global_norm
from rft_fn.optim.inner_states import count, ema_params, parts
from rft_fn.optim.pure import pure
from rft_fn.optim.schedules import warmup_cosine, warmup_linear
from rft_fn.optim.sgd_and_lion import LionState, SgdState, lion, sgd
from rft_fn.optim.transforms import PartitionState, chain, partition
from rft_fn.optim.updates import apply_updates, by_name
from rft_fn.types import Transform

__all__ = [
    "adamw", "apply_updates", "chain", "clip_by_global_norm", "constant", "count", "ema", "ema_params",
    "global_norm", "lion", "partition", "pure", "sgd", "warmup_cosine", "warmup_linear",
]  # fmt: skip
