"""The step by rft_fn: prompts, rollout, rewards, advantages, packs, gradients, update, sync."""

from typing import Any

import torch
from case import Case, flat, lengths, reward, texts, warm_up
from clock import Clock

import rft_fn as rft
from rft_fn.engine import requests
from rft_fn.strategy import StrategyConfig, get_strategy


def no_end(lm: Any, tokenizer: Any) -> frozenset[int]:
    """No token ends a response: its limit does."""
    return frozenset()


def steps(case: Case, clock: Clock, *, share_prefixes: bool = True) -> list[dict]:
    """The row of each step, the first of which warms up."""
    requests.end_tokens = no_end  # before the engine reads it
    size = case.prompts * case.group
    st = get_strategy(StrategyConfig(engine_batch=size, share_prefixes=share_prefixes))
    algo = rft.algorithm.get_algorithm("grpo", group=case.group)
    tokenizer = rft.model.load_tokenizer(case.model)
    sampling = rft.Sampling(temperature=1.0)
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-6))
    apply, state = st.init(rft.model.load(case.model), tx, sampling=sampling, entropy=True)
    eng = rft.engine.get_engine(rft.engine.config_of(st.config), case.model)
    rft.sync.push(st, state, eng, version=0, lend=True)  # as a run does

    def loss_fn(out: rft.TokenOut, b: rft.Packed):
        loss, metrics = algo.loss(out, b)
        return loss, metrics | rft.metric.policy(out, b)

    work = [warm_up(case)] + [(texts(case, i), lengths(case)) for i in range(case.steps)]
    rows, equal = [], flat(case)
    for i, (prompts, most) in enumerate(work):
        clock.clear()
        with clock.phase("generate"):
            ids = [tokenizer(p)["input_ids"] for p in prompts]
            keys = [rft.rng.fold_in(0, i, j) for j in range(len(ids))]
            sampled = rft.Sampling(temperature=1.0, max_new=max(most))
            how = {"n": case.group, "sampling": sampled, "max_new": most}
            rollout = rft.collect.gather_and_generate(eng, st, ids, keys, **how)
        with clock.phase("judge"):
            asked = [p for p in prompts for _ in range(case.group)]
            said = rft.reward.responses(rollout, tokenizer)
            scores = [reward(p, text, equal) for p, text in zip(asked, said)]
            rewards = torch.tensor(scores).view(case.prompts, case.group)
            adv = algo.advantage(rewards, rollout)
        with clock.phase("gradients"):
            exp = rft.experience(rollout, adv=adv, w=algo.weight(rollout.mask))
            exp = rft.packing.drop_flat(exp, loss_fn, spare=case.budget)  # as grpo.py does
            grads, _ = st.grad(state, apply, loss_fn, st.shard(exp, case.budget))
        with clock.phase("update"):
            state, _ = st.update(state, grads)
        with clock.phase("sync"):
            rft.sync.push(st, state, eng, version=i + 1, lend=True)
        response = int(rollout.mask.sum())
        rows.append(clock.row(prompt=int(rollout.length.sum()) - response, response=response))
    return rows
