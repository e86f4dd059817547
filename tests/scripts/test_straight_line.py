"""Each train script against a straight line from the definitions, number by number, with every option on.

What is wired wrongly in a script (a sign, a key, a reference that is the policy, weights that are not made
anew for a minibatch) shows in some number of some step.
"""

import copy
import json
import math
import random
from functools import partial

import chats
import pytest
import straight_line as line
import torch
from test_house import load_script as script
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

import rft_fn as rft
from rft_fn import rng
from rft_fn.collect import asynchronous
from rft_fn.run.options import Limits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64", "plain_runs")]


@pytest.fixture
def wide(monkeypatch):
    """Models in float64, so that two ways to compute a number agree to 1e-9 after ten steps."""
    monkeypatch.setattr(rft.model, "load", partial(rft.model.load, dtype=torch.float64))
    monkeypatch.setattr(
        rft.model, "load_critic", partial(rft.model.load_critic, dtype=torch.float64), raising=True
    )
    # their norms compute in float32 whatever the type of a model, and then the gradients of tokens that are
    # computed once for several sequences differ from the sums of theirs by 1e-8, which Adam makes 1e-6
    for norm in (LlamaRMSNorm, Qwen3MoeRMSNorm):
        monkeypatch.setattr(norm, "forward", norm_of_any_type)


def norm_of_any_type(self, hidden):
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))


@pytest.fixture
def versions(monkeypatch):
    """The version of the weights behind each rollout of a script, in their order."""
    seen, generate = [], rft.collect.gather_and_generate

    def recorded(*args, **options):
        rollout = generate(*args, **options)
        seen.extend(set(rollout.version.tolist()))
        return rollout

    for caller in (rft.collect, asynchronous):  # of evaluations, and of what the sampler of a script calls
        monkeypatch.setattr(caller, "gather_and_generate", recorded)
    return seen


def logged(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


# by tests/analysis/test_noise.py, and by tests/scripts/test_flat_rows_of_runs.py
MEASURED = {"step", "grad/snr", "grad/noise_scale", "train/rows"}


def same(found, wanted, tolerance=1e-9):
    """Every number of every step, and no name more or less."""
    assert len(found) == len(wanted)
    for step, (row, want) in enumerate(zip(found, wanted)):
        row = {name: x for name, x in row.items() if name not in MEASURED}
        assert set(row) == set(want), f"step {step}: {sorted(set(row) ^ set(want))}"
        for name, x in want.items():
            assert row[name] == pytest.approx(x, rel=tolerance, abs=tolerance), f"step {step}: {name}"


def same_weights(folder, want, tolerance=1e-6):
    saved = rft.model.load(str(folder), dtype=torch.float64)
    for name, p in saved.named_parameters():
        torch.testing.assert_close(p.detach(), want[name].to(p.dtype), rtol=tolerance, atol=tolerance)


# With this seed no reward is its group's mean but for rounding, which would choose the sign of its advantage.
GRPO = {
    "prompts": 3, "group": 4, "steps": 10, "epochs": 2, "lr": 2e-3, "schedule": "cosine", "lr_end": 0.2,
    "warmup": 3, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "max_norm": 0.7, "kl": 0.3,
    "kl_in_reward": 0.05, "loss": Limits(low=0.15, high=0.25, dual=1.4), "reward_clip": 0.15, "ema": 0.8,
    "rounds": 2, "overlong": 4, "normalize_reward": True, "temperature": 0.9, "top_p": 0.9, "eval_every": 4,
    "eval_prompts": 3, "budget": 64, "seed": 7,
}  # fmt: skip


# what the entropy decides, and responses that are cut off
CHOSEN = GRPO | {
    "entropy": 0.03, "entropy_target": 1.5, "entropy_delta": 0.01, "entropy_share": 0.8, "rounds": 1,
    "mask_truncated": True, "max_new": 4, "overlong": 2, "steps": 5, "seed": 10,
}  # fmt: skip


def grpo_by_hand(cfg, lm, tokenizer):
    """What grpo.py logs, the weights that it saves, and the largest reward before it is clipped."""
    task = line.Task("sort_digits", 1, tokenizer, cfg.template)
    stop, ref = tokenizer.eos_token_id, line.copy_of(lm)
    opt, moments, log, largest = line.AdamW(lm, cfg, cfg.ema), line.Moments(), [], 0.0
    updates = -(-cfg.prompts * cfg.group // cfg.strategy.train_batch_size)
    bonus = cfg.entropy
    for step in range(cfg.steps):
        values = line.evaluation(lm, task, cfg, stop) if step == 0 else {}
        groups, found = grpo_rollout(cfg, lm, ref, task, step, moments, stop)
        rows, logs = [r for g in groups for r in g], []
        chosen, coef, bonus = choose(rows, lm, cfg, bonus)
        largest = max(largest, *(row["raw"] for row in rows))
        for epoch in range(cfg.epochs):
            key = rng.fold_in(cfg.seed, "updates", step, epoch)
            for part in torch.randperm(len(rows), generator=rng.generator(key)).tensor_split(updates):
                lr = grpo_rate(cfg, updates, opt.count)
                logs.append(grpo_update([rows[i] for i in part], lm, ref, cfg, opt, lr, coef))
        values |= line.averaged(logs) | {n: logs[0][n] for n in rft.collect.MISMATCH}
        values |= {"rollout/staleness": 0.0, "rollout/staleness_max": 0.0}
        values |= found | {"lr": lr} | chosen
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= line.evaluation(lm, task, cfg, stop)
        log.append(values)
    return log, opt.average, largest


def choose(rows, lm, cfg, bonus):
    """Mark the tokens to learn from by their entropy, and steer its bonus: (metrics, this one, the next)."""
    kept = [r for r in rows if r["kept"]]
    for row in rows:
        row["chosen"] = [row["kept"]] * len(row["tokens"])
        with torch.no_grad():
            row["entropy"] = line.scores(lm, row, temperature=cfg.temperature, top_p=cfg.top_p)[1].tolist()
    every = sorted((h for r in kept for h in r["entropy"]), reverse=True)
    metrics = {}
    if cfg.entropy_share < 1:
        least = every[math.ceil(cfg.entropy_share * len(every) - 1e-9) - 1]
        metrics["entropy/threshold"] = least
        for row in kept:
            row["chosen"] = [h > least - 1e-4 for h in row["entropy"]]
    if not cfg.entropy_target:
        return metrics, cfg.entropy, cfg.entropy
    low = line.mean(every) <= cfg.entropy_target
    metrics["entropy/coef"] = bonus if low else 0.0
    return (
        metrics,
        metrics["entropy/coef"],
        max(bonus + (cfg.entropy_delta if low else -cfg.entropy_delta), 0),
    )


def grpo_rate(cfg, updates, done):
    each = cfg.epochs * updates
    return line.rate(cfg, cfg.lr, cfg.warmup * each, max(cfg.steps, cfg.warmup) * each, done)


def grpo_rollout(cfg, lm, ref, task, step, moments, stop):
    """The groups of a step with the advantage of each row, and the metrics of that."""
    groups, values = line.filled(lm, task, cfg, step, stop)
    rows = [r for g in groups for r in g]
    for row in rows:
        late = len(row["tokens"]) - (cfg.max_new - cfg.overlong)
        clipped = min(max(row["raw"], -cfg.reward_clip), cfg.reward_clip)
        with torch.no_grad():
            ref_logp = line.scores(ref, row, temperature=cfg.temperature, top_p=cfg.top_p)[0]
        row["ratio"] = sum(row["logp"]) - float(ref_logp.sum())
        row["reward"] = clipped - min(max(late / cfg.overlong, 0), 1) - cfg.kl_in_reward * row["ratio"]
    flat = moments.normalised([r["reward"] for r in rows])
    rewards = [flat[i : i + cfg.group] for i in range(0, len(flat), cfg.group)]
    for g, rs in zip(groups, rewards):
        for row, r in zip(g, rs):
            row["adv"] = (r - line.mean(rs)) / (line.std(rs, 1) + 1e-6) if max(rs) > min(rs) else 0.0
            row["kept"] = not (cfg.mask_truncated and row["truncated"])
    values |= line.rollout_metrics(groups, rewards)
    values |= line.spread("adv", [r["adv"] for r in rows if r["kept"] for _ in r["tokens"]])
    values |= {"kl/in_reward": line.mean(r["ratio"] for r in rows)}
    return groups, values | dict.fromkeys(
        ("reward/mean", "reward/task:sort_digits"), line.mean(r["raw"] for r in rows)
    )


def grpo_update(rows, lm, ref, cfg, opt, lr, coef):
    """One update of the mean over rows of the mean over tokens of clipped loss + kl KL - coef entropy."""
    how = {"temperature": cfg.temperature, "top_p": cfg.top_p}
    low, high, dual = cfg.loss.low, cfg.loss.high, cfg.loss.dual
    total, policy = 0.0, 0.0
    rows = [row for row in rows if row["kept"]]
    lists = {n: [] for n in ("gap", "entropy", "stopped", "kl_old", "kl_ref", "ratio")}
    for row in rows:
        logp, entropy = line.scores(lm, row, **how)
        with torch.no_grad():
            ref_logp, _ = line.scores(ref, row, **how)
        for t, old in enumerate(row["logp"]):
            loss, stopped = line.clipped_loss(logp[t], old, row["adv"], low, high, dual)
            new, anchor = float(logp[t].detach()), float(ref_logp[t])
            # the value of k3 with the gradient of k2
            k2, k3 = (logp[t] - anchor) ** 2 / 2, line.kl_estimate(new, anchor)
            weight = row["chosen"][t] / len(row["tokens"]) / len(rows)
            total = total + weight * (loss + cfg.kl * (k2 - k2.detach() + k3) - coef * entropy[t])
            policy = policy + weight * float(loss.detach())
            lists["gap"].append(abs(new - old))
            lists["entropy"].append(float(entropy[t].detach()))
            lists["stopped"].append(float(stopped))
            lists["kl_old"].append(line.kl_estimate(old, new))
            lists["kl_ref"].append(k3)
            lists["ratio"].append(math.exp(new - old))
    norm = opt.step(line.gradients(lm, total), lr)
    return {
        "loss": float(total.detach()),
        "policy/loss": policy,
        "policy/clip_frac": line.mean(lists["stopped"]),
        "policy/kl_old": line.mean(lists["kl_old"]),
        "policy/ratio_max": max(lists["ratio"]),
        "policy/kl_ref": line.mean(lists["kl_ref"]),
        "policy/logp_gap": line.mean(lists["gap"]),
        "policy/logp_gap_max": max(lists["gap"]),
        "policy/kl_sampler": line.mean(lists["kl_old"]),
        **line.distances(lists["ratio"]),
        "policy/entropy": line.mean(lists["entropy"]),
        "grad/norm": norm,
        "grad/skipped": 0.0,
    }


def test_grpo_is_its_definition(wide, versions, tmp_path):
    grpo = script("grpo")
    strategy = rft.strategy.StrategyConfig(train_batch_size=5, engine_batch=7)
    cfg = grpo.Config(**GRPO, strategy=strategy, out=str(tmp_path / "run"))
    lm, tokenizer = rft.model.load("tiny"), rft.model.load_tokenizer("tiny")
    wanted, weights, largest = grpo_by_hand(cfg, lm.eval(), tokenizer)
    # every option is at work: something is clipped, drawn again, cut off, flat and steered
    assert max(row["policy/clip_frac"] for row in wanted) > 0.05 and wanted[-1]["policy/kl_ref"] > 0.01
    assert {row["sampling/rounds"] for row in wanted} == {1, 2}
    assert max(row["rollout/truncated"] for row in wanted) > 0
    assert max(row["grad/norm"] for row in wanted) > cfg.max_norm and largest > cfg.reward_clip
    grpo.main(cfg)
    same(logged(tmp_path / "run"), wanted)
    same_weights(tmp_path / "run" / "model", weights)
    assert versions == sorted(versions) and set(versions) == set(range(cfg.steps + 1))


def test_grpo_learns_from_the_tokens_that_entropy_chooses(wide, tmp_path):
    grpo = script("grpo")
    strategy = rft.strategy.StrategyConfig(train_batch_size=6, engine_batch=7)
    cfg = grpo.Config(**CHOSEN, strategy=strategy, out=str(tmp_path / "run"))
    lm, tokenizer = rft.model.load("tiny"), rft.model.load_tokenizer("tiny")
    wanted, weights, _ = grpo_by_hand(cfg, lm.eval(), tokenizer)
    # some responses are cut off, not all; the coefficient rises and falls, and is off in some steps
    assert max(row["rollout/truncated"] for row in wanted) > 0
    coefs = [row["entropy/coef"] for row in wanted]
    assert 0.0 in coefs and len(set(coefs)) > 2
    grpo.main(cfg)
    same(logged(tmp_path / "run"), wanted)
    same_weights(tmp_path / "run" / "model", weights)


PPO = {
    "prompts": 4, "group": 2, "steps": 8, "epochs": 2, "minibatches": 2, "lr": 2e-3, "critic_lr": 4e-3,
    "lr_end": 0.3, "warmup": 3, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "max_norm": 0.8,
    "freeze_actor_steps": 2, "gamma": 0.9, "loss": Limits(low=0.1, high=0.15, dual=1.5), "value_clip": 0.4,
    "entropy": 0.02, "kl": 0.2, "kl_target": 0.3, "kl_horizon": 40.0, "reward_clip": 0.15, "overlong": 4,
    "normalize_reward": True, "ptx": 0.3, "ptx_data": "sort_digits:1", "ptx_batch": 3, "positive_nll": 0.4,
    "positive_at": 0.3, "ema": 0.8, "temperature": 0.9, "top_p": 0.9, "budget": 64, "eval_every": 3,
    "eval_prompts": 3, "seed": 5,
}  # fmt: skip


class Valuer(torch.nn.Module):
    """One number for each token of a response: a linear head on the decoder's hidden state before it."""

    def __init__(self, lm):
        super().__init__()
        self.decoder = copy.deepcopy(lm.model)
        self.head = torch.nn.Linear(lm.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, row):
        ids = torch.tensor([[*row["ids"], *row["tokens"]]])
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        at = len(row["ids"]) - 1
        return self.head(hidden[at : at + len(row["tokens"])])[:, 0]


def advantages(row, cfg):
    """The double sum of GAE over the tokens of a response, and the critic's target."""
    r, v, size = row["token_reward"], row["value"], len(row["tokens"])
    v = [*v, 0.0]
    delta = [r[t] + cfg.gamma * v[t + 1] * (t + 1 < size) - v[t] for t in range(size)]

    def traced(lam):
        return [sum((cfg.gamma * lam) ** (k - t) * delta[k] for k in range(t, size)) for t in range(size)]

    if cfg.algorithm == "ppo":
        adv = traced(cfg.gae_lambda)
        return adv, [a + b for a, b in zip(adv, v)]
    lam = max(0.0, 1 - 1 / (cfg.gae_alpha * size))
    return traced(lam), [a + b for a, b in zip(traced(1.0), v)]


def ppo_rollout(cfg, lm, ref, valuer, task, step, moments, coef, stop):
    """The rows of a step with everything that the updates read, and the metrics of that."""
    groups = line.sampled_groups(lm, task, cfg, line.drawn(task, cfg.prompts, step, cfg.seed), stop)
    rows = [r for g in groups for r in g]
    how = {"temperature": cfg.temperature, "top_p": cfg.top_p}
    for row in rows:
        late = len(row["tokens"]) - (cfg.max_new - cfg.overlong)
        clipped = min(max(row["raw"], -cfg.reward_clip), cfg.reward_clip)
        row["reward"] = clipped - min(max(late / cfg.overlong, 0), 1)
    flat = moments.normalised([r["reward"] for r in rows])
    for row, reward in zip(rows, flat):
        with torch.no_grad():
            ref_logp = line.scores(ref, row, **how)[0].tolist()
            row["value"] = valuer(row).tolist()
        row["gap"] = [a - b for a, b in zip(row["logp"], ref_logp)]
        row["token_reward"] = [-coef * d for d in row["gap"]]
        row["token_reward"][-1] += reward
        row["adv"], row["ret"] = advantages(row, cfg)
    everything = [a for r in rows for a in r["adv"]]
    returns = [x for r in rows for x in r["ret"]]
    values = line.spread("adv", everything) | line.spread("return", returns)
    centre = line.mean(everything)
    spread = math.sqrt(line.std(everything, 1) ** 2 + 1e-8)
    for row in rows:
        row["adv"] = [(a - centre) / spread for a in row["adv"]]
    rewards = [flat[i : i + cfg.group] for i in range(0, len(flat), cfg.group)]
    left = [x - v for r in rows for x, v in zip(r["ret"], r["value"])]
    values |= line.rollout_metrics(groups, rewards)
    values |= {"value/explained_variance": 1 - line.std(left) ** 2 / line.std(returns) ** 2}
    values |= {"kl/coef": coef, "kl/ref": line.mean(d for r in rows for d in r["gap"])}
    values |= dict.fromkeys(("reward/mean", "reward/task:sort_digits"), line.mean(r["raw"] for r in rows))
    return rows, values


def value_update(rows, valuer, cfg, opt, lr):
    """One update of the mean over tokens of the clipped squared error."""
    losses, moved = [], []
    for row in rows:
        value = valuer(row)
        for t, v in enumerate(value):
            old, ret = row["value"][t], row["ret"][t]
            near = old + (v - old).clamp(-cfg.value_clip, cfg.value_clip)
            losses.append(0.5 * torch.maximum((v - ret) ** 2, (near - ret) ** 2))
            moved.append(float(abs(float(v.detach()) - old) > cfg.value_clip))
    total = sum(losses) / len(losses)
    norm = opt.step(line.gradients(valuer, total), lr)
    found = {"value/loss": float(total.detach()), "value/clip_frac": line.mean(moved)}
    return found | {"value/grad/norm": norm, "value/grad/skipped": 0.0}


def examples_nll(cfg, lm, task, tokenizer, update):
    """The mean negative log-likelihood of the answers of an update's examples."""
    terms = []
    for i in range(cfg.ptx_batch):
        prompt = task.prompt(cfg.seed + 2, update * cfg.ptx_batch + i)
        answer = [*tokenizer.encode(prompt["row"]["answer"]), tokenizer.eos_token_id]
        how = {"temperature": cfg.temperature, "top_p": cfg.top_p}
        terms += list(-line.scores(lm, {"ids": prompt["ids"], "tokens": answer}, **how)[0])
    return sum(terms) / len(terms)


def actor_update(rows, lm, cfg, ptx, opt, lr):
    """One update of clipped loss, entropy, the likelihood of good responses and that of examples."""
    lists = {n: [] for n in ("loss", "policy", "good", "gap", "entropy", "stopped", "kl_old", "ratio")}
    low, high, dual = cfg.loss.low, cfg.loss.high, cfg.loss.dual
    for row in rows:
        logp, entropy = line.scores(lm, row, temperature=cfg.temperature, top_p=cfg.top_p)
        for t, old in enumerate(row["logp"]):
            loss, stopped = line.clipped_loss(logp[t], old, row["adv"][t], low, high, dual)
            new = float(logp[t].detach())
            lists["policy"].append(float(loss.detach()))
            lists["loss"].append(loss - cfg.entropy * entropy[t])
            if row["raw"] >= cfg.positive_at:
                lists["good"].append(-logp[t])
            lists["gap"].append(abs(new - old))
            lists["entropy"].append(float(entropy[t].detach()))
            lists["stopped"].append(float(stopped))
            lists["kl_old"].append(line.kl_estimate(old, new))
            lists["ratio"].append(math.exp(new - old))
    total = sum(lists["loss"]) / len(lists["loss"]) + cfg.ptx * ptx
    if lists["good"]:
        total = total + cfg.positive_nll * sum(lists["good"]) / len(lists["good"])
    metrics = {
        "loss": float(total.detach()),
        "policy/loss": line.mean(lists["policy"]),
        "policy/clip_frac": line.mean(lists["stopped"]),
        "policy/kl_old": line.mean(lists["kl_old"]),
        "policy/ratio_max": max(lists["ratio"]),
        "policy/logp_gap": line.mean(lists["gap"]),
        "policy/logp_gap_max": max(lists["gap"]),
        "policy/kl_sampler": line.mean(lists["kl_old"]),
        **line.distances(lists["ratio"]),
        "policy/entropy": line.mean(lists["entropy"]),
        "ptx/nll": float(ptx.detach()),
    }
    if lr is None:  # a frozen actor is only compared with its sampler
        return metrics
    return metrics | {"grad/norm": opt.step(line.gradients(lm, total), lr), "grad/skipped": 0.0}


def ppo_by_hand(cfg, lm, tokenizer):
    """The metrics that ppo.py logs, and the weights that it saves."""
    task = line.Task("sort_digits", 1, tokenizer, cfg.template)
    stop, ref, valuer = tokenizer.eos_token_id, line.copy_of(lm), Valuer(lm)
    opt, value_opt = line.AdamW(lm, cfg, cfg.ema), line.AdamW(valuer, cfg)
    each, moments, coef, log = cfg.epochs * cfg.minibatches, line.Moments(), cfg.kl, []
    value_rate = partial(line.rate, cfg, cfg.critic_lr, cfg.warmup, cfg.steps * each)
    rate = partial(line.rate, cfg, cfg.lr, cfg.warmup, (cfg.steps - cfg.freeze_actor_steps) * each)
    for step in range(cfg.steps):
        values = line.evaluation(lm, task, cfg, stop) if step == 0 else {}
        rows, found = ppo_rollout(cfg, lm, ref, valuer, task, step, moments, coef, stop)
        error = min(max(found["kl/ref"] / cfg.kl_target - 1, -0.2), 0.2)
        coef = coef * (1 + error * len(rows) / cfg.kl_horizon)
        logs, learns, lr = [], step >= cfg.freeze_actor_steps, rate(opt.count)
        for epoch in range(cfg.epochs):
            key = rng.fold_in(cfg.seed, "minibatch", step, epoch)
            order = torch.randperm(len(rows), generator=rng.generator(key)).tensor_split(cfg.minibatches)
            for part in order:
                batch, number = [rows[i] for i in part], step * each + len(logs)
                metrics = value_update(batch, valuer, cfg, value_opt, value_rate(value_opt.count))
                if learns:
                    lr = rate(opt.count)
                    ptx = examples_nll(cfg, lm, task, tokenizer, number)
                    metrics |= actor_update(batch, lm, cfg, ptx, opt, lr)
                elif not logs:
                    ptx = examples_nll(cfg, lm, task, tokenizer, number)
                    metrics |= actor_update(batch, lm, cfg, ptx, opt, None)
                logs.append(metrics)
        start = {n: logs[0][n] for n in rft.collect.MISMATCH}
        start |= {"rollout/staleness": 0.0, "rollout/staleness_max": 0.0}
        values |= line.averaged(logs) | start | found | {"lr": lr}
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= line.evaluation(lm, task, cfg, stop)
        log.append(values)
    return log, opt.average


@pytest.mark.parametrize(
    "row", [{"algorithm": "ppo", "gae_lambda": 0.8}, {"algorithm": "vapo", "gae_alpha": 0.7}]
)
def test_ppo_is_its_definition(wide, versions, tmp_path, row):
    ppo = script("ppo")
    cfg = ppo.Config(**PPO, **row, out=str(tmp_path / "run"))
    lm, tokenizer = rft.model.load("tiny"), rft.model.load_tokenizer("tiny")
    wanted, weights = ppo_by_hand(cfg, lm.eval(), tokenizer)
    ppo.main(cfg)
    # normalised rewards and the shares of good responses are float32: their rounding grows with each update
    same(logged(tmp_path / "run"), wanted, tolerance=3e-5)
    same_weights(tmp_path / "run" / "model", weights, tolerance=3e-5)
    assert versions == sorted(versions) and set(versions) == set(range(cfg.steps + 1))


def test_sft_is_its_definition(wide, tmp_path):
    sft = script("sft")
    options = {"steps": 10, "batch": 5, "lr": 2e-3, "schedule": "cosine", "lr_end": 0.5, "warmup": 4}
    options |= {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "max_norm": 0.5, "budget": 40, "seed": 3}
    cfg = sft.Config(**options, out=str(tmp_path / "run"))
    lm, tokenizer = rft.model.load("tiny").eval(), rft.model.load_tokenizer("tiny")
    task, opt, wanted = line.Task("sort_digits", 1, tokenizer, cfg.template), line.AdamW(lm, cfg), []
    for step in range(cfg.steps):
        terms = []
        for prompt, _ in line.drawn(task, cfg.batch, step, cfg.seed):
            answer = [*tokenizer.encode(prompt["row"]["answer"]), tokenizer.eos_token_id]
            row = {"ids": prompt["ids"], "tokens": answer}
            terms += list(-line.scores(lm, row, temperature=1.0, top_p=1.0)[0])
        total = sum(terms) / len(terms)
        lr = line.rate(cfg, cfg.lr, cfg.warmup, cfg.steps, opt.count)
        norm = opt.step(line.gradients(lm, total), lr)
        wanted.append({"loss": float(total.detach()), "grad/norm": norm, "grad/skipped": 0.0, "lr": lr})
    sft.main(cfg)
    same(logged(tmp_path / "run"), wanted)
    same_weights(tmp_path / "run" / "model", opt.params)


CHAT = [
    ["ab?", "<think>\nx\n</think>\n\nb", "and c?", "d"],
    ["c", "e\n"],
    ["\nf?", "\ng", "h", "<think>\nz\n</think>\n\nno"],
]


def said(tokenizer, row, loss_on):
    """(the prompt, the response) of each learned turn of a conversation, as ids."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(row)]
    spoken = range(1, len(turns), 2)
    for i in spoken if loss_on == "all" else spoken[-1:]:
        render = partial(tokenizer.apply_chat_template, tokenize=False)
        before = render(turns[:i], add_generation_prompt=True)
        after = render(turns[: i + 1]).removesuffix("\n")
        assert after.startswith(before)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        yield {"ids": encode(before), "tokens": encode(after[len(before) :])}


@pytest.mark.parametrize(("loss_on", "steps"), [("all", 4), ("last", 3)])
def test_sft_on_conversations_is_its_definition(wide, tmp_path, loss_on, steps):
    """The mean over all learned tokens of what each turn costs after the prompt that asks for it, alone."""
    (tmp_path / "chat.jsonl").write_text(
        "\n".join(
            json.dumps(
                {"conversations": [{"from": ("human", "gpt")[i % 2], "value": x} for i, x in enumerate(row)]}
            )
            for row in CHAT
        )
    )
    sft, folder = script("sft"), chats.folder(tmp_path / "model", chats.QWEN3)
    options = {"steps": steps, "batch": 2, "lr": 2e-3, "warmup": 2, "budget": 128, "seed": 3}
    cfg = sft.Config(
        model=folder,
        data=(str(tmp_path / "chat.jsonl"),),
        messages=("conversations",),
        loss_on=loss_on,
        out=str(tmp_path / "run"),
        **options,
    )
    lm, tokenizer = rft.model.load(folder).eval(), rft.model.load_tokenizer(folder)
    opt, wanted = line.AdamW(lm, cfg), []
    order = [torch.randperm(3, generator=rng.generator(rng.fold_in(3, "order", e))) for e in range(3)]
    for step in range(steps):
        terms = []
        for place in range(2 * step, 2 * step + 2):
            for row in said(tokenizer, CHAT[int(order[place // 3][place % 3])], loss_on):
                terms += list(-line.scores(lm, row, temperature=1.0, top_p=1.0)[0])
        total = sum(terms) / len(terms)
        lr = line.rate(cfg, cfg.lr, cfg.warmup, steps, opt.count)
        norm = opt.step(line.gradients(lm, total), lr)
        wanted.append({"loss": float(total.detach()), "grad/norm": norm, "grad/skipped": 0.0, "lr": lr})
    sft.main(cfg)
    same(logged(tmp_path / "run"), wanted)
    same_weights(tmp_path / "run" / "model", opt.params)


DPO = {
    "steps": 10, "batch": 3, "lr": 2e-3, "schedule": "cosine", "lr_end": 0.5, "warmup": 4, "beta1": 0.8,
    "beta2": 0.95, "weight_decay": 0.1, "max_norm": 0.5, "budget": 60, "seed": 3, "eval_every": 4,
    "eval_pairs": 4, "beta": 0.4,
}  # fmt: skip


def dpo_pair(task, tokenizer, seed, index):
    """The two sides of a pair of a built-in task, as rows."""
    prompt = task.prompt(seed, index)
    random_ = random.Random(rng.fold_in(seed, "rejected", task.name, task.level, index))
    sides = prompt["row"]["answer"], rft.data.wrong_answers.wrong_answer(task.task, prompt["row"], random_)
    ids = [[*tokenizer.encode(side), tokenizer.eos_token_id] for side in sides]
    return [{"ids": prompt["ids"], "tokens": tokens} for tokens in ids]


def dpo_loss(cfg, chosen, rejected, ref_chosen, ref_rejected, tokens):
    """Of one pair, from log-probs of whole responses."""
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    right = -torch.log(1 / (1 + torch.exp(-cfg.beta * h)))
    wrong = -torch.log(1 - 1 / (1 + torch.exp(-cfg.beta * h)))
    if cfg.loss == "ipo":
        loss = (h - 1 / (2 * cfg.beta)) ** 2
    else:
        loss = (1 - cfg.label_smoothing) * right + cfg.label_smoothing * wrong
    return loss - cfg.nll * chosen / tokens


def dpo_pairs(cfg, name, pairs, lm, ref):
    """(the mean loss, metrics) of pairs."""
    terms, gaps, found = [], [], []
    for sides in pairs:
        logps = [line.scores(lm, side, temperature=1.0, top_p=1.0)[0] for side in sides]
        with torch.no_grad():
            refs = [line.scores(ref, side, temperature=1.0, top_p=1.0)[0] for side in sides]
        of = torch.mean if cfg.average else torch.sum
        (c, r), (rc, rr) = [of(x) for x in logps], [of(x) for x in refs]
        terms.append(dpo_loss(cfg, c, r, rc, rr, 1 if cfg.average else len(sides[0]["tokens"])))
        gaps += [abs(float(x)) for a, b in zip(logps, refs) for x in (a - b).detach()]
        c, r = float(c.detach()), float(r.detach())
        better, worse = cfg.beta * (c - float(rc)), cfg.beta * (r - float(rr))
        values = {"reward_chosen": better, "reward_rejected": worse, "margin": better - worse}
        values |= {"accuracy": better > worse, "ranking": c > r, "logp_chosen": c, "logp_rejected": r}
        found.append(values)
    metrics = {f"{name}/{key}": line.mean(x[key] for x in found) for key in found[0]}
    return sum(terms) / len(terms), metrics, line.mean(gaps)


def dpo_evaluation(cfg, task, tokenizer, lm, ref):
    pairs = [dpo_pair(task, tokenizer, cfg.seed + 1, i) for i in range(cfg.eval_pairs)]
    total, metrics, _ = dpo_pairs(cfg, "eval", pairs, lm, ref)
    return metrics | {"eval/loss": float(total.detach())}


def dpo_by_hand(cfg, lm, tokenizer):
    """The metrics that dpo.py logs, and the weights that it saves."""
    task, ref = line.Task("sort_digits", 1, tokenizer, "{short}"), line.copy_of(lm)
    opt, log = line.AdamW(lm, cfg), []
    for step in range(cfg.steps):
        values = dpo_evaluation(cfg, task, tokenizer, lm, ref) if step == 0 else {}
        index = range(step * cfg.batch, (step + 1) * cfg.batch)
        pairs = [dpo_pair(task, tokenizer, cfg.seed, i) for i in index]
        total, metrics, gap = dpo_pairs(cfg, "pairs", pairs, lm, ref)
        lr = line.rate(cfg, cfg.lr, cfg.warmup, cfg.steps, opt.count)
        norm = opt.step(line.gradients(lm, total), lr)
        values |= metrics | {"loss": float(total.detach()), "policy/ref_gap": gap, "lr": lr}
        values |= {"grad/norm": norm, "grad/skipped": 0.0}
        if step + 1 == cfg.steps or (step + 1) % cfg.eval_every == 0:
            values |= dpo_evaluation(cfg, task, tokenizer, lm, ref)
        if cfg.ref_every and (step + 1) % cfg.ref_every == 0:
            line.move(ref, lm, cfg.ref_mix)
        log.append(values)
    return log, opt.params


AVERAGE = {"loss": "ipo", "average": True}


@pytest.mark.parametrize(
    "row",
    [
        {"loss": "dpo", "nll": 0.3},
        {"loss": "cdpo", "label_smoothing": 0.2},
        {"loss": "ipo"},
        AVERAGE,
        {"ref_every": 3},
        {"ref_every": 1, "ref_mix": 0.3},
    ],
)
def test_dpo_is_its_definition(wide, tmp_path, row):
    dpo = script("dpo")
    cfg = dpo.Config(**DPO, **row, out=str(tmp_path / "run"))
    lm, tokenizer = rft.model.load("tiny").eval(), rft.model.load_tokenizer("tiny")
    wanted, weights = dpo_by_hand(cfg, lm, tokenizer)
    dpo.main(cfg)
    same(logged(tmp_path / "run"), wanted)
    same_weights(tmp_path / "run" / "model", weights)


def mixture(folder):
    """The folder of a small mixture of experts that reads what the embedded model reads."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = rft.model.load_tokenizer("tiny")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, pad_token_id=tokenizer.pad_token_id))
        for layer in lm.model.layers:
            layer.mlp.gate.weight.data.normal_(0, 0.5)
    lm.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_sft_of_experts_is_its_definition(wide, monkeypatch, tmp_path):
    """The balance of experts beside the log-likelihood."""
    # the products of all experts at once know no float64
    eager = partial(rft.model.load, experts_implementation="eager")
    monkeypatch.setattr(rft.model, "load", eager)
    sft, folder = script("sft"), mixture(tmp_path / "base")
    cfg = sft.Config(model=folder, steps=4, batch=5, router_aux=0.3, budget=40, out=str(tmp_path / "run"))
    lm, tokenizer = rft.model.load(folder).eval(), rft.model.load_tokenizer(folder)
    task, opt, wanted = line.Task("sort_digits", 1, tokenizer, cfg.template), line.AdamW(lm, cfg), []
    for step in range(cfg.steps):
        terms, balances, shares = [], [], []
        for prompt, _ in line.drawn(task, cfg.batch, step, cfg.seed):
            answer = [*tokenizer.encode(prompt["row"]["answer"]), tokenizer.eos_token_id]
            row = {"ids": prompt["ids"], "tokens": answer}
            balance, share = line.expert_balance(lm, row, experts=4, k=2)
            terms += list(-line.scores(lm, row, temperature=1.0, top_p=1.0)[0] + 0.3 * balance)
            balances += balance.tolist()
            shares += [share] * len(answer)
        total = sum(terms) / len(terms)
        lr = line.rate(cfg, cfg.lr, cfg.warmup, cfg.steps, opt.count)
        norm = opt.step(line.gradients(lm, total), lr)
        wanted.append({"loss": float(total.detach()), "grad/norm": norm, "grad/skipped": 0.0, "lr": lr})
        wanted[-1] |= {"router/aux": line.mean(balances), "router/max_share": line.mean(shares)}
    sft.main(cfg)
    same(logged(tmp_path / "run"), wanted)
    same_weights(tmp_path / "run" / "model", opt.params)
