"""Supervised fine-tuning: examples, packs, loss, gradients, update. The warm-up before GRPO.

    python train_scripts/sft.py --model smollm2-135m --data addition:2 \\
        --template '{question} Put the answer in \\boxed{{}}.' --response '\\boxed{{{answer}}}'
    python train_scripts/sft.py --model MODEL --data chats.jsonl --messages messages --max-prompt 2048

Run the same command again to resume from the last checkpoint, to the bit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

import rft_fn as rft
from rft_fn.limits import Count, Filled, Free, Share, Warmup
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
    first=("response", "messages"),
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
    warmup: Warmup = 5  # steps of linear warm-up; below 1 a share of the run
    save_every: Free[Count] = 10  # steps between checkpoints
    out: Free[Filled] = "runs/sft"  # folder of the run; the model goes to its subfolder model


def check(cfg: Config) -> None:
    """Raise ValueError for options that do not go together."""
    if cfg.messages:
        rft.run.without(cfg, "template", "response", prefix="", instead="--messages takes its place")
    else:
        rft.run.without(cfg, "loss_on", prefix="", instead="it is for --messages")


def load(cfg: Config, st: rft.Strategy) -> rft.run.Task:
    """Load the examples to learn from."""
    tokenizer = rft.model.load_tokenizer(cfg.model)
    processing = rft.run.load_processing(cfg, cfg.model)
    dataset = rft.data.load(
        cfg.data,
        tokenizer,
        seed=cfg.seed,
        response=cfg.response,
        loss_on=cfg.loss_on,
        max_prompt=cfg.max_prompt,
        max_tokens=cfg.budget,
        window=rft.model.read_window(cfg.model),
        **rft.run.data_options(cfg, processing),
    )
    rft.strategy.check_data(st, dataset)
    return rft.run.Task(tokenizer, dataset, None, None, processing)


def lessons(cfg: Config, prompts: list, tokenizer) -> rft.Experience:
    """Return questions with their answers, or conversations with the turns that are learned.

    A conversation is a group of rows, where its template tells earlier turns otherwise behind later ones.
    """
    learn = partial(
        rft.data.lessons,
        tokenizer=tokenizer,
        response=cfg.response,
        messages=cfg.messages,
        loss_on=cfg.loss_on,
        chat_template_kwargs=rft.data.literals(cfg.chat_template_kwargs),
    )
    rows = [(i, lesson) for i, prompt in enumerate(prompts) for lesson in learn(prompt)]
    exp = rft.packing.conversations([lesson for _, lesson in rows])
    return rft.tree.replace(exp, group=torch.tensor([i for i, _ in rows]))


def nll(cfg: Config, out: rft.TokenOut, b: rft.Packed):
    """Return the negative log-likelihood [T], with the balance of experts if asked for."""
    loss = rft.loss.nll(out.logp)
    if not cfg.router_aux:
        return loss
    return loss + cfg.router_aux * out.aux, rft.metric.router(out, b)


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0


def main(cfg: Config) -> None:
    check(cfg)
    size = cfg.strategy.train_batch_size or cfg.batch
    env = rft.run.setup(cfg, usual=30, load=load, batch=size, sampled=False)
    cfg, st, task = env.cfg, env.st, env.task
    loss_fn = partial(nll, cfg)
    tokens = rft.run.token_log(env, loss_fn)
    state, loop = env.restore(env.policy.state, Loop())

    for step in range(loop.step, cfg.steps):
        # examples
        prompts, _ = rft.data.draw(task.dataset, size, step, cfg.seed)
        exp = lessons(cfg, prompts, task.tokenizer)

        # learn, and note what that does to single tokens
        tokens.before(step, state.params, exp)
        with env.phase("train"):
            packs = st.shard(exp, cfg.budget, halves=cfg.halves(step))
            rate = env.policy.schedule(rft.optim.count(state.opt))
            grads, metrics = st.grad(state, env.policy.apply, loss_fn, packs)
            state, more = st.update(state, grads)
        tokens.after(step, state.params, exp)

        # report, save, and stop where a signal asked for it
        values = rft.metric.results(metrics | more) | {"lr": rate}
        env.run.write(step, values, tokens=int(exp.length.sum()))
        env.checkpoint(state, Loop(step=step + 1))
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
