"""The experiments: the arms of each, and which of their numbers are shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from loops import Arm, Student, distil, reinforce

import rft_fn as rft


@dataclass(frozen=True)
class Experiment:
    """A claim, the arms that it is about, and what to look at."""

    title: str
    source: str  # arXiv
    arms: Mapping[str, Arm | Student]
    panels: Mapping[str, str]  # title of a panel -> a metric over the steps
    columns: Mapping[str, tuple[str, str]]  # title of a column -> (metric, end or mean or sum)
    steps: int = 50
    loop: Callable = reinforce


# ---------------------------------------------------------------------------- clip-higher

_several = Arm(updates=4, lr=5e-4)
CLIP_HIGHER = Experiment(
    title="Clip-higher keeps entropy",
    source="2503.14476",
    arms={
        "clip 0.2": replace(_several, loss=partial(rft.loss.ppo_clip, high=0.2)),
        "clip-higher 0.28": replace(_several, loss=partial(rft.loss.ppo_clip, high=0.28)),
        "upper limit 1.0": replace(_several, loss=partial(rft.loss.ppo_clip, high=1.0)),
    },
    panels={"entropy [nats per token]": "entropy", "reward of samples": "reward"},
    columns={
        "entropy, mean of all steps": ("entropy", "mean"),
        "entropy, last 10 steps": ("entropy", "end"),
        "tokens beyond 0.2 [share]": ("beyond", "mean"),
        "reward, last 10 steps": ("reward", "end"),
        "greedy, at the end": ("greedy", "last"),
    },
)

# ---------------------------------------------------------------------------- Dr. GRPO

_long = Arm(task="sort_digits", level=3, model="tiny:sort_digits:3", max_new=24)
LENGTH_BIAS = Experiment(
    title="GRPO's means over responses make wrong responses longer",
    source="2503.20783",
    arms={
        "GRPO": replace(_long, weight=rft.weight.seq_mean),
        "Dr. GRPO": replace(
            _long,
            weight=partial(rft.weight.constant, length=24),
            advantage=partial(rft.advantage.grpo, scale=False),
        ),
    },
    panels={"length of wrong responses [tokens]": "length_wrong", "reward of samples": "reward"},
    columns={
        "wrong: tokens, mean of all steps": ("length_wrong", "mean"),
        "wrong: tokens, last 10 steps": ("length_wrong", "end"),
        "reward, last 10 steps": ("reward", "end"),
        "greedy, at the end": ("greedy", "last"),
    },
    steps=30,
)

# ---------------------------------------------------------------------------- covariance


def largest_covariance(logp: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The 2 % of tokens whose covariance of log-prob and advantage is largest."""
    return rft.weight.top_share(rft.weight.covariance(logp, adv, mask), mask, share=0.02)


def drop_some(w, logp, adv, mask, key):
    """Clip-Cov: drop 2 % of the tokens, drawn from those with a large covariance."""
    cov = rft.weight.covariance(logp, adv, mask)
    return rft.weight.clip_cov(w, cov, mask, key, share=0.02, low=0.5, high=5.0)


COVARIANCE = Experiment(
    title="Clip-Cov and KL-Cov hold the entropy",
    source="2505.22617",
    arms={
        "GRPO": replace(_several, loss=partial(rft.loss.ppo_clip, high=0.2)),
        "Clip-Cov": replace(_several, reweigh=drop_some),
        "KL-Cov": replace(_several, loss=rft.loss.kl_cov, chosen=largest_covariance),
    },
    panels={"entropy [nats per token]": "entropy", "reward of samples": "reward"},
    columns={
        "entropy, mean of all steps": ("entropy", "mean"),
        "entropy, last 10 steps": ("entropy", "end"),
        "reward, last 10 steps": ("reward", "end"),
        "greedy, at the end": ("greedy", "last"),
    },
)

# ---------------------------------------------------------------------------- dynamic sampling

_binary = Arm(task="addition", level=1, model="tiny:addition:1")
DYNAMIC_SAMPLING = Experiment(
    title="Dynamic sampling needs fewer steps",
    source="2503.14476",
    arms={"one round": _binary, "up to 4 rounds": replace(_binary, rounds=4)},
    panels={"greedy, unseen questions": "greedy", "groups whose rewards differ [share]": "varied"},
    columns={
        "greedy, half way": ("greedy", "middle"),
        "greedy, at the end": ("greedy", "last"),
        "groups that differ [share]": ("varied", "mean"),
        "responses sampled": ("drawn", "sum"),
    },
    steps=100,
)

# ---------------------------------------------------------------------------- a sampler that differs

_coarse = Arm(levels=6, trainer_logp=True)
MISMATCH = Experiment(
    title="Truncated importance sampling makes up for a quantised sampler",
    source="https://fengyao.notion.site/off-policy-rl",
    arms={
        "same weights": Arm(),
        "quantised, ignored": _coarse,
        "quantised, sampler's log-probs": replace(_coarse, trainer_logp=False),
        "quantised, TIS": replace(_coarse, correct=rft.weight.truncated_is),
    },
    panels={"greedy of the trained model": "greedy", "reward of samples": "reward"},
    columns={
        "reward of samples, last 10 steps": ("reward", "end"),
        "greedy, half way": ("greedy", "middle"),
        "greedy, at the end": ("greedy", "last"),
    },
    steps=30,
)

# ---------------------------------------------------------------------------- REINFORCE++


def raw(reward: torch.Tensor) -> torch.Tensor:
    """The reward itself: what REINFORCE++ whitens over the batch."""
    return reward


_global = Arm(advantage=raw, whiten=True)
BATCH_SIZE = Experiment(
    title="REINFORCE++ against GRPO in batch size",
    source="2501.03262",
    arms={
        "GRPO, 2 prompts": Arm(prompts=2),
        "REINFORCE++, 2 prompts": replace(_global, prompts=2),
        "GRPO, 16 prompts": Arm(),
        "REINFORCE++, 16 prompts": _global,
    },
    panels={"greedy, unseen questions": "greedy", "reward of samples": "reward"},
    columns={
        "reward, last 10 steps": ("reward", "end"),
        "greedy, half way": ("greedy", "middle"),
        "greedy, at the end": ("greedy", "last"),
    },
    steps=80,
)

# ---------------------------------------------------------------------------- GSPO

EXPERTS = Experiment(
    title="GSPO's ratios vary less on a mixture of experts",
    source="2507.18071",
    arms={
        "experts, GRPO": Arm(model="moe", updates=4, lr=5e-4, weight=rft.weight.seq_mean),
        "experts, GSPO": Arm(
            model="moe", updates=4, lr=5e-4, weight=rft.weight.seq_mean, loss=rft.loss.gspo, by_sequence=True
        ),
        "dense, GRPO": Arm(updates=4, lr=5e-4, weight=rft.weight.seq_mean),
        "dense, GSPO": Arm(
            updates=4, lr=5e-4, weight=rft.weight.seq_mean, loss=rft.loss.gspo, by_sequence=True
        ),
    },
    panels={"log-ratio of tokens, root mean square": "token_ratio", "reward of samples": "reward"},
    columns={
        "token log-ratio": ("token_ratio", "mean"),
        "sequence log-ratio": ("sequence_ratio", "mean"),
        "gradient norm": ("gradient", "mean"),
        "reward, last 10 steps": ("reward", "end"),
        "greedy, at the end": ("greedy", "last"),
    },
    steps=30,
)

# ---------------------------------------------------------------------------- distillation

ON_POLICY = Experiment(
    title="On-policy against off-policy distillation",
    source="2306.13649",
    arms={
        "teacher's responses": Student(samples="teacher", kl="forward"),
        "student's responses": Student(samples="student", kl="forward"),
    },
    panels={"sampled, unseen questions": "sampled", "KL(student, teacher) [nats]": "kl_reverse"},
    columns={
        "sampled, half way": ("sampled", "middle"),
        "sampled, at the end": ("sampled", "last"),
        "greedy, at the end": ("greedy", "last"),
        "KL(student, teacher) on the student's": ("kl_reverse", "last"),
    },
    loop=distil,
    steps=100,
)

KL_DIRECTION = Experiment(
    title="Forward against reverse KL with a small student",
    source="2306.08543",
    arms={
        "forward": Student(kl="forward", student="small", lr=2e-3),
        "reverse": Student(kl="reverse", student="small", lr=2e-3),
    },
    panels={"entropy of the student [nats per token]": "entropy", "sampled, unseen questions": "sampled"},
    columns={
        "entropy, last 10 steps": ("entropy", "end"),
        "sampled, at the end": ("sampled", "last"),
        "greedy, at the end": ("greedy", "last"),
        "KL(student, teacher)": ("kl_reverse", "last"),
        "KL(teacher, student)": ("kl_forward", "last"),
    },
    loop=distil,
    steps=200,
)

EXPERIMENTS = {
    "clip_higher": CLIP_HIGHER,
    "length_bias": LENGTH_BIAS,
    "covariance": COVARIANCE,
    "dynamic_sampling": DYNAMIC_SAMPLING,
    "mismatch": MISMATCH,
    "batch_size": BATCH_SIZE,
    "experts": EXPERTS,
    "on_policy": ON_POLICY,
    "kl_direction": KL_DIRECTION,
}
