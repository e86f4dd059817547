"""Serve rewards over HTTP, for runs elsewhere: `--reward http://HOST:8000/score` is then all of them.

    python train_scripts/serve_reward.py --reward task:sort_digits
    python train_scripts/serve_reward.py --reward math format=0.1 --host 0.0.0.0 --port 8000
    python train_scripts/serve_reward.py --reward model:runs/rm

Requests of several clients are scored together. /health says whether it is well, /metrics what it does; the
token in RFT_REWARD_TOKEN, if there is one, is asked of every client. SIGTERM finishes what has arrived.
"""

from dataclasses import dataclass, field
from typing import Annotated

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled, Range
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(options.Reward):
    """The options of a server."""

    # where it listens, and to whom
    host: Filled = "127.0.0.1"  # the address to listen at; 0.0.0.0 is every address of the machine
    port: Annotated[int, Range(0, 65535)] = 8000  # 0 is any free one
    token_env: Filled = "RFT_REWARD_TOKEN"  # the environment variable with the token of clients

    # how much it takes
    rows: Count = 256  # most completions of a call that several requests share; 1 makes one call of each
    wait: AtLeast0 = 0.002  # seconds to wait for more requests after the first one
    queue: Count = 4096  # most completions that wait; what comes on top is told to come again later
    max_bytes: Count = 1 << 26  # of a request

    # how a reward model reads prompts
    system: str | None = None  # its system prompt; an empty one removes that of the chat template
    chat_template_kwargs: tuple[str, ...] = ()  # arguments of its chat template, as enable_thinking=False
    strategy: StrategyConfig = field(default_factory=StrategyConfig)


@dataclass(frozen=True)
class Reading(options.Reward, options.Data):
    """What the rewards read of the options: vetoes, and how a prompt is made for a model."""


UNREAD = (  # nothing is trained here
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "adam_offload", "use_mp_opt",
    "max_norm", "train_batch_size", "micro_train_batch_size", "packing_samples",
    "fused_linear_logprob", "chunk_size", "compile_blocks", "log_dir", "plot_every", "max_skips",
)  # fmt: skip
SHARED = (  # of engines that a trainer and its ranks share; a judge names its servers itself
    "engine_servers", "engine_process", "engine_threads", "engine_tp_size", "engine_weights",
    "engine_transfer", "engine_adapters",
)  # fmt: skip


def main(cfg: Config) -> None:
    if not cfg.reward:
        raise ValueError("reward: expected at least one to serve, got none")
    rft.run.without(cfg.strategy, *UNREAD, *SHARED)
    st = rft.strategy.get_strategy(cfg.strategy)
    if st.world > 1:
        raise ValueError(f"world: expected one process, got {st.world}; start a server for each device")
    reading = Reading(
        reward_veto=cfg.reward_veto, system=cfg.system, chat_template_kwargs=cfg.chat_template_kwargs
    )
    score = rft.run.load_rewards(cfg.reward, reading, st)
    if all(reward.engine is None for reward, _ in score.components.values()):
        rft.run.without(cfg.strategy, *options.ENGINE, instead="no judge is served")
    rft.run.serve(
        score,
        host=cfg.host,
        port=cfg.port,
        token_env=cfg.token_env,
        rows=cfg.rows,
        wait=cfg.wait,
        queue=cfg.queue,
        max_bytes=cfg.max_bytes,
        timeout=cfg.reward_timeout,
    )
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
