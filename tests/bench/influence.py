"""How well products of gradients predict leave-one-out steps, on the embedded default: docs/scripts.md.

    python tests/bench/influence.py

For every response of a batch, a step is taken without its gradient. The change of a held-out loss is compared
with the product of the response's gradient and the held-out one, by Spearman's rank correlation. Steps are
AdamW's with the moments of the run, as training takes them, and small ones of SGD.
"""

import torch

import rft_fn as rft

SAMPLING = rft.Sampling(max_new=6)


def spearman(x, y):
    """The correlation of the ranks of x and y, [B] each."""
    ranks = torch.stack([v.argsort().argsort().double() for v in (x, y)])
    return float(torch.corrcoef(ranks)[0, 1])


def sampled(st, eng, dataset, tokenizer, score, prompts, group, key):
    """A batch of GRPO on fresh responses."""
    asked, keys = rft.data.draw(dataset, prompts, step=key, seed=1)
    rollout = rft.collect.gather_and_generate(eng, st, asked, keys, n=group, sampling=SAMPLING)
    reward = rft.collect.gather_and_judge(st, score, rollout, asked, tokenizer).reward
    adv = rft.advantage.grpo(reward).view(-1, 1)
    return rft.experience(rollout, adv=adv, w=rft.weight.seq_mean(rollout.mask))


def loss(out, b):
    return -torch.exp(out.logp - b.old_logp) * b.adv


def held_out_loss(st, apply, params, packs):
    with torch.no_grad():
        return sum(float((b.w * loss(apply(params, b), b)).double().sum()) for b in packs)


def correlations(st, apply, state, exp, packs, tx):
    """The rank correlation of the products with the changes that leave-one-out steps of `tx` make."""
    found = rft.analysis.per_sequence(st, state, apply, loss, exp, budget=4096, held_out=(loss, packs))
    changes = []
    for row in [None, *range(len(exp.tokens))]:
        w = exp.w.clone()
        if row is not None:
            w[row] = 0
        kept = rft.tree.replace(exp, w=w)
        fork = rft.strategy.fork(state)
        if tx is not None:
            fork = rft.tree.replace(fork, tx=tx, opt=tx.init(fork.params))
        fork, _ = st.update(fork, st.grad(fork, apply, loss, st.shard(kept, 4096))[0])
        changes.append(held_out_loss(st, apply, fork.params, packs))
    moved = torch.tensor(changes[1:], dtype=torch.float64) - changes[0]
    live = exp.adv[:, 1:].abs().sum(-1) > 0  # the others have no gradient
    return spearman(moved[live], found.with_held_out[live]), int(live.sum())


def main():
    st = rft.strategy.get_strategy()
    tokenizer = rft.model.load_tokenizer("tiny")
    tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(1e-3))
    apply, state = st.init(rft.model.load("tiny"), tx, sampling=SAMPLING)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
    for step in range(61):
        if step % 20 == 0:
            exp = sampled(st, eng, dataset, tokenizer, score, 8, 8, 1000 + step)
            packs = st.shard(sampled(st, eng, dataset, tokenizer, score, 32, 16, 2000 + step), 4096)
            for name, other in (("adamw", None), ("sgd", rft.optim.sgd(1e-3))):
                rank, count = correlations(st, apply, state, exp, packs, other)
                print(f"after {step} steps, {name}: {rank:.3f} of {count} responses", flush=True)
        batch = sampled(st, eng, dataset, tokenizer, score, 32, 16, step)
        state, _ = st.update(state, st.grad(state, apply, loss, st.shard(batch, 4096))[0])
        eng.load(st.export(state), version=step + 1)


if __name__ == "__main__":
    main()
