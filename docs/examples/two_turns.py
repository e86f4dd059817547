"""Two turns with an environment, which counts the places that the first try has right.

The environment's tokens are in no loss, and both turns learn from the last reward (RAGEN, arXiv 2504.20073).
"""

import tyro

import rft_fn as rft


def reply(row, text):
    """How many places of a first try are right, as the environment writes it."""
    return f"{sum(a == b for a, b in zip(text, row['answer']))}="


def main(steps: int = 120, n_prompts: int = 32, group: int = 8, out: str = "runs/two_turns") -> None:
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
        first = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)

        # the environment writes behind each response, and the model continues
        owners = [prompts[g] for g in first.group.tolist()]
        texts = rft.reward.responses(first, tokenizer)
        written = [reply(p.columns, text) for p, text in zip(owners, texts)]
        ids = [a + tokenizer.encode(b) for a, b in zip(rft.rollout.prefixes(first), written)]
        again = [rft.rng.fold_in(0, "second turn", step, row) for row in range(len(ids))]
        second = rft.collect.gather_and_generate(eng, st, ids, again, n=1, sampling=sampling)
        both = rft.rollout.extend(first, second)

        # the last try counts
        last = rft.tree.replace(second, group=both.group)
        judged = rft.collect.gather_and_judge(st, score, last, prompts, tokenizer)
        adv = rft.advantage.grpo(judged.reward).view(-1, 1)
        exp = rft.experience(both, adv=adv, w=rft.weight.token_mean(both.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        first_reward = rft.collect.gather_and_judge_rows(st, score, first, prompts, tokenizer)
        values["reward/first"] = float(first_reward.mean())
        run.write(step, values, tokens=int(both.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
