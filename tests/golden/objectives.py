"""Configs of other libraries that name an objective, and ours that `rft migrate` makes of them.

Each config is one that a user may have. objectives.json has the gradients of their own code, by
`objectives_record.py`: from rewards to log-probs, at three scales of log-ratios, with tool tokens in the
middle of responses and one response without a token. `gradient` is what our command makes of it.
"""

import json
import math
import shlex
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from golden import batch as batches
from test_house import load_script
from torch import Tensor

import rft_fn as rft
from rft_fn import collect, loss, parsing
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.translation import translate
from rft_fn.types import Packed, Rollout, TokenOut

FILE = Path(__file__).with_name("objectives.json")


class Config(NamedTuple):
    """The options of another library that name an objective."""

    library: str
    kind: str  # of the trainer: rl, dpo
    options: dict[str, Any]


A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SEQ = {"importance_sampling_level": "sequence"}
NEAR = {"epsilon": 0.1, "epsilon_high": 0.12}
TRL = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dr_grpo, scaled": {"loss_type": "dr_grpo"},
    "dapo": {},
    "dapo, unscaled": {"scale_rewards": "none"},
    "dapo, scaled over the batch": {"scale_rewards": "batch"},
    "dapo, higher": {"epsilon_high": 0.28},
    "dapo, delta 1.5": {"delta": 1.5},
    "dapo, delta 1.1": {"delta": 1.1, "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo"},
    "cispo, 5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo, sequence": {"loss_type": "cispo", "epsilon_high": 1.12, **SEQ},
    "sapo": {"loss_type": "sapo"},
    "sapo, other temperatures": {
        "loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0,
    },
    "sapo, sequence": {"loss_type": "sapo", **SEQ},
    "luspo": {"loss_type": "luspo", **SEQ, **NEAR},
    "luspo, token": {"loss_type": "luspo"},
    "vespo": {"loss_type": "vespo"},
    "sequence": {**SEQ, **NEAR},
    "sequence, grpo": {"loss_type": "grpo", **SEQ, **NEAR},
    "sequence, dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", **SEQ, **NEAR},
    "sequence, delta": {"delta": 1.15, **SEQ, **NEAR},
    "kl": {"loss_type": "grpo", "beta": 0.05, "num_iterations": 2},
    "kl, uncorrected": {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
}  # fmt: skip
SMOOTHED = {"label_smoothing": 0.1}
TRL_PAIRS = {
    kind: {"loss_type": kind}
    for kind in (
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
        "apo_down", "discopop", "sft", "sigmoid_norm",
    )
}  # fmt: skip
TRL_PAIRS |= {
    f"{kind}, smoothed": {"loss_type": kind, **SMOOTHED} for kind in ("sigmoid", "robust", "exo_pair")
}
MODE, MEAN, EST = A + "policy_loss.loss_mode", A + "loss_agg_mode", "algorithm.adv_estimator"
GRPO = {EST: "grpo"}
GSPO = {**GRPO, MODE: "gspo", A + "clip_ratio_low": 0.1, A + "clip_ratio_high": 0.12}
VERL = {
    **{
        name: {EST: name}
        for name in (
            "gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
            "gpg", "grpo_passk",
        )
    },
    "grpo, unscaled": {**GRPO, "algorithm.norm_adv_by_std_in_grpo": False},
    **{f"grpo, {mean}": {**GRPO, MEAN: mean} for mean in (
        "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    )},
    "grpo, unscaled, a factor": {
        **GRPO, "algorithm.norm_adv_by_std_in_grpo": False, MEAN: "seq-mean-token-sum-norm",
        A + "loss_scale_factor": 100,
    },
    "grpo, higher": {**GRPO, A + "clip_ratio_high": 0.28},
    "grpo, clip_ratio 0.3": {**GRPO, A + "clip_ratio": 0.3},
    "grpo, clip_ratio_c 10": {**GRPO, A + "clip_ratio_c": 10.0},
    "gspo": GSPO,
    "gspo, seq-mean-token-mean": {**GSPO, MEAN: "seq-mean-token-mean"},
    "rloo, gspo": {**GSPO, EST: "rloo"},
    "rloo, seq-mean-token-sum": {EST: "rloo", MEAN: "seq-mean-token-sum"},
    "cispo": {**GRPO, MODE: "cispo"},
    "sapo": {**GRPO, MODE: "sapo"},
    "sapo, other temperatures": {**GRPO, MODE: "sapo", A + "tau_pos": 1.5, A + "tau_neg": 2.0},
    "geo_mean": {**GRPO, MODE: "geo_mean"},
    "geo_mean, 0.4": {**GRPO, MODE: "geo_mean", A + "clip_ratio_low": 0.4, A + "clip_ratio_high": 0.3},
    "dppo_tv": {**GRPO, MODE: "dppo_tv", A + "clip_ratio_low": 0.15, A + "clip_ratio_high": 0.15},
    "dppo_kl": {
        **GRPO, MODE: "dppo_kl", A + "clip_ratio_low": 0.05, A + "clip_ratio_high": 0.05,
        A + "clip_ratio_c": 20,
    },
    "loss gpg": {**GRPO, MODE: "gpg"},
    "clip_cov": {**GRPO, MODE: "clip_cov"},
    "kl_cov": {**GRPO, MODE: "kl_cov"},
    "gae, seq-mean-token-mean": {EST: "gae", MEAN: "seq-mean-token-mean"},
    "gae, gspo": {**GSPO, EST: "gae"},
    "grpo, kl": {**GRPO, A + "use_kl_loss": True, A + "kl_loss_coef": 0.05},
}  # fmt: skip
ADV, KL = "algo.advantage.estimator", "algo.kl."
ORL = {KL + "init_coef": 0.0}
GROUP = {**ORL, ADV: "group_norm"}
IS = "algo.advantage.is_correction_"
OPENRLHF = {
    **{
        name: {**ORL, ADV: name}
        for name in (
            "gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce",
        )
    },
    "gae, lambda 0.95": {**ORL, ADV: "gae", "algo.advantage.lambd": 0.95},
    "group_norm, limits": {**GROUP, "actor.eps_clip_low_high": [0.2, 0.28]},
    "group_norm, seq-mean-token-mean": {**GROUP, "actor.loss_agg_mode": "seq-mean-token-mean"},
    "group_norm, dual clip": {**GROUP, "actor.dual_clip": 3.0},
    "group_norm, gspo": {**GROUP, "actor.policy_loss_type": "gspo", "actor.eps_clip_low_high": [0.1, 0.12]},
    "gae, gspo": {
        **ORL, ADV: "gae", "actor.policy_loss_type": "gspo", "actor.eps_clip_low_high": [0.1, 0.12],
    },
    "group_norm, icepop": {**GROUP, IS + "level": "token"},
    "group_norm, icepop, upper bound": {**GROUP, IS + "level": "token", IS + "threshold": [2.0]},
    "group_norm, tis": {**GROUP, IS + "level": "token", IS + "mode": "clip"},
    "group_norm, seq mask": {**GROUP, IS + "level": "seq"},
    "group_norm, kl k1": {ADV: "group_norm", KL + "use_loss": True, KL + "init_coef": 0.05},
    "group_norm, kl k2": {
        ADV: "group_norm", KL + "use_loss": True, KL + "init_coef": 0.05, KL + "estimator": "k2",
    },
    "group_norm, kl k3": {
        ADV: "group_norm", KL + "use_loss": True, KL + "init_coef": 0.05, KL + "estimator": "k3",
    },
}  # fmt: skip
LRFT = {"init_kl_coef": 0.0}
LIGHTRFT = {
    **{
        name: {**LRFT, "advantage_estimator": name}
        for name in ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "cpgd")
    },
    "group_norm, cpg": {**LRFT, "advantage_estimator": "group_norm", "use_cpg_loss": True},
    "group_norm, gspo": {**LRFT, "advantage_estimator": "group_norm", "use_gspo": True},
    "group_norm, token-mean": {**LRFT, "advantage_estimator": "group_norm", "loss_agg_mode": "token-mean"},
}  # fmt: skip
SIZES = {
    "trl": {"num_generations": 4, "max_completion_length": 12},
    "verl": {R + "n": 4, "data.max_response_length": 12},
    "openrlhf": {"rollout.n_samples_per_prompt": 4},
    "lightrft": {"n_samples_per_prompt": 4},
}
RL = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "lightrft": LIGHTRFT}
CONFIGS: dict[str, Config] = {
    **{f"trl dpo/{key}": Config("trl", "dpo", x) for key, x in TRL_PAIRS.items()},
    **{f"{name}/{key}": Config(name, "rl", SIZES[name] | x) for name in RL for key, x in RL[name].items()},
}


# ---------- our side


@cache
def migrated(key: str) -> tuple[str, list[str], Any]:
    """Return (the command, its notes, the config that its script makes of it)."""
    library, kind, options = CONFIGS[key]
    found = translate(LIBRARIES[library], options, (), kind)
    words = shlex.split(" ".join(found.command))
    script = load_script(Path(words[1]).stem).Config
    return " ".join(words[1:]), found.notes, parsing.parse(script, parsing.qualify(words[2:], script))


def data(library: str, scale: float) -> dict[str, Any]:
    """Return the batch of a scale; without tools for LightRFT, and no empty response, where it is NaN."""
    other = library != "lightrft"
    return batches.scaled(scale, holes=other, silent=other)


def batch(library: str, scale: float) -> dict[str, Tensor]:
    """Return the recorded batch of a scale, [B, S], float64."""
    x = {k: torch.tensor(v) for k, v in data(library, scale).items()}
    return {k: v.double() if v.is_floating_point() else v for k, v in x.items()}


def gradient(cfg: Any, x: dict[str, Tensor]) -> Tensor:
    """Return the gradient [tokens] in the log-probs of what a script with the options `cfg` minimises."""
    logp = x["logp"].clone().requires_grad_()
    total = pairs(cfg, x, logp) if hasattr(cfg, "average") else policy(cfg, x, logp)
    return torch.autograd.grad(total, logp)[0][x["mask"]]


def pairs(cfg: Any, x: dict[str, Tensor], logp: Tensor) -> Tensor:
    """Return the loss of dpo.py: row i is chosen, row i + 8 rejected."""
    both = (logp, x["ref_logp"])
    sides = [side for of in both for side in (of * x["mask"]).sum(-1).chunk(2)]
    if cfg.average or cfg.row.mean:
        tokens = [n.clamp(min=1) for n in x["mask"].sum(-1).chunk(2)]
        sides = [side / n for side, n in zip(sides, tokens * 2)]
    return load_script("dpo").pair_loss(cfg)(*(sides if cfg.row.reference else sides[:2])).mean()


def policy(cfg: Any, x: dict[str, Tensor], logp: Tensor) -> Tensor:
    """Return the loss of grpo.py or ppo.py, from rewards on."""
    mask, reward = x["mask"], x["reward"][0].view(4, 4)
    ones = torch.zeros(len(mask), dtype=torch.long)
    rollout = Rollout(
        tokens=mask.long(), mask=mask, logp=x["sampler_logp"], length=x["length"],
        truncated=x["truncated"], group=torch.arange(16) // 4, version=ones, media=None,
    )  # fmt: skip
    if hasattr(cfg, "gae_lambda"):
        algo = rft.run.actor_critic(cfg)
        token_reward = rft.reward_shaping.on_last_token(reward.flatten(), mask)
        adv, _ = algo.advantage(token_reward, x["old_value"], mask)
        adv = rft.advantage.whiten(adv, mask) if cfg.whiten else adv
    else:
        algo = rft.run.objective(cfg.algorithm, cfg, advantage=getattr(cfg, "advantage", None))
        if cfg.reward_norm:
            reward = rft.reward.scales.standardized(reward, over=cfg.reward_norm)
        more = {"greedy_reward": x["reward"][1][:4]} if algo.greedy else {}
        adv = algo.advantage(reward, rollout, **more)

    # as one pack
    w = algo.weight(mask)
    if cfg.mismatch not in (None, "none"):
        w = w * collect.correction(
            cfg.mismatch, x["old_logp"], rollout, cap=cfg.cap, floor=cfg.floor,
            geo_low=cfg.geo_low, geo_high=cfg.geo_high or math.inf,
        )[0]  # fmt: skip
    flat = lambda t: (t * mask).reshape(-1)  # noqa: E731
    ids, seq = torch.zeros(mask.numel(), dtype=torch.long), torch.arange(16).repeat_interleave(mask.shape[1])
    b = Packed(
        tokens=ids, target=ids, pos=ids, seq=seq,
        mask=mask.reshape(-1), old_logp=flat(x["old_logp"]), adv=flat(adv.expand(mask.shape)), w=flat(w),
        ref_logp=flat(x["ref_logp"]), old_value=None, ret=None, media=None, num_seqs=16,
    )  # fmt: skip
    out = TokenOut(logp=flat(logp), entropy=None, value=None, aux=None)
    each = algo.loss(out, b)[0]
    if not hasattr(cfg, "gae_lambda") and cfg.kl:
        each = each + cfg.kl * loss.kl(out.logp, b.ref_logp)
    return (b.w * each).sum()


def error(theirs: Tensor, ours: Tensor, mask: Tensor) -> float:
    """Return |theirs - ours| / |theirs|, where a response without tokens counts in no mean."""
    rows = mask.any(-1).double().mean()
    return min(float((t - ours).norm() / t.norm().clamp(min=1e-30)) for t in (theirs, theirs / rows))


def errors(key: str, recorded: dict[str, Any]) -> list[float]:
    """Return the error of our command at each scale."""
    _, _, cfg = migrated(key)
    found = []
    for scale in batches.SCALES:
        theirs = torch.tensor(recorded["grad"][str(scale)], dtype=torch.float64)
        x = batch(CONFIGS[key].library, scale)
        found.append(error(theirs, gradient(cfg, x), x["mask"]))
    return found


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())
