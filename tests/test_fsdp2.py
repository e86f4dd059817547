"""FSDP2 over gloo."""

import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import optim, packing, tree, weight
from rft_fn.strategy import StrategyConfig, get_strategy


def experience(seed=0, rows=8):
    exp, g = tiny.experience(seed, rows), torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(exp.mask.shape, generator=g, dtype=torch.float64) * exp.mask  # noqa: E731
    return tree.replace(exp, old_logp=-3 + noise(), adv=noise(), w=weight.token_mean(exp.mask).double())


def loss_fn(out, b):
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), {"logp": rft.metric.mean(out.logp, b.mask)}


def steps(rank, options, count=3):
    st = get_strategy(StrategyConfig(**options))
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    apply, state = st.init(tiny.llama(dtype=torch.float64), tx)
    out = []
    for i in range(count):
        packs = packing.shard(experience(i), 40, st.world)[st.rank]
        grads, metrics = st.grad(state, apply, loss_fn, packs)
        state, more = st.update(state, grads)
        out.append(rft.metric.results(metrics | more))
    return dict(st.export(state)), out


@pytest.mark.parametrize("options", [{}, {"sp_size": 2}, {"shard_size": 1}, {"fsdp_cpu_offload": True}])
def test_same_as_local(options):
    want, logs = steps(0, {})
    for got, log in ranks.run(2, "test_fsdp2:steps", options):
        assert all(torch.allclose(got[n], want[n], rtol=0, atol=1e-12) for n in want)
        assert all(a == pytest.approx(b, rel=1e-9) for a, b in zip(log, logs))
