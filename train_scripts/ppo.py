"""PPO with a critic: rollout, rewards, values, advantages, epochs of minibatches, weight sync.

`python train_scripts/ppo.py` trains the embedded default on a laptop. The critic is a second model with a
second optimizer. Run the same command again to resume from the last checkpoint, to the bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Filled, Finite, Free, Positive, Share, Whole
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(
    options.ScoredRun,
    options.Optimizer,
    options.Reinforcement,
    options.Policy,
    options.Prompts,
    options.Model,
):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # the KL in the reward
    kl: AtLeast0 = 0.0  # coefficient of log(policy / initial model), off the reward of each token
    kl_target: AtLeast0 = 0.0  # KL to steer the coefficient towards [nats per token]; 0 leaves it fixed
    kl_horizon: Positive = 10000.0  # responses over which it is steered

    # advantages
    algorithm: str = "ppo"  # a row of rft_fn.algorithm.TABLE with a critic: ppo or vapo
    gamma: Share = 1.0  # discount per token
    gae_lambda: Share | None = None  # of ppo, 1 for return minus value; None is the algorithm's default
    gae_alpha: Positive | None = None  # of vapo: lambda is 1 - 1 / (alpha length); 1 to 2 for short responses
    whiten: bool = True  # advantages of a rollout are shifted and scaled to mean 0 and deviation 1

    # the critic
    critic: str = ""  # what the critic starts from: a model or a saved critic; if empty, the actor's model
    critic_lr: Positive = 1e-3  # learning rate of the critic
    value_clip: Positive = 0.2  # a value may move no further than this from its value in the rollout
    freeze_actor_steps: Whole = 0  # steps at the start that train the critic alone
    save_critic: Free[bool] = False  # save the critic beside the model

    # further terms of the actor's loss
    entropy: AtLeast0 = 0.0  # coefficient of the entropy bonus
    positive_nll: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of good responses (VAPO)
    positive_at: Finite = 1.0  # the least reward of a good response
    ptx: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of examples
    ptx_data: str = ""  # the examples, named like data; their questions are made by the template
    ptx_response: str = "{answer}"  # their answers; {NAME} stands for a column of the row
    ptx_messages: tuple[str, ...] = ()  # columns of messages that are the examples, in place of both
    ptx_batch: Count = 16  # examples per update

    # other defaults than those of the subjects
    prompts: Count = 512  # prompts per step
    group: Count = 1  # responses per prompt; a critic needs no group
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 60
    minibatches: Count = 4  # updates per pass, unless strategy.train_batch_size sets their size
    lr: Positive = 1e-3  # learning rate of the actor
    warmup: Whole = 0  # updates of linear warm-up
    eval_every: Free[Count] = 20  # steps between evaluations
    save_every: Free[Count] = 20  # steps between checkpoints
    out: Free[Filled] = "runs/ppo"  # folder of the run; the model goes to its subfolder model
    strategy: StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))


def check(cfg: Config) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, data_epochs=cfg.data_epochs)
    rft.run.without(cfg, "partial", prefix="", instead="grpo.py has it")

    # columns of messages take the place of a template
    if cfg.messages and not cfg.ptx:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    if cfg.ptx_messages:
        rft.run.without(cfg, "ptx_response", prefix="", instead="--ptx-messages takes its place")

    # numbers that are limited by others, and options that need another
    for name, most in (("minibatches", cfg.prompts * cfg.group), ("overlong", cfg.max_new)):
        if getattr(cfg, name) > most:
            raise ValueError(f"{name}: expected at most {most}, got {getattr(cfg, name)}")
    for name, other in (("ptx", "ptx_data"), ("kl_target", "kl")):
        if getattr(cfg, name) and not getattr(cfg, other):
            raise ValueError(f"{other}: expected one, as {name} is {getattr(cfg, name)}, got none")

    # each algorithm has one of the two ways to choose lambda
    foreign = "gae_lambda" if cfg.algorithm == "vapo" else "gae_alpha"
    if getattr(cfg, foreign) is not None:
        raise ValueError(f"{foreign}: expected None for {cfg.algorithm}, got {getattr(cfg, foreign)}")


def given(function, **options):
    """`function` with those of the options that are not None."""
    return partial(function, **{name: x for name, x in options.items() if x is not None})


def with_options(cfg: Config, row: rft.algorithm.ActorCritic) -> rft.algorithm.ActorCritic:
    """The algorithm with the options that were given; it has defaults for the others."""
    return row._replace(
        advantage=given(row.advantage, gamma=cfg.gamma, lambda_=cfg.gae_lambda, alpha=cfg.gae_alpha),
        loss=given(row.loss, low=cfg.clip_low, high=cfg.clip_high, dual=cfg.dual),
        value_loss=given(row.value_loss, clip=cfg.value_clip),
    )


def updates_per_step(cfg: Config) -> int:
    """Updates of each model that one rollout gives."""
    return cfg.epochs * rft.run.updates_per_pass(cfg, cfg.strategy)


def optimizer(cfg: Config, lr: float, steps: int, *, ema: float = 0.0):
    """(the optimizer of a model that learns in `steps` steps, its learning rate by the updates done)."""
    updates = max(steps, 0) * updates_per_step(cfg)
    return rft.run.optimizer(cfg, lr, updates=updates, warmup=cfg.warmup, ema=ema)


def load_examples(cfg: Config, st: rft.Strategy, task: rft.run.Task) -> rft.data.Dataset:
    """The examples that the actor also learns from."""
    how = rft.run.data_options(cfg, task.processing) | {
        "messages": cfg.ptx_messages,
        "response": cfg.ptx_response,
    }
    how |= {"max_prompt": cfg.max_prompt, "loss_on": "all", "window": rft.model.read_window(cfg.model)}
    examples = replace(rft.data.load(cfg.ptx_data, task.tokenizer, seed=cfg.seed + 2, **how), seed=cfg.seed)
    rft.strategy.check_data(st, examples)
    return examples


def weighted(cfg: Config, row: Any, exp: rft.Experience) -> rft.Experience:
    """A batch with its own w; w positive, of the good responses, adds up to `positive_nll`."""
    w = row.weight(exp.mask)
    good = exp.extra["positive"]
    share = torch.where(w > 0, cfg.positive_nll * good / (w * good.sum().clamp(min=1)), 0)
    return rft.tree.replace(exp, w=w, extra=exp.extra | {"positive": share})


def minibatches(cfg: Config, row: Any, exp: rft.Experience, step: int) -> Iterator[rft.Experience]:
    """The minibatches of a step, pass after pass, each with its own w."""
    for epoch in range(cfg.epochs):
        key = rft.rng.fold_in(cfg.seed, "minibatch", step, epoch)
        for part in rft.packing.minibatches(exp, rft.run.updates_per_pass(cfg, cfg.strategy), key):
            yield weighted(cfg, row, part)


def supervised(cfg: Config, examples: rft.data.Dataset, tokenizer: Any, update: int) -> rft.Experience:
    """The examples of the run's update number `update`, weighted by their coefficient."""
    prompts, _ = rft.data.draw(examples, cfg.ptx_batch, update, cfg.seed)
    how = {"response": cfg.ptx_response, "messages": cfg.ptx_messages}
    how["chat_template_kwargs"] = rft.data.literals(cfg.chat_template_kwargs)
    exp = rft.packing.conversations([x for p in prompts for x in rft.data.lessons(p, tokenizer, **how)])
    return rft.tree.replace(exp, w=cfg.ptx * exp.w, extra={"ptx": exp.mask.float()})


def steered(cfg: Config, coef: float, kl: float, count: int) -> float:
    """The next coefficient of the KL, after `count` responses with a mean of `kl` [nats per token]."""
    if not cfg.kl_target:
        return coef
    target = {"target": cfg.kl_target, "horizon": cfg.kl_horizon, "count": count}
    return rft.reward_shaping.adaptive_kl(coef, kl, **target)


def actor_loss(cfg: Config, row: Any, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """The actor's loss [T]: the NLL of examples, and for responses the clipped loss with its bonuses."""
    nll = rft.loss.nll(out.logp)
    if "ptx" in b.extra:
        return nll, {"ptx/nll": rft.metric.mean(nll, b.mask)}
    loss, metrics = row.loss(out, b)
    if "correction" in b.extra:  # of the actor alone: the critic learns the returns of all samples alike
        loss = loss * b.extra["correction"]
    metrics["policy/loss"] = rft.metric.sum(b.w * loss)
    if cfg.entropy:
        loss = loss + cfg.entropy * rft.loss.entropy_bonus(out.entropy)
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss + b.extra["positive"] * nll, metrics | rft.metric.policy(out, b)


# The whole run is one function, as long as it is, so that it is read in the order in which it happens: setup,
# then collect, learn and report in every step.
def main(cfg: Config) -> None:
    # ---- setup: processes, data, rewards and folder; mistakes in them are found before a model is loaded
    check(cfg)
    st = rft.run.start(cfg)
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)
    row = with_options(cfg, rft.algorithm.get_actor_critic(cfg.algorithm))
    task = rft.run.load_task(cfg, st)
    cfg = rft.run.plan_rollouts(cfg, st, task, usual=60)
    rft.run.check_rewards(cfg, st, task)
    used = {"data": task.dataset, "eval_data": task.unseen}
    if cfg.ptx:
        examples = load_examples(cfg, st, task)
        used["ptx_data"] = examples
    free = rft.run.free_options(cfg, "steps", "data_epochs")
    run = rft.run.open_folder(cfg, st, free=free, datasets=used, tokenizer=task.tokenizer)

    # ---- setup: actor and critic with their optimizers, and the initial model where the KL asks for it
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    module = rft.run.load_policy(cfg, st)
    how = {"gradient_checkpointing": cfg.gradient_checkpointing, "meta": st.world > 1}
    valuer = rft.model.load_critic(cfg.critic or cfg.model, freeze=cfg.freeze, **how)
    tx, schedule = optimizer(cfg, cfg.lr, cfg.steps - cfg.freeze_actor_steps, ema=cfg.ema)
    critic_tx, _ = optimizer(cfg, cfg.critic_lr, cfg.steps)
    how = {"initial": cfg.kl > 0, "length": cfg.max_prompt + cfg.max_new, "dataset": task.dataset}
    how |= {"rewards": rft.run.reward_modules(task.score), "judges": rft.run.judges_here(task.score)}
    rft.run.print_preflight(cfg, st, (module, tx), (valuer, critic_tx), prompts=cfg.prompts, **how)
    apply, actor = st.init(module, tx, sampling=sampling, entropy=True, aux=cfg.router_aux > 0)
    value_of, critic = st.init(valuer, critic_tx)
    if cfg.kl:
        score_initial = rft.run.initial_scorer(cfg, st, module, apply, sampling=sampling)
    loss_fn = partial(actor_loss, cfg, row)
    how = {"every": cfg.tokens_every, "group": cfg.group, "budget": cfg.budget}
    tokens = rft.run.TokenLog(st, run, apply, loss_fn, task.tokenizer, **how)
    rows = partial(rft.run.gather_rows, st)

    # ---- setup: what samples, and everything that a checkpoint brings back
    extra = {"step": 0, "floor": 0.0, "kl": cfg.kl, "moments": rft.reward_shaping.moments(), "ahead": []}
    states = {"actor": actor, "critic": critic}
    states, extra = rft.run.restore_latest(st, run, states, extra)
    actor, critic = states["actor"], states["critic"]
    samples, push = rft.run.start_sampler(cfg, st, task, extra["ahead"])
    eng = samples.engine
    run.resume(extra["step"])
    actor = rft.run.to_host(st, apply, actor)  # with offload_models, until it is time to learn
    critic = rft.run.to_host(st, value_of, critic)
    push(actor, version=extra["step"])

    def save_ahead():
        """Put the rollouts that are under way into the checkpoint."""
        extra["ahead"] = samples.save()

    for step in range(extra["step"], cfg.steps):
        values = {}
        if step == 0:
            values |= rft.run.evaluate(cfg, st, run, task, eng, step=0)

        # ---- collect: prompts, responses and rewards, the same on every rank
        how = {"n": cfg.group, "sampling": sampling}
        if cfg.ahead:
            for later in rft.collect.due(step, cfg.ahead, cfg.steps):
                samples.begin(*rft.data.draw(task.dataset, cfg.prompts, later, cfg.seed), **how)
        prompts, keys = rft.data.draw(task.dataset, cfg.prompts, step, cfg.seed)
        with run.phase("generate"), rft.run.saved_if_lost(run):
            rollout = samples.generate(prompts, keys, **how)
        with run.phase("judge"):
            judged = rft.run.judge(cfg, st, task, rollout, prompts, step=step)
        mask = rollout.mask
        reward = rft.run.normalized_reward(cfg, task, judged, prompts)
        reward = rft.run.shaped_reward(cfg, reward, rollout)
        if cfg.normalize_reward:
            reward, extra["moments"] = rft.reward_shaping.running_norm(reward, extra["moments"])

        # ---- collect: values and the initial model's log-probs, each [B, S]
        actor = rft.run.to_device(st, apply, actor)
        critic = rft.run.to_device(st, value_of, critic)
        with run.phase("score"):
            exp = rft.experience(rollout, adv=torch.zeros_like(rollout.logp), w=row.weight(mask))
            packs = st.shard(exp, cfg.budget)
            value = rows(rft.model.values(value_of, critic.params, packs), packs, rollout.logp)
            ref_logp = rollout.logp
            if cfg.kl:
                ref_logp = rows(score_initial(actor.params, packs), packs, rollout.logp)
            how = {"budget": cfg.budget, "version": step}
            own = rft.run.correct_mismatch(cfg, st, apply, actor.params, rollout, **how)

        # ---- learn: rewards with the KL, advantages and returns of each token, all [B, S]
        coef = extra["kl"]
        flat = reward.flatten()
        token_reward = rft.reward_shaping.kl_in_reward(flat, rollout.logp, ref_logp, mask, coef=coef)
        kl = float((rollout.logp - ref_logp)[mask].double().mean())
        extra["kl"] = steered(cfg, coef, kl, len(mask))
        adv, ret = row.advantage(token_reward, value, mask)
        values |= rft.metric.spread("adv", adv, mask) | rft.metric.spread("return", ret, mask)
        if cfg.whiten:
            adv = rft.advantage.whiten(adv, mask)
        good = {"positive": ((judged.reward >= cfg.positive_at).view(-1, 1) * mask).float()}
        how = {"old_logp": own.old_logp, "old_value": value, "ret": ret, "extra": good | own.extra}
        exp = rft.experience(rollout, adv=adv, w=row.weight(mask), **how)

        # ---- learn: passes over the minibatches, in each the critic, then the actor
        tokens.before(step, actor.params, rollout)
        logs = []
        learns = step >= cfg.freeze_actor_steps
        rate = schedule(rft.optim.count(actor.opt))
        for i, part in enumerate(minibatches(cfg, row, exp, step)):
            with run.phase("train"):
                mine = st.shard(part, cfg.budget)
                grads, metrics = st.grad(critic, value_of, row.value_loss, mine)
                critic, more = st.update(critic, grads)
                del metrics["loss"]  # the same as value/loss
                logs.append(rft.metric.results(metrics | {f"value/{n}": x for n, x in more.items()}))
                if learns or i == 0:  # a frozen actor is still compared with its sampler
                    if cfg.ptx:
                        lesson = supervised(cfg, examples, task.tokenizer, step * updates_per_step(cfg) + i)
                        mine = mine + st.shard(lesson, cfg.budget)
                    grads, metrics = st.grad(actor, apply, loss_fn, mine)
                    logs[i] |= rft.metric.results(metrics)
            if i == 0:  # before the first update trainer and sampler have the same weights
                gap = logs[0] | own.metrics
                gap = rft.run.check_gap(
                    cfg, extra, gap, rollout, sampling, apply, actor.params, packs, engine=eng
                )
            if learns:
                with run.phase("train"):
                    rate = schedule(rft.optim.count(actor.opt))
                    actor, metrics = st.update(actor, grads)
                    logs[i] |= rft.metric.results(metrics)
        tokens.after(step, actor.params, weighted(cfg, row, exp), prompts, judged, rollout)
        actor = rft.run.to_host(st, apply, actor)
        critic = rft.run.to_host(st, value_of, critic)
        with run.phase("sync"):
            push(actor, version=step + 1)

        # ---- report, save, and stop where a signal asked for it
        extra["step"] = step + 1
        values |= rft.metric.average(logs) | own.metrics | gap
        values |= {"value/explained_variance": rft.model.explained_variance(value, ret, mask)}
        values |= {"kl/coef": coef, "kl/ref": kl, "lr": rate}
        values |= rft.metric.rollout(rollout, reward) | rft.reward.means(judged, "reward")
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= rft.run.evaluate(cfg, st, run, task, eng, step=step + 1)
        run.beside("engine", samples.busy())
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, prompts, rollout, judged)
        states = {"actor": actor, "critic": critic}
        how = {"score": values["reward/mean"], "best": cfg.best, "before": save_ahead}
        rft.run.checkpoint(cfg, st, run, step + 1, states, extra, **how)

    # ---- the models that came out
    actor = rft.run.to_device(st, apply, actor)
    critic = rft.run.to_device(st, value_of, critic)
    weights = rft.run.final_weights(cfg, st, actor)
    st.save_pretrained(run.folder / "model", module, task.saved, weights, merge=cfg.lora_merge)
    if cfg.save_critic:
        st.save_pretrained(run.folder / "critic", valuer, None, st.export(critic))
    samples.close()
    task.score.close()
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
