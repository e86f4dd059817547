"""Log-probs of the targets, from logits or straight from hidden states."""

from rft_fn.logprob.distributions import linear_rows, logits
from rft_fn.logprob.head import default_workspace_mb, linear_logprob
from rft_fn.logprob.of_logits import (
    entropy_from_logits,
    log_probs_and_entropy,
    log_probs_from_logits,
    sum_p2,
)
from rft_fn.logprob.ratio import log_ratio
from rft_fn.sampling import process_logits

__all__ = [
    "entropy_from_logits", "linear_logprob", "linear_rows", "log_probs_from_logits", "process_logits",
    "sum_p2",
]  # fmt: skip
