"""Questions to a bound model: are rows of a pack the same alone, is the head plain; and dropout.

Dropout stays off under checkpointing. Families of models are named here, not in the library.
"""

import copy
import warnings

import floor
import pytest
import ranks
import torch
import transformers
from families import AT, FAMILIES, FAR, SINGLE, VOCAB, config, far, small
from packaging import version
from tiny import definition, logp_rounding, mixed
from torch import nn

import rft_fn as rft
from rft_fn import model, optim, packing, tree
from rft_fn.model import packed_states, packing_probe, reader
from rft_fn.model.bind import wrap_for_training
from rft_fn.model.forward import BOUNDARIES, ONE_SEQUENCE, POSITIONS, ROWS
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

PACK = (
    "Llama",
    "Qwen2",
    "Gemma2",
    "Gemma3Text",
    "GPT2",
    "OPT",
    "Granite",
    "Cohere",
    "Mixtral",
    "GptOss",
    "GraniteSWA",
    "Llama4Text",
)
STATES = (  # layers with states, which read the sequences of a pack as rows of a batch
    "Qwen3Next",
    "Qwen3_5Text",
    "Mamba",
    "Mamba2",
    "FalconH1",
    "Rwkv",
    "Lfm2",
    "Bamba",
    "NemotronH",
    "RecurrentGemma",
)
MIX = ("Bloom", "Mpt", "Falcon", "xLSTM")
if version.parse(transformers.__version__) >= version.parse("5.24"):
    MIX = tuple(kind for kind in MIX if kind != "Falcon")  # its attention keeps to the positions
    PACK = (*PACK, "Falcon")
READ = (
    "Qwen3Next",
    "Qwen3_5Text",
    "GptOss",
    "Mixtral",
    "NemotronH",
    "Mamba2",
    "Lfm2",
    "FalconH1",
    "Bamba",
    "GraniteSWA",  # divides its logits by one
)
CHANGED = (
    "Gemma2",
    "Gemma3Text",
    "Granite",
    "Cohere",
    "FalconH1",
    "RecurrentGemma",
    "xLSTM",
)  # logits after the head


def rows(sizes, seed=0):
    """An Experience of rows of (prompt, response) tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(3, VOCAB, (n,), generator=g).tolist()

    return packing.supervised([(draw(a), draw(b)) for a, b in sizes])


EXP = rows([(2, 5), (3, 7), (1, 4), (2, 2)])


def agree(apply, params, packs, plain, *, atol):
    """Log-probs and gradients of packs are those of the model's own logits, a row at a time."""
    got = packing.unpack([apply(params, b).logp for b in packs], packs, EXP.tokens)
    want = definition(plain, EXP)
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    own = dict(plain.named_parameters())
    grads = torch.autograd.grad(mixed(got), list(params.values()), allow_unused=True)
    wants = torch.autograd.grad(mixed(want), [own[n] for n in params], allow_unused=True)
    for name, g, w in zip(params, grads, wants):
        assert (g is None) == (w is None), name
        if w is not None:
            scale = float(w.abs().max()) + 1
            torch.testing.assert_close(g, w, rtol=0, atol=100 * atol * scale, msg=f"{name}: {g - w}")


def quiet(f, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args, **options)


@pytest.mark.parametrize("kind", [*PACK, *STATES, *MIX])
def test_log_probs_and_gradients_are_those_of_each_row_alone(kind):
    """Packed where the model can be, else a unit one after the other and rows by themselves."""
    floor.require(f"{kind} packs")
    dtype = torch.float64
    atol = 1e-6  # rotary tables, norms and states are float32 inside
    if kind in SINGLE:
        dtype = torch.float32
        atol = 1e-5
    lm = small(kind, dtype)
    plain = copy.deepcopy(lm)
    st = get_fake_strategy()
    apply, params = quiet(st.bind, lm)
    alone = st.shard(EXP, 1000)
    assert [b.num_seqs for b in alone] == ([1] * 4 if kind in MIX else [4])
    agree(apply, params, alone, plain, atol=atol)
    pairs = st.shard(EXP, 1000, unit=2)
    assert [b.num_seqs for b in pairs] == ([2] * 2 if kind in MIX else [4])
    agree(apply, params, pairs, plain, atol=atol)


@pytest.fixture
def no_rows(monkeypatch):
    """Layers with states read a pack as one row, as transformers' own do."""
    monkeypatch.setattr(packed_states, "separated", lambda lm: 0)


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("kind", [*STATES, *MIX])
def test_small_leaks_are_found_too(kind):
    """With the weights that transformers starts from, where Lfm2's is 0.0016 nats."""
    for dtype in (torch.float32,) if kind in SINGLE else (torch.float64, torch.float32):
        root = wrap_for_training(small(kind, dtype, std=0))
        quiet(reader.detect_packing, root)
        assert root.mode == ONE_SEQUENCE


def test_a_leak_and_a_shift_are_each_enough():
    """A model whose rows look at those in front may have the mean of a row alone, and the other way round."""
    small_, large = torch.tensor(1e-9), torch.tensor(1.0)
    bounds = {"most_leak": torch.tensor(1e-5), "most_shift": torch.tensor(1e-4), "plain": torch.tensor(1.0)}
    bounds["twins"] = torch.tensor(0.0)
    assert packing_probe.Found(leak=small_, shift=small_, **bounds).fits()
    assert not packing_probe.Found(leak=large, shift=small_, **bounds).fits()
    assert not packing_probe.Found(leak=small_, shift=large, **bounds).fits()


def test_the_question_changes_the_rows_in_front_and_no_other():
    asked = packing_probe.question(config("Llama"), torch.device("cpu"), POSITIONS)
    odd = asked.pack.seq % 2 == 1  # the rows behind
    changed = asked.pack.tokens != asked.other.tokens
    assert changed[~odd].float().mean() > 0.5 and not changed[odd].any()
    assert asked.single.tokens.tolist() == asked.pack.tokens[asked.pack.seq == 1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PACK)
def test_rounding_is_not_a_leak(kind, dtype):
    floor.require(f"{kind} packs")
    for std in (0, 0.3):
        lm = small(kind, dtype, std=std)
        root = wrap_for_training(lm)
        quiet(reader.detect_packing, root)
        assert root.mode == POSITIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STATES)
def test_layers_with_states_are_packed_in_every_type(kind, dtype):
    floor.require(f"{kind} states")
    for std in (0, 0.3):
        root = wrap_for_training(small(kind, dtype, std=std))
        quiet(reader.detect_packing, root)
        assert root.mode == ROWS


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("kind", ["Qwen3Next", "Mamba2", "Bloom", "RecurrentGemma"])
def test_a_leak_is_found_in_16_bits(kind):
    root = wrap_for_training(small(kind, torch.bfloat16))
    quiet(reader.detect_packing, root)
    assert root.mode == ONE_SEQUENCE


def test_packs_by_hand_are_refused_by_name():
    lm = small("Mpt")
    apply, params = model.bind(lm)
    with pytest.raises(ValueError, match=r"one sequence for MptModel, which mixes .* got 4; cut .*most=1"):
        apply(params, packing.pack(EXP, range(4)))
    with pytest.raises(ValueError, match="expected one sequence for MptModel"):
        apply(params, packing.pack(EXP, range(4), unit=2))
    critic = model.load_critic(small("Mpt"))
    with pytest.raises(ValueError, match="expected one sequence for MptModel"):  # also without bind
        critic(packing.pack(EXP, range(4)))


def test_a_strategy_cuts_by_what_it_was_asked_to_bind():
    """Of several models one is enough; another strategy is another record."""
    st, other = get_fake_strategy(), get_fake_strategy()
    st.bind(small("Llama"))
    assert [b.num_seqs for b in st.shard(EXP, 1000)] == [4]
    st.init(model.load_critic(small("Mpt")), optim.adamw(1e-3))
    assert [b.num_seqs for b in st.shard(EXP, 1000)] == [1] * 4
    assert [b.num_seqs for b in st.shard(EXP, 1000, unit=2)] == [2, 2]
    assert [b.num_seqs for b in other.shard(EXP, 1000)] == [4]
    counted = get_strategy(StrategyConfig(packing_samples=False, micro_train_batch_size=2))
    counted.bind(small("Mpt"))
    assert [b.num_seqs for b in counted.shard(EXP, 1)] == [1] * 4


def test_a_unit_with_an_empty_sequence():
    """A row of one token has no place in a pack; the forward runs for it all the same."""
    lm = small("Mpt")
    calls = []
    lm.transformer.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    apply, params = model.bind(lm)
    exp = packing.supervised([([5], [6, 7]), ([8], [9, 9, 9])])
    for empty in (0, 1):
        short = tree.replace(exp, length=exp.length.clone().index_fill(0, torch.tensor([empty]), 1))
        pack = packing.pack(short, range(2), unit=2)
        calls.clear()
        got = apply(params, pack).logp
        assert len(calls) == 2
        want = apply(params, packing.pack(exp, [1 - empty])).logp
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_words_and_entropies_come_one_after_the_other_too():
    apply, params = model.bind(small("Mpt"), entropy=True)
    exp = tree.replace(EXP, words=EXP.tokens[..., None] % 7 + torch.arange(3))
    whole = apply(params, packing.pack(exp, range(4), unit=4))
    parts = [apply(params, packing.pack(exp, [i])) for i in range(4)]
    for name in ("logp", "entropy", "words_logp"):
        want = torch.cat([getattr(x, name) for x in parts])
        torch.testing.assert_close(getattr(whole, name), want, rtol=0, atol=1e-12)


def test_values_of_a_critic_that_mixes():
    critic = model.load_critic(small("Mpt"))
    nn.init.normal_(critic.head.weight)
    apply, params = model.bind(critic)
    got = apply(params, packing.pack(EXP, range(4), unit=4)).value
    want = torch.cat([apply(params, packing.pack(EXP, [i])).value for i in range(4)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert got.unique().numel() > 4


def test_boundaries_of_states_are_used_where_they_work(monkeypatch):
    """As on a GPU, where kernels read them; the ones that stand in for kernels on a CPU do not."""
    import transformers.models.qwen3_next.modeling_qwen3_next as module

    conv, rule = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule

    def conv_of_packs(x, *args, seq_idx=None, **options):
        if seq_idx is None:
            return conv(x, *args, **options)
        sizes = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return torch.cat([conv(part, *args, **options) for part in x.split(sizes, -1)], -1)

    def rule_of_packs(query, key, value, g, beta, cu_seqlens=None, **options):
        options = {k: x for k, x in options.items() if k in ("initial_state", "output_final_state",
                                                             "use_qk_l2norm_in_kernel")}  # fmt: skip
        if cu_seqlens is None:
            return rule(query, key, value, g=g, beta=beta, **options)
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(sizes, 1) for x in (query, key, value, g, beta)))
        outs = [rule(q, k, v, g=g, beta=b, **options)[0] for q, k, v, g, b in parts]
        return torch.cat(outs, 1), None

    monkeypatch.setattr(module, "causal_conv1d_fn", conv_of_packs)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule_of_packs)
    lm, st = small("Qwen3Next", torch.float32), get_fake_strategy()
    plain = copy.deepcopy(lm)
    root = wrap_for_training(lm)
    quiet(reader.detect_packing, root)
    assert root.mode == BOUNDARIES
    apply, params = quiet(st.bind, lm)
    packs = st.shard(EXP, 1000)
    assert [b.num_seqs for b in packs] == [4]
    agree(apply, params, packs, plain, atol=logp_rounding(plain))


@pytest.mark.parametrize("kind", [*PACK, *STATES, *MIX])
def test_the_head_is_fused_only_where_logits_are_its_output(kind):
    """By values, and on the meta device, where there are none, by whose tensor it is."""
    root = wrap_for_training(small(kind, torch.float32))
    quiet(reader.detect_packing, root)
    assert root.fused == (kind not in CHANGED)
    for dtype in (torch.float32, torch.bfloat16):
        if kind not in READ:  # values, which the meta device does not have
            bare = wrap_for_training(small(kind, dtype).to("meta"))
            quiet(reader.assume_packing, bare)
            assert bare.fused == (kind not in CHANGED)


def halved_after(lm):
    """The head's output written over before it leaves the model."""

    def halved(_, __, out):
        out.logits.mul_(0.5)

    lm.register_forward_hook(halved)


def doubled_before(lm):
    """Other hidden states on their way into the head."""
    lm.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


@pytest.mark.parametrize("change", [halved_after, doubled_before])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_changes_what_enters_or_leaves_its_head_is_seen(change, device):
    lm = small("Llama").to(device)
    change(lm)
    root = wrap_for_training(lm)
    {"cpu": reader.detect_packing, "meta": reader.assume_packing}[device](root)
    assert not root.fused


def test_a_model_that_takes_no_packs_gets_one_sequence_at_a_time():
    """It raises for a pack, as layers do that want whole chunks; alone it is right."""
    lm = small("Llama")

    def only_ones(_, args, inputs):
        if (inputs["position_ids"] == 0).sum() > 1:
            raise RuntimeError("one sequence only")

    lm.model.register_forward_pre_hook(only_ones, with_kwargs=True)
    root = wrap_for_training(lm)
    quiet(reader.detect_packing, root)
    assert (root.mode, root.fused) == (ONE_SEQUENCE, True)


def test_positions_that_do_not_restart_are_found():
    """Nothing leaks then, and a row behind another is still not what it is alone."""
    lm = small("GPT2")

    def counted_on(_, args, inputs):
        ids = inputs["position_ids"]
        return args, inputs | {"position_ids": torch.arange(ids.shape[1])[None]}

    lm.transformer.register_forward_pre_hook(counted_on, with_kwargs=True)
    root = wrap_for_training(lm)
    quiet(reader.detect_packing, root)
    assert root.mode == ONE_SEQUENCE


def test_the_module_is_left_as_it_was():
    lm = small("Gemma3Text", torch.float32)
    lm.register_buffer("count", torch.zeros(()))

    def counted(*_):
        lm.count.add_(1)

    lm.model.register_forward_hook(counted)
    lm.model.layers[1].train()
    root = model.Scorer(lm, rft.Sampling())
    modes = [m.training for m in root.modules()]
    before = {name: x.clone() for name, x in [*root.named_buffers(), *root.named_parameters()]}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    quiet(reader.detect_packing, root)
    assert root.mode == POSITIONS
    assert [m.training for m in root.modules()] == modes and any(modes)
    assert torch.equal(torch.random.get_rng_state(), state)
    after = dict([*root.named_buffers(), *root.named_parameters()])
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert all(p.grad is None for p in root.parameters())


def test_weights_that_are_not_finite_are_not_taken_for_a_leak():
    lm = small("Llama")
    lm.model.norm.weight.data[0] = torch.nan
    root = wrap_for_training(lm)
    reader.detect_packing(root)
    assert (root.mode, root.fused) == (POSITIONS, True)


# ---------- layers that change behind some number of tokens


def whole(name, exp):
    """Log-probs [B, S] of each row alone, by transformers' forward of its whole sequence in a fresh model."""
    out = torch.zeros(exp.tokens.shape, dtype=torch.float64)
    for i in range(len(exp.tokens)):
        row = tree.map(lambda x, i=i: x[i : i + 1], exp)
        out[i] = definition(far(name), row)[0]
    return out


def distinct(sizes):
    """`rows`, without a token twice: where layers choose tokens by scores, equal ones would tie."""
    g = torch.Generator().manual_seed(0)
    drawn = [(torch.randperm(VOCAB - 3, generator=g) + 3).tolist() for _ in sizes]
    return packing.supervised([(x[:a], x[a : a + b]) for x, (a, b) in zip(drawn, sizes)])


LONG_ROWS = distinct([(2, 6), (3, 27), (1, AT - 1), (2, AT - 1), (1, 8), (3, 20)])


def require(name):
    if not hasattr(transformers, f"{name.split()[0]}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@torch.no_grad()
@pytest.mark.parametrize("name", FAR)
def test_rows_on_both_sides_of_a_threshold_are_those_of_each_alone(name):
    """Rows of 8 to 30 tokens, cut as a strategy cuts them: each token's log-prob is transformers' own."""
    require(name)
    floor.require(f"{name} tokens")
    st = get_fake_strategy()
    apply, params = quiet(st.bind, far(name))
    packs = st.shard(LONG_ROWS, 1000)
    got = packing.unpack([apply(params, b).logp for b in packs], packs, LONG_ROWS.tokens)
    torch.testing.assert_close(got.double(), whole(name, LONG_ROWS), rtol=0, atol=5e-5)


def test_every_family_whose_config_names_a_threshold_is_tried():
    """Numbers of tokens that are set in the config, or would be if it were asked for a window."""
    named = ("window", "attention_chunk", "floor", "local_attention", "index_topk", "original_max_position")
    not_tokens = ("pattern", "layers", "use_")
    tried = {name.split()[0] for name in FAR}
    for kind in FAMILIES:
        if not hasattr(transformers, f"{kind}Config"):  # of a later version
            continue
        found = [
            name
            for name, value in vars(config(kind)).items()
            if any(word in name for word in named)
            and not any(word in name for word in not_tokens)
            and isinstance(value, int)
        ]
        assert not found or kind in tried, (kind, found)


@pytest.mark.parametrize("name", ["Phi3 longrope", "Llama4Text floor_scale", "Llama dynamic"])
def test_the_gradient_does_not_depend_on_how_rows_of_such_a_model_are_cut(name):
    grads = []
    for budget, alone in ((1000, False), (30, False), (1000, True)):
        st = get_fake_strategy()
        apply, params = quiet(st.bind, far(name, torch.float64))
        packs = st.shard(LONG_ROWS, budget)
        if alone:
            packs = [packing.pack(LONG_ROWS, [i]) for i in range(len(LONG_ROWS.tokens))]
        logp = packing.unpack([apply(params, b).logp for b in packs], packs, LONG_ROWS.tokens)
        grads.append(torch.autograd.grad(mixed(logp), list(params.values()), allow_unused=True))
    for a, b, c in zip(*grads):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)


def test_a_question_leaves_the_thresholds_as_they_were():
    lm = far("Llama4Text floor_scale")
    before = lm.config.to_dict()
    quiet(reader.detect_packing, wrap_for_training(lm))
    assert lm.config.to_dict() == before
    layers = [m for m in lm.modules() if hasattr(m, "floor_scale")]
    assert [m.floor_scale for m in layers] == [AT, AT]
    with packing_probe.lowered(lm, 3):
        assert (lm.config.floor_scale, layers[0].floor_scale) == (3, 3)
    assert (lm.config.floor_scale, layers[0].floor_scale) == (AT, AT)


@torch.no_grad()
def test_a_row_that_was_sampled_is_scored_as_it_was_drawn():
    """Behind a switch of rotary factors: each token by the factors of what stood before it."""
    exp = tree.replace(LONG_ROWS, old_logp=torch.where(LONG_ROWS.mask, -1.0, 0.0))
    lm = far("Phi3 longrope")
    want = torch.zeros(exp.tokens.shape)
    for i, n in enumerate(exp.length.tolist()):
        for t in range(1, n):
            z = lm(input_ids=exp.tokens[i : i + 1, :t], use_cache=False).logits[0, -1]
            want[i, t] = z.log_softmax(-1)[exp.tokens[i, t]]
    st = get_fake_strategy()
    apply, params = quiet(st.bind, lm)
    packs = st.shard(exp, 1000)
    got = packing.unpack([apply(params, b).logp for b in packs], packs, exp.tokens)
    torch.testing.assert_close(got, torch.where(exp.mask, want, 0), rtol=0, atol=5e-5)
    text = whole("Phi3 longrope", exp)
    crossed = exp.mask & (torch.arange(exp.tokens.shape[1]) <= AT) & (exp.length > AT + 1)[:, None]
    assert (got - text)[crossed].abs().mean() > 0.01  # the two differ, before the switch alone
    behind = exp.mask & (torch.arange(exp.tokens.shape[1]) > AT)
    torch.testing.assert_close(got[behind].double(), text[behind], rtol=0, atol=5e-5)


DROPOUT = {
    "OPT": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "layerdrop": 0.3},
    "GPT2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "Llama": {"attention_dropout": 0.1},
    "Bloom": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "Falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "Gemma2": {"attention_dropout": 0.1},
}


def count(lm):
    """Calls of the first block's first norm, as they come."""
    calls = []
    inside = (m for name, m in lm.named_modules() if ".0." in name)
    norm = next(m for m in inside if "norm" in type(m).__name__.lower())
    norm.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("kind", DROPOUT)
def test_no_dropout_under_checkpointing(kind):
    """Two calls are equal to the bit, gradients are those without, and the forward does run again."""
    packs = [packing.pack(EXP, [i]) for i in range(4)]
    grads, counts = [], []
    for checkpointed in (False, True):
        lm = small(kind, **DROPOUT[kind]).train()
        lm = model.load(lm, gradient_checkpointing=checkpointed)
        apply, params = quiet(model.bind, lm)
        calls = count(lm)
        first, second = (torch.cat([apply(params, b).logp for b in packs]) for _ in range(2))
        assert torch.equal(first, second)
        calls.clear()
        loss = mixed(torch.cat([apply(params, b).logp for b in packs]))
        grads.append(torch.autograd.grad(loss, list(params.values())))
        counts.append(len(calls))
        again = torch.cat([apply(params, b).logp for b in packs])  # also after a backward
        assert torch.equal(first, again)
    assert counts == [4, 8]
    for a, b in zip(*grads):
        assert torch.equal(a, b)


def test_a_checkpointed_copy_is_silent_by_itself():
    """Its layers, not those of the model that it was copied from."""
    lm = model.load(small("OPT", **DROPOUT["OPT"]), gradient_checkpointing=True)
    model.bind(lm)
    twin = copy.deepcopy(lm)
    layer = twin.model.decoder.layers[0]
    assert layer._gradient_checkpointing_func.layer is layer
    apply, params = model.bind(twin)
    b = packing.pack(EXP, [0])
    assert torch.equal(apply(params, b).logp, apply(params, b).logp)


def test_no_dropout_in_an_audio_tower_that_is_checkpointed():
    from transformers import Qwen2AudioEncoder, Qwen2AudioEncoderConfig

    from rft_fn.model.dropout import disable_dropout

    config = Qwen2AudioEncoderConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=16, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1,
        encoder_layerdrop=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    tower = Qwen2AudioEncoder(config).train()
    tower.gradient_checkpointing_enable({"use_reentrant": False})
    disable_dropout(tower)
    x = torch.randn(1, 8, 32)
    first, second = (tower(x).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()


def test_checkpointing_of_another_kind_is_refused():
    class Old(nn.Module):
        gradient_checkpointing = True
        _gradient_checkpointing_func = None

        def get_output_embeddings(self):
            return None

    with pytest.raises(ValueError, match=r"gradient_checkpointing: .* Old has none; load it without"):
        model.bind(Old())


def loss_fn(out, b):
    return -out.logp * b.adv


def moved(st, lm, exp, *, unit=1):
    """Weights after one step, and the packs' sizes; `eps` makes no step of a gradient's rounding."""
    apply, state = quiet(st.init, lm, optim.adamw(1e-2, eps=1e-3))
    packs = st.shard(exp, 1000, unit=unit)
    grads, metrics = st.grad(state, apply, loss_fn, packs)
    state, more = st.update(state, grads)
    return {
        "packs": [b.num_seqs for b in packs],
        "norm": float(rft.metric.results(more)["grad/norm"]),
        "loss": float(rft.metric.results(metrics)["loss"]),
        **{name: x.clone() for name, x in st.export(state)},
    }


def uneven():
    """Three pairs over two processes, one with an empty side."""
    exp = rows([(2, 5), (3, 7), (1, 4), (2, 2), (1, 6), (1, 3)])
    length = exp.length.clone()
    length[3] = 1
    return tree.replace(exp, length=length, adv=torch.where(exp.mask, exp.tokens % 5 - 2.0, 0))


def crossing():
    """Rows of which some were sampled, and some of each have more tokens than the switch."""
    exp = distinct([(2, 6), (3, 27), (1, 8), (2, 20)])
    sampled = torch.tensor([True, True, False, False])[:, None] & exp.mask
    return tree.replace(exp, old_logp=sampled * -1.0, adv=torch.where(exp.mask, exp.tokens % 5 - 2.0, 0))


SHARDED = {"fsdp2": {}, "zero1": {"zero_stage": 1}, "zero3": {"zero_stage": 3}}


ALONE = {"FalconH1": [6], "Mpt": [2, 2, 2]}  # the packs of each on one process


def two_processes(rank, folders):
    """What models with states, and that mix, do on each backend, from folders without memory for them."""
    out = {}
    for kind, folder in folders.items():
        for name, options in SHARDED.items():
            st = get_strategy(StrategyConfig(**options))
            lm = model.load(folder, dtype=torch.float32, meta=True)
            out[kind, name] = moved(st, lm, uneven(), unit=2)
    st = get_strategy(StrategyConfig())
    out["longrope"] = moved(st, far("Phi3 longrope"), crossing())
    try:
        st = get_strategy(StrategyConfig(sp_size=2))
        quiet(st.init, small("FalconH1", torch.float32), optim.adamw(1e-2))
    except ValueError as error:
        out["sp"] = str(error)
    return out


@pytest.fixture(scope="module")
def mixer(tmp_path_factory):
    folders = {}
    for kind in ALONE:
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        small(kind, torch.float32).save_pretrained(folders[kind])
    return folders, ranks.run(2, "test_probe:two_processes", folders)


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("name", SHARDED)
def test_every_backend_trains_a_model_with_states_or_that_mixes_alike(mixer, name, kind):
    folders, both = mixer
    want = moved(get_fake_strategy(), model.load(folders[kind]), uneven(), unit=2)
    assert want["packs"] == ALONE[kind]
    assert sorted(out[kind, name]["packs"] for out in both) == ([[2, 2]] * 2 if kind == "Mpt" else [[2], [4]])
    for got in (out[kind, name] for out in both):
        assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
        for n, x in want.items():
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(got[n], x, rtol=0, atol=2e-4, msg=lambda m, n=n: f"{n}: {m}")


def test_processes_run_equally_many_forwards_where_some_rows_cross_a_switch(mixer):
    want = moved(get_fake_strategy(), far("Phi3 longrope"), crossing())
    for out in mixer[1]:
        got = out["longrope"]
        assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4, abs=1e-6)


def test_tokens_of_a_model_that_mixes_are_not_shared(mixer):
    for out in mixer[1]:
        assert "sp_size: expected 1 for FalconH1" in out["sp"]
