"""The critic: its values, what trains, what is saved, and models that cannot be one."""

import copy

import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import model, packing, tree
from rft_fn.strategy import StrategyConfig, get_strategy


def critic_of(lm, seed=0):
    """A critic whose head is not 0."""
    critic = model.load_critic(lm)
    g = torch.Generator().manual_seed(seed)
    critic.head.weight.data = torch.randn(critic.head.weight.shape, generator=g, dtype=torch.float64).to(
        critic.head.weight.dtype
    )
    critic.head.bias.data.fill_(0.3)
    return critic


def values_of(critic, exp, budget=1000):
    """[B, S] by way of packs."""
    apply, params = model.bind(critic)
    packs = packing.shard(exp, budget)[0]
    return packing.unpack(model.values(apply, params, packs), packs, exp.tokens)


def by_hand(lm, critic, exp):
    """The definition, a row at a time: the value of a token is head(hidden state of the token before it)."""
    out = torch.zeros(exp.tokens.shape, dtype=torch.float64)
    for b, length in enumerate(exp.length.tolist()):
        hidden = lm(input_ids=exp.tokens[b : b + 1, :length], output_hidden_states=True).hidden_states[-1][0]
        for s in range(1, length):
            if exp.mask[b, s]:
                out[b, s] = (hidden[s - 1] * critic.head.weight[0]).sum() + critic.head.bias[0]
    return out


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [30, 64, 1000])
def test_values_are_hidden_states_times_the_head(budget, tied):
    """A forgotten shift, positions that do not restart, or attention across sequences fail here."""
    lm, exp = tiny.llama(dtype=torch.float64, tie_word_embeddings=tied), tiny.experience()
    critic = critic_of(copy.deepcopy(lm))
    with torch.no_grad():
        want = by_hand(lm.eval(), critic, exp)
    torch.testing.assert_close(values_of(critic, exp, budget), want, rtol=0, atol=1e-12)
    assert want[exp.mask].std() > 1


def test_packed_is_each_row_alone_and_zero_outside_mask():
    critic, exp = critic_of(tiny.llama()), tiny.experience()
    apply, params = model.bind(critic)
    together = packing.pack(exp, range(6))
    value = apply(params, together).value
    alone = torch.cat([apply(params, packing.pack(exp, [i])).value for i in range(6)])
    torch.testing.assert_close(value, alone, rtol=0, atol=1e-6 * float(value.detach().abs().max()))
    assert (value[~together.mask] == 0).all() and (value[together.mask] != 0).all()
    assert value.dtype == torch.float32 and (apply(params, together).logp == 0).all()


def test_a_value_knows_only_what_came_before():
    """At t it is about the state before target[t]: changing target[t] and all after it changes nothing."""
    critic, exp = critic_of(tiny.llama()), tiny.experience(rows=1, longest=20)
    before = values_of(critic, exp)
    start, length = int(exp.mask[0].int().argmax()), int(exp.length[0])
    for t in range(start, length):
        tokens = exp.tokens.clone()
        tokens[0, t:] = (tokens[0, t:] + 7) % 30 + 3
        after = values_of(critic, tree.replace(exp, tokens=tokens))
        assert (after - before)[0, : t + 1].abs().max() < 1e-6
        if t + 1 < length:
            assert (after - before)[0, t + 1].abs() > 1e-4


def test_a_new_critic_says_zero_whatever_the_model():
    exp = tiny.experience()
    assert (values_of(model.load_critic(tiny.llama()), exp) == 0).all()
    low = model.load_critic(tiny.llama(dtype=torch.bfloat16))
    assert low.head.weight.dtype == torch.float32 and next(low.decoder.parameters()).dtype == torch.bfloat16
    assert values_of(critic_of(tiny.llama(dtype=torch.bfloat16)), exp).dtype == torch.float32


def regression(out, b):
    return (out.value - b.pos % 3) ** 2


def test_the_head_over_the_vocabulary_is_neither_kept_nor_trained():
    lm = tiny.llama(tie_word_embeddings=False)
    critic = critic_of(lm)
    assert not any(p is lm.lm_head.weight for p in critic.parameters())
    st = rft.strategy.get_strategy()
    apply, state = st.init(critic, rft.optim.adamw(1e-3))
    grads, _ = st.grad(state, apply, regression, [packing.pack(tiny.experience(), range(6))])
    assert set(grads) == {n for n, _ in critic.named_parameters()}
    assert all(g.abs().sum() > 0 for g in grads.values())


def test_gradient_goes_only_into_what_is_trainable():
    critic = critic_of(tiny.llama())
    critic.decoder.embed_tokens.weight.requires_grad_(False)
    frozen = critic.decoder.embed_tokens.weight.detach().clone()
    st = rft.strategy.get_strategy()
    apply, state = st.init(critic, rft.optim.adamw(1e-2))
    grads, _ = st.grad(state, apply, regression, [packing.pack(tiny.experience(), range(6))])
    assert "decoder.embed_tokens.weight" not in grads and "head.weight" in grads
    st.update(state, grads)
    assert torch.equal(critic.decoder.embed_tokens.weight, frozen)


def test_with_adapters_only_they_and_the_head_learn():
    base = tiny.llama()
    want = values_of(critic_of(copy.deepcopy(base)), tiny.experience())
    critic = critic_of(model.apply_lora_configuration(base, rank=2, alpha=4))
    torch.testing.assert_close(values_of(critic, tiny.experience()), want, rtol=0, atol=1e-5)
    _, params = model.bind(critic)
    assert {n for n in params if "lora_" not in n} == {"head.weight", "head.bias"}
    assert any("lora_B" in n for n in params)


def test_it_learns_a_function_of_the_state():
    """From V = 0: the state before a token determines pos, so its residue can be learned."""
    st, exp = rft.strategy.get_strategy(), tiny.experience(rows=12)
    apply, state = st.init(model.load_critic(tiny.llama()), rft.optim.adamw(1e-2))
    packs, losses = packing.shard(exp, 1000)[0], []
    for _ in range(60):
        grads, metrics = st.grad(state, apply, regression, packs)
        losses.append(rft.metric.results(metrics)["loss"])
        state, _ = st.update(state, grads)
    assert losses[0] > 1 and losses[-1] < 0.05


def test_dropout_is_off_and_checkpointing_changes_nothing():
    pack = packing.pack(tiny.experience(), range(6))
    lm = tiny.llama(dtype=torch.float64, attention_dropout=0.5)
    critic = critic_of(lm.train()).train()
    apply, params = model.bind(critic)
    value = apply(params, pack).value
    assert torch.equal(value, apply(params, pack).value)
    plain = torch.autograd.grad(value.sum(), list(params.values()))
    again = model.load_critic(tiny.llama(dtype=torch.float64), gradient_checkpointing=True)
    again.load_state_dict(critic.state_dict())
    calls = []
    again.decoder.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    apply, params = model.bind(again)
    calls.clear()
    saved = torch.autograd.grad(apply(params, pack).value.sum(), list(params.values()))
    assert len(calls) == 2  # the second one is the recomputation
    for a, b in zip(plain, saved):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_critic_has_the_same_values(tmp_path, dtype):
    critic, exp = critic_of(tiny.llama(3, dtype=dtype)), tiny.experience()
    state = torch.random.get_rng_state()
    folder = model.save_critic(tmp_path / "critic", critic)
    again = model.load_critic(folder, dtype=dtype)
    assert torch.equal(values_of(again, exp), values_of(critic, exp))
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing was drawn for a head to throw away
    assert again.head.weight.dtype == dtype


def test_weights_of_a_state_go_into_the_saved_critic(tmp_path):
    critic, exp = critic_of(tiny.llama()), tiny.experience()
    apply, params = model.bind(critic)
    changed = tree.Named((n, p.detach() + 0.01) for n, p in params.items())
    packs = packing.shard(exp, 1000)[0]
    want = packing.unpack(model.values(apply, changed, packs), packs, exp.tokens)
    again = model.load_critic(model.save_critic(tmp_path / "critic", critic, changed.items()))
    assert torch.equal(values_of(again, exp), want)


def test_a_saved_critic_with_adapters_is_a_plain_one(tmp_path):
    lora = model.apply_lora_configuration(tiny.llama(), rank=2, alpha=4)
    for n, p in lora.named_parameters():
        if "lora_B" in n:
            p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    critic, exp = critic_of(lora), tiny.experience()
    again = model.load_critic(model.save_critic(tmp_path / "critic", critic))
    assert not any("lora" in n or "base_layer" in n for n, _ in again.named_parameters())
    want = values_of(critic, exp)
    torch.testing.assert_close(values_of(again, exp), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same decoder as a language model, as adapters of that, and as a critic that was saved."""
    folder = tmp_path_factory.mktemp("models")
    lm = tiny.llama()
    names = {kind: str(folder / kind) for kind in ("whole", "adapters", "critic")}
    model.save(names["whole"], lm, tiny.tokenizer())
    lora = model.apply_lora_configuration(model.load(names["whole"]), 2, 4.0)
    lora.peft_config["default"].base_model_name_or_path = names["whole"]
    for n, p in lora.named_parameters():
        if "lora_B" in n:
            p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    model.save(names["adapters"], lora, None)
    model.save_critic(names["critic"], critic_of(lm))
    return names


def loaded(name, *, meta):
    critic = model.load_critic(name, meta=meta)
    assert any(p.is_meta for p in critic.parameters()) == meta and not critic.head.weight.is_meta
    torch.nn.init.ones_(critic.head.weight)
    return critic


@pytest.mark.parametrize("kind", ["whole", "adapters", "critic"])
def test_a_critic_without_memory_gets_its_weights_when_it_is_bound(folders, kind):
    exp = tiny.experience()
    plain, late = loaded(folders[kind], meta=False), loaded(folders[kind], meta=True)
    got, want = values_of(late, exp), values_of(plain, exp)
    assert torch.equal(got, want) and want.abs().max() > 0.1
    assert [n for n, p in late.named_parameters() if p.requires_grad] == [
        n for n, p in plain.named_parameters() if p.requires_grad
    ]


def sharded(rank, name):
    """The same on two processes: each reads its own part of the files."""
    found = {}
    for kind, options in {"fsdp2": {}, "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}}.items():
        st = get_strategy(StrategyConfig(**options))
        adamw = rft.optim.adamw(1e-3)
        apply, state = st.init(loaded(name, meta=True), adamw)
        packs = st.shard(tiny.experience(), 1000)
        mine = packing.unpack(model.values(apply, state.params, packs), packs, tiny.experience().tokens)
        found[kind] = st.gather(mine[None]).sum(0)
    return found


def test_two_processes_read_their_parts_of_a_critic(folders):
    want = values_of(loaded(folders["whole"], meta=False), tiny.experience())
    for found in ranks.run(2, "test_critic:sharded", folders["whole"]):
        for got in found.values():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_files_beside_the_models_own_are_not_read(folders, tmp_path):
    """Some folders have a second copy of the weights, under the names of another library."""
    from safetensors.torch import save_file

    model.save(tmp_path, tiny.llama(), tiny.tokenizer())
    save_file({"other": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    late = model.materialize(model.load(tmp_path, meta=True))
    assert torch.equal(late.model.norm.weight, tiny.llama().model.norm.weight)


def test_explained_variance():
    g = torch.Generator().manual_seed(0)
    ret, mask = torch.randn(4, 7, generator=g), torch.rand(4, 7, generator=g) < 0.7
    noise = torch.randn(4, 7, generator=g)
    value = ret + 0.5 * noise
    want = 1 - (0.5 * noise[mask]).double().var() / ret[mask].double().var()
    assert model.explained_variance(value, ret, mask) == pytest.approx(float(want))
    value[~mask] = 1e6
    assert model.explained_variance(value, ret, mask) == pytest.approx(float(want))
    assert model.explained_variance(ret + 5, ret, mask) == pytest.approx(1)
    assert model.explained_variance(torch.zeros(4, 7), ret, mask) == 0
    assert model.explained_variance(ret, torch.ones(4, 7), mask) == 0


def test_bad_input(tmp_path):
    pack = packing.pack(tiny.experience(), range(2))
    with pytest.raises(ValueError, match=r"model: expected a folder, a hub name .* got './nowhere'"):
        model.load_critic("./nowhere")
    with pytest.raises(ValueError, match=r"lm: expected a causal language model .* got Linear"):
        model.Critic(torch.nn.Linear(2, 2))
    critic = model.load_critic(tiny.llama())
    with pytest.raises(ValueError, match="media: expected none for language_only"):
        critic(tree.replace(pack, media=rft.Media.of_prompts([{"pixels": torch.zeros(1)}] * 2)))
    with pytest.raises(ValueError, match=r"weights: expected names .* of Critic, got \['lm_head"):
        model.save_critic(tmp_path / "c", critic, [("lm_head.weight", torch.zeros(2))])
    with pytest.raises(ValueError, match=r"pos: expected \[T\]"):
        critic(tree.replace(pack, pos=pack.pos[:-1]))
    with pytest.raises(ValueError, match="ret: expected"):
        model.explained_variance(torch.zeros(3), torch.zeros(4), torch.ones(3, dtype=torch.bool))
