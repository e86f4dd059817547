"""What a run learns, by its options: the algorithm, rewards as it sees them, and the minibatches."""

from collections.abc import Iterator

from torch import Tensor

from rft_fn import algorithm, packing, reward_shaping, rng
from rft_fn.collect import Batch
from rft_fn.run import options
from rft_fn.run.opening import updates_per_pass
from rft_fn.types import Experience, LossFn

__all__ = [
    "actor_critic", "greedy_baseline", "learning_rows", "minibatches", "next_kl", "objective", "shaping",
]  # fmt: skip

_WATCHED = 1024  # tokens of rows without a gradient that are computed all the same


def objective(name: str, cfg: options.Updates, *, advantage: str | None = None) -> algorithm.Algorithm:
    """Return an algorithm without a critic, with what the options put in place of its own.

    `advantage` names another row of the table, to take its advantage.
    """
    return algorithm.configured(
        name,
        group=cfg.group,
        advantage=advantage,
        weight=cfg.weight,
        limits=cfg.limits,
    )


def actor_critic(cfg: options.ActorCriticRun) -> algorithm.ActorCritic:
    """Return the algorithm of `options.ActorCritic`, with the options that were given."""
    return algorithm.configured_actor_critic(
        cfg.algorithm,
        gamma=cfg.gamma,
        lambda_=cfg.gae_lambda,
        alpha=cfg.gae_alpha,
        value_clip=cfg.value_clip,
        weight=cfg.weight,
        limits=cfg.limits,
    )


def shaping(cfg: options.Reinforcement, *, kl: float = 0.0) -> reward_shaping.Shaping:
    """Return the changes to rewards that the options ask for, with a KL to the initial model."""
    return reward_shaping.chain(
        clip=cfg.reward_clip,
        overlong=cfg.overlong,
        max_new=cfg.max_new,
        kl=kl,
        normalize=cfg.normalize_reward,
    )


def greedy_baseline(cfg: options.Reinforcement, batch: Batch) -> dict[str, Tensor]:
    """Return {"greedy_reward": [N]}, the shaped reward of the greedy answers; {} without them."""
    if batch.greedy is None:
        return {}
    answers, graded = batch.greedy
    plain = shaping(cfg)
    shaped, _, _ = plain.apply(graded.reward, plain.init(), answers)
    return {"greedy_reward": shaped[:, 0]}


def next_kl(cfg: options.ActorCritic, coef: float, kl: float, *, count: int) -> float:
    """Return the next coefficient of the KL's penalty, after `count` responses of `kl` nats."""
    if not cfg.kl_target:
        return coef
    target, horizon = cfg.kl_target, cfg.kl_horizon
    return reward_shaping.adaptive_kl(coef, kl, target=target, horizon=horizon, count=count)


def minibatches(
    cfg: options.ReinforcementRun, exp: Experience, step: int, *, unit: int = 1, name: str = "updates"
) -> Iterator[Experience]:
    """Yield the minibatches of a step, pass after pass over its rollout, in an order drawn for each.

    `unit` rows stay together. `name` is part of the key of the draw.
    """
    for epoch in range(cfg.epochs):
        key = rng.fold_in(cfg.seed, name, step, epoch)
        yield from packing.minibatches(exp, updates_per_pass(cfg), key, unit=unit)


def learning_rows(
    cfg: options.FlatRows, exp: Experience, loss_fn: LossFn, update: int = 0, *, unit: int = 1
) -> Experience:
    """Return the rows of a minibatch that add to its gradient; all with `keep_flat`.

    In the first update of a step some of the others stay, one pack of up to 1,024 tokens, so that trainer and
    sampler are compared there.
    """
    if cfg.keep_flat:
        return exp
    spare = 0 if update else min(cfg.budget, _WATCHED)
    return packing.drop_flat(exp, loss_fn, unit=unit, spare=spare)
