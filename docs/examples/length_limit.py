"""A limit on the mean length, kept by a Lagrange multiplier that is learned beside the policy.

The multiplier rises while responses are longer than `limit` and falls while they are shorter, never below 0
(constrained policy optimisation, arXiv 2310.12773).
"""

import tyro

import rft_fn as rft


def main(
    steps: int = 100, n_prompts: int = 32, group: int = 8, limit: float = 4.0, out: str = "runs/length_limit"
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

    price = 0.0
    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        length = rollout.mask.sum(-1).view_as(judged.reward).float()
        adv = rft.advantage.grpo(judged.reward - price * length, scale=False).view(-1, 1)
        price = max(price + 0.02 * float(length.mean() - limit), 0.0)

        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        values |= {"length/price": price, "length/mean": float(length.mean())}
        run.write(step, values, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
