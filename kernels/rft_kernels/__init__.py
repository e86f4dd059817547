"""Kernels of rft_fn. `linear_logprob`: log-probabilities of labels from hidden states, without the logits."""

from rft_kernels.linear_logprob import LogProb, check_labels, linear_logprob

__all__ = ["LogProb", "check_labels", "linear_logprob"]
