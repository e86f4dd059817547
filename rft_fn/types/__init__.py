"""The records of the project, and the signatures of their functions.

Dimensions: N prompts, G samples per prompt, B = N G sequences, S padded length, T tokens and K sequences of
a pack, V vocabulary, D width. `mask` is bool and never a weight; `w` is float and never a mask.
"""

from rft_fn.types.batch import Experience, Packed, Rollout, TokenOut, experience
from rft_fn.types.distribution import Sampling
from rft_fn.types.engine import Engine, record
from rft_fn.types.functions import AdvantageFn, Apply, CriticAdvantageFn, LossFn, WeightFn
from rft_fn.types.media import Media
from rft_fn.types.strategy import Session, Strategy
from rft_fn.types.training import TrainState, Transform

__all__ = [
    "AdvantageFn", "Apply", "Engine", "Experience", "LossFn", "Media", "Packed", "Rollout", "Sampling",
    "Strategy", "TokenOut", "TrainState", "Transform", "WeightFn", "record",
]  # fmt: skip
