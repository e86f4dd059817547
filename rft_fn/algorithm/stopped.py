"""The tokens that a loss stops."""

from typing import Any

from torch import Tensor

from rft_fn.algorithm.rows import Evaluated

__all__ = ["beyond_a_fifth", "beyond_clip", "beyond_log_clip", "outside_clip", "outside_trust_region"]


def _leaves(x: Tensor, adv: Tensor, low: Any, high: Any) -> Tensor:
    """Where the advantage pushes x out of [low, high]."""
    return ((x > high) & (adv > 0)) | ((x < low) & (adv < 0))


def beyond_clip(at: Evaluated, /) -> Tensor:
    """Ratios that would leave [1 - low, 1 + high]."""
    return _leaves(at.ratio, at.adv, 1 - at.options["low"], 1 + at.options["high"])


def beyond_log_clip(at: Evaluated, /) -> Tensor:
    """Ratios whose logarithm would leave [-low, high]."""
    return _leaves(at.ratio.log(), at.adv, -at.options["low"], at.options["high"])


def outside_clip(at: Evaluated, /) -> Tensor:
    """Ratios outside [1 - low, 1 + high].

    CISPO limits them but keeps their gradient.
    """
    return (at.ratio > 1 + at.options["high"]) | (at.ratio < 1 - at.options["low"])


def beyond_a_fifth(at: Evaluated, /) -> Tensor:
    """Ratios that would leave [0.8, 1.2].

    SAPO's soft gate stops no token altogether.
    """
    return _leaves(at.ratio, at.adv, 0.8, 1.2)


def outside_trust_region(at: Evaluated, /) -> Tensor:
    """Tokens that DPPO's trust region stops.

    Their loss is 0, although neither advantage nor log-prob is.
    """
    return (at.loss == 0) & (at.adv != 0) & (at.logp != 0)
