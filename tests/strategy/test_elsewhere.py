"""Gradients at other parameters than the state's, and all weights of a model: on every backend."""

import conformance
import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import model, optim, tree
from rft_fn.model.save import full
from rft_fn.strategy import NonFinite, StrategyConfig, get_strategy, load_fault

SHARDED = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
BACKENDS = {  # name -> (options, float type)
    "fsdp2": ({}, torch.float64),
    "fsdp2 sp": ({"sp_size": 2}, torch.float64),
    "hsdp": ({"shard_size": 1}, torch.float64),
    "zero1": ({"zero_stage": 1}, torch.float32),
    "zero2": ({"zero_stage": 2}, torch.float32),
    "zero3": ({"zero_stage": 3}, torch.float32),  # its small tensors whole on every rank
    "zero3 shards": ({"zero_stage": 3, "extra": SHARDED}, torch.float32),
}


def packs_of(st, dtype, step=0):
    return st.shard(conformance.experience(step, dtype=dtype), 40)


def wholes(grads):
    return {name: full(x).clone() for name, x in grads.items()}


def ascended(before, grads, rho=0.05):
    """The parameters that SAM looks at: rho along the gradient."""
    norm = torch.stack([g.double().norm() for g in grads.values()]).norm()
    return {name: before[name] + rho * (g / norm).to(before[name].dtype) for name, g in grads.items()}


def sam(st, dtype, **more):
    """What one step of SAM gives, and a step after it; nothing of the state changes in the first gradient."""
    lm = tiny.llama(1, dtype=dtype)
    if more.get("checkpointing"):
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    apply, state = st.init(lm, conformance.adamw())
    before = dict(st.export(state))
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs_of(st, dtype))
    own = wholes(grads)
    at = ascended(before, own)

    # with shards of the state's own layout the gradients are the same
    out = {}
    if isinstance(grads, tree.Named):
        norm = optim.global_norm(grads)
        near = tree.map(lambda p, g: p + 0.05 * g / norm, state.params, grads)
        found, _ = st.grad(state, apply, conformance.loss_fn, packs_of(st, dtype), at=near)
        out |= {f"near {n}": x for n, x in wholes(found).items()}
    grads, metrics = st.grad(state, apply, conformance.loss_fn, packs_of(st, dtype), at=at)
    there = wholes(grads)
    assert all(torch.equal(x, before[n]) for n, x in st.export(state))
    assert any(not torch.allclose(x, own[n]) for n, x in there.items())

    # the next step reads the state's parameters again
    state, _ = st.update(state, grads)
    grads, after = st.grad(state, apply, conformance.loss_fn, packs_of(st, dtype, 1))
    state, _ = st.update(state, grads)
    out |= {f"at {n}": x for n, x in there.items()} | {f"own {n}": x for n, x in own.items()}
    out |= {f"{k} {n}": x for k, m in enumerate((metrics, after)) for n, x in rft.metric.results(m).items()}
    return out | dict(st.export(state))


def adapted(st, dtype):
    """All weights of a model with adapters that were trained for a step."""
    torch.manual_seed(3)
    lm = model.apply_lora_configuration(tiny.llama(dtype=dtype), rank=2, alpha=4).to(dtype)
    apply, state = st.init(lm, conformance.adamw())
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs_of(st, dtype))
    state, _ = st.update(state, grads)
    export = st.export(state, whole=True)
    assert export.frozen == frozenset() and st.export(state).frozen
    return dict(export)


def everything(st, dtype):
    return {f"sam {n}": x for n, x in sam(st, dtype).items()} | adapted(st, dtype)


def on_ranks(rank):
    processes = rft.dist.begin(600.0)
    out = {}
    for name, (options, dtype) in BACKENDS.items():
        st = get_strategy(StrategyConfig(**options))
        out[name] = everything(st, dtype)
        st.close()
    processes.close()
    return out


@pytest.mark.slow
def test_two_processes_do_what_one_does():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found = ranks.run(2, "test_elsewhere:on_ranks")
    for name, (_, dtype) in BACKENDS.items():
        want = everything(get_strategy(), dtype)
        if "zero" in name:  # its gradients are no tree
            want = {n: x for n, x in want.items() if not n.startswith("sam near")}
        for got in (mine[name] for mine in found):
            assert got.keys() == want.keys(), name
            pairs = [(torch.as_tensor(got[n]).double(), torch.as_tensor(x).double()) for n, x in want.items()]
            off = torch.stack([(a - b).norm() for a, b in pairs]).norm()
            size = torch.stack([b.norm() for _, b in pairs]).norm()
            assert float(off / size) < (1e-11 if dtype == torch.float64 else 1e-5), name


def test_one_process_is_at_the_parameters_it_was_given():
    """The same as the gradients of a model that has these parameters, also with checkpointing."""
    st = get_strategy()
    for more in ({}, {"checkpointing": True}):
        got = sam(st, torch.float64, **more)
        lm = tiny.llama(1, dtype=torch.float64)
        apply, state = st.init(lm, conformance.adamw())
        own = {n.removeprefix("own "): x for n, x in got.items() if n.startswith("own ")}
        model.assign(state.params, ascended(dict(st.export(state)), own))
        grads, metrics = st.grad(state, apply, conformance.loss_fn, packs_of(st, torch.float64))
        for name, x in grads.items():
            assert torch.allclose(got[f"at {name}"], x, rtol=1e-10, atol=1e-13), name
            assert torch.allclose(got[f"near {name}"], x, rtol=1e-10, atol=1e-13), name
        assert got["0 loss"] == pytest.approx(rft.metric.results(metrics)["loss"], rel=1e-12)


def test_bf16_and_masters_are_there_too():
    """In the type of the parameters: at other parameters, then the state's own again."""
    for options in ({"bf16": True}, {"use_mp_opt": True}):
        st = get_strategy(StrategyConfig(**options))
        apply, state = st.init(tiny.llama(1), optim.adamw(1e-3))
        packs = packs_of(st, torch.float32)
        of = lambda **more: wholes(st.grad(state, apply, conformance.loss_fn, packs, **more)[0])  # noqa: B023, E731
        own, double = of(), of(at=tree.map(lambda p: 2 * p, state.params))
        assert any(not torch.equal(x, double[n]) for n, x in own.items())
        assert all(torch.equal(x, y) for x, y in zip(own.values(), of().values()))


def test_parameters_that_do_not_fit_are_named_and_an_error_leaves_the_state():
    st = get_strategy()
    apply, state = st.init(tiny.llama(1), optim.adamw(1e-3))
    packs, before = packs_of(st, torch.float32), dict(st.export(state))
    name, p = next(iter(state.params.items()))
    at = tree.map(lambda x: 2 * x.detach(), state.params)
    for wrong, line in (
        ({name: p}, "at: expected the names"),
        ({**at, name: p[:1]}, rf"at\['{name}'\]: expected \["),
    ):
        with pytest.raises(ValueError, match=line):
            st.grad(state, apply, conformance.loss_fn, packs, at=wrong)
    with pytest.raises(ZeroDivisionError):
        st.grad(state, apply, lambda out, b: 1 / 0, packs, at=at)
    assert all(torch.equal(x, before[n]) for n, x in st.export(state))


def test_gradients_that_are_not_finite_are_diagnosed_where_they_were_made(tmp_path):
    """The dump has the parameters that were given, and the sequence at fault there."""
    st = get_strategy(StrategyConfig(max_skips=1))
    st.session.set_dump_dir(tmp_path)
    apply, state = st.init(tiny.llama(1), optim.adamw(1e-3))
    at = {name: p.detach() * (float("nan") if "norm" in name else 1) for name, p in state.params.items()}
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs_of(st, torch.float32), at=at)
    with pytest.raises(NonFinite, match="the first sequence with such a gradient is"):
        st.update(state, grads)
    _, weights, about = load_fault(tmp_path / "fault_00000001")
    assert about["row"] is not None and all(weights[n].isnan().all() == ("norm" in n) for n in at)


def test_an_engine_takes_all_weights_of_a_model_with_adapters():
    """As a dict, which names no frozen weights; it then samples what the trained model scores."""
    st = get_strategy()
    lm = model.apply_lora_configuration(model.load("tiny"), rank=2, alpha=4)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.linspace(-0.2, 0.2, p.numel()).view_as(p))
    apply, state = st.init(lm, optim.adamw(1e-3))
    eng = rft.engine.get_engine(None, "tiny")
    with pytest.raises(ValueError):
        eng.load(dict(st.export(state)), version=1)
    eng = rft.engine.get_engine(None, "tiny")
    plain = dict(st.export(state, whole=True))
    assert plain.keys() == {n for n, _ in model.load("tiny").named_parameters()}
    eng.load(plain.items(), version=1)
    rollout = eng.generate([[5, 6, 7]] * 2, [1, 2], n=2, sampling=rft.Sampling(max_new=6))
    scored = st.score(apply, state.params, rollout, 100).logp
    assert torch.allclose(scored, rollout.logp, atol=1e-4)
