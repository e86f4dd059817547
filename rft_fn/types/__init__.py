"""The records that every part of the project speaks in, and the signatures of the functions in them.

Dimensions: N prompts, G samples a prompt, B = N G sequences, S padded length, T tokens of a pack, K sequences
of a pack, V vocabulary, D width. `mask` is bool and never a weight; `w` is float and never a mask.
"""

from rft_fn.types.batch import Experience, Media, Packed, Rollout, TokenOut, experience
from rft_fn.types.engine import Engine
from rft_fn.types.sampling import Sampling
from rft_fn.types.strategy import Apply, LossFn, Session, Strategy
from rft_fn.types.training import TrainState, Transform

__all__ = [
    "Apply", "Engine", "Experience", "LossFn", "Media", "Packed", "Rollout", "Sampling", "Session",
    "Strategy", "TokenOut", "TrainState", "Transform", "experience",
]  # fmt: skip
