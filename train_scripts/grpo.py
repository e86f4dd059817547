"""GRPO and its relatives: prompts, rollout, rewards, advantages, packs, loss, update, weight sync.

`python train_scripts/grpo.py` trains the embedded default on a laptop, `make train-smollm2` a language model.
Run the same command again to resume from the last checkpoint, to the bit.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Filled, Free, Positive, Whole
from rft_fn.data import curriculum
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

    # the algorithm
    algorithm: str = "grpo"  # a row of rft_fn.algorithm.TABLE
    rounds: Count = 1  # most sampling rounds of a step, to fill it with groups whose rewards differ (DAPO)
    kl: AtLeast0 = 0.0  # coefficient of KL(policy, initial model) in the loss
    kl_in_reward: AtLeast0 = 0.0  # coefficient of log(policy / initial model), off the reward of a response
    curriculum: Whole = 0  # prompts in the mean success p of a source, whose share is p (1 - p); 0: off
    curriculum_floor: Positive = 0.02  # least p (1 - p)

    # other defaults than those of the subjects
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 140
    warmup: Whole = 15  # steps of linear warm-up
    out: Free[Filled] = "runs/grpo"  # folder of the run; the model goes to its subfolder model
    strategy: StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))


def check(cfg: Config, algo: rft.algorithm.Algorithm) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, data_epochs=cfg.data_epochs)
    if cfg.messages:
        rft.run.without(cfg, "template", prefix="", instead="--messages takes its place")
    if cfg.overlong > cfg.max_new:
        raise ValueError(f"overlong: expected at most max_new = {cfg.max_new}, got {cfg.overlong}")
    if cfg.partial and (cfg.ahead or cfg.rounds > 1):
        raise ValueError(
            f"partial: expected it without ahead and rounds, got ahead {cfg.ahead}, rounds {cfg.rounds}"
        )
    if cfg.curriculum and (cfg.ahead or cfg.partial):
        raise ValueError(
            "curriculum: expected it without ahead and partial, which draw prompts before the rewards that "
            f"decide their shares, got ahead {cfg.ahead}, partial {cfg.partial}"
        )
    if cfg.curriculum_floor > 0.25:
        raise ValueError(
            f"curriculum_floor: expected at most 0.25, the largest p (1 - p), got {cfg.curriculum_floor}"
        )
    most = cfg.prompts * cfg.group
    if cfg.minibatches > most:
        raise ValueError(f"minibatches: expected at most {most}, got {cfg.minibatches}")
    if algo.greedy and cfg.reward_norm:
        raise ValueError(f"reward_norm: expected none with {cfg.algorithm}: its baseline is a raw reward")
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


def optimizer(cfg: Config):
    """(the optimizer, its learning rate as a function of the updates done)."""
    per_step = cfg.epochs * rft.run.updates_per_pass(cfg, cfg.strategy)
    counts = {"updates": cfg.steps * per_step, "warmup": cfg.warmup * per_step}
    return rft.run.optimizer(cfg, cfg.lr, **counts, ema=cfg.ema)


def draw_round(cfg: Config, dataset: rft.data.Dataset, step: int, i: int):
    """(the prompts of round i of a step, a key for each)."""
    return rft.data.draw(dataset, cfg.prompts, step, cfg.seed, round=i)


def weighted(algo: Any, exp: rft.Experience) -> rft.Experience:
    """A batch weighted by its own mask, and by the correction of the sampler's mismatch if it has one."""
    w = algo.weight(exp.mask)
    if exp.extra:
        w = w * exp.extra["correction"]
    return rft.tree.replace(exp, w=w, extra=None)


def minibatches(cfg: Config, algo: Any, exp: rft.Experience, step: int) -> Iterator[rft.Experience]:
    """The minibatches of a rollout, pass after pass, each weighted by its own mask."""
    for epoch in range(cfg.epochs):
        key = rft.rng.fold_in(cfg.seed, "updates", step, epoch)
        for part in rft.packing.minibatches(exp, rft.run.updates_per_pass(cfg, cfg.strategy), key):
            yield weighted(algo, part)


def policy_loss(cfg: Config, algo: Any, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """The algorithm's loss [T], with the KL to the initial model and the balance of experts if asked for."""
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


# The whole run is one function, as long as it is, so that it is read in the order in which it happens: setup,
# then collect, learn and report in every step.
def main(cfg: Config) -> None:
    # ---- setup: processes, data, rewards and folder; mistakes in them are found before a model is loaded
    st = rft.run.start(cfg)
    algo = limited(rft.algorithm.get_algorithm(cfg.algorithm, group=cfg.group), cfg)
    check(cfg, algo)
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)
    task = rft.run.load_task(cfg, st)
    cfg = rft.run.plan_rollouts(cfg, st, task, usual=140)
    rft.run.check_rewards(cfg, st, task)
    free = rft.run.free_options(cfg, "steps", "data_epochs")
    used = {"data": task.dataset, "eval_data": task.unseen}
    run = rft.run.open_folder(cfg, st, free=free, datasets=used, tokenizer=task.tokenizer)

    # ---- setup: the policy, its optimizer, and the initial model where a KL asks for it
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    greedy = rft.Sampling(temperature=0, max_new=cfg.max_new)
    module = rft.run.load_policy(cfg, st)
    tx, schedule = optimizer(cfg)
    anchored = cfg.kl > 0 or cfg.kl_in_reward > 0
    how = {"initial": anchored, "dataset": task.dataset, "prompts": cfg.prompts}
    how |= {"rewards": rft.run.reward_modules(task.score), "judges": rft.run.judges_here(task.score)}
    rft.run.print_preflight(cfg, st, (module, tx), **how)
    apply, state = st.init(module, tx, sampling=sampling, entropy=True, aux=cfg.router_aux > 0)
    if anchored:
        score_initial = rft.run.initial_scorer(cfg, st, module, apply, sampling=sampling)
    loss_fn = partial(policy_loss, cfg, algo)
    how = {"every": cfg.tokens_every, "group": cfg.group, "budget": cfg.budget}
    tokens = rft.run.TokenLog(st, run, apply, loss_fn, task.tokenizer, **how)

    # ---- setup: what samples, and everything that a checkpoint brings back
    extra = {"step": 0, "floor": 0.0, "moments": rft.reward_shaping.moments()}
    extra |= {"ahead": [], "waiting": None, "curriculum": None}
    following = cfg.curriculum > 0 and len(task.dataset.parts) > 1
    if following:
        extra["curriculum"] = curriculum.init(task.dataset)
    elif cfg.curriculum:
        st.print(f"curriculum: off, for there is one source of data, {task.dataset.name}")
    state, extra = rft.run.restore_latest(st, run, state, extra)
    samples, push = rft.run.start_sampler(cfg, st, task, extra["ahead"])
    eng = samples.engine
    run.resume(extra["step"])
    state = rft.run.to_host(st, apply, state)  # with offload_models, until it is time to learn
    levels = extra["curriculum"]  # enters the checkpoint at the end of a step
    push(state, version=extra["step"])

    def answer(prompts, keys, n=cfg.group, sampling=sampling):
        """Responses to the prompts and their rewards [N, n], the same on every rank."""
        with run.phase("generate"), rft.run.saved_if_lost(run):
            rollout = samples.generate(prompts, keys, n=n, sampling=sampling)
        with run.phase("judge"):
            judged = rft.run.judge(cfg, st, task, rollout, prompts, step=extra["step"])
        return rollout, judged

    def draw_level(step, i):
        """The prompts of round i of a step, and a key for each; with a curriculum by its shares."""
        nonlocal levels
        if not following:
            return draw_round(cfg, task.dataset, step, i)
        how = {"floor": cfg.curriculum_floor}
        prompts, keys, levels = curriculum.draw(levels, task.dataset, cfg.prompts, step, cfg.seed, **how)
        return prompts, keys

    def answer_level(prompts, keys):
        """Responses and rewards of a round, from which the curriculum learns how hard its sources are."""
        nonlocal levels
        rollout, judged = answer(prompts, keys)
        if following:
            how = {"window": cfg.curriculum}
            levels = curriculum.observe(levels, task.dataset, prompts, judged.reward, **how)
        return rollout, judged

    def finished(step):
        """The groups that are finished, after each response grew by `partial` tokens; the others wait."""
        generate = partial(rft.collect.gather_and_generate, eng, st)
        draw = partial(draw_round, cfg, task.dataset, i=0)
        how = {"n": cfg.group, "sampling": sampling, "budget": cfg.partial, "waiting": extra["waiting"]}
        how |= {"strategy": st}  # whose ranks read the media of the prompts that wait
        with run.phase("generate"), rft.run.saved_if_lost(run):
            prompts, rollout, extra["waiting"] = rft.collect.sample_partial(generate, draw, step, **how)
        with run.phase("judge"):
            judged = rft.run.judge(cfg, st, task, rollout, prompts, step=step)
        return rft.collect.judged_groups(prompts, rollout, judged)

    def save_ahead():
        """Put the rollouts that are under way into the checkpoint."""
        extra["ahead"] = samples.save()

    for step in range(extra["step"], cfg.steps):
        values = {}
        if step == 0:
            values |= rft.run.evaluate(cfg, st, run, task, eng, step=0)

        # ---- collect: begin the rollouts of this step and of those ahead of it
        if cfg.ahead:
            for later in rft.collect.due(step, cfg.ahead, cfg.steps):
                samples.begin(*draw_round(cfg, task.dataset, later, 0), n=cfg.group, sampling=sampling)

        # ---- collect: groups of responses; with several rounds those whose rewards differ come first
        if cfg.partial:
            filled = finished(step)
        else:
            draw = partial(draw_level, step)
            filled = rft.collect.sample_varied_groups(answer_level, draw, cfg.prompts, rounds=cfg.rounds)
        prompts, rollout, judged = filled.prompts, filled.rollout, filled.judged
        reward = rft.run.normalized_reward(cfg, task, judged, prompts)
        reward = rft.run.shaped_reward(cfg, reward, rollout)
        mask = rollout.mask

        # ---- collect: log-probs of the initial model, which the reward may pay for leaving
        state = rft.run.to_device(st, apply, state)
        ref_logp = None
        if anchored:
            with run.phase("score"):
                exp = rft.experience(rollout, adv=rollout.logp, w=algo.weight(mask))
                packs = st.shard(exp, cfg.budget)
                ref_logp = rft.run.gather_rows(st, score_initial(state.params, packs), packs, rollout.logp)
        if cfg.kl_in_reward:
            log_ratio = ((rollout.logp - ref_logp) * mask).sum(-1)
            reward = reward - cfg.kl_in_reward * log_ratio.view_as(reward)
            values["kl/in_reward"] = float(log_ratio.mean())
        if cfg.normalize_reward:
            reward, extra["moments"] = rft.reward_shaping.running_norm(reward, extra["moments"])

        # ---- learn: the trainer's own log-probs, where weights make up for what the sampler's differ
        with run.phase("score"):
            how = {"budget": cfg.budget, "version": step}
            own = rft.run.correct_mismatch(cfg, st, apply, state.params, rollout, **how)

        # ---- learn: the advantage and the weight of each token
        baseline = {}
        if algo.greedy:  # ReMax: the reward of the greedy answer, for which keys do not matter
            answers, graded = answer(prompts, range(len(prompts)), 1, greedy)
            baseline["greedy_reward"] = rft.run.shaped_reward(cfg, graded.reward, answers)[:, 0]
        adv = algo.advantage(reward, rollout, **baseline)
        how = {"old_logp": own.old_logp, "ref_logp": ref_logp, "extra": own.extra}
        exp = rft.experience(rollout, adv=adv, w=algo.weight(mask), **how)

        # ---- learn: passes over the minibatches, and what they do to single tokens
        tokens.before(step, state.params, rollout)
        logs = []
        for part in minibatches(cfg, algo, exp, step):
            with run.phase("train"):
                packs = st.shard(part, cfg.budget)
                grads, metrics = st.grad(state, apply, loss_fn, packs)
                logs.append(rft.metric.results(metrics))
            if len(logs) == 1:  # before the first update trainer and sampler have the same weights
                gap = logs[0] | own.metrics
                gap = rft.run.check_gap(
                    cfg, extra, gap, rollout, sampling, apply, state.params, packs, engine=eng
                )
            with run.phase("train"):
                rate = schedule(rft.optim.count(state.opt))
                state, metrics = st.update(state, grads)
                logs[-1] |= rft.metric.results(metrics)
        tokens.after(step, state.params, weighted(algo, exp), prompts, judged, rollout)
        state = rft.run.to_host(st, apply, state)
        with run.phase("sync"):
            push(state, version=step + 1)

        # ---- report, save, and stop where a signal asked for it
        extra |= {"step": step + 1, "curriculum": levels}
        if following:
            values |= curriculum.metrics(levels, task.dataset, floor=cfg.curriculum_floor)
        values |= rft.metric.average(logs) | {"lr": rate}
        values |= own.metrics | gap
        values |= rft.metric.rollout(rollout, reward) | rft.metric.spread("adv", exp.adv, mask)
        values |= rft.reward.means(judged, "reward") | filled.metrics()
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= rft.run.evaluate(cfg, st, run, task, eng, step=step + 1)
        run.beside("engine", samples.busy())
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, prompts, rollout, judged)
        mean = values["reward/mean"]
        how = {"score": mean, "best": cfg.best, "before": save_ahead}
        rft.run.checkpoint(cfg, st, run, step + 1, state, extra, **how)

    # ---- the model that came out
    state = rft.run.to_device(st, apply, state)
    weights = rft.run.final_weights(cfg, st, state)
    st.save_pretrained(run.folder / "model", module, task.saved, weights, merge=cfg.lora_merge)
    samples.close()
    task.score.close()
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
