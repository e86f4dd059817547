"""Learning in an environment over several turns: conversations, advantages, loss, update.

    python train_scripts/multi_turn.py --environment guess_number:1
    python train_scripts/multi_turn.py --environment my_environment.py:make --model MODEL --data rows.jsonl
    python train_scripts/multi_turn.py --agent 'python agent.py' --model MODEL --data rows.jsonl --reward math

The environment gives the rewards; without --data its rows are its own. An agent is any program that speaks to
an endpoint of OpenAI's; --reward, or the program, gives its rewards. Run the same command again to resume
from the last checkpoint, to the bit.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

import rft_fn as rft
from rft_fn.limits import AtLeast0, AutoCount, Count, Filled, Free, Positive, Share, Warmup
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(
    options.ScoredRun,
    options.Evaluation,
    options.Optimizer,
    options.Rollouts,
    options.FlatRows,
    options.Agents,
    options.Reward,
    options.Policy,
    options.Prompts,
    options.Model,
    first=("environment", "agent", "max_turns", "max_tokens", "algorithm", "credit", "kl"),
):
    """A resumed run may change the options that change no result; for others it needs --override."""

    # the environment
    environment: str = "guess_number:1"  # NAME:LEVEL of a built-in one, or FILE.py:NAME of your own
    data: tuple[str, ...] = ()  # rows for the environment, as TASK:LEVEL, files, folders; empty: its own
    max_turns: Count = 8  # most turns of the policy in a conversation
    max_tokens: Count = 128  # most tokens in a conversation
    env_timeout: Free[Positive] = 60.0  # seconds that the environments of a round of turns may take

    # the algorithm
    algorithm: str = "grpo"  # a row of rft_fn.algorithm.TABLE
    credit: Literal["conversation", "turn"] = "conversation"  # turn: each token earns what comes after it
    gamma: Share = 1.0  # discount of a token, with --credit turn
    kl: AtLeast0 = 0.0  # coefficient of KL(policy, initial model) in the loss

    # other defaults than those of the subjects
    steps: Count | None = None  # rollouts, each with one update; None is 100
    data_epochs: Positive | None = None  # passes over the rows of data, in place of steps
    warmup: Warmup = 10  # steps of linear warm-up; below 1 a share of the run
    budget: Free[AutoCount] = 4096  # most tokens in a pack; auto, as on a GPU: by the forecast of memory
    out: Free[Filled] = "runs/multi_turn"  # folder of the run; the model goes to its subfolder model
    strategy: StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))


def check(cfg: Config, algo: rft.algorithm.Algorithm) -> None:
    """Raise ValueError for options that do not go together."""
    rft.run.without(cfg, "ahead", "partial", prefix="", instead="grpo.py has them")
    if algo.greedy:
        raise ValueError(f"algorithm: expected one without a greedy baseline, got {cfg.algorithm}")
    if cfg.credit == "conversation" and cfg.gamma != 1:
        raise ValueError(f"gamma: expected 1 without --credit turn, got {cfg.gamma}")
    if not cfg.data:
        instead = "give --data; the environment's own rows are endless"
        rft.run.without(cfg, "messages", "eval_data", "eval_share", prefix="", instead=instead)
    rft.run.check_agent(cfg)
    if not cfg.agent:
        instead = "the environment gives the rewards"
        rft.run.without(cfg, "reward", "reward_veto", "reward_timeout", prefix="", instead=instead)
        return
    rft.run.without(
        cfg, "environment", "env_timeout", "credit", prefix="", instead="--agent plays the episodes"
    )
    if not cfg.data:
        raise ValueError("data: expected rows for the agent, got none")
    if algo.together:
        raise ValueError(f"algorithm: expected one whose rows stand alone, with --agent, got {cfg.algorithm}")


def load(world: rft.environment.Environment | None, cfg: Config, st: rft.Strategy) -> rft.run.Task:
    """Load the prompts to train on, and the unseen ones to evaluate on; the environment gives the rewards."""
    if cfg.reward:
        return rft.run.load_task(cfg, st)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    if cfg.data:
        processing = rft.run.load_processing(cfg, cfg.model)
        dataset, unseen = rft.run.load_data(
            cfg,
            st,
            tokenizer,
            processing,
            max_prompt=cfg.max_prompt,
            window=rft.model.read_window(cfg.model),
            max_new=cfg.max_new,
        )
        rft.run.check_engine_media(st, cfg.model, dataset)
        return rft.run.Task(tokenizer, dataset, unseen, None, processing)

    assert world is not None
    prompts = partial(
        rft.environment.prompts,
        world,
        tokenizer,
        template=cfg.template,
        system=cfg.system,
        max_prompt=cfg.max_prompt,
        chat_template_kwargs=rft.data.literals(cfg.chat_template_kwargs),
    )
    seeds = cfg.seed, rft.rng.fold_in(cfg.seed, "unseen")
    dataset, unseen = (replace(prompts(seed=seed), seed=cfg.seed) for seed in seeds)  # drawn with the run's
    return rft.run.Task(tokenizer, dataset, unseen, None)


def converse(
    env: rft.run.Setup, world: Any, prompts, keys, *, n: int, sampling: rft.Sampling, step: int
) -> rft.collect.Played:
    """Return n conversations for each prompt, the same on every rank."""
    cfg = env.cfg
    if cfg.agent:
        return rft.run.play_agents(env, world, prompts, keys, n=n, sampling=sampling, step=step)
    return rft.collect.play(
        env.samples.engine,
        env.st,
        world,
        prompts,
        keys,
        renderer_of(env),
        n=n,
        sampling=sampling,
        max_turns=cfg.max_turns,
        max_tokens=cfg.max_tokens,
        timeout=cfg.env_timeout,
    )


def renderer_of(env: rft.run.Setup) -> rft.environment.Renderer:
    """Return what makes tokens of messages."""
    how = rft.data.literals(env.cfg.chat_template_kwargs)
    return rft.environment.Renderer(env.task.tokenizer, env.cfg.system, how)


def evaluate(env: rft.run.Setup, world: Any, step: int) -> dict[str, float]:
    """Return the mean reward and the turns of greedy conversations on unseen prompts."""
    greedy = rft.Sampling(temperature=0, max_new=env.cfg.max_new)
    with env.phase("evaluate"):
        prompts, keys = rft.data.take(env.task.unseen, env.cfg.eval_prompts, env.cfg.seed)
        played = converse(env, world, prompts, keys, n=1, sampling=greedy, step=step)
    env.run.trajectories(step, played.prompts, played.first, played.judged(), split="eval")
    return rft.reward.means(played.judged(), "eval")


def advantages(cfg: Config, algo: rft.algorithm.Algorithm, played: rft.collect.Played) -> Tensor:
    """Return [B, 1], of a whole conversation within its group, or [B, S], of each token for what follows."""
    if cfg.credit == "conversation":
        return played.of_rows(algo.advantage(played.reward, played.first))
    mask = played.rollout.mask
    later = rft.advantage.reinforce_pp(played.token_reward, mask, gamma=cfg.gamma)
    return rft.advantage.whiten(later, mask)


def policy_loss(cfg: Config, algo, out: rft.TokenOut, b: rft.Packed) -> tuple[Tensor, dict]:
    """Return the algorithm's loss [T], with the KL to the initial model and the balance of experts."""
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


class Loop(NamedTuple):
    """What a checkpoint brings back beside the state of the model."""

    step: int = 0
    floor: float = 0.0  # of the gap between trainer and sampler


def main(cfg: Config) -> None:
    algo = rft.algorithm.get_algorithm(cfg.algorithm, group=cfg.group)
    check(cfg, algo)
    world: Any = None if cfg.agent else rft.environment.get_environment(cfg.environment)
    unit = cfg.group if algo.together else 1  # rows that share a pack
    anchor = cfg.kl > 0 or algo.reference
    env = rft.run.setup(cfg, usual=100, load=partial(load, world), anchor=anchor, length=cfg.max_tokens)
    cfg, st = env.cfg, env.st
    if cfg.agent:
        world = rft.run.ModelEndpoint(
            renderer_of(env), env.sampling, window=env.samples.engine.status().get("window")
        )
    loss_fn = partial(policy_loss, cfg, algo)
    tokens = rft.run.token_log(env, loss_fn, group=cfg.group, unit=unit)

    # the state of a run: the model's, and a record of all else that a checkpoint brings back
    state, loop = env.restore(env.policy.state, Loop())
    env.push(state, version=loop.step)

    for step in range(loop.step, cfg.steps):
        # collect: conversations; only what the policy sampled is in the mask
        values = evaluate(env, world, 0) if step == 0 else {}
        prompts, keys = rft.data.draw(env.task.dataset, cfg.prompts, step, cfg.seed)
        with env.sampling_block("converse"):
            played = converse(env, world, prompts, keys, n=cfg.group, sampling=env.sampling, step=step)
        batch = rft.collect.Batch(played.prompts, played.first, played.judged())
        rollout, mask = played.rollout, played.rollout.mask
        ref_logp = env.score(env.reference, state, rollout).logp if env.reference else None  # of a KL
        own = rft.run.trainer_logp(env, state, rollout, step)  # or the sampler's
        tokens.before(step, state.params, rollout)

        # learn: the advantage and the weight of each token
        adv = advantages(cfg, algo, played)
        w = algo.weight(mask)
        if own.extra:
            w = w * own.extra["correction"]
        exp = rft.experience(rollout, adv=adv, w=w, old_logp=own.old_logp, ref_logp=ref_logp)

        # learn: one update
        with env.phase("train"):
            part = rft.run.learning_rows(cfg, exp, loss_fn, unit=unit)
            packs = st.shard(part, cfg.budget, unit=unit, halves=cfg.halves(step))
            grads, metrics = st.grad(state, env.policy.apply, loss_fn, packs)
            gap, floor = rft.run.check_gap(env, loop.floor, metrics, own, rollout, state, packs)
            rate = env.policy.schedule(rft.optim.count(state.opt))
            state, more = st.update(state, grads)
        values |= rft.run.update_kl(env, state, rollout, own)
        tokens.after(step, state.params, exp, batch.prompts, batch.judged, rollout)
        env.push(state, version=step + 1)

        # report, evaluate, save, and stop where a signal asked for it
        values |= rft.metric.results(metrics | more) | gap | {"train/rows": len(part.tokens), "lr": rate}
        values |= rft.metric.spread("adv", exp.adv, mask)
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= evaluate(env, world, step)
        score = env.report(step, batch, played.reward, values)
        loop = Loop(step=step + 1, floor=floor)
        env.checkpoint(state, loop, score=score)
    env.finish(state)


if __name__ == "__main__":
    rft.run.cli(main, Config)
