"""Adapters: target layers, export to an engine, saving and further training, the reference."""

import dataclasses
import json
import re
import warnings

import pytest
import tiny
import torch
from families import seeing
from ranks import run
from safetensors.torch import load_file, save_file
from torch import nn

import rft_fn as rft
from rft_fn import model, packing
from rft_fn.model import packed_attention
from rft_fn.model.lora import require_plain_lora
from rft_fn.model.lora_merged import Export
from rft_fn.model.lora_targets import find_targets
from rft_fn.strategy import StrategyConfig


def config(kind):
    options = {"local": {}, "fsdp2": {"fsdp": True}, "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}}
    return StrategyConfig(**options[kind])


def grpo(kind, steps=3):
    """The README's loop with adapters: (the gap at each step, the change of the merged weights, rewards)."""
    st = rft.strategy.get_strategy(config(kind))
    sampling, tokenizer = rft.Sampling(max_new=6), model.load_tokenizer("tiny")
    module = model.apply_lora_configuration(model.load("tiny", meta=kind != "local"), rank=4, alpha=8)
    apply, state = st.init(module, rft.optim.adamw(1e-2), sampling=sampling)
    eng = rft.engine.get_engine(None, "tiny", tokenizer)
    dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))

    def loss_fn(out, b):
        gap = rft.metric.mean((out.logp - b.old_logp).abs(), b.mask)
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), {"gap": gap}

    gaps, rewards = [], []
    before = {n: x.clone() for n, x in st.export(state)}
    for step in range(steps):
        eng.load(st.export(state), version=step)
        prompts, keys = rft.data.draw(dataset, 8, step, 0)
        rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, n=8, sampling=sampling)
        judged = rft.reward.judge(score, rollout, prompts, tokenizer)
        adv = rft.advantage.grpo(judged.reward).view(-1, 1)
        exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask))
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 512))
        state, _ = st.update(state, grads)
        gaps.append(rft.metric.results(metrics)["gap"])
        rewards.append(float(judged.reward.mean()))
    moved = {n: float((x - before[n]).abs().max()) for n, x in st.export(state)}
    return gaps, moved, rewards, extras(st, module, apply, state)


def extras(st, module, apply, state):
    """The reference by adapters that are off, against the base model itself: the largest difference."""
    packs = st.shard(tiny.experience(), 60)
    plain = model.without_adapters(module, apply)
    off = model.score(plain, state.params, packs)
    on = model.score(apply, state.params, packs)
    base = model.score(*model.bind(model.load("tiny")), packs)
    far = max(float((a - b).abs().max()) for a, b in zip(on, base))
    assert far > 1e-3, "the adapters were trained, so the model is another"
    return max(float((a - b).abs().max()) for a, b in zip(off, base))


def check(result):
    gaps, moved, rewards, off = result
    assert max(gaps) <= 1e-5, gaps
    assert len(moved) == 14 and all(x > 1e-4 for x in moved.values())
    assert all(n.startswith("model.layers.") and n.endswith("_proj.weight") for n in moved)
    assert off < 1e-5
    assert min(rewards) > 0


def test_grpo_with_adapters_is_sampled_from_what_it_trains():
    check(grpo("local"))


def on_ranks(rank):
    model.load("tiny")
    return {kind: grpo(kind) for kind in ("fsdp2", "zero2", "zero3")}


@pytest.mark.slow
def test_two_processes_train_adapters_as_one_does():
    """FSDP2 and ZeRO: the gap, the samples, and the merged weights are those of one process."""
    alone, both = grpo("local"), run(2, "test_lora:on_ranks")
    for kind in ("fsdp2", "zero2", "zero3"):
        for result in (both[0][kind], both[1][kind]):
            check(result)
            assert result[2] == alone[2]
            for name, x in result[1].items():
                assert x == pytest.approx(alone[1][name], rel=1e-2)


# ------------------------------------------------------------------------------------------ which layers


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 60}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class Tower(nn.Module):
    """Layers that end like those of the text model."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.qkv = nn.Linear(8, 8), nn.Linear(8, 8)


class Seeing(nn.Module):
    """The outline of a model that sees: its text model, a tower, what joins them, a head."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"language_model": tiny.llama().model, "visual": Tower()})
        self.model["other"] = nn.ModuleDict({"model": nn.ModuleDict({"language_model": tiny.llama().model})})
        self.lm_head = nn.Linear(32, 60, bias=False)

    def get_decoder(self):
        return self.model["language_model"]

    def get_output_embeddings(self):
        return self.lm_head

    def prepare_inputs_for_generation(self):
        return {}


def adapted(module):
    return {
        n.split(".lora_")[0].removeprefix("base_model.model.")
        for n in dict(module.named_parameters())
        if ".lora_" in n
    }


def test_auto_takes_the_layers_of_the_text_model_by_their_whole_paths():
    """Not the tower, though its layers end alike, nor a second model that ends in the same path."""
    lora = model.apply_lora_configuration(Seeing(), 2, 4)
    names = adapted(lora)
    assert len(names) == 14 and all(n.startswith("model.language_model.layers.") for n in names)


def test_auto_leaves_a_real_vision_tower_alone():
    """Its blocks have gate_proj and up_proj like those of the text model."""
    lm = seeing()
    assert any("visual" in p and p.endswith("gate_proj") for p in find_targets(lm, "all-linear").layers)
    names = adapted(model.apply_lora_configuration(lm, 2, 4))
    assert len(names) == 7 and all("language_model" in n for n in names)


@pytest.mark.parametrize(
    ("targets", "exclude", "count", "within"),
    [
        ("q_proj", (), 2, "language_model"),
        ("q_proj,v_proj", (), 4, "language_model"),
        (["layers.1.mlp"], (), 3, "layers.1.mlp"),
        (["visual.qkv"], (), 1, "visual"),
        ("auto", ["layers.1", "down_proj"], 6, "layers.0"),
        ("all-linear", ["other"], 16, ""),
        ("towers", ["other"], 2, "visual"),
        ("layers.*.q_proj", (), 2, "self_attn.q_proj"),
        ("visual.*", (), 2, "visual"),
        ("auto,towers", ["other"], 16, ""),
        ("v_proj, visual.qkv", (), 3, "v"),
    ],
)
def test_targets(targets, exclude, count, within):
    names = adapted(model.apply_lora_configuration(Seeing(), 2, 4, target_modules=targets, exclude=exclude))
    assert len(names) == count and all(within in n for n in names)
    assert "lm_head" not in names


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: model.apply_lora_configuration(m, 1, 1, target_modules="nope"), r"got \['nope'\]"),
        (
            lambda m: model.apply_lora_configuration(m, 1, 1, target_modules=[]),
            "expected auto, all-linear, towers or",
        ),
        (lambda m: model.apply_lora_configuration(m, 1, 1, exclude=["nope"]), r"exclude: .* got \['nope'\]"),
        (lambda m: model.apply_lora_configuration(m, 1, 1, exclude=["layers"]), "got none of 14"),
        (
            lambda m: model.apply_lora_configuration(m, 1, float("nan")),
            "alpha: expected a number > 0, got nan",
        ),
        (lambda m: model.without_adapters(m, model.bind(m)[0]), "module: expected one with adapters"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(tiny.llama())


# ------------------------------------------------------------------------------------------------ merged


def trained(base, seed=1, **options):
    """A module with adapters whose B is not 0."""
    lora = model.apply_lora_configuration(base, 3, 5.0, **options)
    g = torch.Generator().manual_seed(seed)
    for name, p in lora.named_parameters():
        if ".lora_B." in name:
            p.data = torch.randn(p.shape, generator=g).to(p) * 0.1
    return lora


@pytest.mark.parametrize("make", [tiny.llama, gpt2], ids=["linear", "conv1d"])
def test_an_engine_gets_base_plus_scale_b_a(make):
    """By the plain model's names, only what was trained, and the plain model with it is the trained one."""
    plain, lora = make(), trained(make(), exclude=["mlp"])
    st = rft.strategy.get_strategy()
    apply, state = st.init(lora, rft.optim.adamw(1e-3))
    sent = dict(st.export(state))
    assert sent.keys() < dict(plain.named_parameters()).keys()
    assert not any("mlp" in n or "embed" in n for n in sent)
    for name, x in sent.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        layer, p = lora.get_submodule(path), dict(plain.named_parameters())[name].double()
        step = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double() * 5 / 3
        want = p + (step if make is tiny.llama else step.T)
        assert (x - want).abs().max() < 1e-6 and (x - p).abs().max() > 1e-3
    model.assign(dict(plain.named_parameters()), sent)
    packs = packing.shard(tiny.experience(), 60)[0]
    mine, theirs = model.score(apply, state.params, packs), model.score(*model.bind(plain), packs)
    assert max(float((a - b).abs().max()) for a, b in zip(mine, theirs)) < 1e-4


def test_a_16_bit_base_is_rounded_once():
    lora = trained(tiny.llama(dtype=torch.bfloat16))
    layer = lora.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    assert layer.lora_A["default"].weight.dtype == torch.float32
    params = {n: p for n, p in lora.named_parameters() if p.requires_grad}
    sent = dict(Export(params, lora, torch.Tensor.detach))["model.layers.0.mlp.up_proj.weight"]
    step = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 5 / 3
    assert sent.dtype == torch.bfloat16
    assert torch.equal(sent, (layer.base_layer.weight.float() + step).bfloat16())


def test_an_export_holds_one_layer_at_a_time():
    """The tensors that are put together for a name are asked for when that name is, and not before."""
    lora, asked = trained(tiny.llama()), []

    def full(p):
        asked.append(p)
        return p.detach()

    params = {n: p for n, p in lora.named_parameters() if p.requires_grad}
    export = Export(params, lora, full)
    assert not asked
    for i, _ in enumerate(export):
        assert len(asked) == 3 * (i + 1)
    assert i == 13


def test_an_export_is_of_the_state_and_not_of_the_module():
    """A state with other adapters (a fork, an average) is merged with its own."""
    lora, st = trained(tiny.llama()), rft.strategy.get_strategy()
    _, state = st.init(lora, rft.optim.adamw(1e-3))
    none = rft.tree.replace(state, params=rft.tree.map(torch.zeros_like, state.params))
    base = dict(tiny.llama().named_parameters())
    assert all(torch.equal(x, base[n]) for n, x in st.export(none))
    assert not any(torch.equal(x, base[n]) for n, x in st.export(state))


def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    for lm in (tiny.llama(), trained(tiny.llama())):
        st = rft.strategy.get_strategy()
        _, state = st.init(lm, rft.optim.adamw(1e-3))
        next(iter(state.params.values())).data[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"weights: model\..*: expected finite numbers, got NaN or inf"):
            dict(st.export(state))
        with pytest.raises(ValueError, match=r"is not written: .*: expected finite numbers"):
            st.save_pretrained(tmp_path / "m", lm, None, st.export(state))
        assert not (tmp_path / "m").exists()


# ------------------------------------------------------------------------------- saved, trained further


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, module, state): `folder`/base, and adapters on it that were saved as such and merged."""
    folder = tmp_path_factory.mktemp("lora")
    model.save(folder / "base", tiny.llama(), tiny.tokenizer())
    lora, st = trained(model.load(folder / "base")), rft.strategy.get_strategy()
    _, state = st.init(lora, rft.optim.adamw(1e-3))
    st.save_pretrained(folder / "adapter", lora, tiny.tokenizer(), st.export(state))
    st.save_pretrained(folder / "merged", lora, tiny.tokenizer(), st.export(state), merge=True)
    pairs = {n: x.clone() for n, x in st.export(state)}.items()
    st.save_pretrained(folder / "again", lora, None, pairs, merge=True)
    return folder, lora, state


def scores(module):
    packs = packing.shard(tiny.experience(), 60)[0]
    return torch.cat(model.score(*model.bind(module), packs))


@pytest.mark.parametrize("meta", [False, True])
def test_a_saved_adapter_is_trained_further(saved, meta):
    """All of its tensors and nothing else, from where they were; without memory first, too."""
    folder, lora, state = saved
    again = model.load(folder / "adapter", meta=meta)
    st = rft.strategy.get_strategy()
    _, then = st.init(again, rft.optim.adamw(1e-3))
    assert then.params.keys() == state.params.keys()
    assert all(torch.equal(x, state.params[n]) for n, x in then.params.items())
    assert torch.equal(scores(again), scores(lora))


def test_a_merged_folder_is_a_plain_model(saved):
    folder, lora, _ = saved
    for name in ("merged", "again"):
        plain = model.load(folder / name)
        assert not adapted(plain)
        torch.testing.assert_close(scores(plain), scores(lora), rtol=0, atol=1e-4)
    assert (scores(plain) - scores(model.load(folder / "base"))).abs().max() > 1e-2


def test_an_engine_of_an_adapter_folder_is_given_merged_weights(saved):
    """The loop that starts from adapters: it samples from them at once, and takes what they become."""
    folder, lora, state = saved
    eng = rft.engine.get_engine(None, str(folder / "adapter"))
    sampling = rft.Sampling(max_new=5)
    for version, scale in ((0, 1.0), (1, 2.0)):
        new = rft.tree.Named((n, (p.detach() * scale).requires_grad_()) for n, p in state.params.items())
        if version:
            eng.load(Export(new, lora, torch.Tensor.detach), version=version)
        r = eng.generate([[3, 4, 5]], [7], n=8, sampling=sampling)
        exp = rft.experience(r, adv=torch.zeros(8), w=rft.weight.token_mean(r.mask))
        packs = packing.shard(exp, 64)[0]
        apply, _ = model.bind(lora)
        mine = packing.unpack(model.score(apply, new, packs), packs, exp.w)
        assert (mine - r.logp).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_peft_may_have_adapters_of_the_head(saved, tmp_path, tied):
    """Peft then saves the base model's head as well. One that is the embedding too has no merged weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    base = tiny.llama()
    base.config.tie_word_embeddings = tied
    base = LlamaForCausalLM(base.config)
    model.save(tmp_path / "base", base, tiny.tokenizer())
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    lora = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    for name, x in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.1)
    lora.save_pretrained(tmp_path / "adapter")
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    if tied:
        with pytest.raises(ValueError, match="got some of the head, which is the embedding too"):
            model.load(tmp_path / "adapter")
        return
    assert torch.equal(scores(model.load(tmp_path / "adapter")), scores(lora))
    eng = rft.engine.get_engine(None, str(tmp_path / "adapter"))
    r = eng.generate([[3, 4, 5]], [7], n=4, sampling=rft.Sampling(max_new=5))
    exp = rft.experience(r, adv=torch.zeros(4), w=rft.weight.token_mean(r.mask))
    packs = packing.shard(exp, 64)[0]
    mine = packing.unpack(model.score(*model.bind(lora), packs), packs, exp.w)
    assert (mine - r.logp).abs().max() < 1e-5
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = load_file(path)
    stored["base_model.model.lm_head.base_layer.weight"] += 1
    save_file(stored, path)
    with pytest.raises(ValueError, match=r"unexpected or of another shape are 1: base_model\.model\.lm_head"):
        model.load(tmp_path / "adapter")


def test_adapters_without_a_tokenizer_have_that_of_their_base(saved, tmp_path):
    model.save(tmp_path / "a", saved[1], None)
    assert model.load_tokenizer(tmp_path / "a").encode("12") == tiny.tokenizer().encode("12")


def test_merged_weights_are_no_adapters(saved, tmp_path):
    _, lora, state = saved
    with pytest.raises(ValueError, match=r"weights: expected names of Peft.*st\.export\(state\) itself"):
        model.save(tmp_path / "m", lora, None, list(Export(state.params, lora, torch.Tensor.detach)))


def test_new_adapters_are_the_same_without_memory(saved):
    """A is a function of the seed and the layer's name alone: every process and every run draws the same."""
    base = saved[0] / "base"
    torch.manual_seed(1)
    plain = model.apply_lora_configuration(model.load(base), 2, 4)
    torch.manual_seed(2)
    late = model.materialize(model.apply_lora_configuration(model.load(base, meta=True), 2, 4))
    other = model.apply_lora_configuration(model.load(base), 2, 4, seed=1)
    a, b, c = (m.state_dict() for m in (plain, late, other))
    assert a.keys() == b.keys() and all(torch.equal(x, b[n]) for n, x in a.items())
    drawn = [n for n in a if ".lora_A." in n]
    assert not any(torch.equal(a[n], c[n]) for n in drawn)
    bound = max(float(a[n].abs().max()) * a[n].shape[1] ** 0.5 for n in drawn)
    assert 0.95 < bound <= 1
    assert len({float(a[n].flatten()[0]) for n in drawn}) == len(drawn)


def edited(saved, tmp_path, **changes):
    """A copy of the saved adapter with another config."""
    import shutil

    folder = shutil.copytree(saved[0] / "adapter", tmp_path / "adapter")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "expected plain LoRA adapters, got use_dora"),
        ({"modules_to_save": ["lm_head"]}, "got modules_to_save"),
        ({"bias": "all"}, "got bias; merge them first"),
        ({"alora_invocation_tokens": [8, 9]}, "expected plain LoRA adapters, got alora_invocation_tokens"),
        ({"kasa_config": {"beta": 1e-4}}, "got kasa_config"),
        ({"velora_config": {}, "monteclora_config": {"x": 1}}, "got monteclora_config; merge"),
        ({"arrow_config": {}, "use_qalora": True}, "got use_qalora; merge"),
        ({"use_bdlora": {"nblocks": 2}}, "got use_bdlora"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "got layer_replication"),
        ({"ensure_weight_tying": True, "megatron_config": {"a": 1}}, "ensure_weight_tying, megatron_config"),
        ({"of_next_year": {"more": 1}}, "got of_next_year"),
        ({"init_lora_weights": "pissa"}, "got init_lora_weights 'pissa'"),
        ({"peft_type": "IA3"}, "got peft_type IA3"),
        ({"peft_type": None}, "got peft_type None"),
        ({"r": "8"}, "adapter_config.json: expected adapters that peft can make, got"),
        ({"r": -1}, "expected adapters that peft can make, got .*-1"),
        ({"lora_alpha": "8"}, "expected adapters that peft can make, got unsupported operand"),
        ({"lora_alpha": float("nan")}, "expected adapters that peft can make, got alpha: .*, got nan"),
        ({"rank_pattern": {"q_proj": 0}}, "expected adapters that peft can make, got .* 0"),
        ({"target_modules": 5}, "expected adapters that peft can make, got"),
        ({"target_modules": ["nowhere"]}, "expected adapters that peft can make, got .*nowhere"),
        ({"base_model_name_or_path": 5}, "expected base_model_name_or_path, got none"),
        (
            {"base_model_name_or_path": "of/hub", "revision": "v2"},
            "expected a base model without a revision, got of/hub of revision v2",
        ),
        ({"r": 2}, "missing, unexpected or of another shape are 28"),
        ({"target_modules": ["q_proj"]}, "missing, unexpected or of another shape are 24"),
        ({"base_model_name_or_path": "/nowhere"}, "its base model /nowhere is not there"),
        ({"base_model_name_or_path": None}, "expected base_model_name_or_path, got none"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(saved, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        model.load(edited(saved, tmp_path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text, message", [("[]", "expected a mapping, got list"), ("{", "expected JSON")])
def test_a_config_of_adapters_that_is_none(saved, tmp_path, text, message):
    folder = edited(saved, tmp_path)
    (folder / "adapter_config.json").write_text(text)
    for load in (model.load, model.load_reward, model.read_window):
        with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
            load(folder)


def test_every_field_of_pefts_config_was_decided_on(saved, tmp_path):
    """A field that a later peft adds is refused where it is set, until it was looked at here."""
    from peft import LoraConfig

    left_alone = {f.name for f in dataclasses.fields(LoraConfig) if not refuses(f.name)}
    assert left_alone <= {
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
        "r", "rank_pattern",
        "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "fan_in_fan_out", "eva_config",
        "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size", "megatron_core",
        "runtime_config",
    }  # fmt: skip
    plain = model.load(edited(saved, tmp_path, qalora_group_size=32, init_lora_weights="eva", revision="v2"))
    assert torch.equal(scores(plain), scores(saved[1]))


def refuses(field):
    try:
        require_plain_lora("a", {"peft_type": "LORA", field: "something"})
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("take", [model.bind, model.load, model.Critic])
def test_a_module_whose_adapters_are_more_is_refused(take):
    """An engine gets base + scale B A; peft's forward of DoRA is another."""
    from peft import LoraConfig, get_peft_model

    module = get_peft_model(tiny.llama(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match="PeftModel: expected plain LoRA adapters, got use_dora"):
        take(module)


# ------------------------------------------------------------------------------------------ other families

LEFT_OUT = {
    "GPT2": None,
    "Qwen3Moe": r"routed experts \(down_proj, gate_up_proj: 4 tensors, \d+% of all weights\)",
    "FalconH1": r"no adapters on out_proj \(2 layers\), whose weights FalconH1ForCausalLM reads",
}
ROWS = [(2, 5), (3, 7), (1, 4), (2, 2)]


def family(kind):
    from families import small

    return small(kind, torch.float32)


def adapters_learn(st, kind):
    """(log-probs of the adapted model, of the plain one with merged weights, change of the weights)."""
    from test_probe import quiet, rows

    exp = rows(ROWS)
    module = quiet(model.apply_lora_configuration, family(kind), 4, 8.0)
    apply, state = quiet(st.init, module, rft.optim.adamw(1e-2))
    for _ in range(2):
        packs = st.shard(exp, 1000)
        grads, _ = st.grad(state, apply, lambda out, b: rft.loss.nll(out.logp), packs)
        state, _ = st.update(state, grads)
    sent = dict(st.export(state))
    packs = st.shard(exp, 1000)
    mine = packing.unpack(model.score(apply, state.params, packs), packs, exp.old_logp)
    mine = st.gather(mine[None]).sum(0)
    plain = family(kind)
    before = dict(plain.named_parameters())
    moved = {name: float((x - before[name].detach()).abs().max()) for name, x in sent.items()}
    model.assign(before, sent)
    alone = rft.strategy.get_fake_strategy()
    bound = quiet(alone.bind, plain)
    packs = alone.shard(exp, 1000)
    theirs = packing.unpack(model.score(*bound, packs), packs, exp.old_logp)
    return mine, theirs, moved


def families_on_ranks(rank):
    st = rft.strategy.get_strategy(config("fsdp2"))
    return {kind: adapters_learn(st, kind) for kind in LEFT_OUT}


def equal_and_moved(found):
    for kind, (mine, theirs, moved) in found.items():
        assert float((mine - theirs).abs().max()) < 2e-4, kind
        assert min(moved.values()) > 1e-4, (kind, moved)  # also those of the first layer


def test_adapters_of_other_families_learn_and_merge():
    equal_and_moved({kind: adapters_learn(rft.strategy.get_fake_strategy(), kind) for kind in LEFT_OUT})


def test_adapters_of_other_families_learn_and_merge_on_two_processes():
    for found in run(2, "test_lora:families_on_ranks"):
        equal_and_moved(found)


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_adapters_pass_over_is_said(kind):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        packed_attention.warn_once.cache_clear()
        lora = model.apply_lora_configuration(family(kind), 4, 8.0)
    lines = [str(w.message) for w in heard if str(w.message).startswith("lora: ")]
    assert len(lines) == (LEFT_OUT[kind] is not None)
    assert all(re.search(LEFT_OUT[kind], line) for line in lines), lines
    assert not any("out_proj" in name for name in adapted(lora))


def test_a_layer_that_is_read_is_no_target():
    with pytest.raises(ValueError, match=r"target_modules: expected .* got \['out_proj'\]"):
        model.apply_lora_configuration(family("FalconH1"), 4, 8.0, target_modules="out_proj")


@pytest.mark.parametrize("kind", ["Zamba", "Zamba2"])
def test_layers_that_share_their_weights_get_no_adapters(kind):
    """Two adapters would be merged into one weight."""
    packed_attention.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="which share their weights with other layers"):
        module = model.apply_lora_configuration(family(kind), 4, 8.0)
    bases = [m.get_base_layer().weight for m in module.modules() if hasattr(m, "lora_A")]
    assert len({id(w) for w in bases}) == len(bases) > 0
    uses = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    assert all(uses.count(id(w)) == 1 for w in bases)


def test_the_linear_layers_of_falcons_own_class_get_adapters():
    """Falcon's own class computes what torch's does, in an order of its own."""
    lm = family("Falcon")
    module = model.apply_lora_configuration(lm, 4, 8.0)
    adapted = [m for m in module.modules() if hasattr(m, "lora_A")]
    assert len(adapted) == 8
    for layer in adapted:
        base = layer.get_base_layer()
        x = torch.randn(3, base.in_features)
        torch.testing.assert_close(base(x), torch.nn.functional.linear(x, base.weight, base.bias))


@pytest.mark.parametrize(
    ("kind", "layers"), [("Qwen3Next", 9), ("DeepseekV3", 10), ("Llama4Text", 14), ("Phimoe", 8)]
)
def test_names_of_experts_and_routers_are_no_targets(kind, layers):
    """peft takes shared experts for the routed ones, and a router may be a linear layer with two outputs."""
    packed_attention.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        module = model.apply_lora_configuration(family(kind), 4, 8.0)
    taken = [str(w.message) for w in heard if "peft takes for the routed experts" in str(w.message)]
    assert len(taken) == (kind in ("Qwen3Next", "DeepseekV3"))
    adapted = {name.partition(".lora_A")[0] for name, _ in module.named_parameters() if ".lora_A" in name}
    assert len(adapted) == layers
    assert not any(name.endswith("router") for name in adapted)
    ids = torch.arange(3, 9)[None]
    got = module(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, family(kind)(input_ids=ids, use_cache=False).logits)
