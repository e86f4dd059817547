"""A check of an engine: rows up to the model's window in trainer and engine, and the gap by depth.

    rft check-engine MODEL
    rft check-engine runs/grpo --engine-type vllm --longest 16384
    rft check-engine MODEL --engine-type openai --engine-servers http://HOST:8000

Wrong positions, windows, scaling of RoPE and states of recurrent layers show at the depth where they begin.
Exits with 1 if the mean gap of a depth is above the limit. No data and no training are needed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

import rft_fn as rft
from rft_fn import precision
from rft_fn.limits import Count, Filled, Positive, Seed
from rft_fn.model.load import read_vocabulary
from rft_fn.run.options import Options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(Options):
    """The options of a check."""

    model: tyro.conf.Positional[Filled]  # a model or the folder of a run, which the engine has too
    longest: Count | None = None  # tokens of the longest rows; None is the model's window
    rows: Count = 4  # rows of each length: 64 tokens, 128 and so on
    new: Count = 64  # tokens that the engine samples at the end of a row, at most half of it
    max_gap: Positive | None = None  # largest mean gap, nats per token; None: what rounding explains
    seed: Seed = 0  # of the words of the rows
    strategy: StrategyConfig = field(default_factory=StrategyConfig)


UNREAD = (  # nothing is trained here
    "fsdp", "zero_stage", "sp_size", "shard_size", "fsdp_cpu_offload", "adam_offload", "use_mp_opt", "seed",
    "max_norm", "train_batch_size", "micro_train_batch_size", "log_dir", "plot_every", "max_skips",
)  # fmt: skip


def lengths(cfg: Config, window: int | None) -> list[int]:
    """The lengths of rows: 64, 128 and so on, up to the longest. ValueError without an end."""
    longest = cfg.longest or window
    if longest is None:
        raise ValueError(f"longest: expected a number of tokens, as {cfg.model} names no window, got None")
    if window is not None and longest > window:
        raise ValueError(f"longest: expected at most the model's window, {window}, got {longest}")
    if longest < 8:
        raise ValueError(f"longest: expected at least 8 tokens, got {longest}")
    sizes = [64 << i for i in range(40) if 64 << i < longest]
    return [*sizes, longest]


def words(model: str) -> list[int]:
    """The words that rows are made of: all but the special ones."""
    tokenizer = rft.model.load_tokenizer(model)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    most = read_vocabulary(model) or len(tokenizer)
    return [i for i in range(min(most, len(tokenizer))) if i not in special]


def shown(title: str, found: Sequence[rft.collect.Depth], limit: float) -> str:
    """A table of the gap at each depth."""
    lines = [f"{title}, nats per token", "  positions             tokens      mean       p99       max"]
    for x in found:
        mark = "" if x.mean <= limit else f"  above {limit:.2g}"
        places = f"{x.first:,} to {x.last:,}"
        lines.append(f"  {places:<20}{x.tokens:>8,}  {x.mean:>8.2g}  {x.p99:>8.2g}  {x.max:>8.2g}{mark}")
    return "\n".join(lines)


def main(cfg: Config) -> None:
    rft.run.without(cfg.strategy, *UNREAD)
    model = rft.run.last_model(cfg.model)
    sizes = lengths(cfg, rft.model.read_window(model))
    known = words(model)
    st = rft.strategy.get_strategy(cfg.strategy)
    apply, params = st.bind(rft.model.load(model), sampling=rft.Sampling())
    eng = rft.engine.get_engine(rft.engine.config_of(cfg.strategy), model)
    types = [x.dtype for x in rft.tree.leaves(params)]
    types += [x for x in (eng.status().get("computes"),) if x is not None]
    limit = cfg.max_gap or precision.gap_by_rounding(types)

    # rows of one length at a time; what is sampled went through the cache, what is scored did not
    sampled, scored = [], []
    for i, size in enumerate(rft.run.track(sizes, "lengths", rank=st.rank)):
        new = max(min(cfg.new, size // 2), 1)
        prompts = rft.collect.random_prompts(known, [size - new] * cfg.rows, rft.rng.fold_in(cfg.seed, i))
        drawn, given = rft.collect.gaps_of(eng, st, apply, params, prompts, new=new, seed=i)
        sampled.append(drawn)
        scored += [] if given is None else [given]

    bad = []
    for title, parts in (("sampled tokens", sampled), ("scored tokens", scored)):
        found = rft.collect.depths(*parts) if parts else []
        bad += [(title, x) for x in found if not x.mean <= limit]
        if st.rank == 0 and found:
            print(shown(title, found, limit))
    if st.rank == 0 and not scored:
        print("scored tokens: the engine scores none")
    if st.rank == 0:
        print(verdict(bad, limit))
    st.close()
    if bad:
        sys.exit(1)


def verdict(bad: Sequence[tuple[str, rft.collect.Depth]], limit: float) -> str:
    """One line: whether engine and trainer agree, or from where on they do not."""
    if not bad:
        return f"engine and trainer agree at every depth: the mean gap is at most {limit:.2g} nats per token"
    title, x = min(bad, key=lambda found: found[1].first)
    return (
        f"engine and trainer differ first at positions {x.first:,} to {x.last:,}: by {x.mean:.2g} nats per "
        f"token in {title}, above the limit of {limit:.2g}"
    )


if __name__ == "__main__":
    rft.run.cli(main, Config)
