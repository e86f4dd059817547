"""Learning from preferences: responses, reference log-probs, packs, loss, gradients, update.

    python train_scripts/dpo.py --model runs/sft/model --data pairs.jsonl
    python train_scripts/dpo.py --model MODEL --data chats.jsonl --messages prompt chosen rejected
    python train_scripts/dpo.py --model MODEL --data rated.jsonl --unpaired --loss kto

A row has the columns prompt, chosen and rejected; with --unpaired it has prompt, completion and label.
Without --data the rows are those of a built-in task. `--loss` is a row of rft_fn.loss.PREFERENCES.
Run the same command again to resume from the last checkpoint, to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.limits import AutoCount, Count, Filled, Free, Positive, Warmup
from rft_fn.run import preferences


@dataclass(frozen=True)
class Config(preferences.Preferences):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # other defaults than those of the subjects
    model: Filled = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name; the reference too
    budget: Free[AutoCount] = 1024  # most tokens in a pack, auto: by the forecast of memory; a pair must fit
    steps: Count | None = None  # updates; None is 100
    epochs: Positive | None = None  # passes over the pairs of data, in place of steps; not for tasks
    batch: Count = 64  # pairs per step
    lr: Positive = 3e-4  # learning rate
    warmup: Warmup = 10  # steps of linear warm-up; below 1 a share of the run
    eval_every: Free[Count] = 20  # steps between evaluations
    out: Free[Filled] = "runs/dpo"  # folder of the run; the model goes to its subfolder model


def load(cfg: Config, st: rft.Strategy) -> rft.run.Task:
    """Load the rows to train on, and the unseen ones to evaluate on."""
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    read = partial(
        rft.run.load_data,
        cfg,
        st,
        tokenizer,
        processing,
        max_length=cfg.max_length,
        max_tokens=cfg.budget,
        window=rft.model.read_window(cfg.model),
    )
    if cfg.unpaired:
        found = read(kind=rft.data.POINTS, completion=cfg.completion, labels=(cfg.label,), shares=True)
    else:
        found = read(kind=rft.data.PAIRS, chosen=cfg.chosen, rejected=cfg.rejected)
    return rft.run.Task(tokenizer, *found, None, processing)


def pair_loss(cfg: Config) -> Callable[..., Tensor]:
    """Return the loss with the options that it reads."""
    loss = partial(cfg.row.loss, beta=cfg.beta)
    if cfg.label_smoothing:
        loss = partial(loss, label_smoothing=cfg.label_smoothing)
    if cfg.loss == "simpo":
        loss = partial(loss, margin=cfg.margin)
    if cfg.loss == "kto":
        loss = partial(loss, desirable_weight=cfg.desirable_weight, undesirable_weight=cfg.undesirable_weight)
    return loss


def of_responses(cfg: Config, x: Tensor, b: rft.Packed) -> Tensor:
    """Return the log-prob of each response [K], from log-probs [T] of tokens: a sum, or a mean."""
    factor = torch.ones_like(x)
    if cfg.ld_alpha < 1:
        factor = rft.loss.length_desensitized(b.mask, b.seq, b.num_seqs, alpha=cfg.ld_alpha)
    reduce = rft.segment.mean if cfg.average or cfg.row.mean else rft.segment.sum
    return reduce(factor * x, b.mask, b.seq, b.num_seqs)


def measured(cfg: Config, name: str, logp: Tensor, ref_logp: Tensor, real: Tensor, b: rft.Packed) -> dict:
    """Return the metrics of pairs or of labelled responses, from log-probs [K]."""
    if not cfg.unpaired:
        sides = *logp.view(-1, 2).T, *ref_logp.view(-1, 2).T
        return rft.metric.pairs(name, *sides, real, beta=cfg.beta)
    labels = rft.loss.Labels.of_pack(b)
    baseline = (1.0 if cfg.loss == "bco" else cfg.beta) * labels.baseline
    rows = (logp, ref_logp, labels.desirable)
    return rft.metric.labelled(name, *rows, real, beta=cfg.beta, baseline=baseline)


def losses(cfg: Config, name: str, logp: Tensor, real: Tensor, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the loss of each pair or single response, from log-probs [T] of tokens, and metrics."""
    logp = of_responses(cfg, logp, b)
    ref_logp = of_responses(cfg, b.ref_logp, b) if cfg.row.reference else torch.zeros_like(logp)
    loss = cfg.row.of_pack(pair_loss(cfg), logp, ref_logp, b)
    if cfg.nll:
        tokens = rft.segment.sum(b.mask.to(logp.dtype), b.mask, b.seq, b.num_seqs)[::2].clamp(min=1)
        chosen = logp[::2]
        loss = loss + cfg.nll * rft.loss.nll(chosen if cfg.average or cfg.row.mean else chosen / tokens)
    return loss, measured(cfg, name, logp, ref_logp, real, b)


def policy_loss(cfg: Config, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the loss of a pair, or of a response, at each of its tokens [T]; w makes the mean."""
    name = "responses" if cfg.unpaired else "pairs"
    loss, metrics = losses(cfg, name, out.logp, rft.packing.real(b), b)
    loss = loss[b.seq if cfg.row.single else b.seq // 2]
    if cfg.row.reference:
        metrics["policy/ref_gap"] = rft.metric.mean((out.logp - b.ref_logp).abs(), b.mask)
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss, metrics


def evaluation(cfg: Config, held_out: rft.Experience, logp: Tensor) -> dict[str, float]:
    """Return the loss and the metrics of unseen rows, by the policy's log-probs [B, S]."""
    exp = rft.tree.replace(held_out, old_logp=logp, media=None)
    b = rft.packing.pack(exp, range(len(exp.mask)), unit=cfg.unit)
    loss, metrics = losses(cfg, "eval", b.old_logp, rft.packing.real(b), b)
    metrics["eval/loss"] = rft.metric.mean(loss, torch.ones_like(loss, dtype=torch.bool))
    return preferences.with_margin(rft.metric.results(metrics))


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0
    shift: float = 0.0  # of the rewards, which only bco reads
    middles: int = -1  # batches that the shift is the mean of; -1: all of them


def main(cfg: Config) -> None:
    preferences.check_options(cfg)
    what = "responses" if cfg.unpaired else "pairs"
    env = rft.run.setup(
        cfg, usual=100, load=load, batch=cfg.batch, what=what, anchor=cfg.row.reference, sampled=False
    )
    cfg, st, task = env.cfg, env.st, env.task
    loss_fn = partial(policy_loss, cfg)
    names = () if cfg.unpaired else ("chosen", "rejected")
    tokens = rft.run.token_log(env, loss_fn, group=cfg.unit, unit=cfg.unit, names=names)
    state, loop = env.restore(env.policy.state, Loop())
    shift = loop.shift
    middles = loop.step if loop.middles < 0 else loop.middles

    # the rows of the evaluations, whose reference log-probs change only with the reference
    unseen, _ = rft.data.take(task.unseen, cfg.eval_pairs, cfg.seed)
    held_out = preferences.with_reference(cfg, env, state, unseen, shift)

    def evaluate(state: rft.TrainState, shift: float) -> dict[str, float]:
        """Return the loss and the metrics of unseen rows."""
        batch = preferences.with_reference(cfg, env, state, unseen, shift) if cfg.row.single else held_out
        with env.phase("evaluate"):
            logp = st.score(env.policy.apply, state.params, batch, cfg.budget, unit=cfg.unit).logp
        return evaluation(cfg, batch, logp)

    for step in range(loop.step, cfg.steps):
        values = evaluate(state, shift) if step == 0 else {}

        # collect: responses, and how probable the reference finds them
        items, _ = rft.data.draw(task.dataset, cfg.batch, step, cfg.seed)
        exp = preferences.with_reference(cfg, env, state, items, shift)

        # learn, and note what that does to single tokens
        tokens.before(step, state.params, exp)
        with env.phase("train"):
            packs = st.shard(exp, cfg.budget, unit=cfg.unit, halves=cfg.halves(step))
            rate = env.policy.schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, env.policy.apply, loss_fn, packs)
            state, more = st.update(state, grads)
        tokens.after(step, state.params, exp)

        # report, save, and stop where a signal asked for it
        values |= preferences.with_margin(rft.metric.results(metrics | more)) | {"lr": rate}
        shift = preferences.rewards_mean(cfg, shift, values, middles)
        middles += f"{what}/margin" in values  # a batch of one kind has none
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= evaluate(state, shift)
        env.run.write(step, values, tokens=int(exp.length.sum()))
        if cfg.ref_every and (step + 1) % cfg.ref_every == 0:  # the reference follows, TR-DPO
            rft.model.assign(env.reference.params, st.export(state), share=cfg.ref_mix)
            held_out = preferences.with_reference(cfg, env, state, unseen, shift)
        loop = Loop(step=step + 1, shift=shift, middles=middles)
        env.checkpoint(state, loop)
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
