"""Environments: what a policy acts in over several turns, as pure functions of an explicit state.

`reset(row, key)` begins an episode and `step(state, response)` moves it on; `rft_fn.collect.play` samples the
policy's turns. A new built-in environment is a file here and an entry of `ENVIRONMENTS`.
"""

from rft_fn.environment import adapters
from rft_fn.environment.arithmetic import calculate, calculator
from rft_fn.environment.by_name import ENVIRONMENTS, get_environment, lessons, prompts
from rft_fn.environment.guess import guess_number
from rft_fn.environment.kuhn import kuhn_poker
from rft_fn.environment.record import Environment, Observation, Renderer, Row, Stepped, as_messages
from rft_fn.environment.tool_calls import Call, call_parser, tagged_calls
from rft_fn.environment.tool_use import tool_schema, with_tools

__all__ = [
    "ENVIRONMENTS", "Environment", "Renderer", "Stepped", "adapters", "calculator", "call_parser",
    "get_environment", "guess_number", "kuhn_poker", "prompts", "with_tools",
]  # fmt: skip
