"""Serve a model at the endpoints of OpenAI: chats, completions, models and health.

    rft serve-model MODEL
    rft serve-model runs/grpo --port 8000 --host 0.0.0.0
    rft serve-model MODEL --engine-type vllm

MODEL is a model, or the folder of a run, whose last model is served. Requests that wait are sampled together;
an answer has log-probs and token ids where it is asked for them (logprobs, return_token_ids). The token in
RFT_MODEL_TOKEN, if there is one, is asked of every client. SIGTERM finishes what has arrived.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled, Positive, PositiveShare, Range
from rft_fn.run.options import Options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(Options):
    """The options of a server."""

    # what it serves
    model: tyro.conf.Positional[Filled]  # a model, or the folder of a run
    name: str = ""  # of the model, for clients; if empty, that of its folder
    system: str | None = None  # the system prompt of a chat without one; an empty one removes the template's
    chat_template_kwargs: tuple[str, ...] = ()  # arguments of the chat template, as enable_thinking=False

    # what a request has that says nothing of it
    max_new: Count = 1024  # tokens of an answer, and the most of any
    temperature: AtLeast0 = 1.0  # 0 is greedy
    top_p: PositiveShare = 1.0  # the smallest set of words with this mass

    # where it listens, and to whom
    host: Filled = "127.0.0.1"  # the address to listen at; 0.0.0.0 is every address of the machine
    port: Annotated[int, Range(0, 65535)] = 8000  # 0 is any free one
    token_env: Filled = "RFT_MODEL_TOKEN"  # the environment variable with the token of clients

    # how much it takes
    queue: Count = 1024  # most requests that wait; what comes on top is told to come again later
    max_bytes: Count = 1 << 26  # of a request
    timeout: Positive = 600.0  # seconds that an answer may take
    strategy: StrategyConfig = field(default_factory=StrategyConfig)


UNREAD = (  # nothing is trained here
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "adam_offload", "use_mp_opt",
    "max_norm", "train_batch_size", "micro_train_batch_size", "packing_samples",
    "fused_linear_logprob", "chunk_size", "compile_blocks", "log_dir", "plot_every", "max_skips",
)  # fmt: skip


def main(cfg: Config) -> None:
    rft.run.without(cfg.strategy, *UNREAD)
    model = rft.run.last_model(cfg.model)
    st = rft.strategy.get_strategy(cfg.strategy)
    if st.world > 1:
        raise ValueError(f"world: expected one process, got {st.world}; start a server for each device")
    arguments = rft.data.literals(cfg.chat_template_kwargs)
    renderer = rft.environment.Renderer(rft.model.load_tokenizer(model), cfg.system, arguments)
    window = rft.model.read_window(model)
    most = cfg.max_new if window is None else min(cfg.max_new, window - 1)
    rft.run.serve_model(
        rft.engine.get_engine(rft.engine.config_of(cfg.strategy), model),
        renderer,
        name=cfg.name or Path(cfg.model).resolve().name,
        sampling=rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=most),
        rows=cfg.strategy.engine_batch,
        host=cfg.host,
        port=cfg.port,
        token_env=cfg.token_env,
        queue=cfg.queue,
        max_bytes=cfg.max_bytes,
        seconds=cfg.timeout,
        chat_template_kwargs=arguments,
    )
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
