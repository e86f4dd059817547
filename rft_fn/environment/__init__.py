"""Environments: what a policy acts in over several turns, as pure functions of an explicit state.

`reset(row, key)` begins an episode and `step(state, response)` moves it on; `rft_fn.collect.play` samples the
policy's turns. A new built-in environment is a file here and an entry of `ENVIRONMENTS`.
"""

from rft_fn.environment.builtin import ENVIRONMENTS, get_environment, lessons, prompts
from rft_fn.environment.guess_number import guess_number
from rft_fn.environment.record import Environment, Observation, Row, Stepped, as_messages
from rft_fn.environment.rendering import Renderer

__all__ = [
    "ENVIRONMENTS", "Environment", "Observation", "Renderer", "Row", "Stepped", "as_messages",
    "get_environment", "guess_number", "lessons", "prompts",
]  # fmt: skip
