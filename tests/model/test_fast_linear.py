"""A bound model's linear layers by oneDNN: the same numbers, names, copies and files."""

import copy
import math
import pickle
from contextlib import contextmanager

import floor
import pytest
import ranks
import tiny
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import rft_fn as rft
from rft_fn import engine, model, packing
from rft_fn.model.quantize import FastLinear, is_plain, packed, set_fast
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_kernels import products

EXP = tiny.experience()
EXP = rft.tree.replace(EXP, adv=torch.where(EXP.mask, EXP.tokens % 5 - 2.0, 0))


@contextmanager
def forced():
    """oneDNN for products of any size, on any processor that has it; gives a list with an item for each."""
    seen = []
    by_onednn = torch.ops.mkldnn._linear_pointwise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "mkl_is_half", lambda: True)
        patch.setattr(products, "is_zen4", lambda: False)
        patch.setattr(products, "large_layer", lambda: 1)
        patch.setattr(products, "packing", lambda: products.Packing(1, 1))
        patch.setattr(
            torch.ops.mkldnn, "_linear_pointwise", lambda *x: seen.append(1) or by_onednn(*x), raising=False
        )
        yield seen


@pytest.fixture(autouse=True)
def seen():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    with forced() as found:
        yield found


def loss_fn(out, b):
    return -out.logp * b.adv


def gradients(lm, fast=True, **options):
    """(grads, log-probs) of a model."""
    st = get_strategy(StrategyConfig(fast_linear=fast, **options))
    apply, state = st.init(lm, rft.optim.adamw(0.01))
    packs = st.shard(EXP, 40)
    grads, _ = st.grad(state, apply, loss_fn, packs)
    return dict(grads.items()), st.score(apply, state.params, EXP, 40).logp


def fast_layers(module):
    return sum(type(m) is FastLinear for m in module.modules())


def differ(a, b):
    """The largest difference, relative to the largest element of each tensor."""
    assert a.keys() == b.keys()
    pairs = [(a[n].detach().double(), b[n].detach().double()) for n in a]
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-6)) for x, y in pairs)


def of(lm, fast, dtype=torch.float32):
    apply, params = model.bind(lm.to(dtype), fast_linear=fast)
    pack = packing.pack(EXP, range(6))
    loss = lambda p: (apply(p, pack).logp * pack.adv).sum()  # noqa: E731
    return loss, params


def test_gradients_are_within_1e5_of_those_of_float64(seen):
    lm = tiny.llama()
    loss, params = of(lm, True)
    seen.clear()
    got = grad(loss)(params)
    # seven layers twice, forward and two gradients each
    assert len(seen) == 2 * 7 * 3
    loss, params = of(tiny.llama(), False, torch.float64)
    assert differ(got, grad(loss)(params)) < 1e-5


def test_the_option_chooses_and_is_read_again_at_each_binding(seen):
    lm = tiny.llama()
    st = get_strategy(StrategyConfig(fast_linear=False))
    apply, params = st.bind(lm)
    pack = packing.pack(EXP, range(6))
    plain = apply(params, pack).logp
    assert seen == [] and fast_layers(lm) == 0
    apply, params = get_strategy(StrategyConfig()).bind(lm)
    seen.clear()
    fast = apply(params, pack).logp
    assert len(seen) == 14 and fast_layers(lm) == 15
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    st.bind(lm)
    assert fast_layers(lm) == 0


def test_nothing_changes_where_the_processor_would_not_gain(monkeypatch):
    monkeypatch.setattr(products, "packing", lambda: products.Packing(math.inf, 1))
    lm = tiny.llama()
    model.bind(lm)
    assert fast_layers(lm) == 0


def test_vmap_of_gradients_agrees_with_each_alone(seen):
    loss, params = of(tiny.llama(attn_implementation="eager"), True)
    layer = "model.layers.0.mlp.up_proj.weight"
    weights = torch.stack([params[layer], params[layer].flip(0)]).detach()

    def one(weight):
        return loss(rft.tree.Named({**params, layer: weight}))

    got = vmap(grad(one))(weights)
    assert seen
    for each, weight in zip(got, weights):
        torch.testing.assert_close(each, grad(one)(weight), rtol=1e-4, atol=1e-4)


def test_checkpointing_changes_no_bit(seen):
    want, _ = gradients(tiny.llama())
    plain = len(seen)
    lm = tiny.llama()
    lm.gradient_checkpointing_enable()
    lm.train()
    got, _ = gradients(lm)
    assert len(seen) - plain > plain
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("first", ["adapters", "binding"])
def test_adapters_train_and_merge_as_over_torchs_layers(first, seen):
    def adapted():
        lm = tiny.llama()
        if first == "binding":
            set_fast(lm, True)
        torch.manual_seed(0)
        lm = model.apply_lora_configuration(lm, 4, 8)
        for n, p in lm.named_parameters():
            if "lora_B" in n:
                nn.init.normal_(p, std=0.1)
        return lm

    lm = adapted()
    got, logp = gradients(lm)
    count = len(seen)
    want, plain = gradients(adapted(), fast=False)
    assert count and len(seen) == count
    assert differ(got, want) < 1e-4
    torch.testing.assert_close(logp, plain, rtol=1e-4, atol=1e-5)
    merged, of_plain = lm.merge_and_unload().state_dict(), adapted().merge_and_unload().state_dict()
    assert merged.keys() == of_plain.keys() and all(torch.equal(merged[n], of_plain[n]) for n in merged)


def test_copies_and_pickles_are_torchs_layers_and_names_stay():
    lm = tiny.llama()
    names = list(lm.state_dict())
    model.bind(lm)
    assert fast_layers(lm) == 15 and list(lm.state_dict()) == names
    layer = lm.model.layers[0].mlp.up_proj
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm)), copy.copy(layer)):
        assert fast_layers(other) == 0
    other = copy.deepcopy(layer)
    assert type(other) is nn.Linear and torch.equal(other.weight, layer.weight)
    assert other.weight is not layer.weight and b"FastLinear" not in pickle.dumps(lm)
    assert is_plain(layer) and is_plain(other) and not is_plain(nn.Identity())


def test_layers_of_other_kinds_are_left_alone():
    class Other(nn.Linear):
        pass

    class Weight(nn.Parameter):
        pass

    odd = nn.ModuleList([Other(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    odd[1].forward = lambda x: x
    odd[2].weight = Weight(torch.ones(2, 2))
    nn.utils.parametrizations.weight_norm(odd[3])
    before = [type(m) for m in odd]
    set_fast(odd, True)
    assert [type(m) for m in odd] == before


def test_given_parameters_are_those_that_are_read(seen):
    lm = tiny.llama()
    set_fast(lm, True)
    other = {n: p.detach() * 1.5 for n, p in lm.named_parameters()}
    ids = torch.arange(3, 12)[None]
    got = functional_call(lm, other, (ids,)).logits
    plain = tiny.llama()
    assert seen
    torch.testing.assert_close(got, functional_call(plain, other, (ids,)).logits, rtol=1e-4, atol=1e-4)


def test_trainer_and_engine_agree_as_over_torchs_layers(seen):
    gaps = []
    for fast in (True, False):
        count = len(seen)
        config = engine.EngineConfig(fast_linear=fast)
        eng = engine.get_engine(config, tiny.llama(), tiny.tokenizer())
        keys = [rft.rng.fold_in(0, i) for i in range(4)]
        rollout = eng.generate([[3, 4, 5, 6]] * 4, keys, sampling=rft.Sampling(max_new=6))
        assert (len(seen) > count) == fast
        st = get_strategy(StrategyConfig(fast_linear=fast))
        apply, params = st.bind(tiny.llama())
        exp = rft.experience(rollout, adv=rollout.mask.float(), w=rollout.mask.float())
        logp = st.score(apply, params, exp, 40).logp
        gaps.append(float((logp - rollout.logp).abs().max()))
    assert max(gaps) < 1e-5


def test_samples_after_a_load_are_those_of_a_new_engine(seen, monkeypatch):
    """Weights are packed for one rollout: packs of the old weights would sample the old policy."""
    count = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda *a: count.append(1) or reorder(*a), raising=False
    )
    keys = [rft.rng.fold_in(0, i) for i in range(8)]

    def sample(eng):
        return eng.generate([[3, 4, 5, 6]] * 8, keys, sampling=rft.Sampling(max_new=6))

    def built(seed):
        return engine.get_engine(engine.EngineConfig(), tiny.llama(seed), tiny.tokenizer())

    eng = built(0)
    first = sample(eng)
    assert len(count) == 15  # each weight once, whatever the number of tokens
    eng.load(tiny.llama(1).state_dict().items(), version=1)
    eng.sleep()
    second, fresh = sample(eng), sample(built(1))
    assert torch.equal(second.tokens, fresh.tokens) and torch.equal(second.logp, fresh.logp)
    assert not torch.equal(first.logp, second.logp)


def trained(steps, state, apply, st):
    """The state after some steps, each with advantages of its own."""
    for _ in range(steps):
        rows = EXP.adv * (1 + state.step)
        grads, _ = st.grad(state, apply, loss_fn, st.shard(rft.tree.replace(EXP, adv=rows), 40))
        state, _ = st.update(state, grads)
    return state


def test_a_run_resumes_byte_for_byte(seen, tmp_path):
    """The products of a size are the same whatever came before them in the process."""

    def begun():
        st = get_strategy(StrategyConfig())
        tx = rft.optim.chain(rft.optim.clip_by_global_norm(1.0), rft.optim.adamw(0.01, weight_decay=0.1))
        return st, *st.init(tiny.llama(), tx)

    st, apply, state = begun()
    state = trained(2, state, apply, st)
    st.save(tmp_path / "two", state, {})
    whole = trained(3, state, apply, st)

    st, apply, state = begun()
    state, _ = st.restore(tmp_path / "two", state)
    seen.clear()
    resumed = trained(3, state, apply, st)
    assert seen and fast_layers(resumed.module) == 15
    for a, b in ((whole.params, resumed.params), (whole.opt, resumed.opt)):
        pairs = list(zip(rft.tree.leaves(a), rft.tree.leaves(b)))
        assert len(pairs) > 10
        assert all(
            bytes(x.detach().numpy()) == bytes(y.detach().numpy()) for x, y in pairs if torch.is_tensor(x)
        )


def test_packs_end_with_their_context_and_are_not_copied():
    lm = tiny.llama().eval()
    set_fast(lm, True)
    ids = torch.arange(3, 12)[None]
    layer = lm.model.layers[0].mlp.up_proj
    with torch.no_grad():
        want = lm(ids).logits
        with pytest.raises(KeyError), packed(lm):
            got = lm(ids).logits
            assert torch.equal(got, want) or floor.OLD_ONEDNN
            torch.testing.assert_close(got, want)
            assert "pack" not in vars(copy.deepcopy(layer)) and layer.pack.packed is not None
            raise KeyError
        assert layer.pack is None
        layer.weight.mul_(2)
        assert not torch.equal(lm(ids).logits, want)


def on_two(rank):
    """The gradients of two ranks, gathered whole, and how many products were oneDNN's."""
    with forced() as found:
        st = get_strategy(StrategyConfig(fsdp=True))
        apply, state = st.init(tiny.llama(), rft.optim.adamw(0.01))
        packs = st.shard(EXP, 40)
        grads, _ = st.grad(state, apply, loss_fn, packs)
        whole = {n: g.full_tensor() for n, g in grads.items()}
        state, _ = st.update(state, grads)
        return whole, dict(st.export(state)), len(found)


def test_two_sharded_processes_have_the_gradients_of_one():
    want, _ = gradients(tiny.llama(), fast=False)
    for got, exported, count in ranks.run(2, "test_fast_linear:on_two"):
        assert count and differ(got, want) < 1e-4
        assert set(exported) >= set(want)
