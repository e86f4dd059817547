"""The GPU engines against float64, on CUDA or in triton's interpreter; see test_triton.py.

The interpreter works on CPU tensors, and takes about a millisecond for each program and operation, so the
problems are small.
"""

from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear_logprob import CAP, TINIEST, TINY, assert_close, assert_same, definition, misaligned, problem
from triton.runtime import interpreter

from rft_kernels import gemm, linear_logprob, logits_logprob, row_kernels
from rft_kernels.interface import Problem
from rft_kernels.softmax import Cotangent

DEVICE = "cpu" if row_kernels.INTERPRETED else "cuda"
ENGINES = pytest.mark.parametrize("engine", ["gemm", "triton"])


@pytest.fixture(autouse=True, scope="module")
def quick_calls():
    """The interpreter changes triton's language at every call within a kernel: here at the first of each.

    Later calls find nothing to change, and to look for it is two fifths of all work.
    """
    if DEVICE == "cuda":
        yield
        return
    change = cache(interpreter._patch_lang)

    def call(self, *args, **kwargs):
        change(self.fn)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


def call(h, w, y, **options):
    """linear_logprob on the device; tensors among the options go there too."""
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return linear_logprob(h.to(DEVICE), w.to(DEVICE), y.to(DEVICE), **options)


def run(h, w, y, g, *, frozen=False, **options):
    """[logp, entropy, lse, dh, dw (, dbias)] on the CPU, as in test_linear_logprob; frozen: [logp, dh]."""
    bias = options.pop("bias", None)
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in (h, w, bias) if x is not None]
    if frozen:
        logp = call(leaves[0], w, y, **options).logp
        grads = torch.autograd.grad((g[0].to(logp) * logp).sum(), leaves[0])
        return [x.detach().cpu() for x in (logp, *grads)]
    options |= {"entropy": True, "lse": True}
    if bias is not None:
        options["bias"] = leaves[2]
    out = call(leaves[0], leaves[1], y, **options)
    total = sum((a.double() * b.to(DEVICE)).sum() for a, b in zip(g, out, strict=True))
    return [x.detach().cpu() for x in (*out, *torch.autograd.grad(total, leaves))]


# ----------------------------------------------------------------------------------- against the definition
SHAPES = [
    (5, 8, 17),
    (6, 90, 1000),
    (2, 96, 1100),
    (1, 4, 32001),
    (0, 8, 40),
    (1, 8, 40),
    (129, 12, 65),
    (3, 8, 1),
]


@ENGINES
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_float64(engine, shape):
    h, w, y, g = problem(*shape, dtype=torch.float64)
    mb = TINY if shape[2] < 2000 else 0.2
    assert_close(run(h, w, y, g, engine=engine, workspace_mb=mb), definition(h, w, y, g), 1e-12)


@ENGINES
def test_a_large_vocabulary(engine):
    """One token is 2374 tiles of the persistent kernel: too many for the interpreter, which has fewer."""
    vocabulary = 151936
    if (engine, DEVICE) == ("triton", "cpu"):
        vocabulary = 4001
    h, w, y, g = problem(1, 3, vocabulary, dtype=torch.float64)
    assert_close(run(h, w, y, g, engine=engine, workspace_mb=0.2), definition(h, w, y, g), 1e-12)


@ENGINES
@settings(deadline=None, max_examples=15)
@given(
    T=st.integers(0, 5),
    D=st.integers(1, 40),
    V=st.integers(1, 200),
    seed=st.integers(0, 9999),
    sharpness=st.sampled_from([0.1, 1.0, 20.0]),
    temperature=st.sampled_from([1.0, 0.3, 10.0, None]),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
def test_definition(engine, T, D, V, seed, sharpness, temperature, with_bias, softcap):
    h, w, y, g = problem(T, D, V, dtype=torch.float64, seed=seed, sharpness=sharpness)
    options = {"temperature": temperature or torch.linspace(0.4, 3, T), "softcap": softcap}
    if with_bias:
        options["bias"] = torch.linspace(-2, 1, V, dtype=torch.float64)
    got = run(h, w, y, g, engine=engine, workspace_mb=TINY, **options)
    assert_close(got, definition(h, w, y, g, **options), 1e-10, least=CAP if softcap else TINIEST)


@ENGINES
@pytest.mark.parametrize("sharpness", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_float32_tolerance(engine, sharpness, scale):
    h, w, y, g = problem(9, 90, 700, sharpness=sharpness)
    g = [x * scale for x in g]
    bound = 1e-5 * (1 + float((h @ w.T).abs().max()) / 10)
    assert_close(run(h, w, y, g, engine=engine, workspace_mb=TINY), definition(h, w, y, g), bound)


@pytest.fixture
def narrow_products(monkeypatch):
    """On a CPU: products of 16-bit matrices summed in float32, as tensor cores have them."""
    if DEVICE == "cuda":
        return

    def product(a, b, *, out, add=False):
        total = a.double() @ b.double()
        if add:
            total += out.double()
        out.copy_(total)

    monkeypatch.setattr(gemm, "product", product)
    monkeypatch.setattr(gemm, "_product_type", lambda h, w, scale: h.dtype)


def norm(x):
    return np.linalg.norm(x, axis=-1)


@ENGINES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("sharpness", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_narrow_types(engine, dtype, bound, sharpness, scale, narrow_products):
    """At every sharpness, up to p > 0.999, and also if gradients underflow float16."""
    h, w, y, g = problem(8, 96, 1000, dtype=dtype, sharpness=sharpness)
    y = (h.double() @ w.double().T).argmax(1) if sharpness > 3 else y
    g = [x * s for x, s in zip(g, (scale, scale / 9, scale / 99), strict=True)]
    # A factor that no returned gradient of 16 bits could hold is put back by the loss scale of the caller.
    got, want = run(h, w, y, g, engine=engine, workspace_mb=0.01), definition(h, w, y, g)
    assert (np.exp(want[0]).max() > 0.999) == (sharpness == 30)
    assert [x.dtype for x in got] == [torch.float32] * 3 + [dtype] * 2
    assert_close(got[:3], want[:3], 1e-4)
    # What float16 itself cannot hold: the gradients are returned in it.
    floor = 2.0**-24 * 96**0.5 if scale < 1 and dtype == torch.float16 else 1e-30
    bound = 2 * bound if dtype == torch.bfloat16 and DEVICE == "cpu" else bound  # the interpreter truncates
    for x, r in zip(got[3:], want[3:], strict=True):
        assert np.linalg.norm(x.double() - r) <= bound * np.linalg.norm(r) + floor * len(r) ** 0.5
    assert (norm(got[3].double().numpy() - want[3]) <= 1e-2 * norm(want[3]) + floor).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_with_a_frozen_head(dtype, narrow_products):
    h, w, y, g = problem(8, 96, 1000, dtype=dtype, sharpness=4)
    g = [g[0], 0 * g[1], 0 * g[2]]
    want = definition(h, w, y, g)
    logp, dh = run(h, w, y, g, frozen=True, engine="gemm", workspace_mb=0.01)
    np.testing.assert_allclose(logp, want[0], atol=1e-4)
    assert (norm(dh.double().numpy() - want[3]) <= 1e-2 * norm(want[3])).all()


def test_a_gradient_of_a_logit_keeps_its_bits_in_float16(narrow_products):
    """1 / V and an upstream gradient of 1e-4 would be 0 in float16; rows that differ by 1e4 share one dw."""
    h, w, y, g = problem(6, 32, 600, dtype=torch.float16, sharpness=0.1)
    cot = torch.tensor([1.0, 1e-4, 1e-3, 1e-4, 1e-2, 1.0])
    one = torch.ones(6, device=DEVICE)
    given = Problem(h.to(DEVICE), w.to(DEVICE), None, one, softcap=None, workspace=10**4)
    logp, entropy, lse, _ = gemm.forward(given, y.to(DEVICE), entropy=True, unit_grad=False)
    cotangent = Cotangent.of(logp, entropy, lse, cot.to(DEVICE), None, None)
    dh, dw, _ = gemm.backward(given, y.to(DEVICE), cotangent, (True, True, False))
    want = definition(h, w, y, [cot.double(), 0 * g[1], 0 * g[2]])
    assert (norm(dh.cpu().double().numpy() - want[3]) <= 1e-3 * norm(want[3])).all()
    assert np.linalg.norm(dw.cpu().double().numpy() - want[4]) <= 1e-3 * np.linalg.norm(want[4])


@ENGINES
def test_tokens_in_several_blocks(engine, monkeypatch):
    monkeypatch.setattr(gemm, "_ROWS", 16)
    h, w, y, g = problem(40, 8, 150, dtype=torch.float64)
    bias = torch.linspace(-1, 1, 150).double()
    options = {"bias": bias, "temperature": torch.linspace(0.5, 2, 40)}
    got = run(h, w, y, g, engine=engine, workspace_mb=TINY, **options)
    assert_close(got, definition(h, w, y, g, **options), 1e-12)


# --------------------------------------------------------------------------------------- difficult numbers
@ENGINES
@pytest.mark.parametrize("offset", [-200.0, 200.0, -5000.0])
def test_a_common_offset_of_the_logits(engine, offset):
    h, w, y, g = problem(3, 9, 1000)
    h[:, 0], w[:, 0] = 1.0, offset
    got, want = run(h, w, y, g, engine=engine, workspace_mb=TINY), definition(h, w, y, g)
    for x, r in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, r, atol=abs(offset) * 1e-5)
    for x, r in zip(got[3:], want[3:], strict=True):
        assert np.linalg.norm(x.numpy() - r) <= abs(offset) * 1e-5 * np.linalg.norm(r)


@ENGINES
@pytest.mark.parametrize("frozen", [False, True])
def test_a_nearly_certain_policy_keeps_its_relative_accuracy(engine, frozen):
    h, _, y, _ = problem(5, 20, 20)
    h, w = 0.1 * h + 21 * torch.eye(20)[y], torch.eye(20)
    g = [torch.ones(5).double(), torch.zeros(5).double(), torch.zeros(5).double()]
    got, want = run(h, w, y, g, frozen=frozen, engine=engine), definition(h, w, y, g)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    dh = got[3] if not frozen else got[1]
    np.testing.assert_allclose(dh, want[3], rtol=1e-5)


@ENGINES
def test_a_vocabulary_masked_by_the_bias(engine):
    h, w, y, g = problem(4, 8, 200, dtype=torch.float64)
    y, allowed = y % 50, torch.arange(200) < 50
    bias = torch.where(allowed, 0.0, -torch.inf).double()
    got = run(h, w, y, g, bias=bias, engine=engine, workspace_mb=TINY)
    assert_close([*got[:4], got[4][:50]], definition(h, w[:50], y, g), 1e-12)
    assert not got[4][50:].any() and not got[5][50:].any()


@ENGINES
def test_float16_logits_beyond_65504(engine, narrow_products):
    h, w, y, g = problem(5, 64, 100, dtype=torch.float16)
    h, w = h * 100, w * 400
    assert (h.double() @ w.double().T).abs().max() > 65504
    got, want = run(h, w, y, g, engine=engine), definition(h, w, y, g)
    for x, r in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, r, rtol=1e-5, atol=1e-1)


# -------------------------------------------------------------------------------------- rows and their fate
@ENGINES
@pytest.mark.parametrize("frozen", [False, True])
def test_ignored_rows_are_zero_even_if_their_h_is_nan(engine, frozen):
    h, w, y, g = problem(6, 8, 70, dtype=torch.float64)
    clean = run(h, w, y, [x.index_fill(0, torch.tensor([0, 4]), 0) for x in g], frozen=frozen, engine=engine)
    y[[0, 4]], h[[0, 4]] = -100, torch.nan
    got = run(h, w, y, g, frozen=frozen, engine=engine)
    assert all((x[[0, 4]] == 0).all() for x in got[:4])
    torch.testing.assert_close(got[-1], clean[-1])


@ENGINES
@pytest.mark.parametrize("label", [70, 128, -1, 2**40])
def test_a_label_out_of_range_is_nan_in_its_row_alone(engine, label):
    h, w, y, _ = problem(6, 8, 70)
    want = call(h, w, y, entropy=True, workspace_mb=TINY, engine=engine)
    y[2] = label
    got = call(h, w, y, entropy=True, workspace_mb=TINY, engine=engine)
    others = [0, 1, 3, 4, 5]
    assert got.logp[2].isnan() and torch.equal(got.logp[others], want.logp[others])


@ENGINES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_row_does_not_reach_the_others(engine, bad):
    h, w, y, g = problem(6, 8, 70)
    want = call(h, w, y, entropy=True, lse=True, workspace_mb=TINY, engine=engine)
    h[3, 5] = bad
    got = call(h, w, y, entropy=True, lse=True, workspace_mb=TINY, engine=engine)
    others = [0, 1, 2, 4, 5]
    for x, r in zip(got, want, strict=True):
        assert torch.equal(x[others], r[others])
    assert got.logp[3].isnan() and got.entropy[3].isnan() and not got.lse[3].isfinite()
    for frozen in (False, True):
        dh = run(h, w, y, g, frozen=frozen, engine=engine, workspace_mb=TINY)[1 if frozen else 3]
        assert dh[others].isfinite().all() and not dh[3].isfinite().all()


@ENGINES
def test_a_row_does_not_depend_on_the_others_nor_on_the_slices(engine):
    h, w, y, g = problem(20, 16, 300)
    want = run(h, w, y, g, engine=engine, workspace_mb=TINY)
    other = h.clone()
    other[1:] = h[1:].flip(0) * 3
    assert torch.equal(run(other, w, y, g, engine=engine, workspace_mb=TINY)[0][0], want[0][0])
    assert_same(run(h, w, y, g, engine=engine, workspace_mb=TINY), want)
    for mb in (0.01, 16):
        for x, r in zip(run(h, w, y, g, engine=engine, workspace_mb=mb), want, strict=True):
            torch.testing.assert_close(x, r, rtol=2e-6, atol=2e-6 * max(1, r.abs().max().item()))


@ENGINES
def test_non_contiguous_and_sliced_inputs(engine):
    h, w, y, g = problem(5, 8, 150)
    want = run(h, w, y, g, engine=engine, workspace_mb=TINY)
    wide = torch.stack([h, h * 0], 2).flatten(1)[:, ::2]
    parent = torch.cat([w, w], 1)[:, 8:]
    labels = torch.stack([y, y], 1)[:, 1]
    strided = [(h.T.contiguous().T, w.T.contiguous().T, y), (wide, parent, labels)]
    for *views, at in (*strided, [misaligned(x) for x in (h, w, y)]):
        leaves = [x.detach().to(DEVICE).requires_grad_() for x in views]
        out = call(*leaves, at, entropy=True, lse=True, workspace_mb=TINY, engine=engine)
        grads = torch.autograd.grad([x.double() for x in out], leaves, [x.to(DEVICE) for x in g])
        for x, r in zip([*out, *grads], want, strict=True):
            torch.testing.assert_close(x.cpu(), r, rtol=2e-6, atol=2e-6)


@ENGINES
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
@pytest.mark.parametrize("output", ["logp", "entropy", "lse"])
def test_some_inputs_through_one_output(engine, needs, output):
    h, w, y, g = problem(4, 8, 150, dtype=torch.float64)
    inputs = [x.to(DEVICE) for x in (h, w, torch.linspace(-1, 1, 150).double())]
    leaves = [x.requires_grad_() for x, need in zip(inputs, needs, strict=True) if need]
    grads = []
    for e in (engine, "reference"):
        h, w, bias = inputs
        out = call(h, w, y, bias=bias, entropy=output == "entropy", lse=True, engine=e, workspace_mb=TINY)
        grads.append(torch.autograd.grad(getattr(out, output), leaves, g[0].to(DEVICE)))
    for x, r in zip(*grads, strict=True):
        torch.testing.assert_close(x, r, rtol=1e-11, atol=1e-11)


def test_a_frozen_head_needs_one_product_forward_and_one_for_its_gradient(monkeypatch):
    h, w, y, g = problem(4, 8, 60)
    seen, product = [], gemm.product
    monkeypatch.setattr(gemm, "product", lambda *a, **k: seen.append(1) or product(*a, **k))
    run(h, w, y, g, frozen=True, engine="gemm")
    assert len(seen) == 2


# ------------------------------------------------------------------------------------------ on given logits
def from_logits(z, y, g, **options):
    leaf = z.detach().to(DEVICE).requires_grad_()
    out = logits_logprob(leaf * 1, y.to(DEVICE), entropy=True, **options)
    grads = torch.autograd.grad([x.double() for x in out], leaf, [x.to(DEVICE) for x in g[:2]])
    return [x.detach().cpu() for x in (*out, *grads)]


@pytest.mark.parametrize("engine", ["gemm", "streamed"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(5, 17), (3, 1100), (0, 40), (40, 1), (2, 5000)])
@pytest.mark.parametrize("temperature", [1.0, 0.4, None])
def test_given_logits(engine, inplace, shape, temperature):
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z, y, g = 3 * normal(shape), torch.arange(shape[0]) * 7 % shape[1], [normal(shape[0]) for _ in range(2)]
    options = {"temperature": temperature or torch.linspace(0.5, 2, len(z))}
    # The logits of the identity and a head zᵀ are z, and the head's gradient is that of z.
    identity = torch.eye(len(z)).double()
    logp, entropy, _, _, dz = definition(identity, z.T, y, [*g, 0 * g[0]], **options)
    got = from_logits(z, y, g, engine=engine, inplace_backward=inplace, **options)
    for x, r in zip(got, (logp, entropy, dz.T), strict=True):
        np.testing.assert_allclose(x, r, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["gemm", "streamed"])
def test_given_logits_in_place_narrow_ignored_and_bad(engine):
    make = partial(torch.randn, 6, 300, generator=torch.Generator().manual_seed(0))
    z, y, g = make().half(), torch.tensor([3, -100, 299, 300, 0, 7]), [torch.ones(6).double()] * 2
    z[1], g[0] = torch.nan, torch.tensor([1.0, 1, 1, 1, 0, 1]).double()
    g[1] = g[0] / 3
    leaf = z.to(DEVICE).requires_grad_()
    kept = leaf * 1
    out = logits_logprob(kept, y.to(DEVICE), entropy=True, inplace_backward=True, engine=engine)
    (dz,) = torch.autograd.grad([x.double() for x in out], kept, [x.to(DEVICE) for x in g])
    assert dz.data_ptr() == kept.data_ptr() and dz.dtype == torch.half
    good = [0, 2, 5]
    want = definition(
        z[good].double(), torch.eye(300).double(), y[good], [g[0][good], g[1][good], 0 * g[0][good]]
    )
    np.testing.assert_allclose(out.logp[good].detach().cpu(), want[0], atol=1e-5)
    np.testing.assert_allclose(out.entropy[good].detach().cpu(), want[1], atol=1e-5)
    np.testing.assert_allclose(dz[good].cpu().double(), want[3], atol=1e-3)
    assert (dz[[1, 4]] == 0).all() and out.logp[1] == 0 and out.logp[3].isnan()


def test_a_gradient_in_place_of_logits_whose_columns_are_apart_in_memory():
    transposed = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y = torch.arange(5, device=DEVICE)
    want = torch.nn.functional.one_hot(y, 12) - transposed.T.softmax(1)
    z = transposed.T.requires_grad_()
    logp = logits_logprob(z, y, engine="gemm", inplace_backward=True).logp
    (dz,) = torch.autograd.grad(logp.sum(), z)
    torch.testing.assert_close(dz, want, rtol=1e-5, atol=1e-6)
    assert dz.data_ptr() == transposed.data_ptr()


def test_rows_beyond_two_to_the_31():
    """Addresses are 64 bits wide: the second row starts after 2^31 elements, most of them never touched."""
    memory = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    z = memory.as_strided((2, 40), (2**31 + 8, 1))
    z.copy_(torch.randn(2, 40, generator=torch.Generator().manual_seed(0)))
    y, want = torch.tensor([1, 39], device=DEVICE), z.detach().float().cpu().log_softmax(1)
    out = logits_logprob(z.requires_grad_(), y, engine="gemm", inplace_backward=True).logp
    torch.testing.assert_close(out.detach().cpu(), want[[0, 1], y.cpu()])
    (dz,) = torch.autograd.grad(out.sum(), z)
    assert dz.data_ptr() == z.data_ptr() and dz.stride() == z.stride()
    hot = torch.nn.functional.one_hot(y.cpu(), 40)
    torch.testing.assert_close(dz.float().cpu(), hot - want.exp(), rtol=1e-3, atol=1e-6)
