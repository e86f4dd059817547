"""Sweep losses over their limits on one frozen buffer, to see a clip before a run is spent on it.

    python train_scripts/sweep.py --out docs/sweep
    python train_scripts/sweep.py --train --configs grpo grpo,high=0.5 cispo,lr=2e-3 --out runs/sweep

With --train it trains instead: each config for some steps, with bands over seeds. The rest is about limits.

Samples are drawn once and the policy takes a few steps away from them, as in the later epochs of PPO. Then
`torch.func.vmap` evaluates each loss at every limit: the gradient to the log-probs by vmap over the loss,
from there to the parameters by vmap over one vjp, without another forward. Writes sweep.png and sweep.json.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

import rft_fn as rft
from rft_fn.limits import Count, Filled, Positive, Seed, Several, Whole
from rft_fn.run.options import Options


@dataclass(frozen=True)
class Config(Options):
    """The options of a sweep."""

    model: Filled = "tiny"  # tiny or tiny:TASK:LEVEL, smollm2-135m, a folder, or a hub name
    data: tuple[str, ...] = ("sort_digits:1",)  # tasks as TASK:LEVEL, files, folders, hub names; =SHARE
    template: str = "{short}"  # the question; {NAME} stands for a column of the row
    reward: tuple[str, ...] = ("task:sort_digits",)  # as in grpo.py
    prompts: Count = 16  # prompts of the buffer
    group: Several = 8  # responses per prompt
    away: Whole = 4  # updates between the samples and the policy that the sweep looks at
    lr: Positive = 2e-4  # learning rate of these updates
    budget: Count = 512  # most tokens in a pack, which goes through the model at once
    low: Positive = 1e-4  # smallest limit of the sweep
    high: Positive = 1.0  # largest limit of the sweep
    points: Several = 21  # limits, evenly spaced in logarithm; as many coefficients of the KL term
    at_once: Count = 21  # points whose gradients are held at a time; lower it for a large model
    max_new: Count = 6  # most tokens in a response
    seed: Seed = 0  # of samples and prompts; with --train of the first of `seeds`
    out: Filled = "runs/sweep"  # folder of the picture and the numbers

    # training in place of limits
    train: bool = False  # train each of `configs` for some steps
    configs: tuple[str, ...] = ("grpo", "gspo", "cispo", "grpo,high=0.5")  # ROW,LIMIT=NUMBER,lr=NUMBER each
    own: bool = False  # each config has rollouts of its own; if not, all learn from those of the first
    steps: Count = 20  # rollouts that each config learns from
    passes: Count = 4  # updates on a rollout
    train_lr: Positive = 1e-3  # learning rate of a config that names none
    seeds: Count = 3  # runs of each config, over which the bands go
    eval_every: Count = 5  # steps between greedy answers to unseen prompts
    eval_prompts: Count = 64  # unseen prompts


def check(cfg: Config) -> None:
    """ValueError for numbers that make no sweep, and for a folder that cannot be written to."""
    if not 0 < cfg.low < cfg.high:
        raise ValueError(f"low, high: expected 0 < low < high, got {cfg.low} and {cfg.high}")
    rft.run.check_results(Path(cfg.out) / ("train.json" if cfg.train else "sweep.json"))


def at(name: str, logp: Tensor, b: rft.Packed, x: Tensor) -> Tensor:
    """The loss `name` with its limit at x: [T]."""
    if name == "gspo":
        return rft.loss.gspo(logp, b.old_logp, b.adv, b.mask, b.seq, b.num_seqs, low=x, high=x)
    if name == "dppo_tv":
        return rft.loss.dppo_tv(logp, b.old_logp, b.adv, limit=x)
    if name == "kl":
        return rft.loss.ppo_clip(logp, b.old_logp, b.adv) + x * rft.loss.kl(logp, b.ref_logp)
    return rft.loss.ppo_clip(logp, b.old_logp, b.adv, low=x, high=x)


def cispo(out: rft.TokenOut, b: rft.Packed) -> Tensor:
    """The loss of the updates before the sweep: it stops no gradient."""
    return rft.loss.cispo(out.logp, b.old_logp, b.adv)


def buffer(cfg: Config) -> tuple:
    """(apply, params, packs): the policy after `away` steps, and samples from before them."""
    # samples of the policy as it is at first
    tokenizer = rft.model.load_tokenizer(cfg.model)
    sampling = rft.Sampling(max_new=cfg.max_new)
    dataset = rft.data.load(cfg.data, tokenizer, seed=cfg.seed, template=cfg.template)
    prompts, keys = rft.data.draw(dataset, cfg.prompts, 0, cfg.seed)
    eng = rft.engine.get_engine(rft.engine.EngineConfig(batch=512), cfg.model, tokenizer)
    rollout = eng.generate(prompts, keys, n=cfg.group, sampling=sampling)

    # packs with the group's advantages; the first policy is also the reference
    st = rft.strategy.get_strategy()
    score = rft.run.load_rewards(cfg.reward, rft.run.options.Data(), st)
    reward = rft.reward.judge(score, rollout, prompts, tokenizer).reward
    score.close()
    adv = rft.advantage.grpo(reward).view(-1, 1)
    w = rft.weight.seq_mean(rollout.mask)
    exp = rft.experience(rollout, adv=adv, w=w, ref_logp=rollout.logp)
    packs = rft.packing.shard(exp, cfg.budget)[0]

    # a few updates away from them
    apply, state = st.init(rft.model.load(cfg.model), rft.optim.adamw(cfg.lr), sampling=sampling)
    for _ in range(cfg.away):
        grads, _ = st.grad(state, apply, cispo, packs)
        state, _ = st.update(state, grads)
    return apply, rft.tree.map(lambda p: p.detach(), state.params), packs


def sweep(name: str, x: Tensor, stages: list) -> tuple[Tensor, Tensor]:
    """(gradient norm, share of tokens with an advantage whose gradient is stopped), each like x [C].

    A stage is (pack, its log-probs, their vjp to the parameters).
    """
    total = None
    moving = 0
    tokens = 0
    # the limits are swept by vmap, the packs one after the other: gradients add up over packs
    for b, logp, back in stages:
        slope = grad(lambda z, c: (b.w * at(name, z, b, c)).sum())  # noqa: B023
        to_logp = vmap(slope, (None, 0))(logp, x)  # [C, T]
        (grads,) = vmap(back)(to_logp)
        total = grads if total is None else rft.tree.map(torch.add, total, grads)
        has = b.mask & (b.adv != 0)
        moving = moving + ((to_logp != 0) & has).sum(-1)
        tokens = tokens + has.sum()
    squares = [g.flatten(1).square().sum(1) for g in rft.tree.leaves(total)]
    return torch.stack(squares).sum(0).sqrt(), 1 - moving / tokens


def main(cfg: Config) -> None:
    check(cfg)
    if cfg.train:
        return train(cfg)

    # one forward of each pack, which every limit is swept over
    warnings.filterwarnings("ignore", "There is a performance drop")  # attention has no batching rule: a loop
    apply, params, packs = buffer(cfg)
    stages = [(b, *vjp(lambda p: apply(p, b).logp, params)) for b in packs]  # noqa: B023
    x = torch.logspace(*torch.tensor([cfg.low, cfg.high]).log10().tolist(), cfg.points)

    # the gradient of each loss at each limit
    found: dict = {"x": x.tolist(), "config": asdict(cfg)}
    for name in ("ppo_clip", "gspo", "dppo_tv", "kl"):
        parts = [sweep(name, part, stages) for part in x.split(cfg.at_once)]
        norm, stopped = (torch.cat(p).tolist() for p in zip(*parts))
        found[name] = {"grad_norm": norm, "stopped": stopped}
    gap = torch.cat([(logp - b.old_logp)[b.mask] for b, logp, _ in stages])
    found["log_ratio_std"] = gap.std().item()

    # numbers, a picture and a table
    folder = Path(cfg.out)
    (folder / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, folder / "sweep.png")
    rows = {f"{limit:.1e}": line(found, i) for i, limit in enumerate(found["x"])}
    rft.run.table(rows, title=f"limit: gradient norm (share of tokens stopped) of {', '.join(LABELS)}")
    print(f"{len(gap)} tokens, log-ratios of std {gap.std():.3f}; {folder / 'sweep.png'}")


LABELS = {"ppo_clip": "ppo_clip(low=high=x)", "gspo": "gspo(low=high=x)", "dppo_tv": "dppo_tv(limit=x)"}


def line(found: dict, i: int) -> str:
    """The gradient norm and the share of stopped tokens of each loss at limit number i."""
    numbers = [(found[name]["grad_norm"][i], found[name]["stopped"][i]) for name in LABELS]
    return "   ".join(f"{norm:8.4f} ({stopped:5.1%})" for norm, stopped in numbers)


def draw(found: dict, path: Path) -> None:
    """Gradient norm and clipped share against the limit, and the norm against the KL coefficient."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # norm and stopped share of each loss over its limit; the KL's coefficient has a panel for itself
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name, label in LABELS.items():
        axes[0].plot(found["x"], found[name]["grad_norm"], label=label)
        axes[1].plot(found["x"], found[name]["stopped"], label=label)
    axes[2].plot(found["x"], found["kl"]["grad_norm"], color="C3", label="ppo_clip + x kl(logp, ref_logp)")

    titles = ("gradient norm", "share of tokens whose gradient is stopped", "gradient norm")
    labels = ("limit x", "limit x", "coefficient x")
    for ax, title, label in zip(axes, titles, labels):
        ax.set(xscale="log", title=title, xlabel=label)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
        ax.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


# ---------- training each of some configs


class Arm(NamedTuple):
    """A config that is trained: its algorithm, and the policy with its state."""

    algorithm: rft.algorithm.Algorithm
    apply: rft.types.Apply
    state: rft.types.TrainState


def read(cfg: Config, text: str) -> tuple[rft.algorithm.Algorithm, float]:
    """The row of ROW,LIMIT=NUMBER,... with these limits, and its learning rate."""
    name, *given = text.split(",")
    options = {}
    for part in given:
        option, equal, number = part.partition("=")
        try:
            options[option] = float(number)
        except ValueError:
            equal = ""
        if not equal or option not in ("low", "high", "dual", "lr"):
            raise ValueError(f"configs: expected ROW,low=X,high=X,dual=X,lr=X or some of them, got {text!r}")
    rate = options.pop("lr", cfg.train_lr)
    row = rft.algorithm.configured(name, group=cfg.group, limits=options)
    if row.greedy:
        raise ValueError(f"configs: expected rows without a greedy answer, got {name}")
    return row, rate


def learn(cfg: Config, st: rft.types.Strategy, arm: Arm, rollout: rft.Rollout, reward: Tensor) -> tuple:
    """(the arm after its updates on a rollout, the metrics of the last one)."""
    exp = rft.experience(
        rollout, adv=arm.algorithm.advantage(reward, rollout), w=arm.algorithm.weight(rollout.mask)
    )
    state = arm.state
    metrics: dict[str, float] = {}
    for _ in range(cfg.passes):
        grads, seen = st.grad(state, arm.apply, arm.algorithm.loss, st.shard(exp, cfg.budget))
        state, more = st.update(state, grads)
        metrics = rft.metric.results(seen | more)
    return arm._replace(state=state), metrics


def run(cfg: Config, configs: Mapping[str, tuple], seed: int) -> dict[str, list[dict[str, float]]]:
    """The metrics of each step of each config, from one seed."""
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(seed=seed))
    tokenizer = rft.model.load_tokenizer(cfg.model)
    sampling = rft.Sampling(max_new=cfg.max_new)
    dataset, unseen = rft.data.load_for_training(cfg.data, tokenizer, seed=seed, template=cfg.template)
    questions, keys = rft.data.take(unseen, cfg.eval_prompts, seed)
    eng = rft.engine.get_engine(rft.engine.EngineConfig(batch=512), cfg.model, tokenizer)
    score = rft.run.load_rewards(cfg.reward, rft.run.options.Data(), st)
    arms = {}
    for name, (row, rate) in configs.items():
        tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(rate))
        arms[name] = Arm(row, *st.init(rft.model.load(cfg.model), tx, sampling=sampling))

    def answered(arm: Arm, version: int, prompts, keys, n: int, how: rft.Sampling) -> tuple:
        rft.sync.push(st, arm.state, eng, version=version)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=n, sampling=how)
        return rollout, rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer).reward

    logs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for step in range(cfg.steps):
        drawn = rft.data.draw(dataset, cfg.prompts, step, seed)
        shared = None
        for name, arm in arms.items():
            if cfg.own or shared is None:
                shared = answered(arm, step, *drawn, cfg.group, sampling)
            rollout, reward = shared
            arms[name], metrics = learn(cfg, st, arm, rollout, reward)
            kept = {key: metrics[key] for key in TRAINED.values() if key in metrics}
            logs[name].append({"step": step + 1, **kept})
            if (step + 1) % cfg.eval_every == 0 or step + 1 == cfg.steps:
                greedy = rft.Sampling(temperature=0.0, max_new=cfg.max_new)
                marks = answered(arms[name], step + 1, questions, keys, 1, greedy)[1]
                logs[name][-1]["eval/mean"] = float(marks.mean())
    score.close()
    st.close()
    return logs


TRAINED = {
    "greedy reward on unseen prompts": "eval/mean",
    "KL to the sampler [nats per token]": "policy/kl_old",
    "share of tokens stopped": "policy/clip_frac",
    "gradient norm": "grad/norm",
}


def train(cfg: Config) -> None:
    """Train each config from each seed; write the curves, their picture and a table."""
    configs = {text: read(cfg, text) for text in cfg.configs}
    runs = []
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        runs.append(run(cfg, configs, seed))
    curves = {name: [logs[name] for logs in runs] for name in configs}
    folder = Path(cfg.out)
    (folder / "train.json").write_text(json.dumps({"config": asdict(cfg), "curves": curves}) + "\n")
    draw_curves(curves, folder / "train.png")
    rows = {}
    for name, logs in curves.items():
        last = torch.tensor([log[-1]["eval/mean"] for log in logs], dtype=torch.float64)
        rows[name] = f"{last.mean():.3f} ({last.min():.3f} to {last.max():.3f})"
    whose = "their own rollouts" if cfg.own else f"the rollouts of {cfg.configs[0]}"
    rft.run.table(rows, title=f"greedy reward after {cfg.steps} steps on {whose}, {cfg.seeds} seeds")
    print(folder / "train.png")


def draw_curves(curves: Mapping[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """A panel for each metric: the mean of a config as a line, lowest to highest seed as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(1, len(TRAINED), figsize=(16, 3.6), layout="constrained")
    for ax, (title, key) in zip(axes, TRAINED.items()):
        for k, (name, logs) in enumerate(curves.items()):
            steps = [row["step"] for row in logs[0] if key in row]
            if not steps:  # a loss without a limit stops nothing
                continue
            y = torch.tensor([[row[key] for row in log if key in row] for log in logs], dtype=torch.float64)
            ax.plot(steps, y.mean(0), color=f"C{k}", lw=1.6, marker="o", ms=2.5, label=name)
            ax.fill_between(steps, y.amin(0), y.amax(0), color=f"C{k}", alpha=0.18, lw=0)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    rft.run.cli(main, Config)
