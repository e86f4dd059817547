"""VinePPO: the worth of every prefix is measured by finishing it several times, in place of a critic.

A token's advantage is the worth of the response with it, less that without it; the worth of a whole response
is its reward (arXiv 2410.01679).
"""

import torch
import tyro

import rft_fn as rft


def main(
    steps: int = 200, n_prompts: int = 16, group: int = 4, tries: int = 4, out: str = "runs/vine"
) -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-3))
    apply, state = st.init(rft.model.load("tiny"), tx, sampling=sampling)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)

    def loss_fn(out, b):
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), rft.metric.policy(out, b)

    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        # row b has n prefixes inside of its response; each is finished `tries` times
        start, end = rollout.mask.int().argmax(-1), rollout.length
        rows = [b for b, (s, e) in enumerate(zip(start, end)) for _ in range(int(e - s))]
        cuts = [c for s, e in zip(start.tolist(), end.tolist()) for c in range(s, e)]
        ids = rft.rollout.prefixes(rft.rollout.take(rollout, rows), cuts)
        again = [rft.rng.fold_in(0, "vine", step, i) for i in range(len(ids))]
        tried = rft.collect.gather_and_generate(eng, st, ids, again, n=tries, sampling=sampling)
        tried = rft.rollout.extend(rft.rollout.take(rollout, rows), tried)
        found = rft.collect.gather_and_judge_rows(st, score, tried, prompts, tokenizer)
        found = found.view(-1, tries).mean(-1)

        # worth [B, S]: of the prefix before each token; behind the last one stands the reward
        worth = torch.zeros(rollout.tokens.shape[0], rollout.tokens.shape[1] + 1)
        worth[rows, cuts] = found
        worth[torch.arange(len(end)), end] = judged.reward.flatten()
        adv = (worth[:, 1:] - worth[:, :-1]) * rollout.mask
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        run.write(step, values, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
