"""Serves a reward over HTTP: one process, many clients, whose requests are scored together.

`serve` is all of it: `app` speaks HTTP in a thread of its own, `jobs` holds the requests that wait, and
`scoring` computes their rewards in the main thread, where models and time limits are at home.
"""

from rft_fn.tools.serving.serve import serve

__all__ = ["serve"]
