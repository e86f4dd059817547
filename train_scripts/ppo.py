"""PPO with a critic, whole: rollout, rewards, values, advantages, epochs of minibatches, weight sync.

`python train_scripts/ppo.py` trains the embedded default on a laptop. The critic is a second model with an
optimizer of its own. The same command again resumes from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

import rft_fn as rft
from rft_fn.check import (
    Above1,
    AtLeast0,
    Count,
    Decay,
    Finite,
    Free,
    Positive,
    PositiveShare,
    Seed,
    Share,
    Whole,
)  # fmt: skip
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config:
    """A resumed run may change the options that change no result; for others it needs --override."""

    # models and data
    model: str = "tiny"  # tiny or tiny:TASK:LEVEL (built on the spot), smollm2-135m, a folder, or a hub name
    critic: str = ""  # what the critic starts from: a model or a saved critic; if empty, the actor's model
    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{short}"  # the question; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages that are the prompt, in place of the template
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is given, as enable_thinking=False
    system: str | None = None  # the system prompt; an empty one removes that of the chat template
    max_prompt: Count = 512  # most tokens in a prompt; longer prompts of a file are left out
    lora_rank: Whole = 0  # rank of the actor's low-rank adapters, its only trained weights; 0 trains all
    lora_alpha: Positive = 64.0  # adapters are scaled by this / lora_rank
    lora_targets: str = "auto"  # layers with adapters: auto, all-linear, or names separated by commas
    lora_merge: Free[bool] = True  # save the whole model, adapters merged; if not, the adapters alone
    quantize: Literal["", "int8", "nf4"] = ""  # precision of the frozen base under adapters; empty: its own

    # rollout
    prompts: Count = 512  # prompts per step
    group: Count = 1  # responses per prompt; a critic needs no group
    temperature: AtLeast0 = 1.0  # of sampling, and of the log-probs
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this mass; train on the same
    max_new: Count = 6  # most tokens in a response

    # reward
    reward: tuple[str, ...] = ("task:sort_digits",)  # math:COLUMN, task:NAME, FILE.py:FUNCTION=WEIGHT ...
    reward_timeout: Free[Positive] = 300.0  # seconds that the rewards of a batch may take
    reward_clip: AtLeast0 = 0.0  # rewards are clipped to +- this; 0 is off
    normalize_reward: bool = False  # subtract the running mean of rewards, divide by their running deviation
    overlong: Whole = 0  # tokens before max_new over which a penalty rises to 1 (DAPO); 0 is off
    kl: AtLeast0 = 0.0  # coefficient of log(policy / initial model), off the reward of each token
    kl_target: AtLeast0 = 0.0  # KL to steer the coefficient towards [nats per token]; 0 leaves it fixed
    kl_horizon: Positive = 10000.0  # responses over which it is steered

    # advantages
    algorithm: str = "ppo"  # a row of rft_fn.algorithm.TABLE with a critic: ppo or vapo
    gamma: Share = 1.0  # discount per token
    gae_lambda: Share | None = None  # of ppo, 1 for return minus value; None is the algorithm's default
    gae_alpha: Positive | None = None  # of vapo: lambda is 1 - 1 / (alpha length); 1 to 2 for short responses
    whiten: bool = True  # advantages of a rollout are shifted and scaled to mean 0 and deviation 1

    # learning
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 60
    data_epochs: Positive | None = None  # passes over the rows of data, in place of steps; not for tasks
    epochs: Count = 1  # passes over a rollout
    minibatches: Count = 4  # updates per pass, unless strategy.train_batch_size says how large they are
    freeze_actor_steps: Whole = 0  # so many steps at the start train the critic alone
    clip_low: AtLeast0 | None = None  # the ratio is clipped at 1 - this; None is the algorithm's default
    clip_high: AtLeast0 | None = None  # the ratio is clipped at 1 + this; None is the algorithm's default
    dual: Above1 | None = None  # bound of the loss at negative advantages; None is the algorithm's default
    value_clip: Positive = 0.2  # a value may move no further than this from its value in the rollout
    entropy: AtLeast0 = 0.0  # coefficient of the entropy bonus
    router_aux: AtLeast0 = 0.0  # coefficient of the balance of experts, of a mixture of experts
    positive_nll: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of good responses (VAPO)
    positive_at: Finite = 1.0  # the least reward of a good response
    ptx: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of examples
    ptx_data: str = ""  # the examples, named like data; their questions are made by the template
    ptx_response: str = "{answer}"  # their answers; {NAME} stands for a column of the row
    ptx_messages: tuple[str, ...] = ()  # columns of messages that are the examples, in place of both
    ptx_batch: Count = 16  # examples per update
    lr: Positive = 1e-3  # learning rate of the actor
    critic_lr: Positive = 1e-3  # learning rate of the critic
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # decay; constant ignores lr_end
    lr_end: Share = 0.1  # final learning rates as a share of the first; 1 lets you add steps later
    warmup: Whole = 0  # updates of linear warm-up
    beta1: Decay = 0.9  # decay of AdamW's first moment
    beta2: Decay = 0.999  # decay of AdamW's second moment
    weight_decay: AtLeast0 = 0.0  # AdamW's weight decay, of matrices only
    max_norm: Positive = 1.0  # the gradients of each model are clipped to this global norm
    ema: Decay = 0.0  # decay of an average of the weights, which is then the model that is saved; 0 is off
    budget: Free[Count] = 1024  # most tokens in a pack, which goes through the model at once
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory
    max_gap: Free[Positive] = 0.01  # stop when trainer and sampler differ by more than this [nats per token]

    # evaluation
    eval_data: tuple[str, ...] = ()  # data of the evaluation; if empty, a test split, or rows held out
    eval_share: Share = 0.1  # share of the rows that is held out then; 0 evaluates on what is trained on
    eval_every: Free[Count] = 20  # steps between evaluations
    eval_prompts: Count = 128  # questions of an evaluation, answered greedily

    # the run
    seed: Seed = 0  # seed of everything random
    out: Free[str] = "runs/ppo"  # folder of the run
    override: Free[bool] = False  # resume with changed options; overrides.jsonl in the folder lists them
    save_every: Free[Count] = 20  # steps between checkpoints
    save_critic: Free[bool] = False  # save the critic beside the model
    keep: Free[Count] = 2  # how many of the newest checkpoints are kept
    best: Free[Whole] = 1  # checkpoints with the highest rewards, kept beside the newest
    max_bytes: Free[Whole] = 0  # bytes that all checkpoints may take; the newest always stays; 0 is no limit
    trackers: Free[tuple[str, ...]] = ()  # any of tensorboard, wandb, trackio
    project: Free[str] = "rft_fn"  # the project's name at the tracker
    run_name: Free[str] = ""  # the run's name at the tracker; if empty, the folder's
    strategy: rft.strategy.StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))

    __post_init__ = rft.check.fields


def check(cfg: Config) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, data_epochs=cfg.data_epochs)
    rft.run.without(cfg.strategy, "max_norm", instead="use --max-norm")
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    if cfg.messages and not cfg.ptx:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    if cfg.ptx_messages:
        rft.run.without(cfg, "ptx_response", prefix="", instead="--ptx-messages takes its place")
    for name, most in (("minibatches", cfg.prompts * cfg.group), ("overlong", cfg.max_new)):
        if getattr(cfg, name) > most:
            raise ValueError(f"{name}: expected at most {most}, got {getattr(cfg, name)}")
    for name, other in (("ptx", "ptx_data"), ("kl_target", "kl")):
        if getattr(cfg, name) and not getattr(cfg, other):
            raise ValueError(f"{other}: expected one, as {name} is {getattr(cfg, name)}, got none")
    foreign = "gae_lambda" if cfg.algorithm == "vapo" else "gae_alpha"
    if getattr(cfg, foreign) is not None:
        raise ValueError(f"{foreign}: expected None for {cfg.algorithm}, got {getattr(cfg, foreign)}")


def given(function, **options):
    """`function` with those of the options that are not None."""
    return partial(function, **{name: x for name, x in options.items() if x is not None})


def parts(cfg):
    """Minibatches of a rollout: by the strategy's train_batch_size, where it has one."""
    rows = cfg.prompts * cfg.group
    return cfg.strategy.updates(rows) if cfg.strategy.train_batch_size else cfg.minibatches


def optimizer(cfg, lr, steps, *more):
    """Clipping and AdamW over the updates of `steps` steps, and its learning rate by the updates done."""
    total = max(steps * cfg.epochs * parts(cfg), cfg.warmup)
    decay = rft.optim.warmup_cosine if cfg.schedule == "cosine" else rft.optim.warmup_linear
    end = 1.0 if cfg.schedule == "constant" else cfg.lr_end
    schedule = decay(lr, cfg.warmup, total, floor=end)
    adamw = rft.optim.adamw(schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay)
    return rft.optim.chain(rft.optim.clip_by_global_norm(cfg.max_norm), adamw, *more), schedule


def minibatches(cfg, row, exp, step):
    """A step's minibatches with a w of their own; w positive adds up to the coefficient of `positive_nll`."""
    for epoch in range(cfg.epochs):
        key = rft.rng.fold_in(cfg.seed, "minibatch", step, epoch)
        for part in rft.packing.minibatches(exp, parts(cfg), key):
            w, good = row.weight(part.mask), part.extra["positive"]
            share = torch.where(w > 0, cfg.positive_nll * good / (w * good.sum().clamp(min=1)), 0)
            yield rft.tree.replace(part, w=w, extra={"positive": share})


def supervised(cfg, examples, tokenizer, update):
    """The examples of the run's update number `update`, weighted by their coefficient."""
    prompts, _ = rft.data.draw(examples, cfg.ptx_batch, update, cfg.seed)
    how = {"response": cfg.ptx_response, "messages": cfg.ptx_messages}
    how["chat_template_kwargs"] = rft.data.literals(cfg.chat_template_kwargs)
    exp = rft.packing.conversations([x for p in prompts for x in rft.data.lessons(p, tokenizer, **how)])
    return rft.tree.replace(exp, w=cfg.ptx * exp.w, extra={"ptx": exp.mask.float()})


def learned_reward(cfg, judged, rollout, moments):
    """The reward that is learned from [N, G], clipped and less the penalty of long responses; and the moments
    of all rewards so far."""
    shaping = rft.reward_shaping
    reward = judged.reward
    if cfg.reward_clip:
        reward = shaping.clip(reward, cfg.reward_clip)
    if cfg.overlong:
        length = rollout.mask.sum(-1).view_as(reward)
        reward = reward + shaping.overlong_penalty(length, max_new=cfg.max_new, buffer=cfg.overlong)
    if cfg.normalize_reward:
        reward, moments = shaping.running_norm(reward, moments)
    return reward, moments


def actor_loss(cfg, row, out, b):
    """The actor's loss: of examples their NLL; else the clipped loss with its bonuses."""
    nll = rft.loss.nll(out.logp)
    if "ptx" in b.extra:
        return nll, {"ptx/nll": rft.metric.mean(nll, b.mask)}
    loss, metrics = row.loss(out, b)
    metrics["policy/loss"] = rft.metric.sum(b.w * loss)
    if cfg.entropy:
        loss = loss + cfg.entropy * rft.loss.entropy_bonus(out.entropy)
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss + b.extra["positive"] * nll, metrics | rft.metric.policy(out, b)


# The whole run is one function, as long as it is, so that it is read from top to bottom in the order in which
# it happens: what is checked before anything is loaded, and which state each step takes and leaves.
def main(cfg: Config) -> None:
    # ---- where it runs, and the algorithm with the options given
    check(cfg)
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    rft.engine.check_config(rft.engine.config_of(cfg.strategy))
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)
    row = rft.algorithm.get_actor_critic(cfg.algorithm)
    row = row._replace(
        advantage=given(row.advantage, gamma=cfg.gamma, lambda_=cfg.gae_lambda, alpha=cfg.gae_alpha),
        loss=given(row.loss, low=cfg.clip_low, high=cfg.clip_high, dual=cfg.dual),
        value_loss=given(row.value_loss, clip=cfg.value_clip),
    )

    # ---- data; what is wrong with it is found before a model is loaded
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    greedy = rft.Sampling(temperature=0, max_new=cfg.max_new)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    score = rft.reward.parse(cfg.reward)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    options["chat_template_kwargs"] = rft.data.literals(cfg.chat_template_kwargs)
    needed = options | {"messages": cfg.messages, "columns": rft.reward.columns(score)}
    evaluated = {"eval_data": cfg.eval_data, "eval_share": cfg.eval_share}
    dataset, unseen = rft.data.load_for_training(cfg.data, tokenizer, seed=cfg.seed, **evaluated, **needed)
    rft.strategy.check_data(st, dataset, unseen)
    chosen = {"steps": cfg.steps, "epochs": cfg.data_epochs, "option": "data_epochs"}
    cfg = replace(cfg, steps=rft.data.decide_steps(dataset, cfg.prompts, usual=60, **chosen))
    st.print(rft.data.plan(dataset, cfg.steps, cfg.prompts, unseen))

    # ---- the folder of the run, which refuses other options than those of the steps that it holds
    extendable = cfg.lr_end == 1 or cfg.schedule == "constant"  # then no rate depends on the steps
    free = ("steps", "data_epochs") if extendable else ()
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

    # ---- rewards; what is wrong with them is found before a model is loaded
    first_prompts, _ = rft.data.take(dataset, 2, cfg.seed)
    rft.collect.check_reward(st, score, first_prompts, timeout=cfg.reward_timeout)
    examples = None
    if cfg.ptx:
        options |= {"response": cfg.ptx_response, "messages": cfg.ptx_messages, "loss_on": "all"}
        examples = rft.data.load(cfg.ptx_data, tokenizer, seed=cfg.seed + 2, **options)
        rft.strategy.check_data(st, examples)

    # ---- actor and critic with their optimizers, and the initial model where the KL asks for it
    load = partial(rft.model.load, cfg.model, meta=st.world > 1)
    module = load(gradient_checkpointing=cfg.gradient_checkpointing, quantize=cfg.quantize)
    if cfg.lora_rank:
        module = rft.model.apply_lora_configuration(
            module, cfg.lora_rank, cfg.lora_alpha, target_modules=cfg.lora_targets, seed=cfg.seed
        )
    valuer = rft.model.load_critic(
        cfg.critic or cfg.model, gradient_checkpointing=cfg.gradient_checkpointing, meta=st.world > 1
    )
    average = [rft.optim.ema(cfg.ema)] if cfg.ema else []
    tx, schedule = optimizer(cfg, cfg.lr, max(cfg.steps - cfg.freeze_actor_steps, 0), *average)
    critic_tx, _ = optimizer(cfg, cfg.critic_lr, cfg.steps)
    copy = cfg.kl > 0 and not cfg.lora_rank  # the initial model in memory; with LoRA it is the actor itself
    models = [(module, tx), (valuer, critic_tx)] + [(module, None)] * copy
    st.print(rft.strategy.preflight(st, *models, budget=cfg.budget, length=cfg.max_prompt + cfg.max_new))
    apply, actor = st.init(module, tx, sampling=sampling, entropy=True, aux=cfg.router_aux > 0)
    value_of, critic = st.init(valuer, critic_tx)
    initial = None
    if copy:
        initial = st.bind(load(), sampling=sampling)
    elif cfg.kl:
        plain = rft.model.without_adapters(module, apply)

    # ---- what samples, and everything that a checkpoint brings back
    eng = rft.engine.get_engine(rft.engine.config_of(cfg.strategy), cfg.model, tokenizer)
    shaping = rft.reward_shaping
    extra = {"step": 0, "kl": cfg.kl, "moments": shaping.moments()}
    if saved := rft.ckpt.latest(run.checkpoints):
        states, extra = st.restore(saved, {"actor": actor, "critic": critic}, extra)
        actor, critic = states["actor"], states["critic"]
    run.resume(extra["step"])
    eng.load(st.export(actor), version=extra["step"])

    loss_fn = partial(actor_loss, cfg, row)
    shard = partial(st.shard, budget=cfg.budget)

    def judge(rollout, prompts):
        """The rewards of responses; what they are told of the run is where it stands now."""
        stands = rft.reward.trainer_state(extra["step"], cfg.steps, prompts=cfg.prompts, size=dataset.size)
        return rft.collect.gather_and_judge(
            st, score, rollout, prompts, tokenizer, timeout=cfg.reward_timeout, state=stands
        )

    def collect(prompts, keys, n, how):
        """Responses to the prompts, and their rewards [N, n]: the same on every rank."""
        with run.phase("generate"):
            rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=n, sampling=how)
        with run.phase("judge"):
            judged = judge(rollout, prompts)
        return rollout, judged

    def evaluate():
        """Greedy answers to unseen questions."""
        with run.phase("evaluate"):
            prompts, keys = rft.data.take(unseen, cfg.eval_prompts, cfg.seed)
            rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=1, sampling=greedy)
            judged = judge(rollout, prompts)
        return rft.reward.means(judged, "eval")

    def score_rows(rollout):
        """(values, log-probs of the initial model), each [B, S] and the same on every rank; and the packs."""
        exp = rft.experience(rollout, adv=torch.zeros_like(rollout.logp), w=row.weight(rollout.mask))
        packs = shard(exp)

        def rows(found):
            return st.gather(rft.packing.unpack(found, packs, rollout.logp)[None]).sum(0)

        value = rows(rft.model.values(value_of, critic.params, packs))
        if initial is not None:
            return value, rows(rft.model.score(*initial, packs)), packs
        if cfg.kl:
            return value, rows(rft.model.score(plain, actor.params, packs)), packs
        return value, rollout.logp, packs

    for step in range(extra["step"], cfg.steps):
        values = evaluate() if step == 0 else {}

        # ---- collect: prompts, responses, rewards, values
        prompts, keys = rft.data.draw(dataset, cfg.prompts, step, cfg.seed)
        rollout, judged = collect(prompts, keys, cfg.group, sampling)
        mask = rollout.mask
        reward, extra["moments"] = learned_reward(cfg, judged, rollout, extra["moments"])
        with run.phase("score"):
            value, ref_logp, packs = score_rows(rollout)

        # ---- the KL is a part of each token's reward, with a coefficient that may follow it
        coef = extra["kl"]
        token_reward = shaping.kl_in_reward(reward.flatten(), rollout.logp, ref_logp, mask, coef=coef)
        kl = float((rollout.logp - ref_logp)[mask].double().mean())
        if cfg.kl_target:
            target = {"target": cfg.kl_target, "horizon": cfg.kl_horizon, "count": len(mask)}
            extra["kl"] = shaping.adaptive_kl(coef, kl, **target)

        # ---- advantages and returns of each token
        adv, ret = row.advantage(token_reward, value, mask)
        values |= rft.metric.spread("adv", adv, mask) | rft.metric.spread("return", ret, mask)
        if cfg.whiten:
            adv = rft.advantage.whiten(adv, mask)
        good = {"positive": ((judged.reward >= cfg.positive_at).view(-1, 1) * mask).float()}
        exp = rft.experience(rollout, adv=adv, w=row.weight(mask), old_value=value, ret=ret, extra=good)

        # ---- learn: in each minibatch the critic, then the actor
        updates = []
        learns = step >= cfg.freeze_actor_steps
        rate = schedule(rft.optim.count(actor.opt))
        for i, part in enumerate(minibatches(cfg, row, exp, step)):
            with run.phase("train"):
                mine = shard(part)
                grads, metrics = st.grad(critic, value_of, row.value_loss, mine)
                critic, more = st.update(critic, grads)
                del metrics["loss"]  # the same as value/loss
                updates.append(rft.metric.results(metrics | {f"value/{n}": x for n, x in more.items()}))
                if learns or i == 0:  # a frozen actor is still compared with its sampler
                    if examples is not None:
                        number = step * cfg.epochs * parts(cfg) + i
                        mine = mine + shard(supervised(cfg, examples, tokenizer, number))
                    grads, metrics = st.grad(actor, apply, loss_fn, mine)
                    updates[i] |= rft.metric.results(metrics)
            if i == 0:  # before the first update trainer and sampler have the same weights
                start = {name: x for name, x in updates[0].items() if "logp_gap" in name}
                rft.collect.check_mismatch(
                    start, cfg.max_gap, eng, rollout, sampling, apply, actor.params, packs
                )
            if learns:
                with run.phase("train"):
                    rate = schedule(rft.optim.count(actor.opt))
                    actor, metrics = st.update(actor, grads)
                    updates[i] |= rft.metric.results(metrics)
        with run.phase("sync"):
            eng.load(st.export(actor), version=step + 1)

        # ---- report
        extra["step"] = step + 1
        done = extra["step"] == cfg.steps
        values |= rft.metric.average(updates) | start
        values |= {"value/explained_variance": rft.model.explained_variance(value, ret, mask)}
        values |= {"kl/coef": coef, "kl/ref": kl, "lr": rate}
        values |= rft.metric.rollout(rollout, reward) | rft.reward.means(judged, "reward")
        if done or extra["step"] % cfg.eval_every == 0:
            values |= evaluate()
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, prompts, rollout, judged)

        # ---- save, and stop where a signal asked for it
        stop = run.stopping()
        if done or stop or extra["step"] % cfg.save_every == 0:
            with run.phase("save"):
                states = {"actor": actor, "critic": critic}
                path = run.checkpoints / f"step_{extra['step']:08d}"
                st.save(path, states, extra, score=values["reward/mean"], wait=done or stop)
                limit = cfg.max_bytes or None
                st.rotate(run.checkpoints, keep=cfg.keep, best=cfg.best, max_bytes=limit)
        if stop and not done:
            run.stop(extra["step"])

    # ---- the models that came out
    weights = rft.optim.ema_params(actor.opt).items() if cfg.ema else st.export(actor)
    st.save_pretrained(run.folder / "model", module, tokenizer, weights, merge=cfg.lora_merge)
    if cfg.save_critic:
        st.save_pretrained(run.folder / "critic", valuer, None, st.export(critic))
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
