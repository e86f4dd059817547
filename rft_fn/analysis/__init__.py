"""Gradients looked at: of several losses on one buffer, of single responses, and how noisy they are.

    analysis.gradients(st, state, apply, {"grpo": f, "gspo": g}, packs)   # norms and cosines, by layer too
    analysis.noise_scale(...)       # signal and noise of a gradient, from the norms of its halves

Everything goes through `Strategy.grad`, so it works on one process, under FSDP2 and under ZeRO. Nothing here
is imported by a train step that does not ask for it.
"""

from rft_fn.analysis import estimators
from rft_fn.analysis.exact import every_response, exact_slopes, mass
from rft_fn.analysis.gradients import Gradients, gradients
from rft_fn.analysis.noise import Noise, noise_scale
from rft_fn.analysis.sequences import Sequences, per_sequence

__all__ = [
    "Gradients",
    "Noise",
    "Sequences",
    "estimators",
    "every_response",
    "exact_slopes",
    "gradients",
    "mass",
    "noise_scale",
    "per_sequence",
]
