"""The kernels of a new token against float64, and whole models by them; see test_triton.py."""

import numpy as np
import pytest
import ref_kernels as ref
import tiny
import torch
from families import small
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import DEVICE, quick_calls

from rft_fn import rng
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.hf import draws, fused_steps, probe
from rft_fn.engine.hf.sampler import Sampler
from rft_fn.engine.requests import Stop
from rft_fn.model import packed_attention
from rft_fn.types import Sampling
from rft_kernels import decode

__all__ = ["quick_calls"]

# (of the type, how far a result may be): the interpreter cuts bfloat16 off, three times in a rotation
NEAR = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 6e-2}
SHAPES = {
    "rows": st.integers(1, 3),
    "of_keys": st.integers(1, 2),
    "each": st.sampled_from([1, 3]),
    "size": st.sampled_from([6, 16, 32]),
    "columns": st.sampled_from([1, 64, 130]),
    "dtype": st.sampled_from(list(NEAR)),
    "seed": st.integers(0, 2**30),
}
drawn = settings(max_examples=12, deadline=None, derandomize=True)


def numbers(seed, dtype, *shapes):
    """Random tensors, and the same in float64."""
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g).to(dtype).to(DEVICE) for shape in shapes]
    return made, [exact(x) for x in made]


def exact(x):
    return x.cpu().double().numpy()


def near(got, want, dtype):
    np.testing.assert_allclose(exact(got), want, rtol=NEAR[dtype], atol=NEAR[dtype])


@drawn
@given(rows=st.integers(1, 3), width=st.sampled_from([1, 24, 1500]), dtype=SHAPES["dtype"], add=st.booleans())
def test_norm_and_swiglu(rows, width, dtype, add):
    (x, more, w), (x_, more_, w_) = numbers(width, dtype, (rows, width), (rows, width), (width,))
    near(decode.swiglu(x, more), ref.swiglu(x_, more_), dtype)
    got = decode.norm(x, w, 1e-5, more=more if add else None)
    near(got, ref.rms_norm(x_ + add * more_, w_, 1e-5), dtype)
    near(x, x_ + add * more_, dtype)


@drawn
@given(**SHAPES, norm=st.booleans())
def test_rotation_into_the_cache(rows, of_keys, each, size, columns, dtype, seed, norm):
    heads, cache = of_keys * each, (rows, of_keys, columns, size)
    flat = [(rows, n * size) for n in (heads, of_keys, of_keys)]
    turn = ((rows, size), (rows, size), (size,), (size,))
    made, (q_, k_, v_, cos_, sin_, w_, x_, *_) = numbers(seed, dtype, *flat, *turn, cache, cache)
    q, k, v, cos, sin, w, x, keys, values = made
    column = seed % columns
    before = [keys.clone(), values.clone()]
    norms = ((w, 1e-5), (x, 1e-6)) if norm else None
    at = torch.tensor([column], device=DEVICE)
    got = decode.rotate(q, k, v, (cos, sin), keys, values, at, norms)

    q_, k_ = q_.reshape(rows, heads, size), k_.reshape(rows, of_keys, size)
    if norm:
        q_, k_ = ref.rms_norm(q_, w_, 1e-5), ref.rms_norm(k_, x_, 1e-6)
    near(got, ref.rotated(q_, cos_, sin_), dtype)
    near(keys[:, :, column], ref.rotated(k_, cos_, sin_), dtype)
    near(values[:, :, column], v_.reshape(rows, of_keys, size), dtype)
    rest = [c for c in range(columns) if c != column]
    for now, old in zip((keys, values), before):
        assert torch.equal(now[:, :, rest], old[:, :, rest])


@drawn
@given(**SHAPES)
def test_attention(rows, of_keys, each, size, columns, dtype, seed):
    """Rows begin anywhere, some see nothing, columns in between are hidden, and those to come hold NaN."""
    cache = (rows, of_keys, columns, size)
    (q, keys, values), (q_, keys_, values_) = numbers(seed, dtype, (rows, of_keys * each, size), cache, cache)
    g = torch.Generator().manual_seed(seed)
    first = torch.randint(columns + 1, (rows,), generator=g)
    place, end = torch.arange(columns), int(torch.randint(columns, (), generator=g))
    seen = (place >= first[:, None]) & (place <= end) & (torch.rand(rows, columns, generator=g) < 0.8)
    bias = torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -torch.inf)
    for x in (keys, values):
        x[:, :, end + 1 :] = torch.nan
    given = (x.to(DEVICE) for x in (bias, first, torch.tensor([end])))
    got = decode.attend(q, keys, values, *given, scale=0.3)
    near(got, ref.attend(q_, keys_, values_, exact(bias), 0.3), dtype)


def test_16_bits_are_rounded_where_the_model_rounds_them():
    """So a norm, a rotation and SwiGLU of float16 are those of the modules to the bit."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen

    (q, k, v, w, cos, sin), _ = numbers(0, torch.float16, (3, 64), (3, 32), (3, 32), (16,), (3, 16), (3, 16))
    norm = qwen.Qwen3RMSNorm(16).to(DEVICE, torch.float16)
    norm.weight.data.copy_(w)
    heads = [norm(x.view(3, 1, -1, 16)).transpose(1, 2) for x in (q, k)]
    want = qwen.apply_rotary_pos_emb(*heads, cos[:, None], sin[:, None])
    keys, values = (torch.zeros(3, 2, 1, 16, dtype=q.dtype, device=DEVICE) for _ in range(2))
    at = torch.zeros(1, dtype=torch.long, device=DEVICE)
    got = decode.rotate(q, k, v, (cos, sin), keys, values, at, ((norm.weight, 1e-6),) * 2)
    assert torch.equal(got, want[0][:, :, 0]) and torch.equal(keys, want[1])
    assert torch.equal(decode.swiglu(k, v), torch.nn.functional.silu(k) * v)


@drawn
@given(rows=st.integers(1, 3), words=st.integers(1, 40) | st.sampled_from([4097, 9001]), seed=SHAPES["seed"])
def test_a_draw_is_that_of_the_engine_to_the_bit(rows, words, seed):
    g = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(rows, words, generator=g)).softmax(-1).to(DEVICE)
    u = torch.rand(rows, draws.numbers_per_draw(words), generator=g, dtype=torch.float64).to(DEVICE)
    assert torch.equal(decode.draw(p, u), draws.draw(p, u))


# ---------- models

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
LIMITS = [3, 9, 6, 1, 5, 9]


def responses(lm, batching, **chosen):
    """Two of each prompt: rows join, leave and end."""
    sampling = Sampling(max_new=max(LIMITS), **{"temperature": 0.9} | chosen)
    stop = Stop(None, frozenset(range(0, 64, 16)), ())
    sampler = Sampler(lm, batching, sampling, stop, 0, 4, 3)
    keys = [rng.fold_in(0, i) for i in range(len(PROMPTS))]
    with torch.no_grad():
        rows = requests.Request(PROMPTS, keys, 2, sampling, LIMITS).rows()
        return sampler.responses(PROMPTS, prompt_media.text(PROMPTS), rows)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_model_samples_the_same_by_fused_kernels(kind):
    """Alone and with shared prompts; the greedy, and those drawn by the same numbers."""
    lm = small(kind, torch.float32).to(DEVICE)
    way = probe.find_cache_support(lm, 0, fixed=True)
    assert way.fused and way.shares and not probe.find_cache_support(lm, 0, fixed=True, fused=False).fused
    for shares, chosen in ((False, {}), (True, {"temperature": 0})):
        fused = responses(lm, way._replace(shares=shares), **chosen)
        plain = responses(lm, way._replace(shares=shares, fused=False), **chosen)
        assert [x.tokens for x in fused] == [x.tokens for x in plain]
        for x, y in zip(fused, plain):
            bound = tiny.logp_rounding(lm)
            torch.testing.assert_close(torch.tensor(x.logp), torch.tensor(y.logp), rtol=0, atol=bound)


@pytest.mark.parametrize(("kind", "tried"), [("Granite", True), ("Gemma3Text", False), ("GPT2", False)])
def test_another_model_decodes_by_its_own_modules(kind, tried):
    """One that is built as Llama and multiplies what it adds, and those that are built otherwise."""
    packed_attention.warn_once.cache_clear()
    lm = small(kind, torch.float32, **({"residual_multiplier": 0.5} if tried else {})).to(DEVICE)
    assert fused_steps.can_fuse(lm) == tried
    if tried:
        with pytest.warns(UserWarning, match="GraniteForCausalLM decodes without fused kernels"):
            way = probe.find_cache_support(lm, 0, fixed=True)
        assert way.fixed and not way.fused
