"""A curriculum by success rate: draw from the levels that are solved about half of the time.

Each level's success is a running mean p, and its share of the prompts is p (1 - p), which is where rewards of
a group differ most (arXiv 2504.03380).
"""

import torch
import tyro

import rft_fn as rft


def main(steps: int = 100, n_prompts: int = 32, group: int = 8, out: str = "runs/curriculum") -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-3))
    apply, state = st.init(rft.model.load("tiny"), tx, sampling=sampling)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    levels = [rft.data.load(f"sort_digits:{n}", tokenizer, template="{short}") for n in (1, 2, 3, 4)]
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)

    def loss_fn(out, b):
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), rft.metric.policy(out, b)

    success = torch.full((len(levels),), 0.5)
    for step in range(steps):
        # each prompt's level is drawn by the share of its level
        share = (success * (1 - success)).clamp(min=0.01)
        draws = rft.rng.generator(rft.rng.fold_in(0, "levels", step))
        chosen = torch.multinomial(share, n_prompts, replacement=True, generator=draws)
        prompts, keys = [], []
        for n, count in enumerate(torch.bincount(chosen, minlength=len(levels)).tolist()):
            more = rft.data.draw(levels[n], max(count, 1), step, n)
            prompts += more[0][:count]
            keys += more[1][:count]
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        # what each level's rows got moves its running mean
        level = chosen.sort().values.repeat_interleave(group)
        for n, rows in rft.rollout.split(rollout, level).items():
            got = rft.collect.gather_and_judge_rows(st, score, rows, prompts, tokenizer).mean()
            success[n] = 0.9 * success[n] + 0.1 * got

        adv = rft.advantage.grpo(judged.reward).view(-1, 1)
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        values |= {f"level/{n + 1}": float(x) for n, x in enumerate(success)}
        run.write(step, values, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
