"""Every number of metrics.jsonl of a run with everything on, computed again from the rollout files."""

import math

import numpy as np
import pytest
import torch
from script_runs import rows
from test_house import load_script

import rft_fn as rft
from rft_fn.run.rollout_files import read_rollout

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_runs")]

KL, BONUS, SHARE, IN_REWARD, CLIP, OVERLONG, MAX_NEW, LR = 0.05, 0.02, 0.6, 0.1, 0.4, 3, 6, 2e-3
OPTIONS = {
    "prompts": 6, "group": 4, "max_new": MAX_NEW, "lr": LR, "schedule": "constant", "warmup": 0, "kl": KL,
    "entropy": BONUS, "entropy_share": SHARE, "kl_in_reward": IN_REWARD, "reward_clip": CLIP,
    "overlong": OVERLONG, "normalize_reward": True, "mismatch": "tis", "geo_low": 0.5, "geo_high": 2.0,
    "update_kl": True, "rollouts_every": 1, "eval_every": 1, "eval_prompts": 4, "noise_every": 1,
}  # fmt: skip

# what no rollout file tells, and why
ELSEWHERE = {
    "eval/mean": "the answers of an evaluation are in no file",
    "eval/task:sort_digits": "the answers of an evaluation are in no file",
    "grad/snr": "depends on which rows share a pack, which is no property of the rollout",
    "grad/noise_scale": "depends on which rows share a pack, which is no property of the rollout",
}
EXACT = 1e-9
ROUNDED = 2e-5  # log-probs of the run are in float32, here in float64


def forward(folder, rollout):
    """Log-probs and entropies [B, S] of tokens in float64, a row at a time, with the gradient."""
    model = rft.model.load(str(folder)).double().eval()
    logp, entropy = [], []
    for tokens, length in zip(rollout.tokens, rollout.length.tolist()):
        logits = model(input_ids=tokens[None, :length]).logits[0].log_softmax(-1)
        shifted = torch.zeros(len(tokens), 2, dtype=torch.float64)
        own = logits[:-1].gather(-1, tokens[1:length, None])[:, 0]
        spread = -(logits.exp() * logits).sum(-1)[:-1]
        shifted[1:length] = torch.stack([own, spread], -1)
        logp.append(shifted[:, 0])
        entropy.append(shifted[:, 1])
    return model, torch.stack(logp), torch.stack(entropy)


def spread(name, x):
    return {f"{name}/mean": x.mean(), f"{name}/std": x.std(), f"{name}/min": x.min(), f"{name}/max": x.max()}


def again(step, rollout, reward, folder, seen):
    """The metrics of a step by their definitions, from the weights in `folder` and the rewards `seen`."""
    model, logp, entropy = forward(folder, rollout)
    _, ref, _ = (x.detach() if isinstance(x, torch.Tensor) else x for x in forward("tiny", rollout))
    mask, m = rollout.mask, rollout.mask.numpy()
    p, h, sampler = logp.detach().numpy(), entropy.detach().numpy(), rollout.logp.double().numpy()
    n = m.sum(-1)
    raw = reward.double().numpy()

    # rewards as they are learned
    shaped = np.clip(raw, -CLIP, CLIP) - np.clip((n.reshape(raw.shape) - MAX_NEW + OVERLONG) / OVERLONG, 0, 1)
    away = ((sampler - ref.numpy()) * m).sum(-1)
    shaped = shaped - IN_REWARD * away.reshape(raw.shape)
    seen = np.concatenate([seen, shaped.ravel()])
    shaped = (shaped - seen.mean()) / (seen.std(ddof=1) + 1e-8)
    adv = (shaped - shaped.mean(1, keepdims=True)) / (shaped.std(1, ddof=1, keepdims=True) + 1e-6)
    adv = np.repeat(adv.ravel()[:, None], m.shape[1], 1)

    # weights of tokens: a mean over rows of means, times the ratio, of the most uncertain alone
    d = (p - sampler)[m]
    ratio = np.where(m, np.exp(p - sampler), 0)
    away_of_rows = ((p - sampler) * m).sum(-1)
    inside = (away_of_rows / n >= math.log(0.5)) & (away_of_rows / n <= math.log(2.0))
    cut = np.minimum(ratio, 2.0) * inside[:, None]
    least = np.sort(h[m])[::-1][math.ceil(SHARE * m.sum()) - 1]
    w = m / n[:, None] / len(m) * cut * (h >= least - 1e-4)

    # the loss at the old policy, and its gradient
    gap = logp - ref
    k3 = torch.exp(-gap) - 1 + gap
    surrogate = -torch.from_numpy(adv) * torch.exp(logp - logp.detach())
    value = (torch.from_numpy(w) * (surrogate + KL * k3 - BONUS * entropy)).sum()
    slope = (torch.from_numpy(w) * (surrogate + KL * gap.square() / 2 - BONUS * entropy)).sum()
    grads = torch.autograd.grad(slope, [x for x in model.parameters() if x.requires_grad])
    total = away_of_rows[n > 0]
    found = {
        "loss": float(value.detach()),
        "policy/loss": float((w * -adv).sum()),
        "policy/clip_frac": 0.0,
        "policy/kl_old": 0.0,
        "policy/ratio_max": 1.0,
        "policy/kl_ref": float(k3.detach()[mask].mean()),
        "policy/entropy": h[m].mean(),
        "policy/logp_gap": abs(d).mean(),
        "policy/logp_gap_max": abs(d).max(),
        "policy/kl_sampler": (np.exp(d) - 1 - d).mean(),
        "policy/k1_sampler": -d.mean(),
        "policy/chi2_sampler": (np.exp(2 * d) - 1).mean(),
        "policy/ess_sampler": np.exp(d).sum() ** 2 / (len(d) * np.exp(2 * d).sum()),
        "grad/norm": math.sqrt(sum(float(g.square().sum()) for g in grads)),
        "grad/skipped": 0.0,
        "kl/in_reward": away.mean(),
        "sampling/rounds": 1.0,
        "sampling/varied": (raw.max(1) > raw.min(1)).mean(),
        "rollout/staleness": (step - rollout.version.numpy()).mean(),
        "rollout/staleness_max": (step - rollout.version.numpy()).max(),
        "mismatch/ess_seq": np.exp(total).sum() ** 2 / (len(total) * np.exp(2 * total).sum()),
        "mismatch/chi2_seq": (np.exp(2 * total) - 1).mean(),
        "mismatch/outside_band": 1 - inside[n > 0].mean(),
        "mismatch/weight": cut[m].mean(),
        "mismatch/cut": (cut != ratio)[m].mean(),
        "entropy/threshold": least,
        "lr": LR,
        "train/rows": len(rollout.tokens),  # a KL is of every row
        "reward/mean": raw.mean(),
        "reward/task:sort_digits": raw.mean(),
        "reward/std": shaped.std(),
        "reward/flat_groups": (shaped.max(1) == shaped.min(1)).mean(),
        "rollout/length_mean": n.mean(),
        "rollout/length_max": n.max(),
        "rollout/truncated": rollout.truncated.double().mean().item(),
        "rollout/empty": (n <= 1).mean(),
        "rollout/sampler_logp": sampler[m].mean(),
        "step": step,
    }
    return found | spread("adv", adv[m]), seen, logp.detach()


def test_every_metric_is_what_the_rollout_file_says(tmp_path):
    """Two steps; the weights before the second are those of a run of one."""
    grpo = load_script("grpo")
    for steps in (1, 2):
        grpo.main(grpo.Config(**OPTIONS, steps=steps, out=str(tmp_path / str(steps))))
    written = rows(tmp_path / "2")
    assert rows(tmp_path / "1")[0] == written[0]
    weights = ["tiny", tmp_path / "1" / "model", tmp_path / "2" / "model"]
    seen = np.zeros(0)
    for step, row in enumerate(written):
        file = tmp_path / "2" / "rollouts" / f"step_{step:08d}.safetensors"
        rollout, reward = read_rollout(file)
        want, seen, before = again(step, rollout, reward, weights[step], seen)
        _, after, _ = forward(weights[step + 1], rollout)
        d = (after.detach() - before)[rollout.mask]
        want |= {
            "policy/kl_update": float((d.exp() - 1 - d).mean()),
            "policy/kl_quadratic": float(d.square().mean() / 2),
        }
        assert set(row) - set(ELSEWHERE) == set(want)  # a new number is computed here, or has a reason
        wrong = {
            name: (row[name], float(x))
            for name, x in want.items()
            if not abs(row[name] - x) <= limit(name, x)
        }
        assert not wrong
    assert written[1]["policy/kl_ref"] > 1e-5 and written[1]["policy/kl_update"] > 1e-5


def limit(name, x):
    """How far a number may be off."""
    counted = name.startswith(
        ("rollout/length", "sampling", "rollout/stale", "rollout/trunc", "rollout/empty")
    )
    return EXACT if counted else ROUNDED * max(1.0, abs(x))
