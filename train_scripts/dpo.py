"""Learning from preference pairs: pairs, reference log-probs, packs, loss, gradients, update.

    python train_scripts/dpo.py --model runs/sft/model --data pairs.jsonl
    python train_scripts/dpo.py --model MODEL --data chats.jsonl --messages prompt chosen rejected

A row has the columns prompt, chosen and rejected; without --data the pairs are those of a built-in task.
Run the same command again to resume from the last checkpoint, to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Filled, Free, Positive, Range, Whole
from rft_fn.run import options


@dataclass(frozen=True)
class Config(
    options.Recorded,
    options.HeldOut,
    options.Optimizer,
    options.Examples,
    options.Policy,
    options.Data,
    options.Model,
):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # the pairs
    template: str = "{prompt}"  # the prompt; {NAME} stands for a column; "": what both responses begin with
    chosen: str = "{chosen}"  # the better response; {NAME} stands for a column of the row
    rejected: str = "{rejected}"  # the worse response; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages: prompt chosen rejected, or the last two alone
    max_length: Count = 512  # most tokens in a prompt with one response; longer pairs of a file are left out
    eval_pairs: Count = 256  # pairs of an evaluation; all of a file that has fewer

    # the loss
    loss: Literal["dpo", "cdpo", "ipo"] = "dpo"  # of a pair
    beta: Positive = 0.1  # hold on the reference: the reward is beta log(policy / reference)
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0  # cdpo: the share of wrong labels
    nll: AtLeast0 = 0.0  # coefficient of the chosen side's negative log-prob, a mean over its tokens (RPO)

    # other defaults than those of the subjects
    model: Filled = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name; the reference too
    budget: Free[Count] = 1024  # most tokens in a pack, which goes through the model at once; a pair must fit
    steps: Count | None = None  # updates; None is 100
    epochs: Positive | None = None  # passes over the pairs of data, in place of steps; not for tasks
    batch: Count = 64  # pairs per step
    lr: Positive = 3e-4  # learning rate
    warmup: Whole = 10  # steps of linear warm-up
    eval_every: Free[Count] = 20  # steps between evaluations
    out: Free[Filled] = "runs/dpo"  # folder of the run; the model goes to its subfolder model


def check(cfg: Config) -> None:
    """Raise ValueError for options that do not go together."""
    # packs and batches hold whole pairs
    rft.run.without(cfg.strategy, "train_batch_size", instead="use --batch, which counts pairs")
    if cfg.strategy.micro_train_batch_size == 1:
        raise ValueError("micro_train_batch_size: expected 0 or at least 2, a pair shares a pack, got 1")

    # an option that the loss or the kind of data does not read
    if (cfg.loss == "cdpo") != (cfg.label_smoothing > 0):
        raise ValueError(
            "label_smoothing: expected above 0 with --loss cdpo, and 0 with others, got "
            f"{cfg.label_smoothing} with {cfg.loss}"
        )
    if cfg.messages:
        texts = ("template", "chosen", "rejected")
        rft.run.without(cfg, *texts, prefix="", instead="--messages takes its place")
    if not cfg.template and cfg.system is not None:
        raise ValueError("system: expected none with an empty template: the texts hold their own turns")


def load(cfg: Config, st: rft.Strategy) -> rft.run.Task:
    """Load the pairs to train on, and the unseen ones to evaluate on."""
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    dataset, unseen = rft.run.load_data(
        cfg,
        st,
        tokenizer,
        processing,
        kind=rft.data.PAIRS,
        chosen=cfg.chosen,
        rejected=cfg.rejected,
        max_length=cfg.max_length,
        max_tokens=cfg.budget,
        window=rft.model.read_window(cfg.model),
    )
    return rft.run.Task(tokenizer, dataset, unseen, None, processing)


def experience(pairs: Sequence[rft.data.Pair]) -> rft.Experience:
    """Return pairs as rows 2i, chosen, and 2i + 1, rejected; w is the mean over pairs."""
    exp = rft.packing.conversations([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return rft.tree.replace(exp, w=rft.weight.pair_mean(exp.mask))


def pair_loss(cfg: Config, sides: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Return the loss [P] of each pair.

    `sides` are log-probs [P]: chosen, rejected, and the reference's of both. `tokens` [P] are the chosen's.
    """
    table = {
        "dpo": partial(rft.loss.dpo, beta=cfg.beta),
        "cdpo": partial(rft.loss.dpo, beta=cfg.beta, label_smoothing=cfg.label_smoothing),
        "ipo": partial(rft.loss.ipo, beta=cfg.beta),
    }
    loss = table[cfg.loss](*sides)
    if cfg.nll:
        loss = loss + cfg.nll * rft.loss.nll(sides[0] / tokens.clamp(min=1))
    return loss


def policy_loss(cfg: Config, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the loss of a pair at each of its tokens [T]; w makes the mean over pairs."""
    sides = *rft.packing.sides(out.logp, b), *rft.packing.sides(b.ref_logp, b)
    tokens, _ = rft.packing.sides(b.mask.float(), b)
    metrics = rft.metric.pairs("pairs", *sides, rft.packing.real(b), beta=cfg.beta)
    metrics["policy/ref_gap"] = rft.metric.mean((out.logp - b.ref_logp).abs(), b.mask)
    loss = pair_loss(cfg, sides, tokens)[b.seq // 2]
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss, metrics


def evaluation(cfg: Config, held_out: rft.Experience, logp: Tensor, ref_logp: Tensor) -> dict[str, float]:
    """Return the loss and the metrics of unseen pairs, by the log-probs [B, S] of both models."""
    sides = *logp.sum(-1).view(-1, 2).T, *ref_logp.sum(-1).view(-1, 2).T
    every = torch.ones(len(logp) // 2, dtype=torch.bool)
    loss = pair_loss(cfg, sides, held_out.mask[::2].sum(-1))
    metrics = rft.metric.pairs("eval", *sides, every, beta=cfg.beta)
    return rft.metric.results(metrics | {"eval/loss": rft.metric.mean(loss, every)})


def main(cfg: Config) -> None:
    check(cfg)
    env = rft.run.setup(cfg, usual=100, load=load, batch=cfg.batch, what="pairs", anchor=True, sampled=False)
    cfg, st, task = env.cfg, env.st, env.task
    loss_fn = partial(policy_loss, cfg)
    tokens = env.tokens(loss_fn, group=2, unit=2, names=("chosen", "rejected"))
    state, loop = env.restore(env.policy.state, {"step": 0})

    # the pairs of the evaluations, whose reference log-probs never change
    pairs, _ = rft.data.take(task.unseen, cfg.eval_pairs, cfg.seed)
    held_out = experience(pairs)
    held_out_ref = env.reference_logp(state, held_out, unit=2)

    def evaluate(state: rft.TrainState) -> dict[str, float]:
        """Return the loss and the metrics of unseen pairs."""
        with env.phase("evaluate"):
            logp = st.score(env.apply, state.params, held_out, cfg.budget, unit=2).logp
        return evaluation(cfg, held_out, logp, held_out_ref)

    for step in range(loop["step"], env.steps):
        values = evaluate(state) if step == 0 else {}

        # collect: pairs, and how probable the reference finds both sides
        pairs, _ = rft.data.draw(task.dataset, cfg.batch, step, cfg.seed)
        exp = experience(pairs)
        exp = rft.tree.replace(exp, ref_logp=env.reference_logp(state, exp, unit=2))

        # learn, and note what that does to single tokens
        tokens.before(step, state.params, exp)
        with env.phase("train"):
            packs = st.shard(exp, cfg.budget, unit=2)
            rate = env.policy.schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, env.apply, loss_fn, packs)
            state, more = st.update(state, grads)
        tokens.after(step, state.params, exp)

        # report, save, and stop where a signal asked for it
        values |= rft.metric.results(metrics | more) | {"lr": rate}
        if env.evaluates(step + 1):
            values |= evaluate(state)
        env.run.write(step, values, tokens=int(exp.length.sum()))
        env.checkpoint(state, {"step": step + 1})
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
