"""PPO with a critic: rollout, rewards, values, advantages, epochs of minibatches, weight sync.

    python train_scripts/ppo.py --model MODEL --data rows.jsonl --template '{q}' --reward math --max-new 256

Without options it trains the embedded default on a laptop. The critic is a second model with a
second optimizer. Run the same command again to resume from the last checkpoint, to the bit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rft_fn as rft
from rft_fn.limits import AtLeast0, Count, Filled, Finite, Free, Positive, Warmup
from rft_fn.run import options


@dataclass(frozen=True)
class Config(options.ActorCriticRun):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # a further term of the actor's loss
    positive_nll: AtLeast0 = 0.0  # coefficient of the negative log-likelihood of good responses (VAPO)
    positive_at: Finite = 1.0  # the least reward of a good response

    # other defaults than those of the subjects
    prompts: Count = 512  # prompts per step
    group: Count = 1  # responses per prompt; a critic needs no group
    steps: Count | None = None  # rollouts, each with epochs x minibatches updates; None is 60
    minibatches: Count = 4  # updates per pass, unless strategy.train_batch_size sets their size
    lr: Positive = 1e-3  # learning rate of the actor
    warmup: Warmup = 0  # updates of linear warm-up; below 1 a share of the run
    eval_every: Free[Count] = 20  # steps between evaluations
    save_every: Free[Count] = 20  # steps between checkpoints
    out: Free[Filled] = "runs/ppo"  # folder of the run; the model goes to its subfolder model

    def __post_init__(self) -> None:
        super().__post_init__()
        rft.run.without(self, "partial", prefix="", instead="grpo.py has it")


def optimizer(cfg: Config):
    """Return (the optimizer of the actor, its learning rate as a function of the updates done)."""
    updates = max(cfg.steps - cfg.freeze_actor_steps, 0) * rft.run.updates_per_step(cfg)
    warmup = rft.run.warmup_updates(cfg.warmup, updates)
    return rft.run.optimizer(cfg, cfg.lr, updates=updates, warmup=warmup, ema=cfg.ema)


def load_critic(cfg: Config, st: rft.Strategy):
    """Return (the critic, its optimizer, its learning rate as a function of the updates done)."""
    updates = cfg.steps * rft.run.updates_per_step(cfg)
    warmup = rft.run.warmup_updates(cfg.warmup, updates)
    tx, schedule = rft.run.optimizer(cfg, cfg.critic_lr, updates=updates, warmup=warmup)
    return rft.run.load_critic(cfg, st), tx, schedule


def weighted(cfg: Config, row, exp: rft.Experience) -> rft.Experience:
    """Weigh a batch by its own mask; the weights of good responses add up to `positive_nll`."""
    w = row.weight(exp.mask)
    good = exp.extra["positive"]
    share = torch.where(w > 0, cfg.positive_nll * good / (w * good.sum().clamp(min=1)), 0)
    return rft.tree.replace(exp, w=w, extra=exp.extra | {"positive": share})


def actor_loss(cfg: Config, row, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the actor's loss [T]: the NLL of examples, and for responses the clipped loss with bonuses."""
    nll = rft.loss.nll(out.logp)
    if "ptx" in b.extra:
        return nll, {"ptx/nll": rft.metric.mean(nll, b.mask)}
    loss, metrics = row.loss(out, b)
    if "correction" in b.extra:  # of the actor only: the critic learns the returns of all samples alike
        loss = loss * b.extra["correction"]
    metrics["policy/loss"] = rft.metric.sum(b.w * loss)
    if cfg.entropy or cfg.entropy_target:  # with the coefficient of this step
        loss = loss + b.extra["entropy"] * rft.loss.entropy_bonus(out.entropy)
    if cfg.router_aux:
        loss = loss + cfg.router_aux * out.aux
        metrics |= rft.metric.router(out, b)
    return loss + b.extra["positive"] * nll, metrics | rft.metric.policy(out, b)


def example_packs(env: rft.run.Setup, step: int, i: int) -> list[rft.Packed]:
    """Return the packs of the examples that update i of a step also learns from, if any."""
    if not env.cfg.ptx:
        return []
    return env.st.shard(rft.run.draw_examples(env.cfg, env.task, step, i), env.cfg.budget)


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0
    floor: float = 0.0  # of the gap between trainer and sampler
    kl: float = 0.0  # coefficient of its penalty
    entropy: float = 0.0  # coefficient of its bonus
    collect: Any = None
    shaping: Any = None


# The run is one function, read in the order in which it happens.
def main(cfg: Config) -> None:
    row = rft.run.actor_critic(cfg)
    env = rft.run.setup(cfg, usual=60, optimizer=optimizer, critic=load_critic, anchor=cfg.kl > 0)
    cfg, st, policy_of, value_of = env.cfg, env.st, env.policy.apply, env.critic.apply
    collector, shaping = env.collector(), rft.run.shaping(cfg)
    loss_fn = partial(actor_loss, cfg, row)
    tokens = rft.run.token_log(env, loss_fn, group=cfg.group)

    # the state of a run: those of both models, and a record of all else that a checkpoint brings back
    loop = Loop(kl=cfg.kl, entropy=cfg.entropy, collect=collector.init(), shaping=shaping.init())
    states, loop = env.restore({"actor": env.policy.state, "critic": env.critic.state}, loop)
    actor, critic = states["actor"], states["critic"]
    env.push(actor, version=loop.step)

    for step in range(loop.step, cfg.steps):
        # collect: the same batch on every rank; values and log-probs are [B, S]
        values = env.evaluation(0) if step == 0 else {}
        batch, collected = collector.next(loop.collect, step)
        rollout, mask = batch.rollout, batch.rollout.mask
        ref_logp = env.score(env.reference, actor, rollout).logp if cfg.kl else rollout.logp
        own = rft.run.trainer_logp(env, actor, rollout, step, entropy=loop.entropy)  # or the sampler's
        value = env.score(env.critic, critic, rollout, fields=("value",)).value
        tokens.before(step, actor.params, rollout)

        # learn: rewards with the KL, advantages and returns of each token [B, S]
        reward = rft.run.normalized_reward(cfg, env.task, batch.judged, batch.prompts)
        reward, moments, _ = shaping.apply(reward, loop.shaping, rollout)
        flat = reward.flatten()
        token_reward = rft.reward_shaping.kl_in_reward(flat, rollout.logp, ref_logp, mask, coef=loop.kl)
        adv, ret = row.advantage(token_reward, value, mask)
        values |= rft.metric.spread("adv", adv, mask) | rft.metric.spread("return", ret, mask)
        adv = rft.advantage.whiten(adv, mask) if cfg.whiten else adv
        good = (batch.judged.reward >= cfg.positive_at).view(-1, 1) * mask
        extra = own.extra | {"positive": good.float()}
        exp = rft.experience(
            rollout, adv=adv, w=row.weight(mask), old_logp=own.old_logp, old_value=value, ret=ret, extra=extra
        )

        # learn: passes over the minibatches, in each the critic, then the actor
        logs, learns = [], step >= cfg.freeze_actor_steps
        with env.phase("train"):
            for i, part in enumerate(rft.run.minibatches(cfg, exp, step, name="minibatch")):
                packs = st.shard(weighted(cfg, row, part), cfg.budget, halves=cfg.halves(step, i))
                grads, metrics = st.grad(critic, value_of, row.value_loss, packs)
                critic, more = st.update(critic, grads)
                del metrics["loss"]  # the same as value/loss
                metrics |= {f"value/{name}": x for name, x in more.items()}
                if learns or i == 0:  # a frozen actor is still compared with its sampler
                    grads, more = st.grad(actor, policy_of, loss_fn, packs + example_packs(env, step, i))
                    metrics |= more
                if i == 0:  # before the first update trainer and sampler have the same weights
                    gap, floor = rft.run.check_gap(env, loop.floor, metrics, own, rollout, actor, packs)
                rate = env.policy.schedule(rft.optim.count(actor.opt))
                if learns:
                    actor, more = st.update(actor, grads)
                    metrics |= more
                logs.append(rft.metric.results(metrics))
        values |= rft.run.update_kl(env, actor, rollout, own)
        tokens.after(step, actor.params, weighted(cfg, row, exp), batch.prompts, batch.judged, rollout)
        env.push(actor, version=step + 1)

        # report, evaluate, save, and stop where a signal asked for it
        kl = float((rollout.logp - ref_logp)[mask].double().mean())
        values |= rft.metric.average(logs) | gap | {"kl/coef": loop.kl, "kl/ref": kl, "lr": rate}
        values["value/explained_variance"] = rft.model.explained_variance(value, ret, mask)
        score = env.report(step, batch, reward, values | env.evaluation(step + 1))
        if cfg.ref_every and (step + 1) % cfg.ref_every == 0:
            rft.model.assign(env.reference.params, st.export(actor), share=cfg.ref_mix)  # TR-DPO, 2404.09656
        coef = rft.run.next_kl(cfg, loop.kl, kl, count=len(mask))
        loop = loop._replace(step=step + 1, floor=floor, kl=coef, entropy=own.entropy)
        loop = loop._replace(collect=collected, shaping=moments)
        env.checkpoint({"actor": actor, "critic": critic}, loop, score=score, collector=collector)
    if cfg.save_critic:
        st.save_pretrained(env.run.folder / "critic", env.critic.module, None, st.export(critic))
    env.finish(actor)


if __name__ == "__main__":
    rft.run.cli(main, Config)
