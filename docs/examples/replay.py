"""Replay: half of each batch was sampled by earlier weights, and is weighted by how likely it is now.

The trainer scores the batch first. Its ratio to the sampler's own log-probs, truncated at 2, goes into the
weights; the loss starts from the trainer's (RePO, arXiv 2506.09340).
"""

import torch
import tyro

import rft_fn as rft


def main(steps: int = 100, n_prompts: int = 32, group: int = 8, out: str = "runs/replay") -> None:
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

    kept, steps_kept = [], 4
    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        adv = rft.advantage.grpo(judged.reward).view(-1, 1)

        # one earlier rollout beside the new one, each with the advantages that it had
        batch, advs = rollout, adv
        if kept:
            old, old_adv = kept[step % len(kept)]
            batch, advs = rft.rollout.concat([rollout, old]), torch.cat([adv, old_adv])
        kept = [*kept, (rollout, adv)][-steps_kept:]

        # how likely its tokens are now
        logp = st.score(apply, state.params, batch, 2048).logp
        w = rft.weight.truncated_is(rft.weight.token_mean(batch.mask), logp, batch.logp)
        exp = rft.experience(batch, adv=advs, w=w, old_logp=logp)
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        values |= {"replay/rows": len(batch.tokens) - len(rollout.tokens)}
        run.write(step, values, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
