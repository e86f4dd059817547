"""DPO on the fly, on the best and the worst response of each group.

The reference is the sampler (online DPO, arXiv 2402.04792). Steps are small: at a learning rate of 1e-3 and
with the mean over the pairs, the policy gets sure of wrong answers too; at step 100 its reward is 0.6, and 3
of 32 groups have a pair left to learn from.
"""

import torch
import tyro

import rft_fn as rft


def main(steps: int = 160, n_prompts: int = 32, group: int = 8, out: str = "runs/dpo_on_the_fly") -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(3e-4))
    apply, state = st.init(rft.model.load("tiny"), tx, sampling=sampling)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)

    def loss_fn(out, b):
        sides = (*rft.packing.sides(out.logp, b), *rft.packing.sides(b.ref_logp, b))
        loss = rft.loss.dpo(*sides, beta=0.5)
        return loss[b.seq // 2], rft.metric.pairs("pairs", *sides, rft.packing.real(b), beta=0.5)

    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        # rows 2i and 2i + 1 are the best and the worst of a group whose rewards differ
        varied = rft.reward_shaping.varied(judged.reward)
        best, worst = judged.reward.argmax(-1), judged.reward.argmin(-1)
        rows = [g * group + int(x[g]) for g in range(n_prompts) if varied[g] for x in (best, worst)]
        pairs = rft.rollout.take(rollout, rows or [0, 1])

        # the mean over all groups: one without a pair counts as 0, so that few pairs make a small step
        w = rft.weight.pair_mean(pairs.mask) * (len(rows) / 2 / n_prompts)
        exp = rft.experience(pairs, adv=torch.zeros(len(pairs.tokens), 1), w=w, ref_logp=pairs.logp)
        for _ in range(2):  # at the first update policy and reference are one
            grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048, unit=2))
            state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        run.write(step, values | {"pairs": len(rows) / 2}, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
