"""Models that see or hear: of the class that their config asks for, with or without memory, checkpointed,
adapted, saved and loaded again."""

import json

import floor
import pytest
import tiny
import torch
from safetensors.torch import save_file
from sees_and_hears import FAMILIES, batch
from test_probe import quiet

import rft_fn as rft
from rft_fn import engine, modality, model, packing
from rft_fn.modality import ActorModality
from rft_fn.strategy import get_fake_strategy

KINDS = list(FAMILIES)
TEXT = {"kinds": (0, 0, 0)}
SMALL = ["Qwen2VL", "Qwen2Audio"]
MODALITY = {"Qwen2Audio": "audio_language", "Voxtral": "audio_language", "Qwen2.5Omni": "omni"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("seeing")
    for kind in KINDS:
        FAMILIES[kind].build(torch.float32).save_pretrained(root / kind)
    tiny.llama().save_pretrained(root / "text")
    return root


def rows(lm, kinds=(1, 0, 2, 0)):
    """A batch with so many media in each row, for the family of a module."""
    kind = {"Qwen2_5OmniThinker": "Qwen2.5Omni"}.get(name_of(lm), name_of(lm))
    family = FAMILIES[kind]
    exp = batch(family, [family.kinds[:1] * count for count in kinds])
    number = (exp.tokens % 5 - 2.0) * exp.mask
    return rft.tree.replace(exp, adv=number, old_logp=0 * number, w=exp.mask / exp.mask.sum())


def name_of(lm):
    return type(model.parts.inside_adapters(lm)).__name__.removesuffix("ForConditionalGeneration")


def scores(lm, **how):
    apply, params = quiet(model.bind, lm)
    exp = rows(lm, **how)
    packs = [packing.pack(exp, range(len(exp.tokens)))]
    return packing.unpack(model.score(apply, params, packs), packs, exp.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_with_towers_gives_the_whole_model(folders, kind):
    """Every parameter and buffer is that of the module which was saved, with memory first or without."""
    want = FAMILIES[kind].build(torch.float32)
    here = model.load(folders / kind)
    later = model.load(folders / kind, meta=True)
    assert all(p.is_meta for p in later.parameters())
    for got in (here, model.materialize(later)):
        assert type(got) is type(want)
        for which in (lambda m: m.state_dict(), lambda m: dict(m.named_buffers())):
            assert which(got).keys() == which(want).keys()
            for name, x in which(want).items():
                assert torch.equal(which(got)[name], x), name


def test_the_checkpoint_of_a_text_model_stays_one(folders, tmp_path):
    assert type(model.load(folders / "text")).__name__ == "LlamaForCausalLM"
    lm = tiny.llama()
    # the text model alone of a family that sees has a type of its own
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, vocab_size=60, head_dim=16, num_key_value_heads=1))
    lm.save_pretrained(tmp_path)
    assert type(model.load(tmp_path)) is Gemma3ForCausalLM
    assert modality.of_config(lm.config) is ActorModality.LANGUAGE_ONLY


@pytest.mark.parametrize("meta", [False, True])
def test_of_a_model_that_speaks_it_is_the_part_that_writes(tmp_path, meta):
    """A folder of Qwen2.5-Omni holds a talker and a vocoder too."""
    floor.require("Qwen2_5Omni folders")
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 60}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"hidden_size": 16, "out_hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 24}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    audio |= {"num_mel_bins": 8, "max_source_positions": 16, "output_dim": 16}
    config = Qwen2_5OmniThinkerConfig(text_config=text, vision_config=vision, audio_config=audio)
    lm = Thinker(config)
    held = {f"thinker.{name}": x for name, x in lm.state_dict().items()}
    names = {"thinker.model.language_model.": "thinker.model."}  # as the hub has them
    for new, old in names.items():
        held = {name.replace(new, old): x for name, x in held.items()}
    for tower in ("visual", "audio_tower"):
        held = {name.replace(f"thinker.model.{tower}", f"thinker.{tower}"): x for name, x in held.items()}
    held |= {"talker.model.norm.weight": torch.ones(4), "token2wav.x.weight": torch.ones(4)}
    Qwen2_5OmniConfig(thinker_config=config.to_dict()).save_pretrained(tmp_path)
    save_file({n: x.clone() for n, x in held.items()}, tmp_path / "model.safetensors", {"format": "pt"})

    got = model.materialize(quiet(model.load, tmp_path, meta=meta))
    assert type(got) is Thinker and modality.of_config(got.config) is ActorModality.OMNI
    assert all(torch.equal(got.state_dict()[name], x) for name, x in lm.state_dict().items())
    model.save(tmp_path / "again", got)
    again = model.load(tmp_path / "again", meta=meta)
    assert type(again) is Thinker
    assert all(torch.equal(model.materialize(again).state_dict()[n], x) for n, x in lm.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_actors_are_a_module_and_its_modality(folders, kind):
    expected = ActorModality(MODALITY.get(kind, "vision_language"))
    made = {
        ActorModality.VISION_LANGUAGE: model.ActorVL,
        ActorModality.AUDIO_LANGUAGE: model.ActorAL,
        ActorModality.OMNI: model.ActorOmni,
    }
    module, found = made[expected](folders / kind, meta=True)
    assert found is expected and type(module) is type(FAMILIES[kind].make())
    again, found = made[expected](module, freeze=["towers"])
    assert again is module and found is expected and not all(p.requires_grad for p in module.parameters())


def test_a_text_actor(folders):
    module, found = model.ActorLanguage(folders / "text")
    assert found is ActorModality.LANGUAGE_ONLY and type(module).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda root: model.ActorVL(root / "text"),
            "vision_language for ActorVL, got .*text, which is language_only; ActorLanguage takes it",
        ),
        (lambda root: model.ActorAL(root / "Qwen2VL"), "which is vision_language; ActorVL takes it"),
        (lambda root: model.ActorVL(root / "Qwen2Audio"), "which is audio_language; ActorAL takes it"),
        (lambda root: model.ActorOmni(root / "Qwen2Audio"), "expected omni for ActorOmni"),
        (lambda root: model.ActorLanguage(root / "Qwen2VL"), "expected language_only for ActorLanguage"),
        (lambda root: model.ActorVL(tiny.llama()), "got LlamaForCausalLM, which is language_only"),
        (lambda root: model.ActorVL(torch.nn.Linear(2, 2)), "got Linear, which is language_only"),
    ],
)
def test_an_actor_of_another_kind_is_not_loaded(folders, call, message):
    with pytest.raises(ValueError, match=message):
        call(folders)


def test_adapters_have_the_modality_of_their_base(folders, tmp_path):
    lora = model.apply_lora_configuration(model.load(folders / "Qwen2VL"), 2, 4)
    model.save(tmp_path, lora)
    module, found = model.ActorVL(tmp_path)
    assert found is ActorModality.VISION_LANGUAGE and "lora_" in "".join(dict(module.named_parameters()))
    with pytest.raises(ValueError, match="ActorVL takes it"):
        model.ActorAL(module)


@pytest.mark.parametrize("kind", SMALL)
def test_checkpointed_towers_have_no_dropout(folders, kind):
    """Media through the whole model: two forwards are one, and so is the gradient without checkpoints.

    Qwen2-Audio's tower has dropout of its own, which is on in training mode.
    """
    from rft_fn.model.dropout import disable_dropout

    family = FAMILIES[kind]
    tensors, ids = family.sample(family.kinds[:1], seed=1)
    ids = torch.tensor(ids)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    if family.types:
        inputs[family.types] = (ids == 50).long()
    found = []
    for checkpointing in (False, True, True):
        lm = model.load(folders / kind, gradient_checkpointing=checkpointing).train()
        for m in lm.modules():
            if isinstance(getattr(m, "dropout", None), float):
                m.dropout = 0.3
        disable_dropout(lm)
        layers = [m for m in lm.modules() if m.training]
        assert bool(layers) is checkpointing
        assert not checkpointing or any(
            "Audio" in type(m).__name__ or "Vision" in type(m).__name__ for m in layers
        )
        logits = lm(**inputs, use_cache=False).logits
        logits.square().mean().backward()
        found.append((logits.detach(), {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}))
    for logits, grads in found[1:]:
        assert torch.equal(logits, found[1][0])
        torch.testing.assert_close(logits, found[0][0], rtol=1e-5, atol=1e-5)
        assert grads.keys() == found[0][1].keys() and any("tower" in n or "visual" in n for n in grads)
        for name, x in grads.items():
            torch.testing.assert_close(x, found[0][1][name], rtol=1e-4, atol=1e-6)


def loss_fn(out, b):
    return -out.logp * b.adv


def trained(lm, steps=2):
    st = get_fake_strategy()
    apply, state = quiet(st.init, lm, rft.optim.adamw(0.03))
    for _ in range(steps):
        grads, _ = st.grad(state, apply, loss_fn, st.shard(rows(lm), 1000))
        state, _ = st.update(state, grads)
    return st, state


def adapted(lm):
    return {
        n.partition(".lora_")[0].removeprefix("base_model.model.")
        for n, _ in lm.named_parameters()
        if "lora_" in n
    }


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_in_the_text_model_unless_a_tower_is_asked_for(folders, kind):
    lm = model.load(folders / kind, meta=True)
    towers = [model.parts.path_of(t, lm) for t in model.parts.find(lm).towers]
    text = model.parts.path_of(model.parts.find(lm).text, lm)
    names = adapted(model.apply_lora_configuration(lm, 2, 4))
    assert names and all(n.startswith(f"{text}.") for n in names)

    # a path that leads into a tower, and every linear layer
    asked = towers[0].rpartition(".")[2]
    lm = model.apply_lora_configuration(model.load(folders / kind, meta=True), 2, 4, target_modules=asked)
    seen = adapted(lm)
    assert seen and all(n.startswith(f"{towers[0]}.") for n in seen)
    lm = model.apply_lora_configuration(
        model.load(folders / kind, meta=True), 2, 4, target_modules="all-linear"
    )
    assert adapted(lm) >= seen | names


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
@pytest.mark.parametrize("kind", SMALL)
def test_adapters_are_saved_merged_and_exported(folders, tmp_path, kind, targets):
    """What was trained is what is loaded again, alone or merged, and what an engine gets."""
    lm = model.apply_lora_configuration(model.load(folders / kind), 2, 4, target_modules=targets)
    before = scores(model.load(folders / kind))
    st, state = trained(lm)
    want = scores(lm)
    assert (want - before).abs().max() > 1e-3

    st.save_pretrained(tmp_path / "adapters", lm, None, st.export(state))
    st.save_pretrained(tmp_path / "merged", lm, None, st.export(state), merge=True)
    again = model.load(tmp_path / "adapters")
    assert adapted(again) == adapted(lm)
    torch.testing.assert_close(scores(again), want, rtol=0, atol=1e-6)
    whole = model.load(tmp_path / "merged")
    assert type(whole) is type(FAMILIES[kind].make()) and not adapted(whole)
    torch.testing.assert_close(scores(whole), want, rtol=0, atol=1e-4)

    # by the plain model's names, towers included where they are adapted
    sent = dict(st.export(state))
    plain = dict(whole.named_parameters())
    assert sent.keys() <= plain.keys()
    assert any("tower" in n or "visual" in n for n in sent) is (targets == "all-linear")
    for name, x in sent.items():
        torch.testing.assert_close(x, plain[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["whole", "frozen", "adapters"])
@pytest.mark.parametrize("kind", SMALL)
def test_after_an_update_the_engine_scores_as_the_trainer(folders, kind, how):
    """Text-only rows: every weight arrives under a name that the engine's model knows."""
    lm = model.load(folders / kind, freeze=["towers"] * (how == "frozen"))
    if how == "adapters":
        lm = model.apply_lora_configuration(lm, 2, 4)
    eng = engine.get_engine(None, str(folders / kind), tiny.tokenizer())
    before = eng.score(rollout(lm), sampling=rft.Sampling())
    st, state = trained(lm)
    delivered = eng.load(st.export(state), version=state.step)
    count = len([p for p in lm.parameters() if p.requires_grad])
    if how == "adapters":
        count //= 2
    assert delivered.tensors == count
    want = scores(lm, **TEXT)
    assert (before - want).abs().max() > 0.01
    assert (eng.score(rollout(lm), sampling=rft.Sampling()) - want).abs().max() < 1e-5


def rollout(lm):
    """Rows of text alone, as `scores` has them with TEXT."""
    exp = rows(lm, **TEXT)
    count = len(exp.tokens)
    return rft.Rollout(
        tokens=exp.tokens, mask=exp.mask, logp=torch.zeros(exp.tokens.shape), length=exp.length,
        truncated=torch.zeros(count, dtype=torch.bool), group=torch.arange(count), version=torch.zeros(count),
    )  # fmt: skip


PROCESSOR = {"preprocessor_config.json": {"patch_size": 4}, "processor_config.json": {"a": 1}}


@pytest.mark.parametrize("meta", [False, True])
def test_a_saved_model_keeps_the_files_of_its_processor(folders, tmp_path, meta):
    source = tmp_path / "source"
    model.save(source, model.load(folders / "Qwen2VL"), tiny.tokenizer())
    assert not list(source.glob("*processor*"))
    for name, content in PROCESSOR.items():
        (source / name).write_text(json.dumps(content))
    lm = model.materialize(model.load(source, meta=meta))
    once = model.save(tmp_path / "once", lm, tiny.tokenizer())
    lora = model.apply_lora_configuration(model.load(once), 2, 4)
    twice = model.save(tmp_path / "twice", lora, merge=True)
    for folder in (once, twice):
        for name, content in PROCESSOR.items():
            assert json.loads((folder / name).read_text()) == content

    # one that was given is the one that stays
    class Processor:
        def save_pretrained(self, folder):
            (folder / "preprocessor_config.json").write_text('{"patch_size": 8}')

    third = model.save(tmp_path / "third", model.load(once), Processor())
    assert json.loads((third / "preprocessor_config.json").read_text()) == {"patch_size": 8}
    assert json.loads((third / "processor_config.json").read_text()) == {"a": 1}


def test_a_text_model_takes_no_files_along(tmp_path, monkeypatch):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)  # where the empty name of a new module would lead
    model.save("text", tiny.llama(), None)
    assert not (tmp_path / "text" / "preprocessor_config.json").exists()
    module = FAMILIES["Qwen2VL"].build(torch.float32)
    model.save("new", module)
    assert not (tmp_path / "new" / "preprocessor_config.json").exists()
