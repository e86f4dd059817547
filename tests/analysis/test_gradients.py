"""Gradients of several losses on one buffer, against `st.grad` of each and their inner products."""

import gc
import weakref

import conformance
import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import analysis
from rft_fn.strategy import StrategyConfig, get_strategy

LOSSES = {
    "clip": lambda out, b: rft.loss.ppo_clip(out.logp, b.old_logp, b.adv),
    "reinforce": lambda out, b: (rft.loss.reinforce(out.logp, b.adv), {"n": rft.metric.sum(b.mask)}),
    "nll": lambda out, b: rft.loss.nll(out.logp),
    "cispo": lambda out, b: rft.loss.cispo(out.logp, b.old_logp, b.adv),
}
LAYERS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm")


def trained(st, dtype=torch.float64):
    apply, state = st.init(tiny.llama(dtype=dtype), rft.optim.adamw(1e-3))
    return state, apply, st.shard(conformance.experience(0, dtype=dtype), 40)


def definition(st, state, apply, packs):
    """[L, K, K]: the products of flat gradients, one `st.grad` for each loss."""
    each_loss = [st.grad(state, apply, f, packs)[0] for f in LOSSES.values()]
    grams = []
    for layer in LAYERS:
        flat = [torch.cat([x.flatten() for n, x in g.items() if n.startswith(layer)]) for g in each_loss]
        grams.append(torch.stack(flat) @ torch.stack(flat).T)
    return torch.stack(grams)


@pytest.mark.parametrize("one_forward", [None, False])
def test_products_are_those_of_st_grad(one_forward):
    st = get_strategy()
    state, apply, packs = trained(st)
    want = definition(st, state, apply, packs)
    got = analysis.gradients(st, state, apply, LOSSES, packs, one_forward=one_forward)
    assert (got.names, got.layers) == (tuple(LOSSES), LAYERS)
    assert torch.allclose(got.products, want, rtol=1e-10, atol=1e-10)
    whole = want.sum(0)
    assert torch.allclose(got.norm, whole.diagonal().sqrt())
    assert torch.allclose(got.cosine, whole / torch.outer(got.norm, got.norm))
    assert torch.allclose(got.layer_norm[1], want[1].diagonal().sqrt())
    assert torch.allclose(got.layer_cosine[2, 0, 1], want[2, 0, 1] / (want[2, 0, 0] * want[2, 1, 1]).sqrt())
    assert got.metrics["reinforce"]["n"] == sum(int(b.mask.sum()) for b in packs)
    assert got.metrics["nll"].keys() == {"loss"}


def test_one_reference_and_layers_of_ones_own():
    st = get_strategy()
    state, apply, packs = trained(st)
    whole = definition(st, state, apply, packs).sum(0)
    for one_forward in (True, False):
        got = analysis.gradients(
            st, state, apply, LOSSES, packs, reference="nll", layer=lambda n: "all", one_forward=one_forward
        )
        assert got.layers == ("all",)
        known = torch.eye(4, dtype=torch.bool)
        known[2] = known[:, 2] = True
        assert torch.allclose(got.products[0][known], whole[known])
        assert bool(got.products[0][~known].isnan().all())


def test_one_forward_runs_it_once_and_in_turn_holds_two_gradients(monkeypatch):
    st = get_strategy()
    state, apply, packs = trained(st)
    calls, alive, most = [], [], []

    def counted(params, pack):
        calls.append(1)
        return apply(params, pack)

    def grad(*args):
        gc.collect()
        most.append(1 + sum(any(x() is not None for x in tensors) for tensors in alive))
        grads, metrics = st.grad(*args)
        alive.append([weakref.ref(x) for x in grads.values()])
        return grads, metrics

    counted.residence = apply.residence
    counting = st._replace(grad=grad)
    apply.residence.bound = None
    analysis.gradients(st, state, counted, LOSSES, packs)
    assert len(calls) == len(packs)
    analysis.gradients(counting, state, apply, LOSSES, packs, one_forward=False)
    assert max(most) == 2 and len(most) == 1 + 3 + 2 + 1
    most.clear()
    analysis.gradients(counting, state, apply, LOSSES, packs, one_forward=False, reference="clip")
    assert max(most) == 2 and len(most) == len(LOSSES)


def test_what_it_refuses():
    st = get_strategy()
    state, apply, packs = trained(st)
    with pytest.raises(ValueError, match="loss_fns: expected one or more losses by name, got none"):
        analysis.gradients(st, state, apply, {}, packs)
    with pytest.raises(ValueError, match="reference: expected one of clip, reinforce, nll, cispo, got 'ppo'"):
        analysis.gradients(st, state, apply, LOSSES, packs, reference="ppo")
    with pytest.raises(ValueError, match=r"loss: expected \[T\]"):
        analysis.gradients(st, state, apply, {"mean": lambda out, b: out.logp.mean()}, packs)
    lm = tiny.llama()
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    apply, state = st.init(lm, rft.optim.adamw(1e-3))
    with pytest.raises(ValueError, match="one_forward: expected False with gradient checkpointing, got True"):
        analysis.gradients(st, state, apply, LOSSES, packs, one_forward=True)


# ---------- several processes

SHARDED = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
BACKENDS = {
    "fsdp2": ({}, torch.float64),
    "fsdp2 sp": ({"sp_size": 2}, torch.float64),
    "hsdp": ({"shard_size": 1}, torch.float64),
    "zero1": ({"zero_stage": 1}, torch.float32),
    "zero2": ({"zero_stage": 2}, torch.float32),
    "zero3": ({"zero_stage": 3, "extra": SHARDED}, torch.float32),
}


def on_ranks(rank):
    processes = rft.dist.begin(600.0)
    out = {}
    for name, (options, dtype) in BACKENDS.items():
        st = get_strategy(StrategyConfig(**options))
        state, apply, packs = trained(st, dtype)
        out[name] = analysis.gradients(st, state, apply, LOSSES, packs).products
        st.close()
    processes.close()
    return out


@pytest.mark.slow
def test_two_processes_give_the_products_of_one():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    mine, other = ranks.run(2, "test_gradients:on_ranks")
    want = {
        d: definition(get_strategy(), *trained(get_strategy(), d)) for d in (torch.float64, torch.float32)
    }
    for name, (_, dtype) in BACKENDS.items():
        assert torch.equal(mine[name], other[name]), name
        size = want[dtype].double().diagonal(dim1=-2, dim2=-1).sqrt()
        apart = (mine[name] - want[dtype].double()).abs() / (size.unsqueeze(-1) * size.unsqueeze(-2))
        assert float(apart.max()) < (1e-10 if dtype == torch.float64 else 1e-6), (name, apart)
