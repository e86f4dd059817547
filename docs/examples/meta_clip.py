"""A meta-gradient of the clip limit, which follows the reward after one more step (arXiv 1805.09801).

CISPO's limit scales gradients; PPO's turns them on and off, and has a derivative of 0. The step is plain
gradient descent on a copy of the whole model, which every process holds: for small models only.
"""

from functools import partial

import torch
import tyro
from torch.func import grad

import rft_fn as rft


def main(steps: int = 60, n_prompts: int = 32, group: int = 8, out: str = "runs/meta_clip") -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-3))
    apply, state = st.init(rft.model.load("tiny"), tx, sampling=sampling)
    copy = rft.model.load("tiny", attn_implementation="eager")  # it has second derivatives
    look, params = rft.model.bind(copy, sampling=sampling, fused=False)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)
    log_limit, meta = torch.tensor(0.0), rft.optim.adamw(0.05)
    meta_state = meta.init(log_limit)

    def loss_fn(out, b, log_limit):
        return rft.loss.cispo(out.logp, b.old_logp, b.adv, high=log_limit.exp())

    def one_step_ahead(log_limit, inner, outer):
        """Minus the expected reward of the outer prompts after a step on the inner ones."""
        slope = grad(lambda p: (inner.w * loss_fn(look(p, inner), inner, log_limit)).sum())(params)
        ahead = rft.tree.map(lambda p, g: p - 0.5 * g, params, slope)
        return -(outer.w * rft.loss.ratio(look(ahead, outer).logp, outer.old_logp) * outer.adv).sum()

    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        adv = rft.advantage.grpo(judged.reward).view(-1, 1)
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        for _ in range(3):  # ratios are 1 at the first
            grads, _ = st.grad(state, apply, partial(loss_fn, log_limit=log_limit), st.shard(exp, 2048))
            state, _ = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        rft.model.assign(params, st.export(state))
        parts = [rft.packing.pack(exp, (rollout.group % 4 == i).nonzero()[:, 0].tolist()) for i in (0, 1)]
        change, meta_state = meta.update(grad(one_step_ahead)(log_limit, *parts), meta_state, log_limit)
        log_limit = log_limit + change
        run.write(step, {"limit": float(log_limit.exp())} | rft.reward.means(judged, "reward"))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
