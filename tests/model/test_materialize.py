"""A model that several processes load is the one that transformers loads, and would write.

That holds for experts that it fuses, older names, persistent buffers, and types that it keeps wide.
"""

import ctypes
import json

import pytest
import ranks
import torch
from families import BASE, DELTA, EXPERTS, MAMBA, USUAL
from safetensors.torch import load_file, save_file
from test_probe import quiet, rows

import rft_fn as rft
from rft_fn import model, packing
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

pytestmark = pytest.mark.slow

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = ROUTED | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
KINDS = {
    "Qwen2Moe": USUAL | EXPERTS,
    "Qwen3Moe": USUAL | EXPERTS | {"head_dim": 8, "num_experts": 12},  # 10 comes after 9
    "Mixtral": USUAL | {"num_local_experts": 4},
    "DeepseekV3": USUAL | LATENT | GROUPED,
    "Qwen3Next": USUAL | DELTA | EXPERTS | {"head_dim": 8},
    "GraniteMoeHybrid": USUAL | MAMBA | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
    "Glm4Moe": USUAL | GROUPED | {"head_dim": 8},
    "MiniMax": USUAL | {
        "num_local_experts": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4,
    },
    "NemotronH": USUAL | ROUTED | {
        "head_dim": 8, "layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "n_group": 2,
        "topk_group": 1, "moe_shared_expert_intermediate_size": 16,
    },
    "GPTNeoX": BASE | {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128},
    "GptOss": USUAL | {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64
    },
    "Gemma4Text": USUAL | {
        "head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2, "sliding_window": 64,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 60,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Apertus": USUAL,
    "DiffLlama": USUAL,  # makes random numbers, which are in memory at once
}  # fmt: skip
# names in the files that are not the model's own, and persistent buffers
OTHERS = {
    "Qwen2Moe": "mlp.experts.3.gate_proj.weight",
    "Qwen3Moe": "mlp.experts.3.gate_proj.weight",
    "Mixtral": "block_sparse_moe.experts.3.w1.weight",
    "DeepseekV3": "mlp.experts.3.gate_proj.weight",
    "Qwen3Next": "mlp.experts.3.gate_proj.weight",
    "GraniteMoeHybrid": "block_sparse_moe.input_linear.weight",
    "Glm4Moe": "mlp.experts.3.gate_proj.weight",
    "MiniMax": "block_sparse_moe.experts.3.w1.weight",
    "NemotronH": "mixer.experts.3.up_proj.weight",
    "GPTNeoX": "embed_out.weight",
}
BUFFERS = {
    "DeepseekV3": "e_score_correction_bias", "Glm4Moe": "e_score_correction_bias",
    "NemotronH": "e_score_correction_bias", "MiniMax": "slope_rate", "Gemma4Text": "layer_scalar",
    "Apertus": "beta",
}  # fmt: skip
EXP = rows([(2, 5), (3, 7), (1, 4), (2, 2)])


def whole(kind):
    """A small model whose weights and persistent buffers are none that it would start from."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config)
        for name, x in lm.state_dict().items():
            if x.dim() >= 2 and "layers" in name:
                x.normal_(0, 0.3)
            else:
                x.mul_(1 + 0.3 * torch.rand(x.shape)).add_(0.2 * torch.rand(x.shape))
    return lm.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        whole(kind).save_pretrained(root / kind, max_shard_size="20KB")
    return root


def names_in(folder):
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_first_a_model_is_what_transformers_loads(folders, tmp_path, kind, dtype):
    """Every parameter and buffer, and its type, is the same, also when it is saved.

    The files have other names and buffers where they should.
    """
    want = model.load(folders / kind, dtype=dtype)
    got = model.materialize(model.load(folders / kind, dtype=dtype, meta=True))
    for which in (lambda m: m.state_dict(), lambda m: dict(m.named_buffers())):
        assert which(got).keys() == which(want).keys()
        for name, x in which(want).items():
            assert which(got)[name].dtype == x.dtype, name
            assert torch.equal(which(got)[name], x), name
    other = names_in(folders / kind) - want.state_dict().keys()
    assert any(name.endswith(OTHERS[kind]) for name in other) if kind in OTHERS else not other
    kept = {n.split(".")[-1] for n, _ in want.named_buffers() if n in want.state_dict()}
    assert BUFFERS[kind] in kept if kind in BUFFERS else not kept
    model.save(tmp_path, got, None)
    assert names_in(tmp_path) == names_in(folders / kind)


def loss_fn(out, b):
    return -out.logp * b.adv


def trained(st, lm, folder):
    """What a model scores, the weights after a step, and what is written of it."""
    adamw = rft.optim.adamw(0.1, eps=0.01)  # gradients of 1e-8, which are rounding, move nothing
    apply, state = quiet(st.init, lm, adamw)
    packs = st.shard(EXP, 1000)
    mine = packing.unpack(model.score(apply, state.params, packs), packs, EXP.tokens)
    st.save_pretrained(folder, lm, None, st.export(state))
    exp = rft.tree.replace(EXP, adv=torch.where(EXP.mask, EXP.tokens % 5 - 2.0, 0))
    grads, _ = st.grad(state, apply, loss_fn, st.shard(exp, 1000))
    state, more = st.update(state, grads)
    norm = float(rft.metric.results(more)["grad/norm"])
    return {"logp": st.gather(mine[None]).sum(0), "norm": norm, "after": dict(st.export(state))}


BACKENDS = {"fsdp2": {}, "zero3": {"zero_stage": 3}}


def on_two(rank, root, kinds, out):
    found = {}
    for name, options in BACKENDS.items():
        st = get_strategy(StrategyConfig(**options))
        for kind in kinds:
            lm = model.load(f"{root}/{kind}", meta=True)
            found[kind, name] = trained(st, lm, f"{out}/{kind}-{name}")
    return found


@pytest.fixture(scope="module")
def two(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved")
    return out, ranks.run(2, "test_materialize:on_two", str(folders), list(KINDS), str(out))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_score_and_train_what_one_does(folders, two, tmp_path, kind, backend):
    want = trained(get_fake_strategy(), model.load(folders / kind), tmp_path / "one")
    assert want["logp"].abs().max() > 1
    for found in two[1]:
        got = found[kind, backend]
        torch.testing.assert_close(got["logp"], want["logp"], rtol=0, atol=2e-5)
        assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
        for name, x in want["after"].items():
            torch.testing.assert_close(got["after"][name], x, rtol=0, atol=2e-4, msg=f"{kind} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_two_processes_save_is_what_they_loaded(folders, two, kind, backend):
    """Tensor for tensor under the names of the files, buffers too; so transformers loads it."""
    saved = two[0] / f"{kind}-{backend}"
    assert names_in(saved) == names_in(folders / kind)
    want, got = model.load(folders / kind).state_dict(), model.load(saved).state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], x) for name, x in want.items())


def resident(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))


def peak(rank, folder):
    """(bytes of this process's shards, most that it took to read them)."""
    from rft_fn.strategy import fsdp2, host, meshes

    # a mapping for each tensor: what the heap keeps in pieces depends on the order of the threads
    assert ctypes.CDLL(None).mallopt(host._MMAP_THRESHOLD, 1 << 20) == 1
    config = StrategyConfig()
    get_strategy(config)
    lm = model.load(folder, meta=True)
    fsdp2.shard_module(lm, meshes.meshes(config)[0], config)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # forget the most that was resident
    before = resident("VmRSS")
    model.materialize(lm)
    return sum(p.to_local().nbytes for p in lm.parameters()), resident("VmHWM") - before


def test_a_process_holds_its_shards_and_one_group(tmp_path):
    """Of 96 MiB of experts in separate tensors each process keeps 48, and never has 64.

    (Two processes, 2909 MiB of a Mixtral in bfloat16: 1591 MiB for shards of 1455 and experts of 112 per
    tensor.)
    """
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 16, "num_local_experts": 8}
    lm = transformers.MixtralForCausalLM(transformers.MixtralConfig(**USUAL | sizes))
    largest = max(p.nbytes for p in lm.parameters())
    total = sum(p.nbytes for p in lm.parameters())
    lm.save_pretrained(tmp_path)
    for shards, most in ranks.run(2, "test_materialize:peak", str(tmp_path)):
        assert shards < 0.51 * total and 4 * largest < total - shards
        assert most < shards + 4 * largest, (shards, most, largest)


def changed(source, folder, change, config=None):
    """A copy of a folder after `change` of the dict of its tensors, with other entries in its config."""
    folder.mkdir()
    held = {}
    for file in source.glob("*.safetensors"):
        held |= load_file(file)
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    entries = json.loads((source / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def without(*ends):
    def change(held):
        for name in [name for name in held if name.endswith(ends)]:
            del held[name]

    return change


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("Gemma4Text", without("0.layer_scalar"), r"missing: model\.layers\.0\.layer_scalar; if"),
        ("DeepseekV3", without("correction_bias"), r"missing: model\.layers\.1\.mlp\.gate\.e_score_corr"),
        (
            "Qwen3Moe",
            without(".0.up_proj.weight", ".0.gate_proj.weight"),
            r"gate_up_proj \[11, 32, 32\] instead",
        ),
        ("Qwen3Moe", without(EXPERT), r"layers\.0\.mlp\.experts\.gate_up_proj can be made of, got 23 like "),
        (
            "Qwen3Moe",
            lambda held: held.update({EXPERT.replace(".0.", ".9."): held[EXPERT] + 1}),
            "unexpected: ",
        ),
        ("GPTNeoX", without("embed_out.weight"), r"missing: lm_head\.weight"),
    ],
)
def test_tensors_that_a_model_cannot_be_made_of(folders, tmp_path, kind, change, message):
    with pytest.raises(ValueError, match=message) as error:
        model.load(changed(folders / kind, tmp_path / "m", change), meta=True)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_an_expert_with_nan_is_found(folders, tmp_path):
    folder = changed(folders / "Qwen3Moe", tmp_path / "m", lambda held: held[EXPERT].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.gate_up_proj: expected finite numbers"):
        model.materialize(model.load(folder, meta=True))


def test_experts_may_be_fused_in_the_files(folders, tmp_path):
    """Under the names that the model itself has, with which it is saved again."""
    lm = model.load(folders / "Mixtral")
    folder = changed(folders / "Mixtral", tmp_path / "m", lambda held: (held.clear(), held.update(state(lm))))
    late = model.materialize(model.load(folder, meta=True))
    assert all(torch.equal(x, state(lm)[name]) for name, x in state(late).items())
    model.save(tmp_path / "again", late, None)
    assert names_in(tmp_path / "again") == names_in(folder)


def state(lm):
    return {name: x.clone() for name, x in lm.state_dict().items()}


@pytest.mark.parametrize("same", [False, True])
def test_a_head_that_only_the_config_ties_stays_apart(folders, tmp_path, same):
    """The files decide, as with transformers; a second copy of the embedding is the embedding."""

    def copy(held):
        if same:
            held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    folder = changed(folders / "Qwen3Moe", tmp_path / "m", copy, {"tie_word_embeddings": True})
    want, late = model.load(folder), model.materialize(model.load(folder, meta=True))
    assert len(list(late.parameters())) == len(list(want.parameters()))
    assert (late.lm_head.weight is late.model.embed_tokens.weight) == same
    assert all(torch.equal(x, state(want)[name]) for name, x in state(late).items())


@pytest.mark.parametrize("kind", ["Gemma4Text", "DeepseekV3", "Qwen3Moe"])
def test_critics_and_adapters_have_the_same_base(folders, kind):
    """Buffers and experts of what is inside another module."""
    want, late = (model.load_critic(folders / kind, meta=meta) for meta in (False, True))
    assert all(torch.equal(x, state(want)[name]) for name, x in state(model.materialize(late)).items())
    want, late = (
        model.apply_lora_configuration(model.load(folders / kind, meta=meta), 2, 4, target_modules="o_proj")
        for meta in (False, True)
    )
    assert all(torch.equal(x, state(want)[name]) for name, x in state(model.materialize(late)).items())


def test_a_folder_without_safetensors_says_how_to_make_one(folders, tmp_path):
    folder = changed(folders / "Qwen3Moe", tmp_path / "m", lambda held: None)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected \*\.safetensors in .*save_pretrained"):
        model.load(folder, meta=True)
    model.load(folder).save_pretrained(tmp_path / "again")
    model.load(tmp_path / "again", meta=True)
