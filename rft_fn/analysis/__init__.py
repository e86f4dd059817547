"""Gradients looked at: of several losses on one buffer, of single responses, and how noisy they are.

    analysis.gradients(st, state, apply, {"grpo": f, "gspo": g}, packs)   # norms and cosines, by layer too
    analysis.per_sequence(st, state, apply, loss, exp, budget=4096)       # of each response
    analysis.noise_scale(first, second, whole, prompts=(16, 16))          # from the norms of both halves
    analysis.update_kl(before, after, mask)                               # of an update, from two scores

Everything goes through `Strategy.grad`, so it works on one process, under FSDP2 and under ZeRO. Nothing here
is imported by a train step that does not ask for it.
"""

from rft_fn.analysis import estimators
from rft_fn.analysis.exact import every_response, exact_slopes, mass
from rft_fn.analysis.gradients import Gradients, gradients
from rft_fn.analysis.noise import Noise, UpdateKL, noise_scale, update_kl
from rft_fn.analysis.sequences import Sequences, per_sequence

__all__ = [
    "Gradients", "Noise", "Sequences", "UpdateKL", "estimators", "every_response", "exact_slopes",
    "gradients", "mass", "noise_scale", "per_sequence", "update_kl",
]  # fmt: skip
