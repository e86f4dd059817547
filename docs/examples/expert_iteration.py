"""Expert iteration: sample, keep what is right, and learn it as if it had been data.

No advantage and no ratio: the mean log-prob of the correct responses, each at most once (ReST-EM,
arXiv 2312.06585).
"""

import torch
import tyro

import rft_fn as rft


def main(steps: int = 160, n_prompts: int = 32, group: int = 8, out: str = "runs/expert_iteration") -> None:
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
        return rft.loss.nll(out.logp), rft.metric.policy(out, b)

    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        # the first copy of each correct response
        right = (judged.reward.flatten() == 1).tolist()
        first = {}
        for b, ids in enumerate(rft.rollout.prefixes(rollout)):
            if right[b]:
                first.setdefault(tuple(ids), b)
        good = rft.rollout.take(rollout, list(first.values()) or [0])

        # with nothing right the weights are 0, and so is the gradient
        w = rft.weight.token_mean(good.mask) * bool(first)
        exp = rft.experience(good, adv=torch.zeros(len(good.tokens), 1), w=w)
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        run.write(step, values | {"kept": len(first) / len(rollout.tokens)}, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
