"""Parts that are not trained: found by pattern, and kept as they are by all that reads parameters."""

import pytest
import ranks
import tiny
import torch
from sees_and_hears import FAMILIES
from test_actors import TEXT, loss_fn, rollout, rows, scores, trained
from test_probe import quiet

import rft_fn as rft
from rft_fn import engine, model
from rft_fn.memory.trace import nbytes
from rft_fn.model.frozen import freeze
from rft_fn.run import options
from rft_fn.run.opening import load_policy
from rft_fn.strategy import StrategyConfig, estimate, get_fake_strategy, get_strategy

SEEING = ("visual", "layers.*.mlp.up_proj")  # a tower, and some of each block: a group has both kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen") / "Qwen2VL"
    FAMILIES["Qwen2VL"].build(torch.float32).save_pretrained(path)
    return path


def frozen(lm):
    return {name for name, p in lm.named_parameters(remove_duplicate=False) if not p.requires_grad}


def closed(name):
    return ".visual." in name or ".up_proj." in name


@pytest.mark.parametrize(
    ("patterns", "held"),
    [
        (["visual"], lambda n: ".visual." in n),
        (["model.visual.blocks"], lambda n: ".visual.blocks." in n),
        (["blocks.1"], lambda n: ".visual.blocks.1." in n),
        (["layers.*.self_attn"], lambda n: ".layers." in n and ".self_attn." in n),
        (["visual.*.weight"], lambda n: ".visual." in n and n.endswith(".weight")),
        (["lm_head", "*norm*"], lambda n: "lm_head" in n or "norm" in n),
        (["towers"], lambda n: ".visual." in n),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_a_pattern_is_a_part_of_a_path(folder, patterns, held, meta):
    lm = model.load(folder, freeze=patterns, meta=meta)
    names = {name for name, _ in lm.named_parameters()}
    expected = {name for name in names if held(name)}
    assert expected and frozen(model.materialize(lm)) == expected


def test_towers_are_all_but_the_text_model():
    lm = freeze(FAMILIES["Qwen2Audio"].build(), ["towers"])
    assert frozen(lm) == {n for n, _ in lm.named_parameters() if "audio_tower" in n or "projector" in n}


def test_a_tied_tensor_is_frozen_by_either_name():
    for name in ("lm_head", "embed_tokens"):
        lm = freeze(tiny.llama(tie_word_embeddings=True), [name])
        assert frozen(lm) == {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["visal"],
            r"freeze: expected parts of Qwen2VLForConditionalGeneration, got 'visal'; it has visual$",
        ),
        (["visual", "audio_tower"], "got 'audio_tower'; it has lm_head, model.language_model, model.visual$"),
        (["vis"], "got 'vis'; it has"),
        (["layer.0"], r"got 'layer.0'; it has layers$"),
        ([""], "got ''; it has lm_head"),
        (["*"], r"freeze: expected weights that are left to train, got \['\*'\]: all of them"),
        (["towers", "language_model", "lm_head"], "expected weights that are left to train"),
    ],
)
def test_a_pattern_has_to_match_and_to_leave_something(folder, patterns, message):
    with pytest.raises(ValueError, match=message):
        model.load(folder, freeze=patterns)
    lm = model.load(folder)
    with pytest.raises(ValueError, match=message):
        freeze(lm, patterns)
    assert not frozen(lm)


def test_a_text_model_has_no_towers():
    with pytest.raises(ValueError, match="sees or hears for 'towers', got LlamaForCausalLM"):
        freeze(tiny.llama(), ["towers"])
    assert not frozen(freeze(tiny.llama(), []))


def test_what_is_frozen_is_not_trained_and_is_saved(folder, tmp_path):
    """No gradient, no moments, not in the export; but in the saved folder, as it was."""
    lm = model.load(folder, freeze=SEEING)
    start = {name: p.detach().clone() for name, p in lm.named_parameters()}
    st, state = trained(lm)
    assert state.params.keys() == {name for name in start if not closed(name)}
    moments = [x for x in rft.tree.leaves(state.opt) if isinstance(x, torch.Tensor) and x.dim()]
    assert len(moments) == 2 * len(state.params)
    sent = dict(st.export(state))
    assert sent.keys() == state.params.keys()
    assert st.export(state).frozen == start.keys() - sent.keys()

    st.save_pretrained(tmp_path, lm, None, st.export(state))
    saved = dict(model.load(tmp_path).named_parameters())
    assert saved.keys() == start.keys()
    for name, x in saved.items():
        assert torch.equal(x, start[name]) is (closed(name) or ".visual." in name), name
    torch.testing.assert_close(scores(model.load(tmp_path)), scores(lm), rtol=0, atol=1e-6)


def test_an_engine_gets_the_rest_and_misses_nothing(folder):
    lm = model.load(folder, freeze=SEEING)
    eng = engine.get_engine(None, str(folder), tiny.tokenizer())
    st, state = trained(lm)
    sent = list(st.export(state))
    assert eng.load(st.export(state), version=2).tensors == len(sent) == len(state.params)
    assert (eng.score(rollout(lm), sampling=rft.Sampling()) - scores(lm, **TEXT)).abs().max() < 1e-5
    # weights without the word that the others are frozen are too few
    with pytest.raises(ValueError, match=r"weights: .*visual.* expected it among the"):
        eng.load(iter(sent), version=3)


def test_a_checkpoint_resumes_to_the_bit(folder, tmp_path):
    """Two steps, saved after the first; frozen weights come from the model's folder."""
    lm = model.load(folder, freeze=SEEING)
    st = rft.strategy.get_strategy()
    apply, state = quiet(st.init, lm, rft.optim.adamw(0.03))
    state, _ = step(st, lm, apply, state)
    st.save(tmp_path / "one", state, {})
    _, want = step(st, lm, apply, state)

    again = model.load(folder, freeze=SEEING)
    apply, state = quiet(st.init, again, rft.optim.adamw(0.03))
    state, _ = st.restore(tmp_path / "one", state, {})
    _, got = step(st, again, apply, state)
    assert got.keys() == want.keys() and all(torch.equal(got[name], x) for name, x in want.items())

    # of a model with other frozen parts nothing is restored
    other = model.load(folder, freeze=["visual"])
    _, state = quiet(st.init, other, rft.optim.adamw(0.03))
    with pytest.raises(ValueError):
        st.restore(tmp_path / "one", state, {})


def step(st, lm, apply, state):
    grads, _ = st.grad(state, apply, loss_fn, st.shard(rows(lm), 1000))
    state, _ = st.update(state, grads)
    return state, dict(st.export(state))


def test_the_forecast_counts_frozen_weights_without_gradients_and_moments(folder):
    whole, part = (model.load(folder, freeze=f) for f in ((), SEEING))
    tx = rft.optim.adamw(1e-3)
    x, y = (estimate(StrategyConfig(), (lm, tx), budget=64, kind="cpu", engine=False) for lm in (whole, part))
    trained_bytes = nbytes(*(p for p in part.parameters() if p.requires_grad))
    assert x.parameters == y.parameters == nbytes(*whole.parameters())
    assert x.gradients == x.parameters and y.gradients == trained_bytes
    assert y.optimizer == pytest.approx(2 * trained_bytes, rel=0.01)


BACKENDS = {"fsdp2": {}, "zero1": {"zero_stage": 1}, "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}}


def on_two(rank, folder, out):
    found = {}
    for name, how in BACKENDS.items():
        st = get_strategy(StrategyConfig(**how))
        lm = model.load(folder, freeze=SEEING, meta=True)
        found[name] = stepped(st, lm, f"{out}/{name}")
    return found


def stepped(st, lm, out):
    """The weights after two steps and a checkpoint between them, and what is saved."""
    tx = rft.optim.adamw(0.03, eps=0.01)
    exp = rows(lm)
    apply, state = quiet(st.init, lm, tx)
    for i in range(2):
        grads, _ = st.grad(state, apply, loss_fn, st.shard(exp, 1000))
        state, _ = st.update(state, grads)
        if i == 0:
            st.save(f"{out}/step", state, {})
            state, _ = st.restore(f"{out}/step", state, {})
    st.save_pretrained(f"{out}/model", lm, None, st.export(state))
    return {name: x.clone() for name, x in st.export(state)}


def test_two_processes_train_what_one_does(folder, tmp_path):
    """FSDP2 and ZeRO, whose groups and flat buffers hold trained and frozen tensors of one block."""
    want = stepped(get_fake_strategy(), model.load(folder, freeze=SEEING), tmp_path / "one")
    start = model.load(folder).state_dict()
    for found in ranks.run(2, "test_freeze:on_two", str(folder), str(tmp_path)):
        for backend in BACKENDS:
            assert found[backend].keys() == want.keys()
            for name, x in want.items():
                torch.testing.assert_close(
                    found[backend][name], x, rtol=0, atol=2e-4, msg=f"{backend} {name}"
                )
    for backend in BACKENDS:
        saved = model.load(tmp_path / backend / "model").state_dict()
        assert saved.keys() == start.keys()
        for name, x in saved.items():
            torch.testing.assert_close(x, want.get(name, start[name]), rtol=0, atol=2e-4)
            assert torch.equal(x, start[name]) or not closed(name), name


def test_a_critic_freezes_parts_of_its_decoder(folder, tmp_path):
    """The same patterns, from the model's folder and from that of a saved critic; its head is trained."""
    critic = quiet(model.load_critic, folder, freeze=SEEING)
    assert frozen(critic) == {n for n, _ in critic.named_parameters() if closed(n)}
    model.save_critic(tmp_path, critic)
    for meta in (False, True):
        again = quiet(model.load_critic, tmp_path, freeze=["visual"], meta=meta)
        assert frozen(again) == {n for n, _ in again.named_parameters() if ".visual." in n}
    with pytest.raises(ValueError, match="got 'lm_head'; it has"):
        quiet(model.load_critic, folder, freeze=["lm_head"])


def test_a_run_freezes_what_its_option_names(folder):
    st = get_fake_strategy()
    cfg = options.Policy(model=str(folder), freeze=("visual",))
    assert frozen(load_policy(cfg, st)) == {n for n in model.load(folder).state_dict() if ".visual." in n}
    assert not frozen(load_policy(options.Policy(model=str(folder)), st))
    with pytest.raises(ValueError, match=r"freeze: expected none with lora_rank 4, .* got visual; "):
        options.Policy(lora_rank=4, freeze=("visual",))


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_that_the_class_keeps_fixed_are_fixed_either_way(tmp_path, kind):
    """The same names are trained with memory first or without; sinusoids of positions are none of them."""
    made = FAMILIES[kind].build(torch.float32)
    made.save_pretrained(tmp_path)
    want = [name for name, p in made.named_parameters() if p.requires_grad]
    for meta in (False, True):
        got = model.load(tmp_path, meta=meta)
        assert [name for name, p in got.named_parameters() if p.requires_grad] == want
    fixed = dict(made.named_parameters()).keys() - set(want)
    assert bool(fixed) is (kind in ("Qwen2Audio", "Voxtral"))
    assert all(name.endswith("audio_tower.embed_positions.weight") for name in fixed)
