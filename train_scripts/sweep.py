"""Sweep losses over their limits on one frozen buffer, to see a clip before a run is spent on it.

    python train_scripts/sweep.py --out docs/sweep

Samples are drawn once and the policy takes a few steps away from them, as in the later epochs of PPO. Then
`torch.func.vmap` evaluates each loss at every limit: the gradient to the log-probs by vmap over the loss,
from there to the parameters by vmap over one vjp, without another forward. Writes sweep.png and sweep.json.
"""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

import rft_fn as rft
from rft_fn.check import Count, Filled, Positive, Seed, Several, Whole
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
    seed: Seed = 0  # of samples and prompts
    out: Filled = "runs/sweep"  # folder of the picture and the numbers


def check(cfg: Config) -> None:
    """ValueError for numbers that make no sweep, and for a folder that cannot be written to."""
    if not 0 < cfg.low < cfg.high:
        raise ValueError(f"low, high: expected 0 < low < high, got {cfg.low} and {cfg.high}")
    rft.run.check_results(Path(cfg.out) / "sweep.json")


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
    # one forward of each pack, which every limit is swept over
    check(cfg)
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


if __name__ == "__main__":
    rft.run.cli(main, Config)
