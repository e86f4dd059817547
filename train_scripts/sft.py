"""Supervised fine-tuning, whole: examples, packs, loss, gradients, update. The warm-up before GRPO.

    python train_scripts/sft.py --model smollm2-135m --data addition:2 \\
        --template '{question} Put the answer in \\boxed{{}}.' --response '\\boxed{{{answer}}}'

The same command again goes on from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field

import rft_fn as rft
from rft_fn.check import Count, Free, Positive, Share, Whole


@dataclass(frozen=True)
class Config:
    model: str = "tiny"  # tiny, tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name
    data: str = "sort_digits:1"  # a task as TASK:LEVEL, a .jsonl / .parquet / .csv file, or a hub name
    template: str = "{short}"  # the question, from the columns of a row
    response: str = "{answer}"  # what the model learns to say, from the columns of a row
    system: str | None = None  # the system prompt; an empty one leaves out the template's own
    steps: Count = 30  # updates
    batch: Count = 64  # examples a step
    lr: Positive = 1e-3  # learning rate
    lr_end: Share = 1.0  # its share at the last step; a run can be given more steps only if this is 1
    warmup: Whole = 5  # steps of linear warm-up before it
    max_norm: Positive = 1.0  # gradients are clipped to this global norm
    max_prompt: Count = 512  # tokens a prompt; longer ones of a file are left out
    budget: Free[Count] = 1024  # tokens a pack
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory
    save_every: Free[Count] = 10  # steps between checkpoints
    keep: Free[Count] = 1  # newest checkpoints kept
    seed: int = 0  # of the order of examples
    out: Free[str] = "runs/sft"  # folder of the run; the model goes to its subfolder model
    trackers: Free[tuple[str, ...]] = ()  # tensorboard, wandb, trackio
    strategy: rft.strategy.StrategyConfig = field(default_factory=rft.strategy.StrategyConfig)

    __post_init__ = rft.check.fields


def main(cfg: Config) -> None:
    st = rft.strategy.get_strategy(cfg.strategy)
    free = ("steps",) if cfg.lr_end == 1 else ()
    run = rft.run.Run(
        cfg.out, cfg, total=cfg.steps, rank=st.rank, trackers=cfg.trackers, free=free, **st.config.pictures()
    )
    tokenizer = rft.model.load_tokenizer(cfg.model)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, **options)
    rft.data.fill(cfg.response, dataset.prompt(0).columns, cfg.data)  # a missing column is said now

    module = rft.model.load(cfg.model, gradient_checkpointing=cfg.gradient_checkpointing, meta=st.world > 1)
    schedule = rft.optim.warmup_linear(cfg.lr, cfg.warmup, max(cfg.steps, cfg.warmup), floor=cfg.lr_end)
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(cfg.max_norm), rft.optim.adamw(schedule))
    st.print(rft.strategy.preflight(st, (module, tx), budget=cfg.budget, engine=False))
    apply, state = st.init(module, tx)
    if saved := rft.ckpt.latest(run.checkpoints):
        state, _ = st.restore(saved, state)
    run.resume(state.step)

    batch = cfg.strategy.train_batch_size or cfg.batch

    def loss_fn(out, b):
        return rft.loss.nll(out.logp)

    for step in range(state.step, cfg.steps):
        prompts, _ = rft.data.draw(dataset, batch, step, cfg.seed)
        answers = [rft.data.fill(cfg.response, p.columns, cfg.data) for p in prompts]
        ids = [[*tokenizer.encode(a, add_special_tokens=False), tokenizer.eos_token_id] for a in answers]
        exp = rft.packing.supervised([(p.ids, a) for p, a in zip(prompts, ids)])
        packs = st.shard(exp, cfg.budget)
        grads, metrics = st.grad(state, apply, loss_fn, packs)
        state, more = st.update(state, grads)
        run.write(step, rft.metric.results(metrics | more), tokens=int(exp.length.sum()))
        if state.step % cfg.save_every == 0 or state.step == cfg.steps:
            st.save(run.checkpoints / f"step_{state.step:08d}", state, wait=state.step == cfg.steps)
            rft.ckpt.rotate(run.checkpoints, keep=cfg.keep)
    st.save_pretrained(run.folder / "model", module, tokenizer, st.export(state))
    run.finish()


if __name__ == "__main__":
    rft.run.cli(main, Config)
