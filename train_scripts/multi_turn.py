"""Learning in an environment over several turns: conversations, advantages, loss, update.

    python train_scripts/multi_turn.py --environment guess_number:1
    python train_scripts/multi_turn.py --environment my_environment.py:make --model MODEL --data rows.jsonl

The environment gives the rewards; without --data its rows are its own. Run the same command again to resume
from the last checkpoint, to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

import rft_fn as rft
from rft_fn.check import AtLeast0, Count, Filled, Free, Positive, Share, Whole
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig


@dataclass(frozen=True)
class Config(
    options.ScoredRun,
    options.Evaluation,
    options.Optimizer,
    options.Rollouts,
    options.Policy,
    options.Prompts,
    options.Model,
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
    warmup: Whole = 10  # steps of linear warm-up
    budget: Free[Count] = 4096  # most tokens in a pack, which goes through the model at once
    out: Free[Filled] = "runs/multi_turn"  # folder of the run; the model goes to its subfolder model
    strategy: StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))


def check(cfg: Config, algo: rft.algorithm.Algorithm) -> None:
    """ValueError for options that do not go together."""
    rft.check.at_most_one(steps=cfg.steps, data_epochs=cfg.data_epochs)
    rft.run.without(cfg, "ahead", "partial", prefix="", instead="grpo.py has them")
    if algo.greedy:
        raise ValueError(f"algorithm: expected one without a greedy baseline, got {cfg.algorithm}")
    if cfg.credit == "conversation" and cfg.gamma != 1:
        raise ValueError(f"gamma: expected 1 without --credit turn, got {cfg.gamma}")
    if not cfg.data:
        instead = "give --data; the environment's own rows are endless"
        rft.run.without(cfg, "messages", "eval_data", "eval_share", prefix="", instead=instead)


def load_prompts(cfg: Config, st: rft.Strategy, env: rft.environment.Environment, tokenizer: Any):
    """(the prompts to train on, the unseen ones to evaluate on)."""
    if cfg.data:
        processing = rft.run.load_processing(cfg, cfg.model)
        fits = {"window": rft.model.read_window(cfg.model), "max_new": cfg.max_new}
        found = rft.run.load_data(cfg, st, tokenizer, processing, max_prompt=cfg.max_prompt, **fits)
        rft.run.check_engine_media(st, cfg.model, found[0])
        return found
    how = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    how["chat_template_kwargs"] = rft.data.literals(cfg.chat_template_kwargs)
    seeds = [cfg.seed, rft.rng.fold_in(cfg.seed, "unseen")]
    found = [rft.environment.prompts(env, tokenizer, seed=seed, **how) for seed in seeds]
    return tuple(replace(prompts, seed=cfg.seed) for prompts in found)  # drawn with the run's seed


def advantages(cfg: Config, algo: rft.algorithm.Algorithm, played: rft.collect.Played) -> Tensor:
    """[B, S] or [B, 1]: of the whole conversation within its group, or of each token for what follows it."""
    if cfg.credit == "conversation":
        return algo.advantage(played.reward, played.rollout)
    mask = played.rollout.mask
    later = rft.advantage.reinforce_pp(played.token_reward, mask, gamma=cfg.gamma)
    return rft.advantage.whiten(later, mask)


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
    # ---- setup: processes, environment, data and folder; mistakes are found before a model is loaded
    st = rft.run.start(cfg)
    algo = rft.algorithm.get_algorithm(cfg.algorithm, group=cfg.group)
    check(cfg, algo)
    rft.model.check_quantize(cfg.quantize, cfg.model, rank=cfg.lora_rank, world=st.world, config=st.config)
    env = rft.environment.get_environment(cfg.environment)
    tokenizer = rft.model.load_tokenizer(cfg.model)
    dataset, unseen = load_prompts(cfg, st, env, tokenizer)
    cfg = rft.run.plan_steps(cfg, st, dataset, unseen, batch=cfg.prompts, usual=100, passes="data_epochs")
    free = rft.run.free_options(cfg, "steps", "data_epochs")
    used = {"data": dataset, "eval_data": unseen}
    run = rft.run.open_folder(cfg, st, free=free, datasets=used, tokenizer=tokenizer)

    # ---- setup: the policy, its optimizer, and the initial model where a KL asks for it
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    greedy = rft.Sampling(temperature=0, max_new=cfg.max_new)
    module = rft.run.load_policy(cfg, st)
    tx, schedule = rft.run.optimizer(cfg, cfg.lr, updates=cfg.steps, warmup=cfg.warmup)
    rft.run.print_preflight(cfg, st, (module, tx), initial=cfg.kl > 0, length=cfg.max_tokens)
    apply, state = st.init(module, tx, sampling=sampling, entropy=True, aux=cfg.router_aux > 0)
    if cfg.kl:
        score_initial = rft.run.initial_scorer(cfg, st, module, apply, sampling=sampling)
    loss_fn = partial(policy_loss, cfg, algo)
    how = {"every": cfg.tokens_every, "group": cfg.group, "budget": cfg.budget}
    tokens = rft.run.TokenLog(st, run, apply, loss_fn, tokenizer, **how)

    # ---- setup: what samples, and everything that a checkpoint brings back
    eng, push = rft.run.start_engine(cfg, st, rft.run.Task(tokenizer, dataset, unseen, None))
    state, extra = rft.run.restore_latest(st, run, state, {"step": 0, "floor": 0.0})
    run.resume(extra["step"])
    state = rft.run.to_host(st, apply, state)  # with offload_models, until it is time to learn
    push(state, version=extra["step"])
    renderer = rft.environment.Renderer(tokenizer, cfg.system, rft.data.literals(cfg.chat_template_kwargs))

    def converse(prompts: Sequence[Any], keys: Sequence[int], n=cfg.group, sampling=sampling):
        """n conversations for each prompt, the same on every rank."""
        limits = {"max_turns": cfg.max_turns, "max_tokens": cfg.max_tokens, "timeout": cfg.env_timeout}
        return rft.collect.play(eng, st, env, prompts, keys, renderer, n=n, sampling=sampling, **limits)

    def evaluate(step: int) -> dict[str, float]:
        """The mean reward and the turns of greedy conversations on unseen prompts."""
        with run.phase("evaluate"):
            played = converse(*rft.data.take(unseen, cfg.eval_prompts, cfg.seed), 1, greedy)
        run.trajectories(step, played.prompts, played.rollout, played.judged(), split="eval")
        return rft.reward.means(played.judged(), "eval")

    for step in range(extra["step"], cfg.steps):
        values = {}
        if step == 0:
            values |= evaluate(step)

        # ---- collect: conversations; only what the policy sampled is in the mask
        with run.phase("converse"), rft.run.saved_if_lost(run):
            played = converse(*rft.data.draw(dataset, cfg.prompts, step, cfg.seed))
        rollout = played.rollout

        # ---- learn: the trainer's own log-probs, where weights make up for what the sampler's differ
        state = rft.run.to_device(st, apply, state)
        with run.phase("score"):
            how = {"budget": cfg.budget, "version": step}
            own = rft.run.correct_mismatch(cfg, st, apply, state.params, rollout, **how)

        # ---- learn: the advantage and the weight of each token
        w = algo.weight(rollout.mask)
        if own.extra:
            w = w * own.extra["correction"]
        exp = rft.experience(rollout, adv=advantages(cfg, algo, played), w=w, old_logp=own.old_logp)
        if cfg.kl:
            with run.phase("score"):
                packs = st.shard(exp, cfg.budget)
                ref_logp = rft.run.gather_rows(st, score_initial(state.params, packs), packs, rollout.logp)
            exp = rft.tree.replace(exp, ref_logp=ref_logp)

        # ---- learn: one update, and what it does to single tokens
        tokens.before(step, state.params, rollout)
        with run.phase("train"):
            packs = st.shard(exp, cfg.budget)
            grads, metrics = st.grad(state, apply, loss_fn, packs)
            logs = rft.metric.results(metrics)
        gap = logs | own.metrics
        gap = rft.run.check_gap(cfg, extra, gap, rollout, sampling, apply, state.params, packs, engine=eng)
        with run.phase("train"):
            rate = schedule(rft.optim.count(state.opt))
            state, metrics = st.update(state, grads)
        tokens.after(step, state.params, exp, played.prompts, played.judged(), rollout)
        state = rft.run.to_host(st, apply, state)
        with run.phase("sync"):
            push(state, version=step + 1)

        # ---- report, save, and stop where a signal asked for it
        extra["step"] = step + 1
        values |= logs | rft.metric.results(metrics) | own.metrics | gap | {"lr": rate}
        values |= rft.metric.rollout(rollout, played.reward) | rft.reward.means(played.judged(), "reward")
        values |= rft.metric.spread("adv", exp.adv, rollout.mask)
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= evaluate(step)
        run.write(step, values, tokens=int(rollout.length.sum()))
        run.trajectories(step, played.prompts, rollout, played.judged())
        rft.run.checkpoint(cfg, st, run, step + 1, state, extra, score=values["reward/mean"], best=cfg.best)

    # ---- the model that came out
    state = rft.run.to_device(st, apply, state)
    st.save_pretrained(run.folder / "model", module, tokenizer, st.export(state), merge=cfg.lora_merge)
    eng.close()
    run.finish()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
