"""The former name of `rft_fn.run`, kept for one version."""

from rft_fn.run import *  # noqa: F403
