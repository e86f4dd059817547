"""Compare estimators of the policy gradient on one frozen buffer: which is closer, how noisy, why.

    python train_scripts/compare.py --rows grpo dr_grpo rloo my_loss.py:loss --out runs/compare

A buffer is sampled, and the policy takes `drift` updates away from it, as in later epochs. The gradient of
each row there is compared with a reference: RLOO on fresh prompts, or the exact one of a tiny vocabulary.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

import rft_fn as rft
from rft_fn.algorithm import Algorithm, get_algorithm
from rft_fn.analysis import estimators
from rft_fn.limits import Count, Filled, Positive, Seed, Several, Share, Whole
from rft_fn.run import options
from rft_fn.strategy import StrategyConfig
from rft_fn.tools import comparison
from rft_fn.user_files import find_module


@dataclass(frozen=True)
class Config(
    options.Sampling,
    options.Reward,
    options.Prompts,
    options.Model,
    first=("rows", "reference", "prompts", "group", "drift", "lr", "rollouts", "budget", "out"),
    excludes={
        ("rollouts", "sampler"): "which draws its own",
        ("rollouts", "reference"): "which draws its own",
    },
):
    """The options of a comparison."""

    rows: tuple[str, ...] = ("grpo", "dr_grpo", "rloo", "opo", "gspo", "cispo")  # of TABLE, or FILE.py:LOSS
    reference: Literal["rloo", "exact"] = "rloo"  # on fresh prompts, or by enumeration of all responses
    reference_prompts: Count = 256  # fresh ones, of rloo
    least: Share = 1e-5  # exact: responses less probable than this are left out
    prompts: Count = 32  # groups of the buffer; with an exact reference each part has the same prompts
    group: Several = 8  # responses per prompt
    parts: Several = 16  # parts of the buffer, each left out in turn for standard errors; divides prompts
    largest: Whole = 10  # responses that have a column for their share of the gradient; 0 leaves it out
    probes: Whole = 1  # draws of random signs that measure the noise of tokens, a pass over the buffer each
    rollouts: str = ""  # a file that a run wrote with --rollouts-every: the buffer, in place of samples
    sampler: str = ""  # the model that drew the buffer; if empty, `model` itself before the drift
    drift: Whole = 4  # updates on the buffer between its samples and the policy that is looked at
    lr: Positive = 5e-5  # learning rate of these updates
    budget: Count = 2048  # most tokens in a pack, which goes through the model at once
    seed: Seed = 0  # of samples and prompts
    out: Filled = "runs/compare"  # folder of the numbers and the picture; a run's, for its report
    strategy: StrategyConfig = field(default_factory=partial(StrategyConfig, engine_batch=512))


def row(name: str, group: int) -> Algorithm:
    """Return the row of a name, or GRPO's with the loss of FILE.py:LOSS."""
    file, _, function = name.rpartition(":")
    if not file:
        return get_algorithm(name, group=group)
    loss = getattr(find_module(file, name, kind="loss"), function, None)
    if not callable(loss):
        raise ValueError(f"rows: expected a loss {function} in {file}, got none")
    return get_algorithm("grpo")._replace(loss=loss)


def weighted(algo: Algorithm, rollout: rft.Rollout, reward: Tensor, **more: Tensor) -> rft.Experience:
    """Return a buffer with the advantages and weights of a row."""
    return rft.experience(rollout, adv=algo.advantage(reward, rollout, **more), w=algo.weight(rollout.mask))


def setup(cfg: Config) -> tuple:
    """Return (strategy, apply, state, score, tokenizer, engine, sample), with a function that samples."""
    st = rft.strategy.get_strategy(replace(cfg.strategy, seed=cfg.seed))
    model = rft.run.last_model(cfg.model)
    score = rft.run.load_rewards(rft.run.rewards_of(cfg, cfg.data), cfg, st)
    tokenizer = rft.model.load_tokenizer(model)
    dataset = rft.data.load(
        cfg.data, tokenizer, seed=cfg.seed, columns=rft.reward.columns(score),
        values=rft.reward.label_values(score), max_prompt=cfg.max_prompt,
        window=rft.model.read_window(model), max_new=cfg.max_new,
        **rft.run.data_options(cfg, rft.run.load_processing(cfg, model)),
    )  # fmt: skip
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    apply, state = st.init(rft.model.load(model), rft.optim.adamw(cfg.lr), sampling=sampling)
    config, sampler = rft.engine.config_of(cfg.strategy), rft.run.last_model(cfg.sampler or cfg.model)
    eng = rft.engine.get_engine(config, sampler, tokenizer)

    def sample(
        count: int, step: int, *, times: int = 1, n: int = cfg.group, how: rft.Sampling = sampling
    ) -> tuple:
        """Return (prompts, rollout, rewards [N, n]) of `count` prompts, all of them so many times."""
        drawn, own = rft.data.draw(dataset, count, step, cfg.seed)
        prompts, keys = drawn * times, [rft.rng.fold_in(key, i) for i in range(times) for key in own]
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=n, sampling=how)
        judged = rft.collect.gather_and_judge(
            st, score, rollout, prompts, tokenizer, timeout=cfg.reward_timeout, seed=cfg.seed
        )
        return prompts, rollout, judged.reward

    return st, apply, state, score, tokenizer, eng, sample


def exact(cfg: Config, st, apply, state, score, tokenizer, prompts) -> tuple[estimators.Reference, str]:
    """Return the policy gradient of some prompts by enumeration of the responses, and what it is."""
    sampling = rft.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_new=cfg.max_new)
    every = rft.analysis.every_response(
        st, apply, state.params, [prompt.ids for prompt in prompts], words=len(tokenizer),
        end=tokenizer.eos_token_id, sampling=sampling, least=cfg.least, budget=cfg.budget,
    )  # fmt: skip
    slope = rft.analysis.exact_slopes(every, rft.reward.judge_rows(score, every, prompts, tokenizer))
    exp, rows = rft.experience(every, adv=slope, w=every.mask.float()), [range(len(slope))]
    ref = estimators.reference(st, state, apply, exp, slope, rows, budget=cfg.budget)
    return ref, f"exact, {len(slope)} responses with {rft.analysis.mass(every):.2%} of the probability"


def by_samples(cfg: Config, st, apply, state, sample) -> tuple[estimators.Reference, str]:
    """Return RLOO's gradient on fresh prompts, and what it is."""
    _, fresh, worth = sample(cfg.reference_prompts, 1)
    exp = weighted(get_algorithm("rloo"), fresh, worth)
    slope = estimators.slopes(get_algorithm("rloo").loss, exp, fresh.logp)
    rows = estimators.split_prompts(fresh.group, cfg.reference_prompts)
    ref = estimators.reference(st, state, apply, exp, slope, rows, budget=cfg.budget)
    return ref, f"rloo on {cfg.reference_prompts} fresh prompts"


def main(cfg: Config) -> None:
    frozen = comparison.recorded(cfg.rollouts, cfg.rows, cfg.model, cfg) if cfg.rollouts else None
    if frozen:
        cfg = replace(cfg, prompts=len(frozen[1]), group=frozen[1].shape[1])
    rows = {name: row(name, cfg.group) for name in cfg.rows}
    if cfg.prompts % cfg.parts:
        raise ValueError(f"parts: expected a divisor of the {cfg.prompts} prompts, got {cfg.parts}")
    rft.run.without(cfg.strategy, "seed", instead="use --seed")
    rft.run.check_results(Path(cfg.out) / "estimators.json")
    st, apply, state, score, tokenizer, eng, sample = setup(cfg)

    # the buffer. An exact gradient is of some prompts: all parts are then groups for the same ones
    times = cfg.parts if cfg.reference == "exact" else 1
    prompts, rollout, reward = ([], *frozen) if frozen else sample(cfg.prompts // times, 0, times=times)
    parts = estimators.split_prompts(rollout.group, cfg.parts)
    away = get_algorithm("cispo")  # for the updates away from the samples: it stops no gradient
    for _ in range(cfg.drift):
        packs = st.shard(weighted(away, rollout, reward), cfg.budget)
        state, _ = st.update(state, st.grad(state, apply, away.loss, packs)[0])
    logp = st.score(apply, state.params, rollout, cfg.budget).logp

    # each row's slopes there, which its gradient is made of
    greedy = {}
    if any(algo.greedy for algo in rows.values()):
        how = rft.Sampling(temperature=0.0, max_new=cfg.max_new)
        greedy = {"greedy_reward": sample(len(prompts) // times, 0, times=times, n=1, how=how)[2][:, 0]}
    buffers = {}
    for name, algo in rows.items():
        exp = weighted(algo, rollout, reward, **(greedy if algo.greedy else {}))
        buffers[name] = exp, estimators.slopes(algo.loss, exp, logp)

    # the reference there, and the rows one after the other
    if cfg.reference == "exact":
        ref, about = exact(cfg, st, apply, state, score, tokenizer, prompts[: len(prompts) // times])
    else:
        rft.sync.push(st, state, eng, version=cfg.drift)
        ref, about = by_samples(cfg, st, apply, state, sample)
    measured = estimators.compare(
        st, state, apply, buffers, parts, ref, budget=cfg.budget, prompts=cfg.prompts, largest=cfg.largest,
        probes=cfg.probes, key=cfg.seed,
    )  # fmt: skip
    buffer = {"sampler": cfg.rollouts or cfg.sampler or cfg.model, "drift": cfg.drift}
    found = {
        "config": cfg,
        "buffer": buffer | comparison.describe(rollout, reward, logp),
        "reference": {"what": about, "norm": ref.square**0.5, "ceiling": ref.ceiling},
        "rows": {name: next(measured)[1] for name in rft.run.track(list(rows), "rows", rank=st.rank)},
        "evidence": comparison.evidence(buffers, logp),
    }
    comparison.write(found, Path(cfg.out), rank=st.rank)
    score.close()
    st.close()


if __name__ == "__main__":
    rft.run.cli(main, Config)
