"""Serve a reward over HTTP, for runs elsewhere: `--reward http://HOST:8000/score` is then this one.

    python train_scripts/serve_reward.py --reward task:sort_digits
    python train_scripts/serve_reward.py --reward math format=0.1 --host 0.0.0.0 --port 8000

Requests of several clients are scored together. /health says whether it is well, /metrics what it does; the
token in RFT_REWARD_TOKEN, if there is one, is asked of every client. SIGTERM finishes what has arrived.
"""

from dataclasses import dataclass
from typing import Annotated

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Range
from rft_fn.run import options


@dataclass(frozen=True)
class Config(options.Reward):
    """The options of a server."""

    host: str = "127.0.0.1"  # the address to listen at; 0.0.0.0 is every address of the machine
    port: Annotated[int, Range(0, 65535)] = 8000  # 0 is any free one
    token_env: str = "RFT_REWARD_TOKEN"  # the environment variable with the token that clients have to send
    rows: Count = 256  # most completions of a call that several requests share; 1 makes one call of each
    wait: AtLeast0 = 0.002  # seconds to wait for more requests after the first one
    queue: Count = 4096  # most completions that wait; what comes on top is told to come again later
    max_bytes: Count = 1 << 26  # of a request


def main(cfg: Config) -> None:
    if not cfg.reward:
        raise ValueError("reward: expected at least one to serve, got none")
    score = rft.reward.parse(cfg.reward)
    limits = {"rows": cfg.rows, "wait": cfg.wait, "queue": cfg.queue, "max_bytes": cfg.max_bytes}
    where = {"host": cfg.host, "port": cfg.port, "token_env": cfg.token_env}
    rft.run.serve(score, **where, **limits, timeout=cfg.reward_timeout)


if __name__ == "__main__":
    rft.run.cli(main, Config)
