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
    """ValueError for options that do not go together."""
    # packs and batches hold whole pairs
    rft.check.at_most_one(steps=cfg.steps, epochs=cfg.epochs)
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


def load_pairs(
    cfg: Config, st: rft.Strategy, tokenizer, processing
) -> tuple[rft.data.Dataset, rft.data.Dataset]:
    """(the pairs to train on, the unseen ones to evaluate on)."""
    how = {"chosen": cfg.chosen, "rejected": cfg.rejected, "kind": rft.data.PAIRS}
    how |= {"max_length": cfg.max_length, "max_tokens": cfg.budget}
    how["window"] = rft.model.read_window(cfg.model)
    return rft.run.load_data(cfg, st, tokenizer, processing, **how)


def experience(pairs: Sequence[rft.data.Pair]) -> rft.Experience:
    """Pairs as rows 2i, chosen, and 2i + 1, rejected; w is the mean over pairs."""
    exp = rft.packing.conversations([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return rft.tree.replace(exp, w=rft.weight.pair_mean(exp.mask))


def pair_loss(cfg: Config, sides: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The loss [P] of each pair.

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
    """The loss of a pair at each of its tokens [T]; w makes the mean over pairs."""
    sides = *rft.packing.sides(out.logp, b), *rft.packing.sides(b.ref_logp, b)
    tokens, _ = rft.packing.sides(b.mask.float(), b)
    metrics = rft.metric.pairs("pairs", *sides, rft.packing.real(b), beta=cfg.beta)
    metrics["policy/ref_gap"] = rft.metric.mean((out.logp - b.ref_logp).abs(), b.mask)
    loss = pair_loss(cfg, sides, tokens)[b.seq // 2]
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss, metrics


# The whole run is one function, as long as it is, so that it is read in the order in which it happens: setup,
# then collect, learn and report in every step.
def main(cfg: Config) -> None:
    # ---- setup: processes, pairs and folder; mistakes in them are found before a model is loaded
    check(cfg)
    st = rft.run.start(cfg, unread=options.ENGINE)
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    dataset, unseen = load_pairs(cfg, st, tokenizer, processing)
    cfg = rft.run.plan_steps(cfg, st, dataset, unseen, batch=cfg.batch, usual=100, what="pairs")
    free = rft.run.free_options(cfg, "steps", "epochs")
    used = {"data": dataset, "eval_data": unseen}
    run = rft.run.open_folder(cfg, st, free=free, datasets=used, tokenizer=tokenizer)

    # ---- setup: the policy and its optimizer, the reference, and where the last checkpoint left them
    module = rft.run.load_policy(cfg, st)
    tx, schedule = rft.run.optimizer(cfg, cfg.lr, updates=cfg.steps, warmup=cfg.warmup)
    rft.run.print_preflight(cfg, st, (module, tx), initial=True, engine=False)
    apply, state = st.init(module, tx, aux=cfg.router_aux > 0)
    score_initial = rft.run.initial_scorer(cfg, st, module, apply)
    state, _ = rft.run.restore_latest(st, run, state)
    run.resume(state.step)
    loss_fn = partial(policy_loss, cfg)
    how = {"every": cfg.tokens_every, "group": 2, "unit": 2, "budget": cfg.budget}
    sides = "chosen", "rejected"
    tokens = rft.run.TokenLog(st, run, apply, loss_fn, tokenizer, **how, names=sides)

    def scored(exp, score):
        """Log-probs [B, S], the same on every rank."""
        packs = st.shard(exp, cfg.budget, unit=2)
        return rft.run.gather_rows(st, score(state.params, packs), packs, exp.old_logp)

    # ---- setup: the pairs of the evaluations, whose reference log-probs never change
    pairs, _ = rft.data.take(unseen, cfg.eval_pairs, cfg.seed)
    held_out = experience(pairs)
    held_out_ref = scored(held_out, score_initial).sum(-1).view(-1, 2)

    def evaluate():
        """The loss and the metrics of unseen pairs."""
        with run.phase("evaluate"):
            logp = scored(held_out, partial(rft.model.score, apply)).sum(-1).view(-1, 2)
        sides = *logp.T, *held_out_ref.T
        tokens = held_out.mask[::2].sum(-1)
        every = torch.ones(len(logp), dtype=torch.bool)
        metrics = rft.metric.pairs("eval", *sides, every, beta=cfg.beta)
        metrics["eval/loss"] = rft.metric.mean(pair_loss(cfg, sides, tokens), every)
        return rft.metric.results(metrics)

    for step in range(state.step, cfg.steps):
        values = {}
        if step == 0:
            values |= evaluate()

        # ---- collect: pairs, and how probable the reference finds both sides
        pairs, _ = rft.data.draw(dataset, cfg.batch, step, cfg.seed)
        exp = experience(pairs)
        with run.phase("score"):
            exp = rft.tree.replace(exp, ref_logp=scored(exp, score_initial))

        # ---- learn, and note what that does to single tokens
        tokens.before(step, state.params, exp)
        with run.phase("train"):
            packs = st.shard(exp, cfg.budget, unit=2)
            rate = schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, apply, loss_fn, packs)
            state, more = st.update(state, grads)
        tokens.after(step, state.params, exp)

        # ---- report, save, and stop where a signal asked for it
        values |= rft.metric.results(metrics | more) | {"lr": rate}
        if state.step == cfg.steps or state.step % cfg.eval_every == 0:
            values |= evaluate()
        run.write(step, values, tokens=int(exp.length.sum()))
        rft.run.checkpoint(cfg, st, run, state.step, state)

    # ---- the model that came out
    saved = rft.run.with_processor(tokenizer, processing)
    st.save_pretrained(run.folder / "model", module, saved, st.export(state), merge=cfg.lora_merge)
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
