"""The parts of a script that trains a reward model: its rows, its heads, and their calibration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rft_fn import data, model, packing, tree
from rft_fn.data import sources
from rft_fn.model.reward_heads import named_heads
from rft_fn.run import options
from rft_fn.run.cli import without
from rft_fn.run.opening import load_data, load_policy
from rft_fn.types import Experience, Packed, Strategy, TokenOut

__all__ = [
    "RewardModelRun",
    "as_one_pack",
    "calibrate",
    "check_labelled",
    "load_labelled",
    "load_reward_model",
]

_READ = {
    "pairs": ("chosen", "rejected", "margin"),
    "lists": ("completions", "ranks", "scores"),
    "points": ("completion",),
    "steps": ("completions", "labels", "separator"),
}
"""Options of `options.Labelled` that a kind of rows reads, and some other does not."""


@dataclass(frozen=True)
class RewardModelRun(
    options.Run,
    options.Labelled,
    options.Optimizer,
    options.Examples,
    options.Heads,
    options.Policy,
    options.Data,
    options.Model,
):
    """A run that trains a reward model."""


def check_labelled(cfg: RewardModelRun) -> None:
    """Raise ValueError for options of the rows and of the heads that do not go together."""
    without(cfg, "router_aux", prefix="", instead="it is for models of log-probs")
    without(cfg, "lora_merge", prefix="", instead="a reward model is saved whole")
    if cfg.heads:
        named_heads(cfg.heads)

    # options that this kind of rows does not read
    reads = _READ[cfg.kind]
    others = {name for names in _READ.values() for name in names}.difference(reads)
    without(cfg, *sorted(others), prefix="", instead=f"--kind {cfg.kind} has no use for it")
    if not any(sources.parse(text).is_task for text in (*cfg.data, *cfg.eval_data)):
        without(cfg, "negatives", prefix="", instead="only built-in tasks make wrong answers")
    if cfg.messages:
        texts = {"chosen", "rejected", "completion"}.intersection(reads)
        without(cfg, "template", *sorted(texts), prefix="", instead="--messages takes its place")
    if not cfg.template and (cfg.kind != "pairs" or cfg.system is not None):
        raise ValueError(
            "template: expected a text; an empty one is for pairs of texts that begin alike, without a "
            "system prompt"
        )

    # a pack holds whole pairs and lists
    most = cfg.strategy.micro_train_batch_size
    if cfg.kind == "pairs" and most == 1:
        raise ValueError("micro_train_batch_size: expected 0 or at least 2, a pair shares a pack, got 1")
    if cfg.kind == "lists" and most:
        raise ValueError(f"micro_train_batch_size: expected 0, a list shares a pack, got {most}")


def load_labelled(
    cfg: RewardModelRun,
    st: Strategy,
    tokenizer: Any,
    processing: data.Processing | None,
    items: data.Kind,
    *,
    shares: bool = False,
) -> tuple[data.Dataset, data.Dataset]:
    """Load (the rows to train on, the unseen ones to evaluate on), the same on every rank.

    `items` is the kind of rows that the options name. With `shares` the labels of points and steps must be in
    [0, 1]. ValueError for rows that cannot be used.
    """
    columns: dict[str, dict[str, Any]] = {
        "pairs": {"preferences": cfg.heads},
        "lists": {},
        "points": {"labels": cfg.heads or ("score",), "shares": shares},
        "steps": {"shares": shares},
    }
    read = {name: getattr(cfg, name) for name in _READ[cfg.kind]}
    return load_data(
        cfg,
        st,
        tokenizer,
        processing,
        kind=items._replace(from_task=partial(items.from_task, negatives=cfg.negatives)),
        max_length=cfg.max_length,
        max_tokens=cfg.budget - 2 if cfg.kind == "pairs" else cfg.budget,  # a pair has two last tokens
        window=model.read_window(cfg.model),
        **(read | columns[cfg.kind]),
    )


def load_reward_model(cfg: RewardModelRun, st: Strategy) -> model.RewardModel:
    """Load the model to train with its heads: new ones, or its own.

    ValueError for other heads than asked for.
    """
    if cfg.lora_rank:
        return model.load_reward(load_policy(cfg, st), new=True, heads=cfg.heads, pool=cfg.pool)
    module = model.load_reward(
        cfg.model,
        new=not cfg.keep_heads,
        heads=cfg.heads,
        pool=cfg.pool,
        freeze=cfg.freeze,
        meta=st.world > 1 or cfg.dry_run,
        gradient_checkpointing=cfg.gradient_checkpointing,
    )
    if len(module.heads) != len(cfg.heads or ("score",)):
        names = " ".join(head.name for head in module.heads)
        raise ValueError(f"heads: expected those of {cfg.model}, --heads {names}, got none")
    return module


def as_one_pack(exp: Experience, unit: Any, score: Tensor) -> tuple[TokenOut, Packed]:
    """Return scores [B, S, H] of a whole batch as the output of one pack that holds all of it.

    So the loss and the metrics of packs serve an evaluation too. `unit` is as in `st.shard`.
    """
    exp = tree.replace(exp, media=None, extra={**(exp.extra or {}), "score": score})
    b = packing.pack(exp, range(len(exp.mask)), unit=unit)
    assert b.extra is not None
    return TokenOut(logp=torch.zeros_like(b.w), score=b.extra["score"]), b


def calibrate(st: Strategy, module: model.RewardModel, find: Callable[[], Sequence[model.Head]]) -> None:
    """Give a model's heads the calibration that `find` makes of held-out rows.

    Rows that show none, such as pairs that the model orders no better than chance, leave the heads unchanged,
    with a line that says so.
    """
    try:
        module.with_calibration(find())
    except ValueError as error:
        st.print(f"calibration: none, so scores stay as they are: {error}")
