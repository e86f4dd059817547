"""Published algorithms as rows of one table of plain functions.

Index a row, change an entry, or ignore the table:

    algo = algorithm.TABLE["grpo"]
    mine = algo._replace(loss=my_loss)            # a new algorithm is a changed row, not a subclass

`per_token` and `per_sequence` adapt a function of `rft_fn.loss` to a `LossFn` with metrics. The adapted
loss takes the options of that function, with its defaults: a row states only the settings that its paper
changes.
"""

from rft_fn.algorithm.more_losses import per_sequence
from rft_fn.algorithm.published import (
    TABLE,
    ActorCritic,
    configured,
    configured_actor_critic,
    get_actor_critic,
    get_algorithm,
)
from rft_fn.algorithm.row import Algorithm
from rft_fn.algorithm.with_metrics import per_token

__all__ = [
    "TABLE", "ActorCritic", "Algorithm", "configured", "configured_actor_critic",
    "get_actor_critic", "get_algorithm", "per_sequence", "per_token",
]  # fmt: skip
