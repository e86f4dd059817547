"""Supervised fine-tuning, whole: examples, packs, loss, gradients, update. The warm-up before GRPO.

    python train_scripts/sft.py --model smollm2-135m --data addition:2 \\
        --template '{question} Put the answer in \\boxed{{}}.' --response '\\boxed{{{answer}}}'
    python train_scripts/sft.py --model MODEL --data chats.jsonl --messages messages --max-prompt 2048

The same command again resumes from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Decay, Free, Positive, Seed, Share, Whole


@dataclass(frozen=True)
class Config:
    """A resumed run may change the options that change no result; for others it needs --override."""

    model: str = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name
    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{short}"  # the question; {NAME} stands for a column of the row
    response: str = "{answer}"  # what the model learns to say; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages to learn from, in place of template and response
    loss_on: Literal["all", "last"] = "all"  # the assistant's turns that are learned, of the last column
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is given, as enable_thinking=False
    system: str | None = None  # the system prompt; an empty one removes that of the chat template
    max_prompt: Count = 512  # most tokens in a prompt; longer prompts of a file are left out
    lora_rank: Whole = 0  # rank of low-rank adapters, the only weights that are trained; 0 trains all weights
    lora_alpha: Positive = 64.0  # adapters are scaled by this / lora_rank
    lora_targets: str = "auto"  # layers with adapters: auto, all-linear, or names separated by commas
    lora_merge: Free[bool] = True  # save the whole model, adapters merged; if not, the adapters alone
    quantize: Literal["", "int8", "nf4"] = ""  # precision of the frozen base under adapters; empty: its own

    steps: Count | None = None  # updates; None is 30
    epochs: Positive | None = None  # passes over the rows of data, in place of steps; not for tasks
    batch: Count = 64  # examples per step, unless strategy.train_batch_size says how many
    lr: Positive = 1e-3  # learning rate
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # decay; constant ignores lr_end
    lr_end: Share = 1.0  # final learning rate as a share of lr; 1 lets you add steps later
    warmup: Whole = 5  # steps of linear warm-up
    beta1: Decay = 0.9  # decay of AdamW's first moment
    beta2: Decay = 0.999  # decay of AdamW's second moment
    weight_decay: AtLeast0 = 0.0  # AdamW's weight decay, of matrices only
    router_aux: AtLeast0 = 0.0  # coefficient of the balance of experts, of a mixture of experts
    max_norm: Positive = 1.0  # gradients are clipped to this global norm
    budget: Free[Count] = 1024  # most tokens in a pack, which goes through the model at once
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory

    seed: Seed = 0  # seed of everything random
    out: Free[str] = "runs/sft"  # folder of the run; the model goes to its subfolder model
    override: Free[bool] = False  # resume with changed options; overrides.jsonl in the folder lists them
    save_every: Free[Count] = 10  # steps between checkpoints
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


def optimizer(cfg: Config):
    """(the optimizer, its learning rate as a function of the updates done)."""
    decay = rft.optim.warmup_cosine if cfg.schedule == "cosine" else rft.optim.warmup_linear
    end = 1.0 if cfg.schedule == "constant" else cfg.lr_end
    schedule = decay(cfg.lr, cfg.warmup, max(cfg.steps, cfg.warmup), floor=end)
    adamw = rft.optim.adamw(schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay)
    return rft.optim.chain(rft.optim.clip_by_global_norm(cfg.max_norm), adamw), schedule


def check(cfg: Config) -> None:
    """ValueError for options that this script does not read, or not together."""
    rft.check.at_most_one(steps=cfg.steps, epochs=cfg.epochs)
    rft.run.without(cfg.strategy, *UNREAD)
    rft.run.without(cfg.strategy, "max_norm", instead="use --max-norm")
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    if cfg.messages:
        rft.run.without(cfg, "template", "response", prefix="", instead="--messages takes its place")
    else:
        rft.run.without(cfg, "loss_on", prefix="", instead="it is for --messages")


# The whole run is one function, so that it is read from top to bottom in the order in which it happens.
def main(cfg: Config) -> None:
    # ---- where it runs
    check(cfg)
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)

    # ---- data; what is wrong with it is found before a model is loaded
    tokenizer = rft.model.load_tokenizer(cfg.model)
    learn = {"response": cfg.response, "messages": cfg.messages, "loss_on": cfg.loss_on}
    learn["chat_template_kwargs"] = rft.data.literals(cfg.chat_template_kwargs)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, max_tokens=cfg.budget, **options, **learn)
    rft.strategy.check_data(st, dataset)
    batch = cfg.strategy.train_batch_size or cfg.batch
    steps = rft.data.decide_steps(dataset, batch, steps=cfg.steps, epochs=cfg.epochs, usual=30)
    cfg = replace(cfg, steps=steps)
    st.print(rft.data.plan(dataset, cfg.steps, batch))

    # ---- the folder of the run, which refuses other options than those of the steps that it holds
    extendable = cfg.lr_end == 1 or cfg.schedule == "constant"  # then no rate depends on the steps
    free = ("steps", "epochs") if extendable else ()
    run = rft.run.Run(
        cfg.out,
        cfg,
        total=cfg.steps,
        rank=st.rank,
        session=st.session,
        trackers=cfg.trackers,
        project=cfg.project,
        name=cfg.run_name,
        free=free,
        override=cfg.override,
        **st.config.pictures(),
    )

    # ---- the model and its optimizer, and where the last checkpoint left them
    how = {"gradient_checkpointing": cfg.gradient_checkpointing, "quantize": cfg.quantize}
    module = rft.model.load(cfg.model, meta=st.world > 1, **how)
    if cfg.lora_rank:
        module = rft.model.apply_lora_configuration(
            module, cfg.lora_rank, cfg.lora_alpha, target_modules=cfg.lora_targets, seed=cfg.seed
        )
    tx, schedule = optimizer(cfg)
    st.print(rft.strategy.preflight(st, (module, tx), budget=cfg.budget, engine=False))
    apply, state = st.init(module, tx, aux=cfg.router_aux > 0)
    if saved := rft.ckpt.latest(run.checkpoints):
        state, _ = st.restore(saved, state)
    run.resume(state.step)

    def loss_fn(out, b):
        loss = rft.loss.nll(out.logp)
        if not cfg.router_aux:
            return loss
        return loss + cfg.router_aux * out.aux, rft.metric.router(out, b)

    for step in range(state.step, cfg.steps):
        # ---- examples: a question and its answer, or a conversation of which some turns are learned
        prompts, _ = rft.data.draw(dataset, batch, step, cfg.seed)
        lessons = [x for p in prompts for x in rft.data.lessons(p, tokenizer, **learn)]
        exp = rft.packing.conversations(lessons)

        # ---- learn
        with run.phase("train"):
            packs = st.shard(exp, cfg.budget)
            rate = schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, apply, loss_fn, packs)
            state, more = st.update(state, grads)
        values = rft.metric.results(metrics | more) | {"lr": rate}
        run.write(step, values, tokens=int(exp.length.sum()))

        # ---- save, and stop where a signal asked for it
        done = state.step == cfg.steps
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
