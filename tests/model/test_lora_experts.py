"""Adapters of routed experts: their definition, peft's own forward and files, ways of a step, ranks."""

import re
import warnings

import numpy as np
import pytest
import ref
import tiny
import torch
from families import small
from floor import require
from ranks import run
from test_lora import ROWS, config
from test_probe import quiet, rows
from test_router import EXP, routed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rft_fn as rft
from rft_fn import model, packing
from rft_fn.model import mlp_slices, packed_attention
from rft_fn.model.lora_merged import Export, merged

peft = pytest.importorskip("peft")
KINDS = ("Qwen3Moe", "GptOss", "DeepseekV3", "Lfm2Moe")  # GptOss: [E, in, out], biases, interleaved gates
IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 1]])


def adapted(lm, rank=3, targets="experts"):
    """A model with adapters that change it: B is not 0."""
    lora = quiet(model.apply_lora_configuration, lm, rank, 2.0 * rank, target_modules=targets)
    g = torch.Generator().manual_seed(1)
    for name, p in lora.named_parameters():
        if ".lora_B." in name:
            p.data = torch.randn(p.shape, generator=g).to(p) * 0.1
    return lora


def experts_of(lora):
    """(peft's outer layer, the experts inside of it) of the last block."""
    layer = [m for m in lora.modules() if hasattr(m, "parameter_name")][-2]
    return layer, layer.get_base_layer()


def given(experts, tokens=7, dtype=torch.float64):
    """Hidden states, chosen experts and their weights; one expert has no token."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 32, generator=g, dtype=dtype)
    chosen = torch.stack([torch.randperm(experts.num_experts - 1, generator=g)[:2] for _ in range(tokens)])
    return x, chosen, torch.rand(tokens, 2, generator=g, dtype=dtype)


# ------------------------------------------------------------------------------------------------ exactness


def test_the_definition():
    """y = sum over k of g_k (W_e + s B_e A_e) x, in float64 by loops."""
    lora = adapted(small("Qwen3Moe"))
    layer, experts = experts_of(lora)
    model.bind(lora)
    x, chosen, share = given(experts)
    weights = {}
    for one in (layer, layer.base_layer):
        a, b = (m["default"].weight.detach().numpy() for m in (one.lora_A, one.lora_B))
        weights[one.parameter_name] = ref.adapted_experts(one.get_param().detach().numpy(), a, b, 2.0)
    gate, up = np.split(weights["gate_up_proj"], 2, axis=1)
    want = ref.sum_of_experts(x.numpy(), share.numpy(), gate, up, weights["down_proj"], chosen.numpy())
    assert np.abs(layer(x, chosen, share).detach().numpy() - want).max() < 1e-12
    plain = small("Qwen3Moe").model.layers[1].mlp.experts
    assert np.abs(plain(x, chosen, share).detach().numpy() - want).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_what_their_merged_weights_are(kind):
    require(f"{kind} routers")
    lora = adapted(small(kind))
    layer, _ = experts_of(lora)
    apply, params = model.bind(lora)
    plain = small(kind)
    names = dict(plain.named_parameters())
    before = plain(input_ids=IDS).logits
    model.assign(names, Export(params, lora, torch.Tensor.detach))
    path = next(n for n, m in lora.named_modules() if m is layer).removeprefix("base_model.model.")
    x, chosen, share = given(layer.get_base_layer())
    want = plain.get_submodule(path)(x, chosen, share)
    assert (layer(x, chosen, share) - want).abs().max() < 1e-12
    logits = plain(input_ids=IDS).logits
    assert (lora(input_ids=IDS).logits - logits).abs().max() < 1e-9  # norms compute in float32
    assert (before - logits).abs().max() > 0.1
    assert merged(lora, lora.state_dict()).keys() == plain.state_dict().keys()
    off = model.without_adapters(lora, apply)(params, packing.pack(EXP, [0, 1])).logp
    base = model.bind(small(kind))
    assert torch.equal(off, base[0](base[1], packing.pack(EXP, [0, 1])).logp)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_dense_weights(kind):
    """Of A and B: peft's own forward multiplies B A out, and torch differentiates that."""
    require(f"{kind} routers")
    mine, theirs = adapted(small(kind)), adapted(small(kind))
    model.bind(mine)
    found = []
    for lora in (mine, theirs):
        layer, experts = experts_of(lora)
        x, chosen, share = (t.requires_grad_(t.is_floating_point()) for t in given(experts))
        leaves = [x, share, *(p for p in layer.parameters() if p.requires_grad)]
        assert len(leaves) == 6
        g = torch.Generator().manual_seed(3)
        y = layer(x, chosen, share)
        found.append(torch.autograd.grad((y * torch.randn(y.shape, generator=g).to(y)).sum(), leaves))
    for grad, want in zip(*found):
        assert grad.abs().max() > 1e-3 and (grad - want).abs().max() < 1e-10 * max(1, want.abs().max())


def test_apply_is_a_function_of_its_parameters():
    """Other adapters than the module's own, and torch.func.grad; peft's own forward has no such gradient."""
    lora = adapted(small("Qwen3Moe"))
    apply, params = model.bind(lora)
    pack = packing.pack(EXP, [0, 1])
    half = rft.tree.map(lambda p: p.detach() / 2, params)
    grads = torch.func.grad(lambda p: apply(p, pack).logp.sum())(dict(half))
    for p, x in zip(params.values(), half.values()):
        p.data = x
    want = torch.autograd.grad(apply(params, pack).logp.sum(), list(params.values()))
    assert all(float((grads[n] - g).abs().max()) < 1e-6 for n, g in zip(params, want))


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_are_those_of_one_expert_after_the_other(dtype, rank):
    """torch's product wants rows of whole 16 bytes; adapters of a base in 16 bits are in float32."""
    lm = small("Qwen3Moe", dtype)
    lora = adapted(lm, rank)
    layer, experts = experts_of(lora)
    model.bind(lora)
    found = []
    for way in ("eager", "grouped_mm"):
        lm.set_experts_implementation(way)
        x, chosen, share = given(experts, dtype=dtype)
        leaves = [p for p in layer.parameters() if p.requires_grad]
        assert {p.dtype for p in leaves} == {torch.float32}
        y = layer(x, chosen, share)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(*found):
        assert (a - b).abs().max() <= tolerance * a.abs().max()


# ---------------------------------------------------------------------------------------- which weights


@pytest.mark.parametrize(
    ("targets", "exclude", "count"),
    [
        ("experts", (), 4),
        ("auto,experts", (), 12),
        ("experts.down_proj", (), 2),
        ("layers.1.mlp.experts", (), 2),
        ("q_proj,gate_up_proj", (), 4),
        (["experts"], ["layers.0"], 2),
        ("auto", (), 8),
    ],
)
def test_targets(targets, exclude, count):
    """By the word, and by names of parameters; every weight that is left out is said, with the word."""
    packed_attention.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        lora = model.apply_lora_configuration(
            small("Qwen3Moe"), 2, 4, target_modules=targets, exclude=exclude
        )
    names = [n for n, p in lora.named_parameters() if ".lora_A." in n and p.requires_grad]
    assert len(names) == count
    experts = sum(".experts." in n for n in names)
    lines = [str(w.message) for w in heard if "no adapters on routed experts" in str(w.message)]
    assert len(lines) == (experts < 4)
    assert all(re.search(rf"{4 - experts} tensors.*; the target 'experts' takes them", x) for x in lines)


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        (
            "Llama4Text",
            "q_proj,experts",
            r"got \['experts'\]: the routed experts of Llama4TextExperts have a",
        ),
        ("Llama", "experts", r"expected auto, all-linear, towers or some of .* got \['experts'\]"),
        ("Qwen3Moe", "nope", r"auto, all-linear, towers, experts or some of \['down_proj', 'gate_up_proj'"),
    ],
)
def test_targets_that_are_refused(kind, targets, message):
    with pytest.raises(ValueError, match=message) as error:
        quiet(model.apply_lora_configuration, small(kind, torch.float32), 2, 4, target_modules=targets)
    assert "\n" not in str(error.value)


def test_parameters_that_are_no_experts_are_refused():
    """peft takes any parameter: a router's has two dimensions."""
    lora = peft.get_peft_model(
        small("Qwen3Moe"), peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    )
    for take in (model.bind, model.load):
        with pytest.raises(ValueError, match=r"expected weights of routed experts .* got weight of Qwen3"):
            take(lora)


def test_an_older_peft_is_refused(monkeypatch):
    """Its A and B have other sizes: files would be no other program's."""
    from peft.tuners.lora.layer import ParamWrapper

    plain = ParamWrapper.__init__

    def without(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        del self._did_swap_in_out_features

    monkeypatch.setattr(ParamWrapper, "__init__", without)
    with pytest.raises(ValueError, match=r"expected peft >= 0\.19 for adapters of routed experts"):
        adapted(small("Qwen3Moe"))


# ------------------------------------------------------------------------------------ folders, the engine


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, module, state): `folder`/base, and adapters of experts and one layer on it."""
    folder = tmp_path_factory.mktemp("experts")
    model.save(folder / "base", small("Qwen3Moe", torch.float32), tiny.tokenizer())
    lora, st = adapted(model.load(folder / "base"), targets="q_proj,experts"), rft.strategy.get_strategy()
    _, state = st.init(lora, rft.optim.adamw(1e-3))
    st.save_pretrained(folder / "adapter", lora, tiny.tokenizer(), st.export(state))
    st.save_pretrained(folder / "merged", lora, tiny.tokenizer(), st.export(state), merge=True)
    return folder, lora, state


def test_peft_loads_the_folder(saved):
    """By its own names, and computes the same by its own forward."""
    folder, lora, _ = saved
    base = model.load(folder / "base")
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    got, want = lora(input_ids=IDS).logits, theirs(input_ids=IDS).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    plain = model.load(folder / "merged")
    torch.testing.assert_close(got, plain(input_ids=IDS).logits, rtol=0, atol=1e-5)
    merged_by_peft = theirs.merge_and_unload()
    torch.testing.assert_close(got, merged_by_peft(input_ids=IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("meta", [False, True])
def test_a_saved_adapter_is_trained_further(saved, meta):
    folder, lora, state = saved
    again = quiet(model.load, folder / "adapter", meta=meta)
    _, then = rft.strategy.get_strategy().init(again, rft.optim.adamw(1e-3))
    assert then.params.keys() == state.params.keys()
    assert all(torch.equal(x, state.params[n]) for n, x in then.params.items())
    assert torch.equal(again(input_ids=IDS).logits, lora(input_ids=IDS).logits)


def test_new_adapters_are_the_same_without_memory(saved):
    base = saved[0] / "base"
    plain = quiet(model.apply_lora_configuration, model.load(base), 2, 4, target_modules="experts")
    late = quiet(model.apply_lora_configuration, model.load(base, meta=True), 2, 4, target_modules="experts")
    a, b = plain.state_dict(), model.materialize(late).state_dict()
    assert a.keys() == b.keys() and all(torch.equal(x, b[n]) for n, x in a.items())
    firsts = {float(x.flatten()[0]) for n, x in a.items() if ".lora_A." in n}
    assert len(firsts) == 4


def test_the_engine_samples_from_what_is_trained(saved):
    folder, lora, state = saved
    eng = rft.engine.get_engine(None, str(folder / "base"))
    sent = rft.sync.push(rft.strategy.get_strategy(), state, eng, version=1)
    assert sent.tensors == 6
    r = eng.generate([[3, 4, 5]], [7], n=8, sampling=rft.Sampling(max_new=5))
    packs = packing.shard(rft.experience(r, adv=torch.zeros(8), w=rft.weight.token_mean(r.mask)), 64)[0]
    mine = packing.unpack(model.score(*model.bind(lora), packs), packs, r.logp)
    assert ((mine - r.logp) * r.mask).abs().max() < 1e-5


def test_changed_weights_are_read_with_adapters_in_them(saved):
    """The check of an engine under noise: without a change the model is itself."""
    from rft_fn.sync.changed_weights import unchanged, weights_read_as

    _, lora, state = saved
    pack = packing.pack(EXP, [0, 1])
    apply, params = model.bind(lora)
    want = apply(params, pack).logp
    residence = apply.residence
    names = {name for name, _ in Export(state.params, lora, torch.Tensor.detach)}
    for change, near in ((unchanged, True), (lambda n, x: x * (1 + 0.1 * ("experts" in n)), False)):
        with torch.no_grad(), weights_read_as(residence.root, lora, change, names):
            got = apply(params, pack).logp
        assert ((got - want).abs().max() < 1e-5) == near


# ----------------------------------------------------------------------------------- ways to compute a step


def gradients(lm, packs, **options):
    lora = adapted(lm)
    if options:
        lora = model.load(lora, **options)
    st = rft.strategy.get_fake_strategy()
    apply, state = quiet(st.init, lora, rft.optim.adamw(0.0))
    grads, _ = st.grad(state, apply, lambda out, b: rft.loss.nll(out.logp), packs)
    return dict(grads.items())


def test_a_step_computed_again_in_slices_or_by_given_experts_is_the_same(monkeypatch):
    monkeypatch.setattr(mlp_slices, "SLICE", 10)
    require("Qwen3Moe routers")
    for exp in (EXP, routed(EXP)):
        whole, cut = [packing.pack(exp, [0, 1, 2, 3])], [packing.pack(exp, x) for x in ([2, 0], [3, 1])]
        want = gradients(small("Qwen3Moe", torch.float32), whole)
        assert min(float(g.abs().max()) for g in want.values()) > 1e-4
        found = [gradients(small("Qwen3Moe", torch.float32), cut)]
        for kept in (True, "products", "slices", "host"):
            found.append(gradients(small("Qwen3Moe", torch.float32), whole, gradient_checkpointing=kept))
        for grads in found:
            for name, g in want.items():
                torch.testing.assert_close(grads[name], g, rtol=0, atol=2e-5 * float(g.abs().max() + 1))


class Sizes(TorchDispatchMode):
    """Notes how many numbers each new tensor has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [[x for x in tree_leaves(t) if isinstance(x, torch.Tensor)] for t in ((args, kwargs), out)]
        old, new = [{x.untyped_storage().data_ptr(): x.untyped_storage() for x in part} for part in tensors]
        self.sizes += [new[place].nbytes() // 4 for place in new.keys() - old.keys()]
        return out


def test_a_step_makes_no_matrix_of_all_experts():
    """peft's own forward makes W + B A of every layer, and its backward a gradient of that size."""
    sizes = {"hidden_size": 64, "num_experts": 16, "moe_intermediate_size": 64}
    weight = 16 * 128 * 64
    largest = []
    for grouped in (True, False):
        lora = adapted(small("Qwen3Moe", torch.float32, **sizes), 4)
        if grouped:
            model.bind(lora)
        with Sizes() as made:
            trained = [p for p in lora.parameters() if p.requires_grad]
            torch.autograd.grad(lora(input_ids=IDS).logits.sum(), trained)
        largest.append(max(made.sizes))
    assert largest[0] < weight // 4 and largest[1] >= weight


def learnt(st, dtype=torch.float32):
    """(gradients' norms, merged weights, log-probs, those without adapters) over three updates."""
    exp = rows(ROWS)
    lm = small("Qwen3Moe", dtype)
    module = quiet(model.apply_lora_configuration, lm, 3, 6.0, target_modules="q_proj,experts")
    apply, state = quiet(st.init, module, rft.optim.adamw(1e-2))
    norms = []
    for _ in range(3):
        grads, _ = st.grad(state, apply, lambda out, b: rft.loss.nll(out.logp), st.shard(exp, 1000))
        state, metrics = st.update(state, grads)
        norms.append(rft.metric.results(metrics)["grad/norm"])
    sent = {name: x.clone() for name, x in st.export(state)}
    mine = st.score(apply, state.params, exp, 1000).logp
    off = st.score(model.without_adapters(module, apply), state.params, exp, 1000).logp
    return norms, sent, mine, off


def learnt_on_ranks(rank):
    """Whether the experts of a rank's part are gathered where they are read, by hooks of each strategy."""
    found = {kind: learnt(rft.strategy.get_strategy(config(kind))) for kind in ("fsdp2", "zero2", "zero3")}
    return found, learnt(rft.strategy.get_strategy(config("fsdp2")), torch.bfloat16)


@pytest.mark.slow
def test_two_processes_train_adapters_of_experts_as_one_does():
    pytest.importorskip("deepspeed")
    norms, sent, mine, off = learnt(rft.strategy.get_strategy())
    base = dict(small("Qwen3Moe", torch.float32).named_parameters())
    assert all((x - base[name]).abs().max() > 1e-3 for name, x in sent.items())
    narrow = learnt(rft.strategy.get_strategy(), torch.bfloat16)
    for found, narrow2 in run(2, "test_lora_experts:learnt_on_ranks"):
        assert narrow2[0] == pytest.approx(narrow[0], rel=0.02)  # adapters in float32, in groups of their own
        for kind, (norms2, sent2, mine2, off2) in found.items():
            assert norms2 == pytest.approx(norms, rel=1e-5), kind
            assert sent2.keys() == sent.keys()
            for name, x in sent.items():
                torch.testing.assert_close(sent2[name], x, rtol=0, atol=1e-5)
            torch.testing.assert_close(mine2, mine, rtol=0, atol=1e-5)
            torch.testing.assert_close(off2, off, rtol=0, atol=1e-5)
