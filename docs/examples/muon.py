"""Muon for the matrices of the blocks, AdamW for all else (arXiv 2502.16982).

Both are pairs of functions; `optim.partition` divides the parameters between them by name.
"""

import tyro
from optimizers import muon

import rft_fn as rft
from rft_fn import optim


def kind(name, p):
    """Which optimizer a parameter gets."""
    return "muon" if p.dim() == 2 and "embed" not in name and "head" not in name else "adamw"


def main(steps: int = 100, n_prompts: int = 32, group: int = 8, out: str = "runs/muon") -> None:
    st = rft.strategy.get_strategy()
    sampling = rft.Sampling(max_new=6)
    tokenizer = rft.model.load_tokenizer("tiny")
    both = optim.partition(kind, muon=muon(1e-3), adamw=optim.adamw(1e-3))
    tx = optim.chain(optim.clip_by_global_norm(1.0), both)
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
        adv = rft.advantage.grpo(judged.reward).view(-1, 1)
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 2048))
        state, more = st.update(state, grads)
        eng.load(st.export(state), version=state.step)
        values = rft.metric.results(metrics | more) | rft.reward.means(judged, "reward")
        run.write(step, values, tokens=int(rollout.length.sum()))
    run.finish()


if __name__ == "__main__":
    tyro.cli(main)
