"""The training loops of the experiments: reinforcement learning and distillation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import folder_of

import rft_fn as rft

MAX_EVAL = 128  # questions of an evaluation


@dataclass(frozen=True)
class Arm:
    """One way to run reinforcement learning. Every field is a default that an experiment may vary."""

    advantage: Callable = rft.advantage.grpo  # reward [N, G] -> [N, G]
    whiten: bool = False  # the advantages are whitened over the whole batch, as in REINFORCE++
    loss: Callable = rft.loss.ppo_clip  # (logp, old_logp, adv) -> [T]
    by_sequence: bool = False  # the loss also takes mask, seq and num_seqs, as GSPO's does
    weight: Callable = rft.weight.token_mean  # mask [B, S] -> [B, S]
    chosen: Callable | None = None  # (logp, adv, mask) -> [B, S], a field "chosen" of the loss
    reweigh: Callable | None = None  # (w, logp, adv, mask, key) -> w
    correct: Callable | None = None  # (w, trainer's logp, sampler's logp) -> w
    trainer_logp: bool = False  # old_logp is the trainer's, not the sampler's
    levels: int = 0  # the sampler's weights are rounded to as many levels; 0 is as they are
    stale: int = 0  # the sampler's weights are as many steps old
    rounds: int = 1  # most rounds of dynamic sampling
    model: str = "tiny"
    task: str = "sort_digits"
    level: int = 1
    prompts: int = 16
    group: int = 8
    updates: int = 1  # passes over each rollout
    max_new: int = 6
    lr: float = 1e-3


def rounded(weights: Any, levels: int) -> Any:
    """The matrices of (name, tensor), each row rounded to `levels` levels between -max and max."""
    for name, x in weights:
        if levels and x.ndim == 2:
            scale = x.abs().amax(1, keepdim=True).clamp(min=1e-8) / (levels // 2)
            x = (x / scale).round() * scale
        yield name, x


def loss_of(arm: Arm) -> Callable:
    """The loss function of the trainer, with its metrics."""

    def loss_fn(out: rft.TokenOut, b: rft.Packed) -> tuple[torch.Tensor, dict]:
        given = (out.logp, b.old_logp, b.adv)
        if arm.chosen is not None:
            loss = arm.loss(*given, b.extra["chosen"])
        elif arm.by_sequence:
            loss = arm.loss(*given, b.mask, b.seq, b.num_seqs)
        else:
            loss = arm.loss(*given)

        # how far the ratios of single tokens and of whole responses are from 1
        gap = (out.logp - b.old_logp).detach()
        mean = rft.segment.mean(gap, b.mask, b.seq, b.num_seqs)[b.seq]
        metrics = {
            "token_ratio": rft.metric.mean(gap.square(), b.mask),
            "sequence_ratio": rft.metric.mean(mean.square(), b.mask),
            "beyond": rft.metric.mean((gap.exp() - 1).abs() > 0.2, b.mask),
        }
        return loss, metrics | rft.metric.policy(out, b)

    return loss_fn


def reinforce(arm: Arm, seed: int, steps: int) -> list[dict[str, float]]:
    """The metrics of each step of reinforcement learning."""
    # ---- setup: strategy, policy, sampler, data and reward
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(seed=seed))
    name = folder_of(arm.model)
    sampling = rft.Sampling(max_new=arm.max_new)
    tokenizer = rft.model.load_tokenizer(name)
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(arm.lr))
    apply, state = st.init(rft.model.load(name), tx, sampling=sampling, entropy=True)
    eng = rft.engine.get_engine(rft.engine.EngineConfig(batch=512), name, tokenizer)
    task = f"{arm.task}:{arm.level}"
    dataset, unseen = rft.data.load_for_training(task, tokenizer, seed=seed, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task(arm.task), 1.0))
    loss_fn = loss_of(arm)

    def answer(prompts, keys, n=arm.group, how=sampling):
        rollout = eng.generate(prompts, keys, n=n, sampling=how)
        return rollout, rft.reward.judge(score, rollout, prompts, tokenizer)

    def evaluated():
        asked = rft.data.take(unseen, MAX_EVAL, seed)
        return float(answer(*asked, 1, rft.Sampling(temperature=0, max_new=arm.max_new))[1].reward.mean())

    def snapshot():
        """A copy of the weights that the sampler may be given later."""
        return list(rounded(st.export(state), arm.levels))

    waiting = [snapshot()]
    logs = []
    for step in range(steps):
        # ---- collect: the sampler has the oldest of the weights that wait
        eng.load(waiting[0], version=step)

        def draw(i, step=step):
            return rft.data.draw(dataset, arm.prompts, step, seed, round=i)

        filled = rft.collect.sample_varied_groups(answer, draw, arm.prompts, rounds=arm.rounds)
        rollout, reward = filled.rollout, filled.judged.reward
        mask = rollout.mask

        # ---- learn: what each token gains, and what its weight is
        adv = arm.advantage(reward).view(-1, 1) * mask
        if arm.whiten:
            adv = rft.advantage.whiten(adv, mask)
        w = arm.weight(mask)
        old_logp = rollout.logp
        if arm.correct is not None or arm.trainer_logp:
            own = st.score(apply, state.params, rollout, 2048).logp
            if arm.correct is not None:
                w = arm.correct(w, own, rollout.logp)
            old_logp = own
        if arm.reweigh is not None:
            w = arm.reweigh(w, old_logp, adv, mask, rft.rng.fold_in(seed, "reweigh", step))
        extra = None
        if arm.chosen is not None:
            extra = {"chosen": arm.chosen(old_logp, adv, mask).to(torch.float32)}
        exp = rft.experience(rollout, adv=adv, w=w, old_logp=old_logp, extra=extra)

        # ---- learn: the updates
        for _ in range(arm.updates):
            grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
            state, more = st.update(state, grads)
        waiting = [*waiting, snapshot()][-arm.stale - 1 :]

        # ---- report
        found = rft.metric.results(metrics | more)
        wrong = reward.flatten() < 1
        length = mask.sum(-1).double()
        logs.append(
            {
                "reward": float(reward.mean()),
                "entropy": found["policy/entropy"],
                "gap": found["policy/logp_gap"],
                "gradient": found["grad/norm"],
                "token_ratio": math.sqrt(found["token_ratio"]),
                "sequence_ratio": math.sqrt(found["sequence_ratio"]),
                "beyond": found["beyond"],
                "length": float(length.mean()),
                "length_wrong": float(length[wrong].sum() / wrong.sum().clamp(min=1)),
                "length_right": float(length[~wrong].sum() / (~wrong).sum().clamp(min=1)),
                "varied": filled.varied / filled.drawn,
                "drawn": float(filled.drawn * arm.group),
            }
        )
        if step % 10 == 9 or step + 1 == steps:
            eng.load(snapshot(), version=step + 1)
            logs[-1]["greedy"] = evaluated()
    eng.close()
    return logs


@dataclass(frozen=True)
class Student:
    """One way to learn from a teacher."""

    samples: str = "student"  # whose responses are learned from: student or teacher
    kl: str = "reverse"  # KL(student, teacher) or "forward", KL(teacher, student), exact at each token
    student: str = "tiny"
    teacher: str = "teacher"
    prompts: int = 16
    group: int = 4
    max_new: int = 6
    lr: float = 5e-4


def distil(arm: Student, seed: int, steps: int) -> list[dict[str, float]]:
    """The metrics of each step of distillation."""
    # ---- setup: both models, an engine for each, data and reward
    st = rft.strategy.get_strategy(rft.strategy.StrategyConfig(seed=seed))
    names = {"student": folder_of(arm.student), "teacher": folder_of(arm.teacher)}
    sampling = rft.Sampling(max_new=arm.max_new)
    tokenizer = rft.model.load_tokenizer(names["teacher"])
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(arm.lr))
    apply, state = st.init(rft.model.load(names["student"]), tx, sampling=sampling, entropy=True)
    by_teacher, teacher = st.bind(rft.model.load(names["teacher"]), sampling=sampling)
    config = rft.engine.EngineConfig(batch=512)
    engines = {who: rft.engine.get_engine(config, name, tokenizer) for who, name in names.items()}
    dataset, unseen = rft.data.load_for_training("sort_digits:1", tokenizer, seed=seed, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))

    def divergence(logp, teacher_logp):
        if arm.kl == "forward":
            return rft.loss.reverse_kl(teacher_logp, logp)
        return rft.loss.reverse_kl(logp, teacher_logp)

    def loss_fn(out, b):
        loss = divergence(out.words_logp, b.extra["teacher"])
        return loss, {"policy/entropy": rft.metric.mean(out.entropy, b.mask)}

    def scored(rollout):
        """The rollout with the teacher's log-probs of every word at each token [B, S, V]."""
        words = torch.arange(len(tokenizer)).expand(*rollout.tokens.shape, -1)
        zero = torch.zeros_like(rollout.logp)
        exp = rft.experience(rollout, adv=zero, w=rft.weight.token_mean(rollout.mask), words=words)
        found = st.score(by_teacher, teacher, exp, 2048, fields=("words_logp",)).words_logp
        return rft.tree.replace(exp, extra={"teacher": found})

    def evaluated():
        """On unseen questions: greedy and sampled rewards of the student, and its KL to the teacher."""
        prompts, keys = rft.data.take(unseen, MAX_EVAL, seed)
        found = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            how = rft.Sampling(temperature=temperature, max_new=arm.max_new)
            rollout = engines["student"].generate(prompts, keys, n=1, sampling=how)
            found[name] = float(rft.reward.judge(score, rollout, prompts, tokenizer).reward.mean())

        # on the student's own samples the reverse KL, on the teacher's the forward one
        theirs = engines["teacher"].generate(prompts, keys, n=1, sampling=sampling)
        for name, rows in (("kl_reverse", rollout), ("kl_forward", theirs)):
            exp = scored(rows)
            own = st.score(apply, state.params, exp, 2048, fields=("words_logp",)).words_logp
            pair = (own, exp.extra["teacher"])
            if name == "kl_forward":
                pair = pair[::-1]
            kl = rft.loss.reverse_kl(*pair)
            found[name] = float((kl * rows.mask).sum() / rows.mask.sum())
        return found

    # ---- learn: samples of one of the two, and the KL at each of their tokens
    logs = []
    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, arm.prompts, step, seed)
        rollout = engines[arm.samples].generate(prompts, keys, n=arm.group, sampling=sampling)
        exp = scored(rollout)
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        engines["student"].load(st.export(state), version=step + 1)
        found = rft.metric.results(metrics | more)
        logs.append({"loss": found["loss"], "entropy": found["policy/entropy"]})
        if step % 10 == 9 or step + 1 == steps:
            logs[-1] |= evaluated()
    for engine in engines.values():
        engine.close()
    return logs
