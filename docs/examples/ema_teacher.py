"""Exact reverse KL to an average of the student's own weights, beside the reward.

The teacher scores every word of the vocabulary, so that the KL is a sum and no estimate. It keeps the policy
from moving faster than the average does (WARP's anchor, arXiv 2406.16768).
"""

import torch
import tyro

import rft_fn as rft


def main(steps: int = 100, n_prompts: int = 32, group: int = 8, out: str = "runs/ema_teacher") -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-3), rft.optim.ema(0.95))
    apply, state = st.init(rft.model.load("tiny"), tx, sampling=sampling)
    score_by_teacher, teacher = st.bind(rft.model.load("tiny"), sampling=sampling)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)

    def loss_fn(out, b):
        kl = rft.loss.reverse_kl_top_k(out.words_logp, b.extra["teacher"])
        metrics = rft.metric.policy(out, b) | {"policy/kl_teacher": rft.metric.mean(kl, b.mask)}
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv) + 0.05 * kl, metrics

    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=group, sampling=sampling)
        judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
        # the teacher's log-probs of all words, at each token [B, S, V]
        words = torch.arange(len(tokenizer)).expand(*rollout.tokens.shape, -1)
        exp = rft.experience(
            rollout,
            adv=rft.advantage.grpo(judged.reward).view(-1, 1),
            w=rft.weight.token_mean(rollout.mask),
            words=words,
        )
        average = rft.tree.replace(state, params=rft.optim.ema_params(state.opt))
        rft.model.assign(teacher, st.export(average))
        scored = st.score(score_by_teacher, teacher, exp, 2048, fields=("words_logp",))
        exp = rft.tree.replace(exp, extra={"teacher": scored.words_logp})
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        run.write(step, values, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
