"""A tree of responses: branch each one at a random token.

A prefix is worth the mean reward of its leaves. Tokens before the branch get that less the prompt's mean;
tokens behind it get their leaf's reward less that worth (TreeRL, arXiv 2506.11902).
"""

import torch
import tyro

import rft_fn as rft


def main(
    steps: int = 150, n_prompts: int = 16, roots: int = 4, branches: int = 4, out: str = "runs/tree"
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
        root = rft.collect.gather_and_generate(eng, st, prompts, keys, n=roots, sampling=sampling)

        # cut each root somewhere in its response, and continue it from there
        start = root.mask.int().argmax(-1)
        generator = rft.rng.generator(rft.rng.fold_in(0, "cut", step))
        cut = (start + 1 + torch.rand(len(start), generator=generator) * (root.length - start - 1)).long()
        again = [rft.rng.fold_in(0, "branch", step, row) for row in range(len(start))]
        ids = rft.rollout.prefixes(root, cut)
        grown = rft.collect.gather_and_generate(eng, st, ids, again, n=branches, sampling=sampling)
        leaves = rft.rollout.extend(root, grown)

        # rewards [N, roots, branches]; a leaf's group is its prompt
        judged = rft.collect.gather_and_judge(st, score, leaves, prompts, tokenizer)
        reward = judged.reward.view(n_prompts, roots, branches)
        worth = reward.mean(-1, keepdim=True)
        before = (worth - worth.mean(1, keepdim=True)).expand_as(reward).reshape(-1, 1)
        new = torch.arange(leaves.mask.shape[1]) >= cut.repeat_interleave(branches)[:, None]
        adv = (before + (reward - worth).reshape(-1, 1) * new) * leaves.mask
        exp = rft.experience(leaves, adv=adv, w=rft.weight.token_mean(leaves.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        run.write(step, values, tokens=int(leaves.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
