"""A population of four learning rates, in which the worst member takes the place of the best.

Every `every` steps the member with the lowest mean reward gets the weights of the best, and its learning rate
times or divided by 1.5 (population based training, arXiv 1711.09846).
"""

import tyro

import rft_fn as rft


def main(
    steps: int = 60, n_prompts: int = 16, group: int = 8, every: int = 10, out: str = "runs/population"
) -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)

    def loss_fn(out, b):
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)

    # a learning rate is read at every update, so it may change
    rates = [1e-4, 3e-4, 1e-3, 3e-3]
    members = []
    for i in range(len(rates)):
        adamw = rft.optim.adamw(lambda count, i=i: rates[i])
        tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), adamw)
        apply, state = st.init(rft.model.load("tiny"), tx, sampling=sampling)
        members.append((apply, state, rft.engine.get_engine(None, "tiny", tokenizer)))

    recent = [0.0] * len(members)
    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        for i, (apply, state, eng) in enumerate(members):
            rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
            judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
            adv = rft.advantage.grpo(judged.reward).view(-1, 1)
            exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
            grads, _ = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
            state, _ = st.update(state, grads)
            eng.load(st.export(state), version=state.step)
            members[i] = (apply, state, eng)
            recent[i] = 0.8 * recent[i] + 0.2 * float(judged.reward.mean())

        # the worst continues from the best, a little away from its learning rate
        if (step + 1) % every == 0:
            best, worst = recent.index(max(recent)), recent.index(min(recent))
            rft.model.assign(members[worst][1].params, st.export(members[best][1]))
            factor = (1.5, 1 / 1.5)[rft.rng.fold_in(0, "factor", step) % 2]
            rates[worst], recent[worst] = rates[best] * factor, recent[best]
        run.write(step, {"reward/mean": max(recent)} | {f"lr/{i}": x for i, x in enumerate(rates)})
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
