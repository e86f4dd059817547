"""GRPO and its relatives, whole: prompts, rollout, rewards, advantages, packs, loss, update, weight sync.

`python train_scripts/grpo.py` trains the embedded default on a laptop, `make train-smollm2` a language model.
The same command again resumes from the last checkpoint, to the bit.
"""

import inspect
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import rft_fn as rft
from rft_fn.check import Above1, AtLeast0, Count, Decay, Free, Positive, PositiveShare, Seed, Share, Whole
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config:
    """A resumed run may change the options that change no result; for others it needs --override."""

    # model and data
    model: str = "tiny"  # tiny or tiny:TASK:LEVEL (built on the spot), smollm2-135m, a folder, or a hub name
    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{short}"  # the question; {NAME} stands for a column of the row
    messages: tuple[str, ...] = ()  # columns of messages that are the prompt, in place of the template
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is given, as enable_thinking=False
    system: str | None = None  # the system prompt; an empty one removes that of the chat template
    max_prompt: Count = 512  # most tokens in a prompt; longer prompts of a file are left out
    lora_rank: Whole = 0  # rank of low-rank adapters, the only weights that are trained; 0 trains all weights
    lora_alpha: Positive = 64.0  # adapters are scaled by this / lora_rank
    lora_targets: str = "auto"  # layers with adapters: auto, all-linear, or names separated by commas
    lora_merge: Free[bool] = True  # save the whole model, adapters merged; if not, the adapters alone
    quantize: Literal["", "int8", "nf4"] = ""  # precision of the frozen base under adapters; empty: its own

    # rollout
    prompts: Count = 32  # prompts per step
    group: Count = 16  # responses per prompt
    temperature: AtLeast0 = 1.0  # of sampling, and of the log-probs
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this mass; train on the same
    max_new: Count = 6  # most tokens in a response
    rounds: Count = 1  # sample at most so often per step to fill it with groups whose rewards differ (DAPO)

    # reward
    reward: tuple[str, ...] = ("task:sort_digits",)  # math:COLUMN, task:NAME, FILE.py:FUNCTION=WEIGHT ...
    reward_timeout: Free[Positive] = 300.0  # seconds that the rewards of a batch may take
    reward_clip: AtLeast0 = 0.0  # rewards are clipped to +- this; 0 is off
    normalize_reward: bool = False  # subtract the running mean of rewards, divide by their running deviation
    overlong: Whole = 0  # tokens before max_new over which a penalty rises to 1 (DAPO); 0 is off
    kl_in_reward: AtLeast0 = 0.0  # coefficient of log(policy / initial model), off the reward of a response

    # learning
    algorithm: str = "grpo"  # a row of rft_fn.algorithm.TABLE
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 140
    data_epochs: Positive | None = None  # passes over the rows of data, in place of steps; not for tasks
    epochs: Count = 1  # passes over a rollout
    minibatches: Count = 1  # updates per pass, unless strategy.train_batch_size says how large they are
    clip_low: AtLeast0 | None = None  # the ratio is clipped at 1 - this; None is the algorithm's default
    clip_high: AtLeast0 | None = None  # the ratio is clipped at 1 + this; None is the algorithm's default
    dual: Above1 | None = None  # bound of the loss at negative advantages; None is the algorithm's default
    kl: AtLeast0 = 0.0  # coefficient of KL(policy, initial model) in the loss
    router_aux: AtLeast0 = 0.0  # coefficient of the balance of experts, of a mixture of experts
    lr: Positive = 1e-3  # learning rate
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # decay; constant ignores lr_end
    lr_end: Share = 0.1  # final learning rate as a share of lr; 1 lets you add steps later
    warmup: Whole = 15  # steps of linear warm-up
    beta1: Decay = 0.9  # decay of AdamW's first moment
    beta2: Decay = 0.999  # decay of AdamW's second moment
    weight_decay: AtLeast0 = 0.0  # AdamW's weight decay, of matrices only
    max_norm: Positive = 1.0  # gradients are clipped to this global norm
    ema: Decay = 0.0  # decay of an average of the weights, which is then the model that is saved; 0 is off
    budget: Free[Count] = 1024  # most tokens in a pack, which goes through the model at once
    gradient_checkpointing: Free[bool] = False  # trade a second forward for memory
    max_gap: Free[Positive] = 0.01  # stop when trainer and sampler differ by more than this [nats per token]

    # evaluation
    eval_data: tuple[str, ...] = ()  # data of the evaluation; if empty, a test split, or rows held out
    eval_share: Share = 0.1  # share of the rows that is held out then; 0 evaluates on what is trained on
    eval_every: Free[Count] = 30  # steps between evaluations
    eval_prompts: Count = 128  # questions of an evaluation, answered greedily

    # the run
    seed: Seed = 0  # seed of everything random
    out: Free[str] = "runs/grpo"  # folder of the run
    override: Free[bool] = False  # resume with changed options; overrides.jsonl in the folder lists them
    save_every: Free[Count] = 25  # steps between checkpoints
    keep: Free[Count] = 2  # how many of the newest checkpoints are kept
    best: Free[Whole] = 1  # checkpoints with the highest rewards, kept beside the newest
    max_bytes: Free[Whole] = 0  # bytes that all checkpoints may take; the newest always stays; 0 is no limit
    trackers: Free[tuple[str, ...]] = ()  # any of tensorboard, wandb, trackio
    project: Free[str] = "rft_fn"  # the project's name at the tracker
    run_name: Free[str] = ""  # the run's name at the tracker; if empty, the folder's
    strategy: rft.strategy.StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))

    __post_init__ = rft.check.fields


def check(cfg: Config, algo: rft.algorithm.Algorithm) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, data_epochs=cfg.data_epochs)
    rft.run.without(cfg.strategy, "max_norm", instead="use --max-norm")
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    if cfg.messages:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    if cfg.overlong > cfg.max_new:
        raise ValueError(f"overlong: expected at most max_new = {cfg.max_new}, got {cfg.overlong}")
    if cfg.minibatches > cfg.prompts * cfg.group:
        most = cfg.prompts * cfg.group
        raise ValueError(f"minibatches: expected at most {most}, got {cfg.minibatches}")
    if algo.greedy and cfg.normalize_reward:
        raise ValueError(f"normalize_reward: expected off with {cfg.algorithm}: its baseline is a raw reward")


def limited(algo: rft.algorithm.Algorithm, cfg: Config) -> rft.algorithm.Algorithm:
    """The algorithm with the clip limits that were given; ValueError for one that its loss does not have."""
    given = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high, "dual": cfg.dual}
    limits = {}
    for option, x in given.items():
        if x is None:
            continue
        name = option.removeprefix("clip_")
        if name not in inspect.signature(algo.loss).parameters:
            raise ValueError(f"{option}: expected None, {cfg.algorithm} has no such limit, got {x}")
        limits[name] = x
    return algo._replace(loss=partial(algo.loss, **limits))


def updates_per_pass(cfg: Config) -> int:
    """By the strategy's train_batch_size, where it has one."""
    if cfg.strategy.train_batch_size:
        return cfg.strategy.updates(cfg.prompts * cfg.group)
    return cfg.minibatches


def optimizer(cfg: Config):
    """(the optimizer, its learning rate as a function of the updates done)."""
    per_step = cfg.epochs * updates_per_pass(cfg)
    total = max(cfg.steps, cfg.warmup) * per_step
    decay = rft.optim.warmup_cosine if cfg.schedule == "cosine" else rft.optim.warmup_linear
    end = 1.0 if cfg.schedule == "constant" else cfg.lr_end
    schedule = decay(cfg.lr, cfg.warmup * per_step, total, floor=end)
    adamw = rft.optim.adamw(schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay)
    parts = [rft.optim.clip_by_global_norm(cfg.max_norm), adamw]
    if cfg.ema:
        parts.append(rft.optim.ema(cfg.ema))
    return rft.optim.chain(*parts), schedule


def minibatches(cfg: Config, algo: rft.algorithm.Algorithm, exp: rft.Experience, step: int):
    """The minibatches of a rollout, pass after pass, each with weights of its own mask."""
    for epoch in range(cfg.epochs):
        key = rft.rng.fold_in(cfg.seed, "updates", step, epoch)
        for part in rft.packing.minibatches(exp, updates_per_pass(cfg), key):
            yield rft.tree.replace(part, w=algo.weight(part.mask))


def main(cfg: Config) -> None:
    # ---- where it runs
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    rft.engine.check_config(rft.engine.config_of(cfg.strategy))
    algo = limited(rft.algorithm.get_algorithm(cfg.algorithm, group=cfg.group), cfg)
    check(cfg, algo)
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)

    # ---- data; what is wrong with it is found before a model is loaded
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    greedy = rft.Sampling(temperature=0, max_new=cfg.max_new)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    score = rft.reward.parse(cfg.reward)
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    given = rft.data.literals(cfg.chat_template_kwargs)
    options |= {"messages": cfg.messages, "chat_template_kwargs": given}
    needed = options | {"columns": rft.reward.columns(score)}
    evaluated = {"eval_data": cfg.eval_data, "eval_share": cfg.eval_share}
    dataset, unseen = rft.data.load_for_training(cfg.data, tokenizer, seed=cfg.seed, **evaluated, **needed)
    rft.strategy.check_data(st, dataset, unseen)
    chosen = {"steps": cfg.steps, "epochs": cfg.data_epochs, "option": "data_epochs"}
    cfg = replace(cfg, steps=rft.data.decide_steps(dataset, cfg.prompts, usual=140, **chosen))
    st.print(rft.data.plan(dataset, cfg.steps, cfg.prompts, unseen))

    # ---- the folder of the run, which refuses other options than those of the steps that it holds
    extendable = cfg.lr_end == 1 or cfg.schedule == "constant"
    run = rft.run.Run(
        cfg.out,
        cfg,
        total=cfg.steps,
        rank=st.rank,
        session=st.session,
        trackers=cfg.trackers,
        project=cfg.project,
        name=cfg.run_name,
        free=("steps", "data_epochs") if extendable else (),
        override=cfg.override,
        **st.config.pictures(),
    )

    # ---- rewards; what is wrong with them is found before a model is loaded
    first_prompts, _ = rft.data.take(dataset, 2, cfg.seed)
    rft.collect.check_reward(st, score, first_prompts, timeout=cfg.reward_timeout)

    # ---- the policy, its optimizer, and the initial model where a KL asks for it
    load = partial(rft.model.load, cfg.model, meta=st.world > 1)
    module = load(gradient_checkpointing=cfg.gradient_checkpointing, quantize=cfg.quantize)
    if cfg.lora_rank:
        module = rft.model.apply_lora_configuration(
            module, cfg.lora_rank, cfg.lora_alpha, target_modules=cfg.lora_targets, seed=cfg.seed
        )
    tx, schedule = optimizer(cfg)
    anchored = cfg.kl > 0 or cfg.kl_in_reward > 0
    copy = anchored and not cfg.lora_rank  # the initial model in memory; with LoRA it is the policy itself
    models = [(module, tx)] + [(module, None)] * copy
    st.print(rft.strategy.preflight(st, *models, budget=cfg.budget))
    apply, state = st.init(module, tx, sampling=sampling, entropy=True, aux=cfg.router_aux > 0)
    initial = None
    if copy:
        initial = st.bind(load(), sampling=sampling)
    elif anchored:
        plain = rft.model.without_adapters(module, apply)

    # ---- what samples, and everything that a checkpoint brings back
    eng = rft.engine.get_engine(rft.engine.config_of(cfg.strategy), cfg.model, tokenizer)
    extra = {"step": 0, "moments": rft.reward_shaping.moments()}
    if saved := rft.ckpt.latest(run.checkpoints):
        state, extra = st.restore(saved, state, extra)
    run.resume(extra["step"])
    eng.load(st.export(state), version=extra["step"])

    def loss_fn(out, b):
        """The policy's loss, with the KL to the initial model and the balance of experts where asked for."""
        loss, metrics = algo.loss(out, b)
        metrics["policy/loss"] = rft.metric.sum(b.w * loss)
        if cfg.kl:
            kl = rft.loss.kl(out.logp, b.ref_logp)
            loss = loss + cfg.kl * kl
            metrics["policy/kl_ref"] = rft.metric.mean(kl, b.mask)
        if cfg.router_aux:
            loss = loss + cfg.router_aux * out.aux
            metrics |= rft.metric.router(out, b)
        return loss, metrics | rft.metric.policy(out, b)

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

    def sample(step):
        """The groups of a step; with several rounds those whose rewards differ come first."""

        def draw(i):
            return rft.data.draw(dataset, cfg.prompts, step, cfg.seed, round=i)

        groups = partial(collect, n=cfg.group, how=sampling)
        return rft.collect.sample_varied_groups(groups, draw, cfg.prompts, rounds=cfg.rounds)

    def shape(judged, rollout):
        """The reward that is learned from [N, G]: clipped, less the penalty of long responses."""
        reward = judged.reward
        if cfg.reward_clip:
            reward = rft.reward_shaping.clip(reward, cfg.reward_clip)
        if cfg.overlong:
            length = rollout.mask.sum(-1).view_as(reward)
            reward = reward + rft.reward_shaping.overlong_penalty(
                length, max_new=cfg.max_new, buffer=cfg.overlong
            )
        return reward

    def reference(exp):
        """Log-probs [B, S] of the initial model, the same on every rank."""
        packs = st.shard(exp, cfg.budget)
        if initial is not None:
            logp = rft.model.score(*initial, packs)
        else:
            logp = rft.model.score(plain, state.params, packs)
        mine = rft.packing.unpack(logp, packs, exp.old_logp)
        return st.gather(mine[None]).sum(0)

    def evaluate():
        """Greedy answers to unseen questions."""
        with run.phase("evaluate"):
            prompts, keys = rft.data.take(unseen, cfg.eval_prompts, cfg.seed)
            rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=1, sampling=greedy)
            judged = judge(rollout, prompts)
        return rft.reward.means(judged, "eval")

    for step in range(extra["step"], cfg.steps):
        values = evaluate() if step == 0 else {}

        # ---- collect: prompts, responses, rewards
        filled = sample(step)
        prompts, rollout, judged = filled.prompts, filled.rollout, filled.judged
        reward, mask = shape(judged, rollout), rollout.mask
        ref_logp = None
        if anchored:
            with run.phase("score"):
                ref_logp = reference(rft.experience(rollout, adv=rollout.logp, w=algo.weight(mask)))
        if cfg.kl_in_reward:
            log_ratio = ((rollout.logp - ref_logp) * mask).sum(-1)
            reward = reward - cfg.kl_in_reward * log_ratio.view_as(reward)
            values["kl/in_reward"] = float(log_ratio.mean())
        if cfg.normalize_reward:
            reward, extra["moments"] = rft.reward_shaping.running_norm(reward, extra["moments"])

        # ---- advantages, spread over the tokens, and the weight of each token
        more = {}
        if algo.greedy:  # ReMax's baseline: the reward of the greedy answer, for which keys do not matter
            answer, graded = collect(prompts, range(len(prompts)), 1, greedy)
            more["greedy_reward"] = shape(graded, answer)[:, 0]
        adv = algo.advantage(reward, rollout, **more)
        exp = rft.experience(rollout, adv=adv, w=algo.weight(mask), ref_logp=ref_logp)

        # ---- learn: passes over the minibatches
        logs = []
        for part in minibatches(cfg, algo, exp, step):
            with run.phase("train"):
                packs = st.shard(part, cfg.budget)
                grads, metrics = st.grad(state, apply, loss_fn, packs)
                logs.append(rft.metric.results(metrics))
            if len(logs) == 1:  # before the first update trainer and sampler have the same weights
                params = state.params
                rft.collect.check_mismatch(logs[0], cfg.max_gap, eng, rollout, sampling, apply, params, packs)
            with run.phase("train"):
                rate = schedule(rft.optim.count(state.opt))
                state, metrics = st.update(state, grads)
                logs[-1] |= rft.metric.results(metrics)
        with run.phase("sync"):
            eng.load(st.export(state), version=step + 1)

        # ---- report
        extra["step"] = step + 1
        done = extra["step"] == cfg.steps
        values |= rft.metric.average(logs)
        values |= {name: x for name, x in logs[0].items() if "logp_gap" in name}
        values |= rft.metric.rollout(rollout, reward) | filled.metrics()
        values |= rft.metric.spread("adv", exp.adv, mask)
        values |= rft.reward.means(judged, "reward")
        values["lr"] = rate
        if done or extra["step"] % cfg.eval_every == 0:
            values |= evaluate()
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, prompts, rollout, judged)

        # ---- save, and stop where a signal asked for it
        stop = run.stopping()
        if done or stop or extra["step"] % cfg.save_every == 0:
            with run.phase("save"):
                path = run.checkpoints / f"step_{extra['step']:08d}"
                st.save(path, state, extra, score=values["reward/mean"], wait=done or stop)
                limit = cfg.max_bytes or None
                st.rotate(run.checkpoints, keep=cfg.keep, best=cfg.best, max_bytes=limit)
        if stop and not done:
            run.stop(extra["step"])

    # ---- the model that came out
    weights = rft.optim.ema_params(state.opt).items() if cfg.ema else st.export(state)
    st.save_pretrained(run.folder / "model", module, tokenizer, weights, merge=cfg.lora_merge)
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
