"""Rewards of servers: JSON over HTTP, with deadlines, limits, retries and several hosts.

`served_at` makes the reward function, `protocol` and `openrlhf` have the forms of requests and answers, which
docs/remote_rewards.md shows, `client` asks, `hosts` knows which servers answer, `connection` has the bytes.
"""

from rft_fn.reward.remote.client import served_at

__all__ = ["served_at"]
