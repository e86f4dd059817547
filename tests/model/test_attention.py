"""Packed attention: each sequence of a pack gets exactly what it gets alone, without a [T, T] mask."""

import copy
import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import definition, mixed
from torch import nn

import rft_fn as rft
from rft_fn import model, packing, tree
from rft_fn.engine.hf.engine import hf
from rft_fn.model import packed_attention, reader
from rft_fn.model.attention import SDPA, sdpa_attention, turn_on
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.packed_attention import Device
from rft_fn.strategy import host

LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=12)
VOCAB = 60


@pytest.fixture(autouse=True)
def _said():
    """Each test hears each message anew."""
    packed_attention.warn_once.cache_clear()


def reference(q, k, v, sizes, scale, sinks=(-math.inf,) * 4):
    """The definition in float64.

    For each token a softmax over the tokens of its sequence up to itself, and the sink of its head, which has
    no value.
    """
    q, k, v = (x.detach().double().numpy() for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[2]))
    group = q.shape[1] // k.shape[1]
    start = 0
    for size in sizes:
        for t in range(start, start + size):
            for h in range(q.shape[1]):
                s = scale * k[start : t + 1, h // group] @ q[t, h]
                top = max(s.max(), sinks[h])
                p = np.exp(s - top)
                out[t, h] = p / (p.sum() + math.exp(sinks[h] - top)) @ v[start : t + 1, h // group]
        start += size
    return out


def qkv(sizes, heads=4, kv_heads=2, dim=8, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def make(h):
        return torch.randn(sum(sizes), h, dim, generator=g, dtype=torch.float64).to(dtype)

    return make(heads), make(kv_heads), make(kv_heads)


@settings(max_examples=30, deadline=None)
@given(sizes=LENGTHS, kv_heads=st.sampled_from([1, 2, 4]), scale=st.sampled_from([None, 0.5, 2.0]))
def test_by_sequence_is_the_definition(sizes, kv_heads, scale):
    q, k, v = qkv(sizes, kv_heads=kv_heads)
    got = packed_attention.by_sequence(q, k, v, SequenceBounds(sizes), scale=scale)
    want = reference(q, k, v, sizes, scale or 8**-0.5)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(sizes=LENGTHS, kv_heads=st.sampled_from([1, 4]), sink=st.sampled_from([-40.0, -1.0, 0.0, 2.0, 40.0]))
def test_sinks_are_in_the_denominator(sizes, kv_heads, sink):
    """Also one that is larger than every score, and one that is nothing beside them."""
    q, k, v = qkv(sizes, kv_heads=kv_heads)
    sinks = sink + torch.arange(4, dtype=torch.float64) / 7
    got = packed_attention.by_sequence(q, k, v, SequenceBounds(sizes), sinks=sinks)
    want = reference(q, k, v, sizes, 8**-0.5, sinks.tolist())
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [None, torch.arange(4.0) / 7])
def test_16_bits_are_computed_in_float32_on_a_cpu(dtype, sinks):
    """To the bit what float32 gives, rounded once, forward and backward."""
    sizes = [5, 1, 9, 4]
    narrow = [x.requires_grad_() for x in qkv(sizes, dtype=dtype)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    sinks = None if sinks is None else sinks.to(dtype)
    got = packed_attention.by_sequence(*narrow, SequenceBounds(sizes), sinks=sinks)
    want = packed_attention.by_sequence(
        *wide, SequenceBounds(sizes), sinks=None if sinks is None else sinks.float()
    )
    up = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got.backward(up)
    want.backward(up.float())
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    for x, y in zip(narrow, wide):
        assert torch.equal(x.grad, y.grad.to(dtype))


def test_a_sequence_by_itself_has_the_same_bits_in_bfloat16_as_in_a_pack():
    """Processes share the sequences of a batch, so one may have a pack of one."""
    q, k, v = qkv([5, 7], dtype=torch.bfloat16)
    packs = packed_attention.by_sequence(q, k, v, SequenceBounds([5, 7]))
    module = nn.Module()
    module.num_key_value_groups = 2
    for start, end in ((0, 5), (5, 12)):
        alone = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        got, _ = sdpa_attention(module, *alone, None)
        assert got.dtype == torch.bfloat16 and torch.equal(got[0], packs[start:end])


@pytest.mark.parametrize("sizes", [[3, 1, 5], [4, 2, 4, 4, 2, 1, 1, 4]])
def test_gradients_of_sinks_are_those_of_differences(sizes):
    sinks = torch.linspace(-1, 1, 2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*qkv(sizes, heads=2, kv_heads=1, dim=3), sinks)]

    def attend(q, k, v, sinks):
        return packed_attention.by_sequence(q, k, v, SequenceBounds(sizes), sinks=sinks)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("sizes", [[3, 1, 5], [4, 2, 4, 4, 2, 1, 1, 4]])
def test_gradients_of_by_sequence_are_those_of_differences(sizes):
    """Both ways: one call a sequence, and one a length."""
    packs = SequenceBounds(sizes)
    assert (packs.groups is None) == (len(sizes) == 3)
    inputs = [x.requires_grad_() for x in qkv(sizes, heads=2, kv_heads=1, dim=3)]
    assert torch.autograd.gradcheck(lambda *x: packed_attention.by_sequence(*x, packs), inputs)


@pytest.mark.parametrize("sizes, apart", [([3, 3, 5, 5], False), ([3, 5, 3, 5], True), ([2, 2, 2], False)])
def test_sequences_of_one_length_are_one_call_and_neighbours_are_not_moved(monkeypatch, sizes, apart):
    calls = []
    sdpa = packed_attention.scaled_dot_product_attention
    monkeypatch.setattr(
        packed_attention, "scaled_dot_product_attention", lambda *x, **o: calls.append(1) or sdpa(*x, **o)
    )
    packs = SequenceBounds(sizes)
    q, k, v = qkv(sizes)
    got = packed_attention.by_sequence(q, k, v, packs)
    assert len(calls) == len(set(sizes)) and (packs.groups is not None) == apart
    np.testing.assert_allclose(got.numpy(), reference(q, k, v, sizes, 8**-0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [[3, 1, 5], [4, 2, 4, 4, 2, 1, 1, 4]])
@pytest.mark.parametrize("value", [7.0, math.nan, math.inf])
def test_what_one_sequence_holds_changes_no_bit_of_another(sizes, value):
    """Neither outputs nor gradients."""

    def both(q, k, v):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = packed_attention.by_sequence(*inputs, SequenceBounds(sizes))
        return [out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out).cos()).sum(), inputs)]

    q, k, v = qkv(sizes, dtype=torch.float32)
    before = both(q, k, v)
    first = sizes[0]
    for x in (q, k, v):
        x[first : first + sizes[1]] = value
    other = torch.ones(sum(sizes), dtype=torch.bool)
    other[first : first + sizes[1]] = False
    after = both(q, k, v)
    assert all(torch.equal(a[other], b[other]) for a, b in zip(before, after))
    assert not torch.equal(before[0][~other], after[0][~other])


def _attend(q, k, v, cu_q, cu_k, max_q, max_k, scale):
    """The kernels' contract in torch, from the boundaries only: heads of q share those of k."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert torch.equal(cu_q, cu_k)
    sizes = cu_q.diff().tolist()
    assert max_q == max_k == max(sizes)
    assert q.shape[0] == cu_q[-1]
    assert q.shape[1] % k.shape[1] == 0
    return torch.from_numpy(reference(q, k, v, sizes, scale or q.shape[-1] ** -0.5))


def torch_now(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert tuple(window_size) == (-1, 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    return _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert tuple(window_size) == (-1, 0)
    return _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)


def flash(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False,
):  # fmt: skip
    assert causal
    assert dropout_p == 0
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)


def flash_with_lse(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False,
):  # fmt: skip
    assert causal
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale), None


@each("f", [torch_now, torch_2_11, flash, flash_with_lse])
@each("kv_heads", [1, 2, 4])
@each("scale", [None, 0.3])
def test_every_kernel_is_called_as_its_version_wants_it(f, kv_heads, scale):
    sizes = [3, 1, 5, 2]
    q, k, v = qkv(sizes, kv_heads=kv_heads)
    got = packed_attention.by_varlen(f, q, k, v, SequenceBounds(sizes), scale=scale)
    np.testing.assert_allclose(got, reference(q, k, v, sizes, scale or 8**-0.5), rtol=0, atol=1e-12)


def test_the_installed_torch_has_the_keywords_that_are_looked_for():
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    knows = list(inspect.signature(varlen_attn).parameters)
    assert knows[:7] == list(inspect.signature(torch_now).parameters)[:7]
    assert {"window_size", "scale"} <= set(knows)


@each("begin", [turn_on, lambda lm: hf(lm, model.load_tokenizer("tiny"), batch=1)])
def test_no_new_length_waits_for_a_plan_of_cudnn(begin):
    """Training and sampling take cuDNN out of what sdpa may choose from."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    begin(model.load("tiny"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


ALL = frozenset({"varlen", "flash2", "flash3"})


@pytest.mark.parametrize(
    ("device", "dtype", "head", "kernel", "why"),
    [
        (Device("cpu"), torch.float32, 64, "sequence", None),
        (Device("cpu", installed=ALL), torch.bfloat16, 64, "sequence", None),
        (Device("cuda", (9, 0), ALL), torch.bfloat16, 128, "flash3", None),
        (Device("cuda", (8, 0), ALL), torch.float16, 128, "varlen", None),
        (Device("cuda", (10, 0), ALL), torch.bfloat16, 64, "varlen", None),
        (Device("cuda", (9, 0), frozenset({"varlen"})), torch.bfloat16, 256, "varlen", None),
        (Device("cuda", (8, 9), frozenset({"flash2"})), torch.bfloat16, 64, "flash2", None),
        (Device("cuda", (8, 0), frozenset({"flash3"})), torch.bfloat16, 64, "sequence", "neither"),
        (Device("cuda", (9, 0)), torch.bfloat16, 64, "sequence", "neither"),
        (Device("cuda", (9, 0), ALL), torch.float32, 64, "sequence", "this is torch.float32"),
        (Device("cuda", (7, 5), ALL), torch.float16, 64, "sequence", "CUDA 8.0, this is cuda \\(7, 5\\)"),
        (Device("cuda", (9, 0), ALL), torch.bfloat16, 264, "sequence", "these are of 264"),
        (Device("cuda", (9, 0), ALL), torch.bfloat16, 90, "sequence", "these are of 90"),
        (Device("mps"), torch.float16, 64, "sequence", "this is mps"),
    ],
)
def test_choose(device, dtype, head, kernel, why):
    got, reason = packed_attention.choose(device, dtype, head)
    assert got == kernel
    assert reason is None if why is None else re.search(why, reason)


def test_the_chosen_kernel_is_the_one_that_runs(monkeypatch):
    q, k, v = qkv([2, 3])
    called = []
    monkeypatch.setattr(
        packed_attention, "_kernels", lambda: {"varlen": lambda *x, **_: called.append(x) or x[0]}
    )
    monkeypatch.setattr(packed_attention, "choose", lambda *_: ("varlen", None))
    assert packed_attention.packed(q, k, v, SequenceBounds([2, 3])) is called[0][0]
    with pytest.warns(UserWarning, match="heads of 8 for keys, of 4 for values"):
        packed_attention.packed(q, k, v[..., :4], SequenceBounds([2, 3]))
    monkeypatch.setattr(packed_attention, "choose", lambda *_: ("sequence", "it is too old"))
    with pytest.warns(UserWarning, match="one sdpa for each sequence: it is too old"):
        packed_attention.packed(q, k, v, SequenceBounds([2, 3]))


@pytest.fixture
def deterministic():
    """Torch as it is with the option `deterministic`."""
    with host.deterministic_algorithms():
        yield


@pytest.mark.usefixtures("deterministic")
def test_the_gradient_of_flash_attention_follows_torch(monkeypatch):
    """flash-attn is told, torch's own kernel reads the mode, and a flash-attn that cannot is not taken."""
    q, k, v = qkv([2, 3])
    told = []

    def flash2(q, k, v, *cu, softmax_scale=None, causal=False, deterministic=False):
        told.append(deterministic)
        return q

    def flash2_before(q, k, v, *cu, softmax_scale=None, causal=False):
        return q

    monkeypatch.setattr(packed_attention, "choose", lambda *_: ("flash2", None))
    monkeypatch.setattr(packed_attention, "_kernels", lambda: {"flash2": flash2})
    assert packed_attention.packed(q, k, v, SequenceBounds([2, 3])) is q
    monkeypatch.setattr(packed_attention, "_kernels", lambda: {"flash2": flash2_before})
    with pytest.warns(
        UserWarning, match="one sdpa for each sequence: the gradient of this flash-attn is not"
    ):
        assert packed_attention.packed(q, k, v, SequenceBounds([2, 3])) is not q
    torch.use_deterministic_algorithms(False)
    assert packed_attention.packed(q, k, v, SequenceBounds([2, 3])) is q
    monkeypatch.setattr(packed_attention, "_kernels", lambda: {"flash2": flash2})
    packed_attention.packed(q, k, v, SequenceBounds([2, 3]))
    assert told == [True, False]


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCAB, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip


def small(kind, dtype=torch.float64, **changes):
    """A small model of a kind of transformers' with weights that make its log-probs differ."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES | {"num_key_value_heads": 2} | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config)
        for p in lm.parameters():
            mean = float(p.dim() == 1)  # of norms
            p.data.normal_(mean, 0.3)
    return lm.to(dtype).eval()


def rows(lengths, seed=0):
    """An Experience of rows of `lengths` tokens + 1, so that they take `lengths` places in a pack."""
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(3, VOCAB, (n,), generator=g).tolist()

    return packing.supervised([(draw(1), draw(n)) for n in lengths])


def padded(lm, exp):
    """The same by one padded batch."""
    seen = (torch.arange(exp.tokens.shape[1]) < exp.length[:, None]).long()
    z = lm(input_ids=exp.tokens, attention_mask=seen, use_cache=False).logits.log_softmax(-1)
    out = torch.zeros(exp.tokens.shape, dtype=z.dtype)
    out[:, 1:] = z[:, :-1].gather(-1, exp.tokens[:, 1:, None])[..., 0]
    return torch.where(exp.mask, out, 0)


def packed_logp(apply, params, exp, tail=0):
    pack = packing.pack(exp, range(len(exp.length)))
    size = len(pack.tokens)
    logp = apply(params, packing.pad(pack, size + tail)).logp
    assert not logp[size:].any()
    return packing.unpack([logp[:size]], [pack], exp.tokens)


def agree(lm, exp, atol, tail=0, references=(definition, padded)):
    """Log-probs and parameter gradients of the pack are those of the rows."""
    plain = copy.deepcopy(lm)  # from before the model was bound
    apply, params = model.bind(lm)
    got = packed_logp(apply, params, exp, tail)
    grads = torch.autograd.grad(mixed(got), list(params.values()))
    for ref in references:
        want = ref(plain, exp)
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
        own = dict(plain.named_parameters())
        for (name, g), w in zip(
            zip(params, grads), torch.autograd.grad(mixed(want), [own[n] for n in params])
        ):
            scale = float(w.abs().max()) + 1
            torch.testing.assert_close(
                g, w, rtol=0, atol=30 * atol * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_layer_calls_the_kernel_with_the_same_boundaries(monkeypatch, checkpointing):
    """One tensor of boundaries a pack, also when layers are computed again; values are those of the rows."""
    lengths = [5, 1, 9, 3]
    seen = []

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, scale, enable_gqa):
        assert tuple(window_size) == (-1, 0) and enable_gqa
        assert max_q == max_k == int(cu_seq_q.diff().max())
        seen.append((cu_seq_q, cu_seq_k))
        return packed_attention.by_sequence(
            query, key, value, SequenceBounds(cu_seq_q.diff().tolist()), scale=scale
        )

    monkeypatch.setattr(packed_attention, "_kernels", lambda: {"varlen": kernel})
    monkeypatch.setattr(packed_attention, "choose", lambda *_: ("varlen", None))
    lm = model.load(small("Qwen2", num_hidden_layers=3), gradient_checkpointing=checkpointing)
    apply, params = model.bind(lm)
    seen.clear()  # those of the probe
    got = packed_logp(apply, params, rows(lengths))
    grads = torch.autograd.grad(mixed(got), list(params.values()))
    assert len(seen) == 3 * (1 + checkpointing)
    first = seen[0][0]
    assert all(cu is first for pair in seen for cu in pair)
    assert first.dtype == torch.int32 and first.tolist() == [0, 5, 6, 15, 18]

    monkeypatch.undo()
    want = packed_logp(apply, params, rows(lengths))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for g, w in zip(grads, torch.autograd.grad(mixed(want), list(params.values()))):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, tail=st.sampled_from([0, 0, 1, 7]))
def test_packed_is_each_row_alone_and_padded(lengths, tail):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back
        agree(small("Llama"), rows(lengths), 1e-12, tail)


KINDS = ["Llama", "Qwen2", "Mistral", "Gemma", "Qwen3", "Phi3", "SmolLM3", "Olmo2"]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_architectures(number, wide):
    """Lengths that are called one by one, and lengths that come in groups: each with either type."""
    kind, dtype, atol = KINDS[number], *((torch.float64, 1e-12) if wide else (torch.float32, 2e-6))
    lengths = [[5, 1, 9, 3, 12], [4, 7, 4, 4, 7, 1, 1, 4]][(number + wide) % 2]
    changes = {"head_dim": 8} if kind in ("Gemma", "Qwen3") else {}
    changes |= {"sliding_window": None} if kind in ("Mistral", "Phi3") else {}
    if dtype == torch.float32:
        changes |= {"num_hidden_layers": 1}
    if kind == "Gemma":  # its norms are float32 inside
        atol = max(atol, 1e-7)
    lm = small(kind, dtype, **changes)
    if dtype == torch.float32:
        for p in lm.parameters():
            if p.dim() == 2:
                # log-probs above -8, where 2e-6 is 4 units (processors differ by 3); Gemma's norms make
                # larger logits
                p.data.mul_(0.2 if kind == "Gemma" else 0.5)
    references = [definition, padded]
    if kind == "Phi3":
        references = [definition]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(lm, rows(lengths), atol, references=references)
    assert lm.config._attn_implementation == SDPA


def seen_masks(lm):
    """What the attention layers of a model are given as masks, by the time it has run."""
    seen = []
    for m in lm.modules():
        if type(m).__name__.endswith("Attention"):
            m.register_forward_pre_hook(
                lambda _, __, kw: seen.append(kw.get("attention_mask")), with_kwargs=True
            )
    return seen


def test_no_mask_is_made():
    lm = small("Llama")
    seen = seen_masks(lm)
    apply, params = model.bind(lm)
    seen.clear()
    packed_logp(apply, params, rows([4, 5, 2]))
    assert seen == [None, None]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mistral", {"sliding_window": 3}),
        ("Qwen2", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_windows_fall_back_with_a_message_and_are_right(kind, changes):
    lm, exp = small(kind, **changes), rows([9, 5, 1, 12])
    with pytest.warns(UserWarning, match=f"{kind}Attention: it asks for its own mask \\(sliding_window 3"):
        agree(lm, exp, 1e-12)
    wide = small(kind, **changes | {"sliding_window": 100})
    assert (definition(wide, exp) - definition(small(kind, **changes), exp)).abs().max() > 1e-2


def test_other_implementations_stay_as_they_are():
    lm = small("Llama", attn_implementation="eager")
    seen = seen_masks(lm)
    with pytest.warns(UserWarning, match="LlamaModel take a \\[T, T\\] mask: its attention is 'eager'"):
        agree(lm, rows([4, 5, 2]), 1e-5)  # transformers' own softmax is in float32
    assert lm.config._attn_implementation == "eager"
    assert (11, 11) in [tuple(mask.shape[-2:]) for mask in seen]


def test_a_model_that_loses_the_boundaries_is_run_again_with_a_mask():
    """In one layer only: the other alone would not show it."""
    lm = small("Llama")
    layer = lm.model.layers[1].self_attn
    forward = layer.forward

    def without_bounds(*args, rft_bounds=None, **options):
        return forward(*args, **options)

    layer.forward = without_bounds
    exp = rows([4, 5, 2])
    want = definition(small("Llama"), exp)
    with pytest.warns(UserWarning, match="not all of its layers got the boundaries"):
        apply, params = model.bind(lm)
    got = packed_logp(apply, params, exp)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(packed_logp(apply, params, exp), want, rtol=0, atol=1e-12)


def test_a_model_that_does_not_promise_to_hand_them_on_is_left_alone(monkeypatch):
    lm = small("Llama")
    monkeypatch.setattr(type(lm.model), "_supports_attention_backend", False)
    monkeypatch.setattr(type(lm), "_supports_attention_backend", False)
    with pytest.warns(UserWarning, match="it does not hand keyword arguments to its attention"):
        agree(lm, rows([4, 5, 2]), 1e-12)


@pytest.mark.parametrize(
    ("options", "attribute", "why"),
    [
        ({"dropout": 0.1}, {}, "dropout 0.1"),
        ({"is_causal": False}, {}, "not causal"),
        ({}, {"is_causal": False}, "not causal"),
        ({"output_attentions": True}, {}, "output_attentions"),
        ({"position_bias": torch.zeros(1, 4, 6, 6).double()}, {}, "position_bias"),
        ({"s_aux": torch.zeros(4)}, {}, "s_aux"),
    ],
)
def test_what_a_layer_asks_for_beyond_is_named(options, attribute, why):
    layer = nn.Module()
    layer.is_causal, layer.num_key_value_groups = True, 2
    for name, x in attribute.items():
        setattr(layer, name, x)
    q, k, v = (x.transpose(0, 1)[None] for x in qkv([4, 2]))
    with pytest.warns(UserWarning, match=why):
        got = sdpa_attention(layer, q, k, v, None, rft_bounds=SequenceBounds([4, 2]), **options)[0]
    if options.get("dropout"):
        return
    causal = "not causal" not in why
    alone = [
        sdpa_attention(layer, *(x[:, :, a:b] for x in (q, k, v)), None, is_causal=causal)[0]
        for a, b in ((0, 4), (4, 6))
    ]
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=0, atol=1e-12)


def test_func_grad_is_backward():
    apply, params = model.bind(small("Llama"))
    exp = rows([4, 7, 4, 4, 7, 1])
    functional = torch.func.grad(lambda p: mixed(packed_logp(apply, p, exp)))(params)
    plain = torch.autograd.grad(mixed(packed_logp(apply, params, exp)), list(params.values()))
    for g, w in zip(functional.values(), plain):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_parameters_can_be_mapped_over():
    """An ensemble over one pack, as for sweeps of models."""
    apply, params = model.bind(small("Llama"))
    pack = packing.pack(rows([4, 5, 4, 4]), range(4))
    many = tree.map(lambda p: torch.stack([p.detach(), 1.1 * p.detach()]), params)
    got = torch.func.vmap(lambda p: apply(p, pack).logp)(many)
    for i, factor in enumerate((1, 1.1)):
        want = apply(tree.map(lambda p: factor * p.detach(), params), pack).logp  # noqa: B023
        torch.testing.assert_close(got[i], want, rtol=0, atol=1e-12)


def test_checkpointing_gives_the_same_gradients():
    """Its second forward takes place in the backward, with the same boundaries."""
    exp, grads = rows([4, 7, 4, 4, 7, 1]), []
    for checkpointed in (False, True):
        lm = model.load(small("Llama"), dtype=torch.float64, gradient_checkpointing=checkpointed)
        seen = seen_masks(lm)
        apply, params = model.bind(lm)
        seen.clear()
        grads.append(torch.autograd.grad(mixed(packed_logp(apply, params, exp)), list(params.values())))
        assert seen == [None] * (4 if checkpointed else 2)
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_adapters():
    base = small("Llama")
    lora = model.apply_lora_configuration(copy.deepcopy(base), rank=2, alpha=4)
    seen, exp = seen_masks(lora), rows([4, 5, 2])
    apply, params = model.bind(lora)
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = packed_logp(apply, params, exp)
    assert seen == [None, None]
    torch.testing.assert_close(got, definition(base, exp), rtol=0, atol=1e-12)


def test_whole_logits_take_the_same_attention():
    lm, exp = small("Llama"), rows([4, 5, 2])
    seen = seen_masks(lm)
    apply, params = model.bind(lm, sampling=rft.Sampling(top_k=VOCAB - 1))
    seen.clear()
    pack = packing.pack(exp, range(3))
    assert not model.Scorer(lm, rft.Sampling(top_k=5)).fused
    got = packing.unpack([apply(params, pack).logp], [pack], exp.tokens)
    assert seen == [None, None]
    one = [packing.pack(exp, [i]) for i in range(3)]
    want = packing.unpack([apply(params, b).logp for b in one], one, exp.tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_critic_too():
    lm, exp = small("Llama"), rows([4, 7, 4, 4, 7, 1])
    seen = seen_masks(lm)
    critic = model.Critic(lm)
    nn.init.normal_(critic.head.weight)
    reader.detect_packing(critic)
    seen.clear()
    whole = critic(packing.pack(exp, range(6))).value
    assert seen == [None, None]
    alone = torch.cat([critic(packing.pack(exp, [i])).value for i in range(6)])
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-12)
    assert whole.unique().numel() > 6


def test_a_token_of_one_row_changes_no_bit_of_another():
    apply, params = model.bind(small("Llama", torch.float32))
    exp = rows([4, 7, 4, 4, 7, 1])
    tokens = exp.tokens.clone()
    tokens[2] = (tokens[2] + 5) % 50 + 3
    before = packed_logp(apply, params, exp)
    after = packed_logp(apply, params, tree.replace(exp, tokens=tokens))
    same = (before == after).all(-1)
    assert same.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 3}])
def test_generation_is_unchanged_to_the_bit(changes):
    """With left padding and a cache: a bound model samples as it did."""
    kind = "Mistral" if changes else "Llama"
    lm = small(kind, torch.float32, **changes)
    prompts = torch.randint(3, VOCAB, (3, 6), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(prompts)
    seen[1, :4] = 0

    def sample():
        torch.manual_seed(0)
        out = lm.generate(
            prompts, attention_mask=seen, do_sample=True, max_new_tokens=8, min_new_tokens=8,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return out.sequences, torch.stack(out.logits)

    before = sample()
    apply, params = model.bind(lm)
    assert lm.config._attn_implementation == SDPA
    assert all(torch.equal(a, b) for a, b in zip(before, sample()))
    packed_logp(apply, params, rows([4, 5]))
    assert all(torch.equal(a, b) for a, b in zip(before, sample()))


def test_a_saved_model_does_not_hold_the_name(tmp_path):
    lm = small("Llama")
    model.bind(lm)
    lm.save_pretrained(tmp_path)
    assert SDPA not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_the_message_is_said_once():
    lm, exp = small("Mistral", sliding_window=3), rows([9, 5])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        apply, params = model.bind(lm)
        for _ in range(3):
            packed_logp(apply, params, exp)
    assert len([w for w in heard if "attention:" in str(w.message)]) == 1
