"""Distillation: responses of the student (or given ones), what the teacher says of them, loss, update.

    python train_scripts/distill.py --teacher runs/grpo
    python train_scripts/distill.py --teacher ema --ema 0.99 --teacher-temperature 0.5
    python train_scripts/distill.py --teacher openai:http://HOST:8000 --top-k 20 --on-policy 0.5

The teacher is a model or run folder, the policy itself behind another prompt, an average of it, or a server.
Run the same command again to resume from the last checkpoint, to the bit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.limits import Count, Filled, Free, Warmup


@dataclass(frozen=True)
class Config(rft.run.DistillationRun, first=("algorithm",)):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # the algorithm
    algorithm: str = "grpo"  # a row of rft_fn.algorithm.TABLE: loss of sampled, to_go and --rl, and weights

    # other defaults than those of the subjects
    group: Count = 4  # responses per prompt
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 60
    warmup: Warmup = 5  # steps of linear warm-up; below 1 a share of the run
    out: Free[Filled] = "runs/distill"  # folder of the run; the model goes to its subfolder model


def advantages(
    cfg: Config, algo, batch: rft.collect.Batch, reward: Tensor, taught, old_logp: Tensor
) -> Tensor:
    """Return advantages [B, S] from the teacher's log-probs and from rewards."""
    adv = torch.zeros_like(old_logp)
    if cfg.loss in ("sampled", "to_go"):
        gamma = cfg.gamma if cfg.loss == "to_go" else 0.0
        mask = batch.learned.mask & taught.rows[:, None]
        adv = rft.loss.teacher_advantage(old_logp, taught.logp, mask, gamma=gamma, normalize=gamma > 0)
    if cfg.rl:
        adv = adv + cfg.rl * algo.advantage(reward, batch.rollout)
    return adv


def weighted(algo, exp: rft.Experience) -> rft.Experience:
    """Weigh a batch by its own mask, and by the factor of each token if it has one."""
    w = algo.weight(exp.mask)
    return rft.tree.replace(exp, w=w * exp.extra["correction"] if "correction" in exp.extra else w)


def student_loss(cfg: Config, algo, sampled: bool, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the loss [T], a divergence from the teacher or one by advantages, and metrics."""
    metrics = rft.metric.policy(out, b) if sampled else {}
    if cfg.loss == "nll":
        loss = rft.loss.nll(out.logp)
    elif out.divergence is not None:
        loss = out.divergence * b.extra["taught"]
        metrics["distill/divergence"] = rft.metric.mean(out.divergence, b.mask)
        metrics["distill/agreement"] = rft.metric.mean(out.agreement, b.mask)
    else:
        loss = torch.zeros_like(out.logp)
    if cfg.rl or cfg.loss in ("sampled", "to_go"):
        more, own = algo.loss(out, b)
        loss, metrics = loss + more, metrics | own
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss, metrics | {"distill/loss": rft.metric.sum(b.w * loss)}


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0
    floor: float = 0.0  # of the gap between trainer and sampler
    collect: Any = None
    shaping: Any = None


def main(cfg: Config) -> None:
    algo = rft.run.objective(cfg.algorithm, cfg)
    env = rft.run.setup(cfg, usual=60, load=rft.run.load_taught_task, scorers=rft.run.teacher_modules)
    cfg, st, apply = env.cfg, env.st, env.policy.apply
    teachers = rft.run.load_teachers(env)
    collector, shaping = env.collector(), rft.run.shaping(cfg)
    tokens = rft.run.token_log(env, partial(student_loss, cfg, algo, True), group=cfg.group)

    # the state of a run: the model's, and a record of all else that a checkpoint brings back
    loop = Loop(collect=collector.init(), shaping=shaping.init())
    state, loop = env.restore(env.policy.state, loop)
    env.push(state, version=loop.step)

    for step in range(loop.step, cfg.steps):
        # collect: the same batch on every rank, the student's responses or others
        values = env.evaluation(0) if step == 0 else {}
        sampled, collected, gap, floor = teachers.on_policy(step), loop.collect, {}, loop.floor
        if sampled:
            batch, collected = collector.next(collected, step)
            own = rft.run.trainer_logp(env, state, batch.learned, step)
            tokens.before(step, state.params, batch.rollout)
        else:
            batch = teachers.batch(step)
        rollout, learned = batch.rollout, batch.learned  # all responses, and what of them is learned from
        old_logp, correction = (own.old_logp, own.extra) if sampled else (rollout.logp, {})
        taught = teachers.say(state, batch)

        # learn: the teacher's words for the student's forward, rewards and advantages
        reward = rft.run.normalized_reward(cfg, env.task, batch.judged, batch.prompts)
        reward, moments, shaped = shaping.apply(reward, loop.shaping, rollout)
        adv = advantages(cfg, algo, batch, reward, taught, old_logp)
        extra = taught.extra | correction | {"taught": taught.rows.float()}
        exp = rft.experience(learned, adv=adv, w=algo.weight(learned.mask), old_logp=old_logp, extra=extra)
        loss_fn = partial(student_loss, cfg, algo, sampled)

        # learn: passes over the minibatches
        logs = []
        with env.phase("train"):
            for whole in rft.run.minibatches(cfg, exp, step):
                part = rft.run.learning_rows(cfg, weighted(algo, whole), loss_fn, len(logs))
                packs = st.shard(part, cfg.budget, halves=cfg.halves(step, len(logs)))
                grads, metrics = st.grad(state, apply, loss_fn, packs)
                if sampled and not logs:  # before the first update trainer and sampler have the same weights
                    gap, floor = rft.run.check_gap(env, loop.floor, metrics, own, rollout, state, packs)
                rate = env.policy.schedule(rft.optim.count(state.opt))
                state, more = st.update(state, grads)
                logs.append(rft.metric.results(metrics | more) | {"train/rows": len(part.tokens)})
        moved = rft.run.update_kl(env, state, learned, own) if sampled else {}
        tokens.after(step, state.params, exp, batch.prompts, batch.judged, rollout)
        env.push(state, version=step + 1)

        # report, evaluate, save, and stop where a signal asked for it
        values |= shaped | batch.metrics | rft.metric.average(logs) | gap | moved | taught.metrics
        score = env.report(step, batch, reward, values | {"lr": rate} | env.evaluation(step + 1))
        loop = Loop(step=step + 1, floor=floor, collect=collected, shaping=moments)
        env.checkpoint(state, loop, score=score, collector=collector)
    teachers.close()
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
