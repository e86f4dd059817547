"""Bases in low precision under adapters: what is trained, sampled and saved is one and the same model."""

import subprocess
from importlib.util import find_spec

import pytest
import tiny
import torch
from each_case import each
from ranks import run
from sees_and_hears import FAMILIES, batch
from test_probe import quiet

import rft_fn as rft
from rft_fn import engine, model, packing
from rft_fn.model import quantize
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

INSTALLED = {"int8": find_spec("torchao"), "nf4": find_spec("bitsandbytes")}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not INSTALLED[kind], reason=f"no library for {kind}"))
    for kind in INSTALLED
]
EXP = tiny.experience()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    model.save(path, tiny.llama(hidden_size=64, intermediate_size=128), tiny.tokenizer())
    return path


def lora(folder, kind, **options):
    return model.apply_lora_configuration(model.load(folder, quantize=kind), 4, 8, **options)


def scores(lm):
    apply, params = model.bind(lm)
    packs = [packing.pack(EXP, range(6))]
    return packing.unpack(model.score(apply, params, packs), packs, EXP.tokens)


def loss_fn(out, b):
    return -out.logp * b.adv


def trained(lm, steps=3):
    st = get_fake_strategy()
    apply, state = st.init(lm, rft.optim.adamw(0.03))
    exp = rft.tree.replace(EXP, adv=torch.where(EXP.mask, EXP.tokens % 5 - 2.0, 0))
    losses = []
    for _ in range(steps):
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 1000))
        losses.append(float(rft.metric.results(metrics)["loss"]))
        state, _ = st.update(state, grads)
    return st, state, losses


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_over_a_frozen_base_and_the_engine_samples_from_it(folder, kind):
    lm = lora(folder, kind, target_modules="q_proj,up_proj")
    low = {n: quantize.whole(p).clone() for n, p in lm.named_parameters() if quantize.is_low(p)}
    full = dict(model.load(folder).named_parameters())
    assert len(low) == 14 and all(n.partition(".model.")[2].replace(".base_layer", "") in full for n in low)
    assert (scores(lm) - scores(model.load(folder))).abs().max() > 0.01
    st, state, losses = trained(lm)
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in state.params.items())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(quantize.whole(p), low[n]) for n, p in lm.named_parameters() if n in low)

    eng = engine.get_engine(None, str(folder), tiny.tokenizer())
    eng.load(st.export(state), version=1)
    sampling = rft.Sampling()
    gap = (eng.score(rollout(), sampling=sampling) - scores(lm)).abs().max()
    assert gap < 1e-4


def on_ranks(rank, kind, folder, saved):
    """Three steps over FSDP2; what it exports, and the loss of one more by a state that was restored."""
    exp = rft.tree.replace(EXP, adv=torch.where(EXP.mask, EXP.tokens % 5 - 2.0, 0))
    st = get_strategy(StrategyConfig(fsdp=True))
    apply, state = st.init(lora(folder, kind), rft.optim.adamw(0.03))

    def stepped(apply, state):
        grads, metrics = st.grad(state, apply, loss_fn, st.shard(exp, 1000))
        return float(rft.metric.results(metrics)["loss"]), st.update(state, grads)[0]

    losses = []
    for _ in range(3):
        loss, state = stepped(apply, state)
        losses.append(loss)
    whole = {name: x.clone() for name, x in st.export(state)}
    st.save(saved, state)
    last, _ = stepped(apply, state)
    apply, fresh = st.init(lora(folder, kind), rft.optim.adamw(0.03))
    again, _ = stepped(apply, st.restore(saved, fresh)[0])
    return losses, whole, (last, again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_shard_the_adapters_over_a_whole_base(folder, tmp_path, kind):
    """FSDP2 on two: the losses, and the merged weights, are those of one process."""
    st, state, losses = trained(lora(folder, kind))
    want = dict(st.export(state))
    # no forks: transformers remembers which libraries there are, and the fork server has none of these
    ranks = run(2, "test_quantize:on_ranks", kind, folder, tmp_path / "saved", popen=subprocess.Popen)
    for got, whole, (last, again) in ranks:
        assert got == pytest.approx(losses, rel=1e-5) and last == again
        assert whole.keys() == want.keys()
        assert all((whole[name] - x).abs().max() < 1e-3 for name, x in want.items())


def rollout():
    return rft.Rollout(
        tokens=EXP.tokens, mask=EXP.mask, logp=torch.zeros(EXP.tokens.shape), length=EXP.length,
        truncated=torch.zeros(6, dtype=torch.bool), group=torch.arange(6), version=torch.zeros(6),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_merged_it_is_saved_in_full_and_apart_it_is_adapters(folder, tmp_path, kind):
    lm = lora(folder, kind)
    st, state, _ = trained(lm)
    want = scores(lm)
    st.save_pretrained(tmp_path / "whole", lm, tiny.tokenizer(), st.export(state), merge=True)
    whole = model.load(tmp_path / "whole")
    assert not any(quantize.is_low(p) for p in whole.parameters())
    torch.testing.assert_close(scores(whole), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores(lm), want, rtol=0, atol=0)  # writing it changed nothing
    st.save_pretrained(tmp_path / "apart", lm, tiny.tokenizer(), st.export(state))
    again = model.load(tmp_path / "apart", quantize=kind)
    assert sum(quantize.is_low(p) for p in again.parameters()) == 14
    torch.testing.assert_close(scores(again), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_was_saved_in_low_precision(folder, tmp_path, kind):
    """It is loaded so, trained under adapters, in full for an engine or a critic, and quantised once."""
    low = model.load(folder, quantize=kind)
    low.save_pretrained(tmp_path / "low")
    tiny.tokenizer().save_pretrained(tmp_path / "low")
    again = model.load(tmp_path / "low")
    assert torch.equal(scores(again), scores(low))
    full = model.load(tmp_path / "low", quantize="none")
    assert not any(quantize.is_low(p) for p in full.parameters())
    torch.testing.assert_close(scores(full), scores(low), rtol=0, atol=1e-4)
    critic = model.load_critic(tmp_path / "low")
    assert not any(quantize.is_low(p) for p in critic.parameters())
    with pytest.raises(ValueError, match=f"quantize: expected none for .*quantised already, got {kind}"):
        model.load(tmp_path / "low", quantize=kind)
    with pytest.raises(ValueError, match=r"quantize: expected .* in full precision for several processes"):
        model.load(tmp_path / "low", meta=True)
    st, state, losses = trained(model.apply_lora_configuration(again, 4, 8))
    assert losses[-1] < losses[0] - 0.1
    eng = engine.get_engine(None, str(tmp_path / "low"))
    eng.load(st.export(state), version=1)
    gap = (eng.score(rollout(), sampling=rft.Sampling()) - scores(state.module)).abs().max()
    assert gap < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@each(
    ("options", "message"),
    [
        ({}, "expected adapters on a quantised model.*lora_rank"),
        ({"bf16": True}, "full precision with bf16 and use_mp_opt"),
        ({"use_mp_opt": True}, "full precision with bf16 and use_mp_opt"),
        ({"fsdp": True, "bf16": True}, "full precision with bf16, use_mp_opt and fsdp_cpu_offload"),
        ({"zero_stage": 1}, "full precision with DeepSpeed ZeRO"),
    ],
)
def test_what_cannot_hold_it_says_so(folder, kind, options, message):
    import torch.distributed as dist

    lm = model.load(folder, quantize=kind)
    lm = model.apply_lora_configuration(lm, 4, 8) if options else lm
    with pytest.raises(ValueError, match=r"quantize: .*full precision with an engine"):
        engine.hf(lm, tiny.tokenizer())
    try:
        with pytest.raises(ValueError, match=f"quantize: .*{message}"):
            get_strategy(StrategyConfig(**options)).init(lm, rft.optim.adamw(1e-3))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_counts_its_bytes(folder, kind):
    """A byte a weight of int8 and half a byte of nf4, with scales; an engine has all in full."""
    full, lm = model.load(folder), lora(folder, kind)
    adapters = sum(p.nbytes for p in lm.parameters() if p.requires_grad)
    linear = sum(m.weight.numel() for n, m in full.named_modules() if n.endswith("_proj"))
    rest = sum(p.nbytes for p in full.parameters()) - 4 * linear
    plain = model.apply_lora_configuration(full, 4, 8)
    adamw = rft.optim.adamw(1e-3)
    want, was = (
        rft.strategy.estimate(StrategyConfig(), (x, adamw), budget=64, kind="cpu") for x in (lm, plain)
    )
    weights = {"int8": 1.0, "nf4": 0.5}[kind] * linear
    assert weights + rest + adapters < want.parameters < 1.3 * weights + rest + adapters
    assert want.engine == was.engine and not want.unknown
    assert want.activations > 0.9 * was.activations


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_sees_is_quantised_but_for_its_tower(tmp_path, kind):
    """Tower and projector are in full; one step through images changes the adapters, and nothing else."""
    family = FAMILIES["Qwen2VL"]
    family.build(torch.float32).save_pretrained(tmp_path)
    full = dict(model.load(tmp_path).named_parameters())
    lm = model.load(tmp_path, quantize=kind)
    low = {name for name, p in lm.named_parameters() if quantize.is_low(p)}
    assert low == {name for name in full if "language_model.layers" in name and name.endswith("proj.weight")}
    assert all(torch.equal(p, full[name]) for name, p in lm.named_parameters() if name not in low)

    lm = model.apply_lora_configuration(lm, 4, 8)
    st = get_fake_strategy()
    apply, state = quiet(st.init, lm, rft.optim.adamw(0.03))
    before = {name: quantize.whole(p).clone() for name, p in lm.named_parameters()}
    exp = batch(family, [["image", "image"], [], ["image"]])
    grads, _ = st.grad(state, apply, loss_fn, st.shard(exp, 1000))
    logp = torch.cat(model.score(apply, state.params, st.shard(exp, 1000)))
    assert logp.isfinite().all() and logp.abs().max() > 0.1
    st.update(state, grads)
    after = {name: quantize.whole(p) for name, p in lm.named_parameters()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_B" in name}  # A has no gradient while B is 0


def test_bad_input(folder, monkeypatch):
    with pytest.raises(ValueError, match="quantize: expected one of int8, nf4, got 'int3'"):
        model.load(folder, quantize="int3")
    with pytest.raises(ValueError, match="quantize: expected none without memory, got int8"):
        model.load(folder, quantize="int8", meta=True)
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="quantize: int8 needs torchao, which is not installed"):
        model.load(folder, quantize="int8")


@pytest.mark.skipif(not INSTALLED["int8"], reason="no torchao")
def test_a_run_over_it_samples_from_what_it_trains_and_is_exported_as_it_left(tmp_path):
    from script_runs import rows
    from test_house import load_script as script

    grpo, out = script("grpo"), tmp_path / "r"
    small = {"prompts": 4, "group": 4, "steps": 3, "eval_prompts": 4, "warmup": 0, "lr": 5e-3, "kl": 0.01}
    grpo.main(grpo.Config(**small, lora_rank=4, quantize="int8", out=str(out)))
    found = rows(out)
    assert all(r["policy/logp_gap"] < 1e-4 and r["grad/norm"] > 0 for r in found)
    assert found[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-6) and found[-1]["policy/kl_ref"] > 1e-5
    export = script("export")
    export.main(export.Config(run=str(out), out=str(tmp_path / "merged")))
    own = (out / "model/model.safetensors").read_bytes()
    assert (tmp_path / "merged/model.safetensors").read_bytes() == own
    grpo.main(grpo.Config(**small, lora_rank=4, out=str(tmp_path / "full")))
    assert (tmp_path / "full/model/model.safetensors").read_bytes() != own


@pytest.mark.skipif(not INSTALLED["int8"], reason="no torchao")
@pytest.mark.parametrize("name", ["grpo", "ppo", "sft"])
def test_a_run_that_cannot_train_over_it_ends_before_a_model_is_loaded(tmp_path, monkeypatch, name):
    from test_house import load_script as script

    main, Config = script(name).main, script(name).Config
    monkeypatch.setattr(model, "load", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr(rft.data, "load", lambda *a, **k: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"^lora_rank: expected > 0 with quantize int8, .* got 0"):
        main(Config(quantize="int8", out=str(tmp_path / "a")))
    config = StrategyConfig(bf16=True)
    with pytest.raises(ValueError, match=r"^quantize: expected none with bf16, got int8"):
        main(Config(quantize="int8", lora_rank=2, strategy=config, out=str(tmp_path / "b")))
    config = StrategyConfig(engine_adapters="alone")
    with pytest.raises(
        ValueError, match=r"^(engine_adapters alone: .* int8 with hf|strategy.engine_adapters)"
    ):
        main(Config(quantize="int8", lora_rank=2, strategy=config, out=str(tmp_path / "c")))
