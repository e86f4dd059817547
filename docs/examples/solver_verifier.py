"""A solver answers and a verifier judges the answer: two models, each with its own state.

The verifier says y or n to an answer; right and wrong ones weigh alike, or it would learn the commoner word.
The solver gets the task's reward, and a little for answers that are believed (arXiv 2505.13445).
"""

import torch
import tyro

import rft_fn as rft


def main(steps: int = 150, n_prompts: int = 16, group: int = 8, out: str = "runs/solver_verifier") -> None:
    st = rft.strategy.get_strategy()
    tokenizer = rft.model.load_tokenizer("tiny")
    samplings = {"solver": rft.Sampling(max_new=6), "verifier": rft.Sampling(max_new=1)}
    apply, state, eng = {}, {}, {}
    for name, sampling in samplings.items():
        tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-3))
        apply[name], state[name] = st.init(rft.model.load("tiny"), tx, sampling=sampling)
        eng[name] = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    run = rft.run.Run(out, {"steps": steps}, total=steps, rank=st.rank)

    def loss_fn(out, b):
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)

    def sample(name, prompts, keys, n):
        return rft.collect.gather_and_generate(eng[name], st, prompts, keys, n=n, sampling=samplings[name])

    def learn(name, rollout, adv):
        """One update of a model from its advantages [N, G]."""
        exp = rft.experience(rollout, adv=adv.view(-1, 1), w=rft.weight.token_mean(rollout.mask))
        grads, _ = st.grad(state[name], apply[name], loss_fn, st.shard(exp, 2048))
        state[name], _ = st.update(state[name], grads)
        eng[name].load(st.export(state[name]), version=state[name].step)

    for step in range(steps):
        prompts, keys = rft.data.draw(dataset, n_prompts, step, 0)
        answers = sample("solver", prompts, keys, group)
        reward = rft.collect.gather_and_judge(st, score, answers, prompts, tokenizer).reward

        # each answer is a prompt of the verifier's
        ids = [row + tokenizer.encode(":") for row in rft.rollout.prefixes(answers)]
        again = [rft.rng.fold_in(0, "verify", step, row) for row in range(len(ids))]
        said = rft.reward.responses(verdicts := sample("verifier", ids, again, 4), tokenizer)
        yes, no = (torch.tensor([text == word for text in said]).view(-1, 4).float() for word in "yn")
        right = reward.flatten() == 1
        verified = torch.where(right[:, None], yes, no)
        alike = 0.5 / torch.where(right, right.float().mean(), (~right).float().mean())
        learn("verifier", verdicts, (verified - 0.5) * alike[:, None])  # verdicts that agree learn too
        learn("solver", answers, rft.advantage.grpo(reward + 0.1 * yes.mean(-1).view_as(reward)))
        run.write(step, {"reward/mean": float(reward.mean()), "verifier": float((verified.T * alike).mean())})
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
