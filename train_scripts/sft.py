"""Supervised fine-tuning: examples, packs, loss, gradients, update. The warm-up before GRPO.

    python train_scripts/sft.py --model smollm2-135m --data addition:2 \\
        --template '{question} Put the answer in \\boxed{{}}.' --response '\\boxed{{{answer}}}'
    python train_scripts/sft.py --model MODEL --data chats.jsonl --messages messages --max-prompt 2048

Run the same command again to resume from the last checkpoint, to the bit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import rft_fn as rft
from rft_fn.check import Count, Filled, Free, Share, Whole
from rft_fn.run import options


@dataclass(frozen=True)
class Config(
    options.Recorded,
    options.Optimizer,
    options.Examples,
    options.Policy,
    options.Prompts,
    options.Data,
    options.Model,
):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # what is learned
    response: str = "{answer}"  # what the model learns to say; {NAME} stands for a column of the row
    loss_on: Literal["all", "last"] = "all"  # the assistant's turns that are learned, of the last column

    # other defaults than those of the subjects
    messages: tuple[str, ...] = ()  # columns of messages to learn from, in place of template and response
    steps: Count | None = None  # updates; None is 30
    batch: Count = 64  # examples per step, unless strategy.train_batch_size sets the number
    lr_end: Share = 1.0  # final learning rate as a share of lr; 1 lets you add steps later
    warmup: Whole = 5  # steps of linear warm-up
    save_every: Free[Count] = 10  # steps between checkpoints
    out: Free[Filled] = "runs/sft"  # folder of the run; the model goes to its subfolder model


def check(cfg: Config) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, epochs=cfg.epochs)
    if cfg.messages:
        rft.run.without(cfg, "template", "response", prefix="", instead="--messages takes its place")
    else:
        rft.run.without(cfg, "loss_on", prefix="", instead="it is for --messages")


def nll(cfg: Config, out: rft.TokenOut, b: rft.Packed):
    """The negative log-likelihood [T], with the balance of experts if asked for."""
    loss = rft.loss.nll(out.logp)
    if not cfg.router_aux:
        return loss
    return loss + cfg.router_aux * out.aux, rft.metric.router(out, b)


def main(cfg: Config) -> None:
    # ---- setup: processes, data and folder; mistakes in them are found before a model is loaded
    check(cfg)
    st = rft.run.start(cfg, unread=options.ENGINE)
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    learn = {"response": cfg.response, "messages": cfg.messages, "loss_on": cfg.loss_on}
    learn["chat_template_kwargs"] = rft.data.literals(cfg.chat_template_kwargs)
    how = rft.run.data_options(cfg, processing) | learn
    how |= {"max_prompt": cfg.max_prompt, "max_tokens": cfg.budget}
    how["window"] = rft.model.read_window(cfg.model)
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, **how)
    rft.strategy.check_data(st, dataset)
    batch = cfg.strategy.train_batch_size or cfg.batch
    cfg = rft.run.plan_steps(cfg, st, dataset, batch=batch, usual=30)
    free = rft.run.free_options(cfg, "steps", "epochs")
    run = rft.run.open_folder(cfg, st, free=free, datasets={"data": dataset}, tokenizer=tokenizer)

    # ---- setup: the model and its optimizer, and where the last checkpoint left them
    module = rft.run.load_policy(cfg, st)
    tx, schedule = rft.run.optimizer(cfg, cfg.lr, updates=cfg.steps, warmup=cfg.warmup)
    rft.run.print_preflight(cfg, st, (module, tx), engine=False, dataset=dataset, prompts=batch)
    apply, state = st.init(module, tx, aux=cfg.router_aux > 0)
    state, _ = rft.run.restore_latest(st, run, state)
    run.resume(state.step)
    loss_fn = partial(nll, cfg)
    how = {"every": cfg.tokens_every, "budget": cfg.budget}
    tokens = rft.run.TokenLog(st, run, apply, loss_fn, tokenizer, **how)

    for step in range(state.step, cfg.steps):
        # ---- examples: a question and its answer, or a conversation of which some turns are learned
        prompts, _ = rft.data.draw(dataset, batch, step, cfg.seed)
        lessons = [x for p in prompts for x in rft.data.lessons(p, tokenizer, **learn)]
        exp = rft.packing.conversations(lessons)

        # ---- learn, and note what that does to single tokens
        tokens.before(step, state.params, exp)
        with run.phase("train"):
            packs = st.shard(exp, cfg.budget)
            rate = schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, apply, loss_fn, packs)
            state, more = st.update(state, grads)
        tokens.after(step, state.params, exp)

        # ---- report, save, and stop where a signal asked for it
        values = rft.metric.results(metrics | more) | {"lr": rate}
        run.write(step, values, tokens=int(exp.length.sum()))
        rft.run.checkpoint(cfg, st, run, state.step, state)

    # ---- the model that came out
    saved = rft.run.with_processor(tokenizer, processing)
    st.save_pretrained(run.folder / "model", module, saved, st.export(state), merge=cfg.lora_merge)
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
