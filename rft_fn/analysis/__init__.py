"""Gradients looked at: of several losses on one buffer, of single responses, and how noisy they are.

    analysis.gradients(st, state, apply, {"grpo": f, "gspo": g}, packs)   # norms and cosines, by layer too

Everything goes through `Strategy.grad`, so it works on one process, under FSDP2 and under ZeRO. Nothing here
is imported by a train step that does not ask for it.
"""

from rft_fn.analysis.gradients import Gradients, gradients

__all__ = ["Gradients", "gradients"]
