"""PPO with a critic, whole: rollout, rewards, values, advantages, epochs of minibatches, weight sync.

`python train_scripts/ppo.py` trains the embedded default on a laptop. The critic is a model of its own with
its own optimizer. The same command again goes on from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field
from functools import partial

import torch

import rft_fn as rft
from rft_fn.check import Above1, AtLeast0, Count, Decay, Finite, Free, Positive, PositiveShare, Share, Whole
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config:
    model: str = "tiny"  # tiny or tiny:TASK:LEVEL (built on the spot), smollm2-135m, a folder, or a hub name
    critic: str = ""  # what the critic starts from, a model or a saved critic; when empty the model
    data: str = "sort_digits:1"  # a task as TASK:LEVEL, a .jsonl / .parquet / .csv file, or a hub name
    template: str = "{short}"  # the question, from the columns of a row
    system: str | None = None  # the system prompt; an empty one leaves out the template's own
    reward: tuple[str, ...] = ("task:sort_digits",)  # math numeric boxed exact format file.py:f, =WEIGHT
    algorithm: str = "ppo"  # a row of rft_fn.algorithm.TABLE with a critic: ppo or vapo
    steps: Count = 60  # rollouts, each with epochs x minibatches updates
    prompts: Count = 512  # prompts a step
    group: Count = 1  # responses a prompt; a critic needs no group
    epochs: Count = 1  # passes over a rollout
    minibatches: Count = 4  # updates a pass, unless strategy.train_batch_size says how large they are
    lr: Positive = 1e-3  # learning rate of the actor
    critic_lr: Positive = 1e-3  # learning rate of the critic
    lr_end: Share = 0.1  # their share at the last step; a run can be given more steps only if this is 1
    warmup: Whole = 0  # updates of linear warm-up before it
    max_norm: Positive = 1.0  # the gradients of each model are clipped to this global norm
    freeze_actor_steps: Whole = 0  # first steps, in which only the critic learns
    gamma: Share = 1.0  # discount a token
    gae_lambda: Share | None = None  # of ppo, 1 for return minus value; None is the algorithm's own
    gae_alpha: Positive | None = None  # of vapo: lambda is 1 - 1 / (alpha length); 1 to 2 for short responses
    whiten: bool = True  # advantages of a rollout to mean 0 and deviation 1
    clip_low: AtLeast0 | None = None  # the ratio is clipped to 1 - this; None is the algorithm's own
    clip_high: AtLeast0 | None = None  # and to 1 + this
    dual: Above1 | None = None  # bound of the loss in negative advantages, above 1
    value_clip: Positive = 0.2  # a value moves no further than this from the rollout's
    entropy: AtLeast0 = 0.0  # coefficient of the entropy bonus
    kl: AtLeast0 = 0.0  # coefficient of log(policy / initial model) in the reward of each token
    kl_target: AtLeast0 = 0.0  # KL that the coefficient is steered to [nats a token]; 0 leaves it fixed
    kl_horizon: Positive = 10000.0  # responses over which it is steered
    overlong: Whole = 0  # last tokens of max_new, over which a penalty rises to 1
    normalize_reward: bool = False  # take off the running mean of rewards, divide by their running deviation
    ptx: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of examples
    ptx_data: str = ""  # the examples, named like data; their questions are made by the template
    ptx_response: str = "{answer}"  # their answers, from the columns of a row
    ptx_batch: Count = 16  # examples an update
    positive_nll: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of good responses (VAPO)
    positive_at: Finite = 1.0  # the least reward of a good response
    ema: Decay = 0.0  # decay of an average of the weights, which is then the model that is saved; 0 is off
    temperature: AtLeast0 = 1.0  # of sampling, and of the log-probs
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this mass; train on the same
    max_new: Count = 6  # tokens a response
    max_prompt: Count = 512  # tokens a prompt; longer ones of a file are left out
    budget: Free[Count] = 1024  # tokens a pack
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory
    max_gap: Free[Positive] = 0.01  # stop when trainer and sampler differ by more than this [nats a token]
    eval_data: str = ""  # data of the evaluation; when empty a task's unseen rows, or a file's own
    eval_every: Free[Count] = 20  # steps between evaluations
    eval_prompts: Count = 128  # questions of an evaluation, answered greedily
    save_every: Free[Count] = 20  # steps between checkpoints; the two newest and the best one stay
    save_critic: Free[bool] = False  # leave the critic beside the model
    seed: int = 0  # of everything
    out: Free[str] = "runs/ppo"  # folder of the run
    trackers: Free[tuple[str, ...]] = ()  # tensorboard, wandb, trackio
    strategy: rft.strategy.StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))

    __post_init__ = rft.check.fields


def check(cfg: Config) -> None:
    """ValueError for options that do not go together."""
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
    """Clipping and AdamW over the updates of `steps` steps."""
    total = max(steps * cfg.epochs * parts(cfg), cfg.warmup)
    adamw = rft.optim.adamw(rft.optim.warmup_linear(lr, cfg.warmup, total, floor=cfg.lr_end))
    return rft.optim.chain(rft.optim.clip_by_global_norm(cfg.max_norm), adamw, *more)


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
    answers = [rft.data.fill(cfg.ptx_response, p.columns, cfg.ptx_data) for p in prompts]
    ids = [[*tokenizer.encode(a, add_special_tokens=False), tokenizer.eos_token_id] for a in answers]
    exp = rft.packing.supervised([(p.ids, a) for p, a in zip(prompts, ids)])
    return rft.tree.replace(exp, w=cfg.ptx * exp.w, extra={"ptx": exp.mask.float()})


def main(cfg: Config) -> None:
    check(cfg)
    st, row = rft.strategy.get_strategy(cfg.strategy), rft.algorithm.get_actor_critic(cfg.algorithm)
    row = row._replace(
        advantage=given(row.advantage, gamma=cfg.gamma, lambda_=cfg.gae_lambda, alpha=cfg.gae_alpha),
        loss=given(row.loss, low=cfg.clip_low, high=cfg.clip_high, dual=cfg.dual),
        value_loss=given(row.value_loss, clip=cfg.value_clip),
    )
    free = ("steps",) if cfg.lr_end == 1 else ()
    run = rft.run.Run(
        cfg.out, cfg, total=cfg.steps, rank=st.rank, trackers=cfg.trackers, free=free, **st.config.pictures()
    )
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, **options)
    unseen = rft.data.load(cfg.eval_data or cfg.data, tokenizer, seed=cfg.seed + 1, split="test", **options)
    examples = rft.data.load(cfg.ptx_data, tokenizer, seed=cfg.seed + 2, **options) if cfg.ptx else None
    if examples:
        supervised(cfg, examples, tokenizer, 0)  # a missing column is said now
    score = rft.reward.parse(cfg.reward)
    rft.reward.check(score, [p.columns for p in rft.data.take(dataset, 2, cfg.seed)[0]])

    load = partial(rft.model.load, meta=st.world > 1)
    module = load(cfg.model, gradient_checkpointing=cfg.gradient_checkpointing)
    valuer = rft.model.load_critic(cfg.critic or cfg.model, gradient_checkpointing=cfg.gradient_checkpointing)
    ema = [rft.optim.ema(cfg.ema)] if cfg.ema else []
    tx = optimizer(cfg, cfg.lr, max(cfg.steps - cfg.freeze_actor_steps, 0), *ema)
    models = (
        (module, tx),
        (valuer, optimizer(cfg, cfg.critic_lr, cfg.steps)),
        *[(module, None)] * bool(cfg.kl),
    )
    st.print(rft.strategy.preflight(st, *models, budget=cfg.budget, length=cfg.max_prompt + cfg.max_new))
    apply, actor = st.init(module, tx, sampling=sampling, entropy=True)
    value_of, critic = st.init(valuer, optimizer(cfg, cfg.critic_lr, cfg.steps))
    ref = st.bind(load(cfg.model), sampling=sampling) if cfg.kl else None
    eng = rft.engine.get_engine(cfg.strategy.engine, cfg.model, tokenizer)
    shaping = rft.reward_shaping
    extra = {"step": 0, "kl": cfg.kl, "moments": shaping.moments()}
    if saved := rft.ckpt.latest(run.checkpoints):
        states, extra = st.restore(saved, {"actor": actor, "critic": critic}, extra)
        actor, critic = states["actor"], states["critic"]
    eng.load(st.export(actor), version=extra["step"])
    run.resume(extra["step"])

    def loss_fn(out, b):
        nll = rft.loss.nll(out.logp)
        if "ptx" in b.extra:
            return nll, {"ptx/nll": rft.metric.mean(nll, b.mask)}
        loss, metrics = row.loss(out, b)
        loss = loss + cfg.entropy * rft.loss.entropy_bonus(out.entropy) if cfg.entropy else loss
        return loss + b.extra["positive"] * nll, metrics | rft.metric.policy(out, b)

    def collect(prompts, keys, n, how):
        rollout = rft.engine.gather_and_generate(eng, st, prompts, keys, n=n, sampling=how)
        return rollout, rft.reward.judge(score, rollout, prompts, tokenizer)

    def evaluate():
        greedy = rft.Sampling(temperature=0, max_new=cfg.max_new)
        _, judged = collect(*rft.data.take(unseen, cfg.eval_prompts, cfg.seed), 1, greedy)
        return rft.reward.means(judged, "eval")

    shard = partial(st.shard, budget=cfg.budget)
    for step in range(extra["step"], cfg.steps):
        values = evaluate() if step == 0 else {}
        prompts, keys = rft.data.draw(dataset, cfg.prompts, step, cfg.seed)
        rollout, judged = collect(prompts, keys, cfg.group, sampling)
        reward, mask, logp, coef = judged.reward, rollout.mask, rollout.logp, extra["kl"]
        if cfg.overlong:
            late = shaping.overlong_penalty(mask.sum(-1), max_new=cfg.max_new, buffer=cfg.overlong)
            reward = reward + late.view_as(reward)
        if cfg.normalize_reward:
            reward, extra["moments"] = shaping.running_norm(reward, extra["moments"])
        packs = shard(rft.experience(rollout, adv=torch.zeros_like(logp), w=row.weight(mask)))
        rows = lambda x: st.gather(rft.packing.unpack(x, packs, logp)[None]).sum(0)  # noqa: B023, E731
        value = rows(rft.model.values(value_of, critic.params, packs))
        ref_logp = rows(rft.model.score(*ref, packs)) if ref else logp
        token_reward = shaping.kl_in_reward(reward.flatten(), logp, ref_logp, mask, coef=coef)
        kl = float((logp - ref_logp)[mask].double().mean())
        if cfg.kl_target:
            target = {"target": cfg.kl_target, "horizon": cfg.kl_horizon, "count": len(mask)}
            extra["kl"] = shaping.adaptive_kl(coef, kl, **target)
        adv, ret = row.advantage(token_reward, value, mask)
        adv = rft.advantage.whiten(adv, mask) if cfg.whiten else adv
        good = {"positive": ((judged.reward >= cfg.positive_at).view(-1, 1) * mask).float()}
        exp = rft.experience(rollout, adv=adv, w=row.weight(mask), old_value=value, ret=ret, extra=good)

        updates, learns = [], step >= cfg.freeze_actor_steps
        for i, part in enumerate(minibatches(cfg, row, exp, step)):
            mine = shard(part)
            grads, metrics = st.grad(critic, value_of, row.value_loss, mine)
            critic, more = st.update(critic, grads)
            del metrics["loss"]  # the same as value/loss
            updates.append(rft.metric.results(metrics | {f"value/{name}": x for name, x in more.items()}))
            if learns or i == 0:  # a frozen actor is still compared with its sampler
                number = step * cfg.epochs * parts(cfg) + i
                mine += shard(supervised(cfg, examples, tokenizer, number)) if examples else []
                grads, metrics = st.grad(actor, apply, loss_fn, mine)
                updates[i] |= rft.metric.results(metrics)
            if i == 0:
                start = {name: x for name, x in updates[0].items() if "logp_gap" in name}
                rft.engine.check_gap(start, cfg.max_gap, eng, rollout, sampling, apply, actor.params, packs)
            if learns:
                actor, metrics = st.update(actor, grads)
                updates[i] |= rft.metric.results(metrics)
        eng.load(st.export(actor), version=step + 1)

        extra["step"], done = step + 1, step + 1 == cfg.steps
        values |= rft.metric.average(updates) | start
        values |= {"value/explained_variance": rft.model.explained_variance(value, ret, mask)}
        values |= {"kl/coef": coef, "kl/ref": kl} | rft.metric.rollout(rollout, reward)
        values |= rft.reward.means(judged, "reward")
        values |= evaluate() if done or extra["step"] % cfg.eval_every == 0 else {}
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, prompts, rollout, judged)
        if done or extra["step"] % cfg.save_every == 0:
            states, path = {"actor": actor, "critic": critic}, run.checkpoints / f"step_{step + 1:08d}"
            st.save(path, states, extra, score=values["reward/mean"], wait=done)
            rft.ckpt.rotate(run.checkpoints, keep=2, best=1)
    weights = rft.optim.ema_params(actor.opt).items() if cfg.ema else st.export(actor)
    st.save_pretrained(run.folder / "model", module, tokenizer, weights)
    if cfg.save_critic:
        st.save_pretrained(run.folder / "critic", valuer, None, st.export(critic))
    run.finish()


if __name__ == "__main__":
    rft.run.cli(main, Config)
