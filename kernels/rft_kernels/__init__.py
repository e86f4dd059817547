"""Log-probabilities of labels, from hidden states without the logits, or from logits."""

from rft_kernels.logits import FromLogits, logits_logprob
from rft_kernels.operation import LogProb, check_labels, default_workspace_mb, linear_logprob

__all__ = [
    "FromLogits",
    "LogProb",
    "check_labels",
    "default_workspace_mb",
    "linear_logprob",
    "logits_logprob",
]
