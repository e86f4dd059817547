"""Layers with states in packs: transformers' own, which read each sequence of a pack as a row of a batch."""

import copy
import re
import warnings
from typing import Any

import media_checks
import pytest
import torch
import transformers
from families import FAMILIES, VOCAB, small
from tiny import definition, mixed

from rft_fn import model, packing, tree
from rft_fn.model import packed_states, packing_probe, reader
from rft_fn.model.bind import wrap_for_training
from rft_fn.model.blocks import compile_blocks
from rft_fn.model.bounds import COUNTS, SequenceBounds
from rft_fn.model.forward import BOUNDARIES, MASKED_ROWS, POSITIONS, ROWS
from rft_fn.strategy import get_fake_strategy

# By what their layers compute in where all else is float64: log-probs, and gradients relative to the largest.
EXACT = ("Lfm2", "Lfm2Moe", "Lfm3", "MiniMax", "Rwkv")
SINGLE = (
    "BailingHybrid", "Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "InklingText", "Jamba",
    "KimiLinear", "LaraMini", "Mamba", "Mamba2", "NemotronH", "OlmoHybrid", "Qwen3Next", "Qwen3_5MoeText",
    "Qwen3_5Text", "Qwen4ExpText", "RecurrentGemma", "Zamba", "Zamba2",
)  # fmt: skip
BOUND = dict.fromkeys(EXACT, 1e-10) | dict.fromkeys(SINGLE, 5e-6)


def require(kind):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")


def rows(sizes, seed=0):
    """An Experience of rows of (prompt, response) tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(3, VOCAB, (n,), generator=g).tolist()

    return packing.supervised([(draw(a), draw(b)) for a, b in sizes])


# longer than a chunk of 64 and than windows of 64, of one length and of lengths that need two batches
EXP = rows([(4, 30), (9, 70), (1, 1), (2, 32), (6, 47), (1, 9)])


def bound(lm, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.bind(lm, **options)


def root_of(apply: Any) -> Any:
    return apply.root


def scored(apply, params, packs):
    """Log-probs [B, S] and the gradients of a mixture of them."""
    logp = packing.unpack([apply(params, b).logp for b in packs], packs, EXP.tokens)
    grads = torch.autograd.grad(mixed(logp), list(params.values()), allow_unused=True)
    return logp, dict(zip(params, grads))


def agree(got, want, atol):
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=atol)
    scale = max(float(g.abs().max()) for g in want[1].values() if g is not None)
    for name, g in got[1].items():
        assert (g is None) == (want[1][name] is None), name
        if g is not None:
            assert float((g - want[1][name]).abs().max()) <= atol * scale, name


@pytest.mark.parametrize("kind", BOUND)
def test_a_pack_is_its_rows(kind):
    """Log-probs and gradients of one pack are those of transformers' model for each row alone."""
    require(kind)
    lm = small(kind)
    plain = copy.deepcopy(lm)
    apply, params = bound(lm)
    assert root_of(apply).mode in (ROWS, MASKED_ROWS)  # the latter in older versions of transformers
    packs = [packing.pack(EXP, range(len(EXP.length)))]
    own = dict(plain.named_parameters())
    want = definition(plain, EXP)
    wants = torch.autograd.grad(mixed(want), [own[name] for name in params], allow_unused=True)
    agree(scored(apply, params, packs), (want, dict(zip(params, wants))), BOUND[kind])


# responses to two prompts, and turns that begin with a whole row of another
ALIKE = packing.supervised(
    [
        (prompt, [*begun, *(3 + (7 * k + 5 * j) % 50 for j in range(2 + 9 * k))])
        for prompt, begun in (([*range(3, 33)], []), ([*range(5, 50)], [9, 8, 7] * 12))
        for k in range(4)
    ]
)


def exact_norms(lm):
    """Norms that compute in the type of the model, where transformers has float32."""
    for m in lm.modules():
        if type(m).__name__.endswith("RMSNorm"):
            m.forward = lambda x, m=m: m.weight * x * (x.square().mean(-1, True) + m.variance_epsilon).rsqrt()
    return lm


def shared_and_not(lm, atol):
    """Compare ALIKE in one pack as a model reads it that may share tokens, and as one that may not."""
    pack = packing.pack(ALIKE, range(8))
    found, computed = [], []
    for share in (True, False):
        apply, params = bound(copy.deepcopy(lm), share_prefixes=share)
        before = COUNTS.computed
        logp = packing.unpack([apply(params, pack).logp], [pack], ALIKE.tokens)
        computed.append(COUNTS.computed - before)
        grads = torch.autograd.grad(mixed(logp), list(params.values()), allow_unused=True)
        found.append((logp, dict(zip(params, grads))))
    agree(*found, atol)
    torch.testing.assert_close(found[0][0], definition(lm, ALIKE), rtol=0, atol=atol)
    return computed


@pytest.mark.parametrize("kind", ["Bamba", "Jamba", "KimiLinear", "Qwen3_5Text", "Zamba2"])
def test_what_has_no_state_is_computed_once_for_rows_that_begin_alike(kind, monkeypatch):
    """Log-probs and gradients stay: layers with states read every row whole."""
    require(kind)
    monkeypatch.setattr(packing_probe, "rounds", lambda *_: False)  # in float64 norms round the gradient
    few, every = shared_and_not(small(kind), BOUND[kind])
    assert few < 0.6 * every == 0.6 * sum(ALIKE.length - 1)


def test_in_float64_throughout_sharing_changes_thirteen_digits_at_most():
    few, every = shared_and_not(exact_norms(small("Lfm2")), 1e-12)
    assert few < 0.6 * every


def test_a_model_of_layers_with_states_alone_shares_nothing():
    """Neither does one that masks by windows, also where they are longer than the probe's rows."""
    for kind in ("Mamba", "RecurrentGemma"):
        assert not root_of(bound(small(kind, torch.float32))[0]).shared
    assert root_of(bound(small("Jamba", torch.float32))[0]).shared


def test_every_family_with_a_layer_that_carries_states_is_tried():
    """Families that `families` holds, and that mix sequences, are here or known to be of another kind."""
    of_another_kind = {"BioGpt", "Bloom", "Mpt", "XGLM", "xLSTM", "Falcon", "StableLm"}
    for kind in set(FAMILIES) - set(BOUND):
        lm = small(kind, torch.float32)
        assert kind in of_another_kind or not packed_states.separated(lm), kind


@pytest.mark.parametrize("kind", ["Qwen3_5Text", "Jamba", "GraniteMoeHybrid"])
def test_a_checkpointed_layer_runs_again_with_the_boundaries_of_its_own_pack(kind):
    """Two forwards before the first backward: the second pack's boundaries are not those of the first."""
    found = []
    for checkpointed in (False, True):
        apply, params = bound(model.load(small(kind), gradient_checkpointing=checkpointed))
        found.append(scored(apply, params, [packing.pack(EXP, x) for x in ([0, 1, 2], [3, 4, 5])]))
    agree(found[1], found[0], 1e-12)


def test_layers_are_as_they_were_outside_of_a_pack():
    """Of one sequence, with a cache, and in a copy of the model."""
    lm = small("Bamba")
    plain = copy.deepcopy(lm)
    bound(lm)
    ids = EXP.tokens[:2, :9]
    for each in (lm, copy.deepcopy(lm)):
        for options in ({"use_cache": False}, {"use_cache": True}):
            torch.testing.assert_close(
                each(ids, **options).logits, plain(ids, **options).logits, rtol=0, atol=1e-12
            )
    twin = copy.deepcopy(lm)
    mixers = [m for m in twin.modules() if hasattr(m, "rft_separated")]
    assert mixers and mixers[0] is not next(m for m in lm.modules() if hasattr(m, "rft_separated"))
    assert type(plain.model.layers[0].mamba).__name__ == "BambaMixer"  # other models keep their class
    packed_states.joined(twin)
    assert not any(hasattr(m, "rft_separated") for m in twin.modules())


def test_asking_twice_gives_the_same_mode():
    root = wrap_for_training(small("Qwen3_5Text", torch.float32))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.detect_packing(root)
        assert root.mode == ROWS


def test_attention_that_is_not_looked_up_gets_a_mask():
    """Layers with states keep apart all the same."""
    lm = small("Qwen3Next")
    plain = copy.deepcopy(lm)
    lm.config._attn_implementation = "eager"
    apply, params = bound(lm)
    assert root_of(apply).mode == MASKED_ROWS
    logp = apply(params, packing.pack(EXP, range(6))).logp
    got = packing.unpack([logp], [packing.pack(EXP, range(6))], EXP.tokens)
    torch.testing.assert_close(got, definition(plain, EXP), rtol=0, atol=5e-6)


def test_no_mask_of_all_pairs_is_made(monkeypatch):
    """Neither for attention that takes no keywords: its memory would grow with the square of a pack."""
    lm = small("Qwen3_5Text")
    apply, params = bound(lm)
    monkeypatch.setattr(SequenceBounds, "same", property(lambda self: pytest.fail("a [T, T] mask")))
    masks = []

    def heard(_, args, inputs):
        masks.append(inputs["attention_mask"])

    lm.model.layers[1].self_attn.register_forward_pre_hook(heard, with_kwargs=True)
    apply(params, packing.pack(EXP, range(6)))
    assert masks == [None]


def test_models_without_such_layers_are_asked_no_more_than_before():
    lm = small("Llama")
    calls = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    apply, _ = bound(lm)
    assert root_of(apply).mode == POSITIONS and len(calls) == 4


def test_a_compiled_model_packs_them_too():
    lm = small("Qwen3_5Text", torch.float32, num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    apply, params = bound(lm)
    pack = packing.pack(EXP, range(6))
    want = apply(params, pack).logp
    assert compile_blocks(root_of(apply), backend="eager") == 2
    torch.testing.assert_close(apply(params, pack).logp, want, rtol=0, atol=1e-5)
    other = packing.pack(EXP, [1, 2])
    torch.testing.assert_close(apply(params, other).logp, want[packing_places([1, 2])], rtol=0, atol=1e-5)


def packing_places(members):
    """The places in the pack of all rows of the tokens of some."""
    sizes = [n - 1 for n in EXP.length.tolist()]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return torch.cat([torch.arange(starts[i], starts[i] + sizes[i]) for i in members])


def test_batches_waste_at_most_their_half():
    bounds = SequenceBounds([5, 100, 60, 3, 50, 49, 1])
    assert bounds.batches == [[1, 2, 4], [5], [0, 3], [6]]
    assert sorted(i for batch in bounds.batches for i in batch) == list(range(7))


def test_each_process_calls_a_layer_equally_often_where_a_call_gathers_its_weights():
    """Under ZeRO 3, whatever the lengths of its sequences."""
    lm = small("Mamba")
    apply, params = bound(lm)
    pack = packing.pack(EXP, range(6))
    calls = []
    mixer = lm.backbone.layers[0].mixer
    mixer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    want = apply(params, pack).logp
    assert len(calls) == 4
    for p in mixer.parameters():
        p.ds_id = 0
    calls.clear()
    torch.testing.assert_close(apply(params, pack).logp, want, rtol=0, atol=5e-6)
    assert len(calls) == 1


def test_keywords_of_kernels_come_before_rows(monkeypatch):
    """On a GPU with causal-conv1d and flash-linear-attention a pack is one row, without padding.

    A contract: it has not been run with the kernels themselves. `seq_idx` [1, T] i32 numbers the sequences,
    and `cu_seq_lens_q` [K + 1] i32 are their starts and the end.
    """
    import transformers.models.lfm2.modeling_lfm2 as module

    asked = []
    plain = module.causal_conv1d_fn

    def kernel(x, *args, seq_idx=None, **options):
        if seq_idx is None:
            return plain(x, *args, **options)
        asked.append((seq_idx, options.get("cu_seq_lens_q")))
        sizes = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return torch.cat([plain(part, *args, **options) for part in x.split(sizes, -1)], -1)

    monkeypatch.setattr(module, "causal_conv1d_fn", kernel)
    lm = small("Lfm2")
    plainly = copy.deepcopy(lm)
    apply, params = bound(lm)
    assert root_of(apply).mode == BOUNDARIES
    assert not any(hasattr(m, "rft_separated") for m in lm.modules())
    pack = packing.pack(EXP, range(6))
    asked.clear()
    got = packing.unpack([apply(params, pack).logp], [pack], EXP.tokens)
    torch.testing.assert_close(got, definition(plainly, EXP), rtol=0, atol=1e-10)
    seq_idx, starts = asked[0]
    assert seq_idx.dtype == torch.int32
    assert torch.equal(seq_idx[0].bincount(), EXP.length - 1)
    if starts is not None:  # some versions of transformers drop it on the way
        assert starts.dtype == torch.int32
        assert torch.equal(starts.diff(), (EXP.length - 1).int())


def test_a_strategy_packs_them():
    st = get_fake_strategy()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        st.bind(small("Mamba2"))
    assert [b.num_seqs for b in st.shard(EXP, 1000)] == [6]
    assert not [w for w in heard if re.search("one at a time|mask", str(w.message))]


def test_values_of_a_critic():
    critic = model.load_critic(small("Qwen3_5Text"))
    torch.nn.init.normal_(critic.head.weight)
    apply, params = bound(critic)
    got = apply(params, packing.pack(EXP, range(6))).value
    each: list[Any] = [apply(params, packing.pack(EXP, [i])).value for i in range(6)]
    want = torch.cat(each)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)


def test_a_model_that_sees():
    """Images and text in one pack of a hybrid."""
    got = media_checks.packed("Qwen3.5")
    assert got.value <= 1e-10 and got.note == ""


def test_an_empty_row_of_a_unit():
    apply, params = bound(small("Mamba2"))
    short = tree.replace(EXP, length=EXP.length.clone().index_fill(0, torch.tensor([2]), 1))
    got = apply(params, packing.pack(short, range(6))).logp
    want = torch.cat([apply(params, packing.pack(EXP, [i])).logp for i in (0, 1, 3, 4, 5)])
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
