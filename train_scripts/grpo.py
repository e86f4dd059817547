"""GRPO and its relatives: prompts, rollout, rewards, advantages, packs, loss, update, weight sync.

    python train_scripts/grpo.py --model MODEL --data rows.jsonl --template '{q}' --reward math --max-new 256

Without options it trains the embedded default on a laptop. The same command again resumes it, to the bit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled, Free, Warmup
from rft_fn.run import options


@dataclass(frozen=True)
class Config(
    options.ReinforcementRun, options.Collect, options.Entropy, options.Reference, first=("algorithm", "kl")
):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # the algorithm
    algorithm: str = "grpo"  # a row of rft_fn.algorithm.TABLE
    advantage: Filled | None = None  # another row of that table, to take its advantage; None: the algorithm's
    kl: AtLeast0 = 0.0  # coefficient of KL(policy, reference) in the loss; the reference is the initial model
    kl_in_reward: AtLeast0 = 0.0  # coefficient of log(policy / initial model), off the reward of a response

    # other defaults than those of the subjects
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 140
    warmup: Warmup = 15  # steps of linear warm-up; below 1 a share of the run
    out: Free[Filled] = "runs/grpo"  # folder of the run; the model goes to its subfolder model


def weighted(algo: rft.algorithm.Algorithm, exp: rft.Experience) -> rft.Experience:
    """Weigh a batch by its own mask, and by the factor of each token if it has one."""
    w = algo.weight(exp.mask)
    return rft.tree.replace(exp, w=w * exp.extra["correction"] if "correction" in exp.extra else w)


def policy_loss(cfg: Config, algo, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the algorithm's loss [T], with a KL to the reference, an entropy bonus, a balance of experts."""
    loss, metrics = algo.loss(out, b)
    metrics["policy/loss"] = rft.metric.sum(b.w * loss)
    if cfg.kl:
        kl = rft.loss.kl(out.logp, b.ref_logp)
        loss = loss + cfg.kl * kl
        metrics["policy/kl_ref"] = rft.metric.mean(kl, b.mask)
    if cfg.entropy or cfg.entropy_target:  # with the coefficient of this step
        loss = loss + b.extra["entropy"] * rft.loss.entropy_bonus(out.entropy)
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss, metrics | rft.metric.policy(out, b)


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0
    floor: float = 0.0  # of the gap between trainer and sampler
    entropy: float = 0.0  # coefficient of its bonus
    collect: Any = None
    shaping: Any = None


def main(cfg: Config) -> None:
    algo = rft.run.objective(cfg.algorithm, cfg, advantage=cfg.advantage)
    anchor = cfg.kl > 0 or cfg.kl_in_reward > 0 or algo.reference
    env = rft.run.setup(cfg, usual=140, anchor=anchor, greedy=algo.greedy)
    cfg, st, apply = env.cfg, env.st, env.policy.apply
    collector, shaping = env.collector(), rft.run.shaping(cfg, kl=cfg.kl_in_reward)
    loss_fn = partial(policy_loss, cfg, algo)
    unit = cfg.group if algo.together else 1  # rows that share a pack
    tokens = rft.run.token_log(env, loss_fn, group=cfg.group, unit=unit)

    # the state of a run: the model's, and a record of all else that a checkpoint brings back
    loop = Loop(entropy=cfg.entropy, collect=collector.init(), shaping=shaping.init())
    state, loop = env.restore(env.policy.state, loop)
    env.push(state, version=loop.step)

    for step in range(loop.step, cfg.steps):
        # collect: the same batch on every rank
        values = env.evaluation(0) if step == 0 else {}
        batch, collected = collector.next(loop.collect, step)
        rollout, learned = batch.rollout, batch.learned  # all responses, and what of them is learned from
        ref_logp = env.score(env.reference, state, rollout).logp if env.reference else None  # of a KL
        own = rft.run.trainer_logp(env, state, learned, step, entropy=loop.entropy)  # or the sampler's
        tokens.before(step, state.params, rollout)

        # learn: rewards [N, G], advantages, and the weight of each token
        reward = rft.run.normalized_reward(cfg, env.task, batch.judged, batch.prompts)
        reward, moments, shaped = shaping.apply(reward, loop.shaping, rollout, ref_logp)
        adv = algo.advantage(reward, rollout, **rft.run.greedy_baseline(cfg, batch))
        w = algo.weight(learned.mask)
        exp = rft.experience(learned, adv=adv, w=w, old_logp=own.old_logp, ref_logp=ref_logp, extra=own.extra)

        # learn: passes over the minibatches
        logs = []
        with env.phase("train"):
            for whole in rft.run.minibatches(cfg, exp, step, unit=unit):
                part = rft.run.learning_rows(cfg, weighted(algo, whole), loss_fn, len(logs), unit=unit)
                packs = st.shard(part, cfg.budget, unit=unit, halves=cfg.halves(step, len(logs)))
                grads, metrics = st.grad(state, apply, loss_fn, packs)
                if not logs:  # before the first update trainer and sampler have the same weights
                    gap, floor = rft.run.check_gap(env, loop.floor, metrics, own, rollout, state, packs)
                rate = env.policy.schedule(rft.optim.count(state.opt))
                state, more = st.update(state, grads)
                logs.append(rft.metric.results(metrics | more) | {"train/rows": len(part.tokens)})
        values |= rft.run.update_kl(env, state, learned, own)
        tokens.after(step, state.params, weighted(algo, exp), batch.prompts, batch.judged, rollout)
        env.push(state, version=step + 1)

        # report, evaluate, save, and stop where a signal asked for it
        values |= shaped | batch.metrics | rft.metric.average(logs) | gap | {"lr": rate}
        values |= rft.metric.spread("adv", exp.adv, exp.mask) | env.evaluation(step + 1)
        score = env.report(step, batch, reward, values)
        if cfg.ref_every and (step + 1) % cfg.ref_every == 0:
            rft.model.assign(env.reference.params, st.export(state), share=cfg.ref_mix)  # TR-DPO, 2404.09656
        loop = Loop(step=step + 1, floor=floor, entropy=own.entropy, collect=collected, shaping=moments)
        env.checkpoint(state, loop, score=score, collector=collector)
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
