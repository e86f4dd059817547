"""Environments of other libraries, as environments of this one; none of the libraries is imported."""

from rft_fn.environment.adapters.gymnasium import gymnasium
from rft_fn.environment.adapters.verifiers import verifiers

__all__ = ["gymnasium", "verifiers"]
