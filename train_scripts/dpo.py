"""Learning from preference pairs, whole: pairs, reference log-probs, packs, loss, gradients, update.

    python train_scripts/dpo.py --model runs/sft/model --data pairs.jsonl
    python train_scripts/dpo.py --model MODEL --data chats.jsonl --messages prompt chosen rejected

A row has the columns prompt, chosen and rejected; without --data the pairs are those of a built-in task.
The same command again resumes from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import torch

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Decay, Free, Positive, Range, Seed, Share, Whole


@dataclass(frozen=True)
class Config:
    model: str = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name; the reference too
    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{prompt}"  # the prompt; {NAME} stands for a column; "": what both responses begin with
    chosen: str = "{chosen}"  # the better response; {NAME} stands for a column of the row
    rejected: str = "{rejected}"  # the worse response; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages: prompt chosen rejected, or the last two alone
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is given, as enable_thinking=False
    system: str | None = None  # the system prompt; an empty one removes that of the chat template
    max_length: Count = 512  # most tokens in a prompt with one response; longer pairs of a file are left out
    lora_rank: Whole = 0  # rank of low-rank adapters, the only weights that are trained; 0 trains all weights
    lora_alpha: Positive = 64.0  # adapters are scaled by this / lora_rank
    lora_targets: str = "auto"  # layers with adapters: auto, all-linear, or names separated by commas
    lora_merge: Free[bool] = True  # save the whole model, adapters merged; if not, the adapters alone
    quantize: Literal["", "int8", "nf4"] = ""  # precision of the frozen base under adapters; empty: its own

    loss: Literal["dpo", "cdpo", "ipo"] = "dpo"  # of a pair
    beta: Positive = 0.1  # hold on the reference: the reward is beta log(policy / reference)
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0  # cdpo: the share of wrong labels
    nll: AtLeast0 = 0.0  # coefficient of the chosen side's negative log-prob, a mean over its tokens (RPO)
    router_aux: AtLeast0 = 0.0  # coefficient of the balance of experts, of a mixture of experts

    steps: Count | None = None  # updates; None is 100
    epochs: Positive | None = None  # passes over the pairs of data, in place of steps; not for tasks
    batch: Count = 64  # pairs per step
    lr: Positive = 3e-4  # learning rate
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # decay; constant ignores lr_end
    lr_end: Share = 0.1  # final learning rate as a share of lr; 1 lets you add steps later
    warmup: Whole = 10  # steps of linear warm-up
    beta1: Decay = 0.9  # decay of AdamW's first moment
    beta2: Decay = 0.999  # decay of AdamW's second moment
    weight_decay: AtLeast0 = 0.0  # AdamW's weight decay, of matrices only
    max_norm: Positive = 1.0  # gradients are clipped to this global norm
    budget: Free[Count] = 1024  # most tokens in a pack, which goes through the model at once; a pair must fit
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory

    eval_data: tuple[str, ...] = ()  # pairs of the evaluation; if empty, a test split, or rows held out
    eval_share: Share = 0.1  # share of the rows that is held out then; 0 evaluates on what is trained on
    eval_every: Free[Count] = 20  # steps between evaluations
    eval_pairs: Count = 256  # pairs of an evaluation; all of a file that has fewer

    seed: Seed = 0  # seed of everything random
    out: Free[str] = "runs/dpo"  # folder of the run; the model goes to its subfolder model
    override: Free[bool] = False  # resume with changed options; overrides.jsonl in the folder lists them
    save_every: Free[Count] = 25  # steps between checkpoints
    keep: Free[Count] = 1  # how many of the newest checkpoints are kept
    max_bytes: Free[Whole] = 0  # bytes that all checkpoints may take; the newest always stays; 0 is no limit
    trackers: Free[tuple[str, ...]] = ()  # any of tensorboard, wandb, trackio
    project: Free[str] = "rft_fn"  # the project's name at the tracker
    run_name: Free[str] = ""  # the run's name at the tracker; if empty, the folder's
    strategy: rft.strategy.StrategyConfig = field(default_factory=rft.strategy.StrategyConfig)

    __post_init__ = rft.check.fields


UNREAD = (
    "engine_type", "engine_batch", "engine_tp_size", "engine_mem_util", "enable_engine_sleep", "plot_every",
)  # fmt: skip


def check(cfg: Config) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, epochs=cfg.epochs)
    rft.run.without(cfg.strategy, *UNREAD)
    rft.run.without(cfg.strategy, "max_norm", instead="use --max-norm")
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    rft.run.without(cfg.strategy, "train_batch_size", instead="use --batch, which counts pairs")
    if cfg.strategy.micro_train_batch_size == 1:
        raise ValueError("micro_train_batch_size: expected 0 or at least 2, a pair shares a pack, got 1")
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


def loss_of_pairs(cfg: Config):
    """(chosen, rejected, ref_chosen, ref_rejected), log-probs [P] each -> loss [P]."""
    table = {
        "dpo": partial(rft.loss.dpo, beta=cfg.beta),
        "cdpo": partial(rft.loss.dpo, beta=cfg.beta, label_smoothing=cfg.label_smoothing),
        "ipo": partial(rft.loss.ipo, beta=cfg.beta),
    }
    return table[cfg.loss]


def optimizer(cfg: Config):
    """(the optimizer, its learning rate as a function of the updates done)."""
    decay = rft.optim.warmup_cosine if cfg.schedule == "cosine" else rft.optim.warmup_linear
    end = 1.0 if cfg.schedule == "constant" else cfg.lr_end
    schedule = decay(cfg.lr, cfg.warmup, max(cfg.steps, cfg.warmup), floor=end)
    adamw = rft.optim.adamw(schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay)
    return rft.optim.chain(rft.optim.clip_by_global_norm(cfg.max_norm), adamw), schedule


def experience(pairs: list[rft.data.Pair]) -> rft.Experience:
    """Pairs as rows 2i, chosen, and 2i + 1, rejected; w is the mean over pairs."""
    exp = rft.packing.conversations([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return rft.tree.replace(exp, w=rft.weight.pair_mean(exp.mask))


# The whole run is one function, so that it is read from top to bottom in the order in which it happens.
def main(cfg: Config) -> None:
    # ---- where it runs
    check(cfg)
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)

    # ---- pairs; what is wrong with them is found before a model is loaded
    tokenizer = rft.model.load_tokenizer(cfg.model)
    options = {"template": cfg.template, "chosen": cfg.chosen, "rejected": cfg.rejected}
    options |= {"system": cfg.system, "max_length": cfg.max_length, "max_tokens": cfg.budget}
    kwargs = rft.data.literals(cfg.chat_template_kwargs)
    options |= {"messages": cfg.messages, "chat_template_kwargs": kwargs, "kind": rft.data.PAIRS}
    options |= {"eval_data": cfg.eval_data, "eval_share": cfg.eval_share}
    dataset, unseen = rft.data.load_for_training(cfg.data, tokenizer, seed=cfg.seed, **options)
    rft.strategy.check_data(st, dataset, unseen)
    steps = rft.data.decide_steps(dataset, cfg.batch, steps=cfg.steps, epochs=cfg.epochs, usual=100)
    cfg = replace(cfg, steps=steps)
    st.print(rft.data.plan(dataset, cfg.steps, cfg.batch, unseen, what="pairs"))

    # ---- the folder of the run, which refuses other options than those of the steps that it holds
    extendable = cfg.lr_end == 1 or cfg.schedule == "constant"  # then no rate depends on the steps
    run = rft.run.Run(
        cfg.out,
        cfg,
        total=cfg.steps,
        rank=st.rank,
        session=st.session,
        trackers=cfg.trackers,
        project=cfg.project,
        name=cfg.run_name,
        free=("steps", "epochs") if extendable else (),
        override=cfg.override,
        **st.config.pictures(),
    )

    # ---- the policy, its optimizer, and the reference: the initial model, or with LoRA the policy without it
    load = partial(rft.model.load, cfg.model, meta=st.world > 1)
    module = load(gradient_checkpointing=cfg.gradient_checkpointing, quantize=cfg.quantize)
    if cfg.lora_rank:
        module = rft.model.apply_lora_configuration(
            module, cfg.lora_rank, cfg.lora_alpha, target_modules=cfg.lora_targets, seed=cfg.seed
        )
    tx, schedule = optimizer(cfg)
    copies = [] if cfg.lora_rank else [(module, None)]
    st.print(rft.strategy.preflight(st, (module, tx), *copies, budget=cfg.budget, engine=False))
    apply, state = st.init(module, tx, aux=cfg.router_aux > 0)
    if cfg.lora_rank:
        plain = rft.model.without_adapters(module, apply)
    else:
        initial = st.bind(load())
    if saved := rft.ckpt.latest(run.checkpoints):
        state, _ = st.restore(saved, state)
    run.resume(state.step)

    def scored(apply, params, exp):
        """Log-probs [B, S], the same on every rank."""
        packs = st.shard(exp, cfg.budget, unit=2)
        mine = rft.packing.unpack(rft.model.score(apply, params, packs), packs, exp.old_logp)
        return st.gather(mine[None]).sum(0)

    def reference(exp):
        """Log-probs [B, S] of the initial model."""
        if cfg.lora_rank:
            return scored(plain, state.params, exp)
        return scored(*initial, exp)

    pair_loss = loss_of_pairs(cfg)

    def objective(sides, tokens):
        """[P]: the loss of each pair, from log-probs of its sides and the tokens of the chosen one."""
        loss = pair_loss(*sides)
        if cfg.nll:
            loss = loss + cfg.nll * rft.loss.nll(sides[0] / tokens.clamp(min=1))
        return loss

    def loss_fn(out, b):
        """The loss of a pair stands on each of its tokens; w makes the mean over pairs."""
        sides = *rft.packing.sides(out.logp, b), *rft.packing.sides(b.ref_logp, b)
        tokens, _ = rft.packing.sides(b.mask.float(), b)
        metrics = rft.metric.pairs("pairs", *sides, rft.packing.real(b), beta=cfg.beta)
        metrics["policy/ref_gap"] = rft.metric.mean((out.logp - b.ref_logp).abs(), b.mask)
        loss = objective(sides, tokens)[b.seq // 2]
        if cfg.router_aux:
            loss = loss + cfg.router_aux * out.aux
            metrics |= rft.metric.router(out, b)
        return loss, metrics

    # the pairs of the evaluations, whose reference log-probs never change
    pairs, _ = rft.data.take(unseen, cfg.eval_pairs, cfg.seed)
    held_out = experience(pairs)
    held_out_ref = reference(held_out).sum(-1).view(-1, 2)

    def evaluate():
        """The loss and the metrics of unseen pairs."""
        with run.phase("evaluate"):
            logp = scored(apply, state.params, held_out).sum(-1).view(-1, 2)
        sides = *logp.T, *held_out_ref.T
        tokens = held_out.mask[::2].sum(-1)
        every = torch.ones(len(logp), dtype=torch.bool)
        metrics = rft.metric.pairs("eval", *sides, every, beta=cfg.beta)
        metrics["eval/loss"] = rft.metric.mean(objective(sides, tokens), every)
        return rft.metric.results(metrics)

    for step in range(state.step, cfg.steps):
        values = evaluate() if step == 0 else {}

        # ---- pairs, and how probable the reference finds both sides
        pairs, _ = rft.data.draw(dataset, cfg.batch, step, cfg.seed)
        exp = experience(pairs)
        with run.phase("score"):
            exp = rft.tree.replace(exp, ref_logp=reference(exp))

        # ---- learn
        with run.phase("train"):
            packs = st.shard(exp, cfg.budget, unit=2)
            rate = schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, apply, loss_fn, packs)
            state, more = st.update(state, grads)
        values |= rft.metric.results(metrics | more) | {"lr": rate}
        done = state.step == cfg.steps
        if done or state.step % cfg.eval_every == 0:
            values |= evaluate()
        run.write(step, values, tokens=int(exp.length.sum()))

        # ---- save, and stop where a signal asked for it
        stop = run.stopping()
        if done or stop or state.step % cfg.save_every == 0:
            with run.phase("save"):
                st.save(run.checkpoints / f"step_{state.step:08d}", state, wait=done or stop)
                st.rotate(run.checkpoints, keep=cfg.keep, max_bytes=cfg.max_bytes or None)
        if stop and not done:
            run.stop(state.step)

    # ---- the model that came out
    st.save_pretrained(run.folder / "model", module, tokenizer, st.export(state), merge=cfg.lora_merge)
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
