"""GRPO and its relatives, whole: prompts, rollout, rewards, advantages, packs, loss, update, weight sync.

`python train_scripts/grpo.py` trains the embedded default on a laptop, `make train-smollm2` a language model.
The same command again goes on from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field
from functools import partial

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Decay, Free, Positive, PositiveShare, Share, Whole
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config:
    model: str = "tiny"  # tiny or tiny:TASK:LEVEL (built on the spot), smollm2-135m, a folder, or a hub name
    data: str = "sort_digits:1"  # a task as TASK:LEVEL, a .jsonl / .parquet / .csv file, or a hub name
    template: str = "{short}"  # the question, from the columns of a row
    system: str | None = None  # the system prompt; an empty one leaves out the template's own
    reward: tuple[str, ...] = ("task:sort_digits",)  # math numeric boxed exact format file.py:f, =WEIGHT
    algorithm: str = "grpo"  # a row of rft_fn.algorithm.TABLE
    steps: Count = 140  # updates
    prompts: Count = 32  # prompts a step
    group: Count = 16  # responses a prompt
    lr: Positive = 1e-3  # learning rate
    lr_end: Share = 0.1  # its share at the last step; a run can be given more steps only if this is 1
    warmup: Whole = 15  # steps of linear warm-up before it
    max_norm: Positive = 1.0  # gradients are clipped to this global norm
    kl: AtLeast0 = 0.0  # coefficient of KL(policy, initial model) in the loss
    ema: Decay = 0.0  # decay of an average of the weights, which is then the model that is saved; 0 is off
    rounds: Count = 1  # sample again, at most so often in all, for groups whose rewards differ (DAPO)
    overlong: Whole = 0  # the last so many tokens before max_new cost up to 1 of the reward (DAPO); 0 is off
    normalize_reward: bool = False  # take off the running mean of rewards, divide by their running deviation
    temperature: AtLeast0 = 1.0  # of sampling, and of the log-probs
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this mass; train on the same
    max_new: Count = 6  # tokens a response
    max_prompt: Count = 512  # tokens a prompt; longer ones of a file are left out
    budget: Free[Count] = 1024  # tokens a pack
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory
    max_gap: Free[Positive] = 0.01  # stop when trainer and sampler differ by more than this [nats a token]
    eval_data: str = ""  # data of the evaluation; when empty a task's unseen rows, or a file's own
    eval_every: Free[Count] = 30  # steps between evaluations
    eval_prompts: Count = 128  # questions of an evaluation, answered greedily
    save_every: Free[Count] = 25  # steps between checkpoints; the two newest and the best one stay
    seed: int = 0  # of everything
    out: Free[str] = "runs/grpo"  # folder of the run
    trackers: Free[tuple[str, ...]] = ()  # tensorboard, wandb, trackio
    strategy: rft.strategy.StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))

    __post_init__ = rft.check.fields


def main(cfg: Config) -> None:
    st = rft.strategy.get_strategy(cfg.strategy)
    algo = rft.algorithm.get_algorithm(cfg.algorithm, group=cfg.group)
    if cfg.overlong > cfg.max_new:
        raise ValueError(f"overlong: expected at most max_new = {cfg.max_new}, got {cfg.overlong}")
    if algo.greedy and cfg.normalize_reward:
        raise ValueError(f"normalize_reward: expected off with {cfg.algorithm}: its baseline is a raw reward")
    penalty = partial(rft.reward_shaping.overlong_penalty, max_new=cfg.max_new, buffer=cfg.overlong)
    free = ("steps",) if cfg.lr_end == 1 else ()
    run = rft.run.Run(
        cfg.out, cfg, total=cfg.steps, rank=st.rank, trackers=cfg.trackers, free=free, **st.config.pictures()
    )
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    greedy = rft.Sampling(temperature=0, max_new=cfg.max_new)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, **options)
    unseen = rft.data.load(cfg.eval_data or cfg.data, tokenizer, seed=cfg.seed + 1, split="test", **options)
    score = rft.reward.parse(cfg.reward)
    rft.reward.check(score, [p.columns for p in rft.data.take(dataset, 2, cfg.seed)[0]])

    load = partial(rft.model.load, meta=st.world > 1)
    module = load(cfg.model, gradient_checkpointing=cfg.gradient_checkpointing)
    updates = cfg.strategy.updates(cfg.prompts * cfg.group)
    total = max(cfg.steps, cfg.warmup) * updates
    schedule = rft.optim.warmup_linear(cfg.lr, cfg.warmup * updates, total, floor=cfg.lr_end)
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(cfg.max_norm), rft.optim.adamw(schedule))
    tx = rft.optim.chain(tx, rft.optim.ema(cfg.ema)) if cfg.ema else tx
    st.print(rft.strategy.preflight(st, (module, tx), *[(module, None)] * bool(cfg.kl), budget=cfg.budget))
    apply, state = st.init(module, tx, sampling=sampling, entropy=True)
    ref = st.bind(load(cfg.model), sampling=sampling) if cfg.kl else None
    eng = rft.engine.get_engine(cfg.strategy.engine, cfg.model, tokenizer)
    extra = {"step": 0, "moments": rft.reward_shaping.moments()}
    if saved := rft.ckpt.latest(run.checkpoints):
        state, extra = st.restore(saved, state, extra)
    eng.load(st.export(state), version=extra["step"])
    run.resume(extra["step"])

    def loss_fn(out, b):
        loss, metrics = algo.loss(out, b)
        if ref:
            kl = rft.loss.kl(out.logp, b.ref_logp)
            loss, metrics["policy/kl_ref"] = loss + cfg.kl * kl, rft.metric.mean(kl, b.mask)
        return loss, metrics | rft.metric.policy(out, b)

    def collect(prompts, keys, n, how):
        rollout = rft.engine.gather_and_generate(eng, st, prompts, keys, n=n, sampling=how)
        return rollout, rft.reward.judge(score, rollout, prompts, tokenizer)

    def sample(step):
        draw = partial(rft.data.draw, dataset, cfg.prompts, step, cfg.seed)
        groups = partial(collect, n=cfg.group, how=sampling)
        return rft.engine.fill_groups(groups, lambda i: draw(round=i), cfg.prompts, rounds=cfg.rounds)

    def shape(judged, rollout):
        return judged.reward + (penalty(rollout.mask.sum(-1)).view_as(judged.reward) if cfg.overlong else 0)

    def baseline(prompts):  # ReMax's: the reward of the greedy answer, for which keys do not matter
        rollout, judged = collect(prompts, range(len(prompts)), 1, greedy)
        return {"greedy_reward": shape(judged, rollout)[:, 0]}

    def evaluate():
        _, judged = collect(*rft.data.take(unseen, cfg.eval_prompts, cfg.seed), 1, greedy)
        return rft.reward.means(judged, "eval")

    for step in range(extra["step"], cfg.steps):
        values = evaluate() if step == 0 else {}
        filled = sample(step)
        prompts, rollout, judged = filled[:3]
        reward = shape(judged, rollout)
        if cfg.normalize_reward:
            reward, extra["moments"] = rft.reward_shaping.running_norm(reward, extra["moments"])
        adv = algo.advantage(reward, rollout, **(baseline(prompts) if algo.greedy else {}))
        exp = rft.experience(rollout, adv=adv, w=algo.weight(rollout.mask))
        parts, logs = rft.packing.minibatches(exp, updates, rft.rng.fold_in(cfg.seed, "updates", step)), []
        for part in parts:
            packs = st.shard(rft.tree.replace(part, w=algo.weight(part.mask)), cfg.budget)
            if ref:
                logp = rft.model.score(*ref, packs)
                packs = [rft.tree.replace(p, ref_logp=x) for p, x in zip(packs, logp)]
            grads, metrics = st.grad(state, apply, loss_fn, packs)
            logs.append(rft.metric.results(metrics))
            if len(logs) == 1:  # before the first update trainer and sampler have the same weights
                rft.engine.check_gap(logs[0], cfg.max_gap, eng, rollout, sampling, apply, state.params, packs)
            state, metrics = st.update(state, grads)
            logs[-1] |= rft.metric.results(metrics)
        extra["step"], done = step + 1, step + 1 == cfg.steps
        eng.load(st.export(state), version=extra["step"])
        values |= rft.metric.average(logs) | rft.metric.rollout(rollout, reward) | filled.metrics()
        values |= rft.reward.means(judged, "reward")
        values |= evaluate() if done or extra["step"] % cfg.eval_every == 0 else {}
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, prompts, rollout, judged)
        if done or extra["step"] % cfg.save_every == 0:
            path = run.checkpoints / f"step_{step + 1:08d}"
            st.save(path, state, extra, score=values["reward/mean"], wait=done)
            rft.ckpt.rotate(run.checkpoints, keep=2, best=1)
    weights = rft.optim.ema_params(state.opt).items() if cfg.ema else st.export(state)
    st.save_pretrained(run.folder / "model", module, tokenizer, weights)
    run.finish()


if __name__ == "__main__":
    rft.run.cli(main, Config)
