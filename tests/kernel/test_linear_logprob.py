"""rft_kernels.linear_logprob against its definition, and every way in which its kind has gone wrong."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import ref_kernels as ref
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rft_kernels import check_labels, linear_logprob, products

TINY = 0.002  # MB of workspace: tiles of 64 columns even for the smallest problem


@pytest.fixture(autouse=True, params=["torch.mm", "oneDNN"])
def library(request, monkeypatch):
    """Every test by both libraries that make products of float32 on a CPU, whatever the processor is."""
    if request.param == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(products, "mkl_is_half", lambda: request.param == "oneDNN")
    monkeypatch.setattr(products, "is_zen4", lambda: False)
    monkeypatch.setattr(products, "_LARGE", 1)


def problem(T, D, V, *, dtype=torch.float32, seed=0, sharpness=1.0):
    """h, w, y and the three upstream gradients; logits have a standard deviation of `sharpness`."""
    make = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=make, dtype=torch.float64)
    h, w = normal(T, D), normal(V, D) * sharpness / D**0.5
    y = torch.randint(V, (T,), generator=make)
    return h.to(dtype), w.to(dtype), y, [normal(T) for _ in range(3)]


def run(h, w, y, g, **options):
    """All outputs, and the gradients of sum(g . outputs): [logp, entropy, lse, dh, dw (, dbias)]."""
    bias = options.pop("bias", None)
    leaves = [x.detach().clone().requires_grad_() for x in (h, w, bias) if x is not None]
    if bias is not None:
        options["bias"] = leaves[2]
    out = linear_logprob(leaves[0], leaves[1], y, entropy=True, lse=True, **options)
    total = sum((a.to(b.dtype) * b).sum() for a, b in zip(g, out, strict=True))
    return [x.detach() for x in (*out, *torch.autograd.grad(total, leaves))]


def definition(h, w, y, g, **options):
    """What `run` returns, from numpy."""
    arrays = [x.detach().double().numpy() for x in (h, w)]
    options = {k: v.double().numpy() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    values = ref.linear_logprob(*arrays, y.numpy(), **options)
    grads = ref.gradients(*arrays, y.numpy(), *(x.numpy() for x in g), **options)
    return [*values, *(grads if options.get("bias") is not None else grads[:2])]


TINIEST = 1e-30
CAP = 0.01  # `least` under a cap of logits: where it is reached, 1 - tanh² is the difference of two ones


def assert_close(got, want, tolerance, least=TINIEST):
    """Values: absolute error. Gradients: Frobenius error over norm, and over `least` where that is larger."""
    for x, r in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x.double().numpy(), r, rtol=tolerance, atol=tolerance)
    for x, r in zip(got[3:], want[3:], strict=True):
        assert np.linalg.norm(x.double().numpy() - r) <= tolerance * max(np.linalg.norm(r), least)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# ----------------------------------------------------------------------------------- against the definition
SHAPES = [
    (5, 8, 17),  # the vocabulary is smaller than a slice
    (6, 90, 1000),
    (6, 16, 1100),
    (3, 4, 32001),
    (2, 3, 151936),
    (0, 8, 40),
    (1, 8, 40),
    (127, 8, 130),
    (129, 12, 65),
    (3, 8, 1),
]


@pytest.mark.parametrize("workspace_mb", [0.02, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_float64(shape, workspace_mb):
    h, w, y, g = problem(*shape, dtype=torch.float64)
    assert_close(run(h, w, y, g, workspace_mb=workspace_mb), definition(h, w, y, g), 1e-12)


@pytest.mark.parametrize("engine", ["streamed", "reference"])
@settings(deadline=None, max_examples=40)
@given(
    T=st.integers(0, 9),
    D=st.integers(1, 9),
    V=st.integers(1, 300),
    seed=st.integers(0, 9999),
    sharpness=st.sampled_from([0.1, 1.0, 20.0]),
    temperature=st.sampled_from([1.0, 0.3, 10.0, None]),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
@example(T=1, D=3, V=1, seed=8470, sharpness=20.0, temperature=0.3, with_bias=False, softcap=2.0)
def test_definition(engine, T, D, V, seed, sharpness, temperature, with_bias, softcap):
    h, w, y, g = problem(T, D, V, dtype=torch.float64, seed=seed, sharpness=sharpness)
    options = {"temperature": temperature or torch.linspace(0.4, 3, T), "softcap": softcap}
    if with_bias:
        options["bias"] = torch.linspace(-2, 1, V, dtype=torch.float64)
    got = run(h, w, y, g, engine=engine, workspace_mb=TINY, **options)
    assert_close(got, definition(h, w, y, g, **options), 1e-10, least=CAP if softcap else TINIEST)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 9999),
    sharpness=st.sampled_from([0.3, 3.0, 30.0]),
    scale=st.sampled_from([1e-3, 1, 1e4]),
)
def test_float32_tolerance(seed, sharpness, scale):
    h, w, y, g = problem(33, 90, 700, seed=seed, sharpness=sharpness)
    g = [x * scale for x in g]
    bound = 1e-5 * (1 + float((h @ w.T).abs().max()) / 10)
    assert_close(run(h, w, y, g, workspace_mb=TINY), definition(h, w, y, g), bound)


def at_the_width_of_a_model(sharpness, seed):
    """Sums of 576 products, with every other target the likeliest word, at |z| = 5 sharpness."""
    h, w, y, g = problem(200, 576, 8192, sharpness=sharpness, seed=seed)
    y[::2] = (h @ w.T).argmax(1)[::2]
    return h, w, y, g


def errors(got, want):
    """The largest error of logp, and that of the gradients over their norm."""
    wrong = (np.linalg.norm(x.double().numpy() - r) / np.linalg.norm(r) for x, r in zip(got[3:], want[3:]))
    return float(np.abs(got[0].double().numpy() - want[0]).max()), *wrong


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_float32_at_the_width_of_a_model(seed, sharpness):
    """Whatever order a library adds up in: oneDNN goes one by one, MKL by the registers of the processor."""
    h, w, y, g = at_the_width_of_a_model(sharpness, seed)
    found = errors(run(h, w, y, g), definition(h, w, y, g))
    assert max(found) <= ref.logp_rounding(h, w)


WRONG = {
    "products in bfloat16": lambda h, w, y, g: run(h.bfloat16().float(), w.bfloat16().float(), y, g),
    "products in TF32": lambda h, w, y, g: run(*(tf32(x) for x in (h, w)), y, g),
    "weights in float16": lambda h, w, y, g: run(h, w.half().float(), y, g),
    "another temperature": lambda h, w, y, g: run(h, w, y, g, temperature=1.001),
    "a word left out": lambda h, w, y, g: run(h, w.index_fill(0, (y[1:2] + 1) % len(w), 0), y, g),
}


def tf32(x):
    """Rounded to the ten bits behind the point that tensor cores keep of float32."""
    scale = 2.0 ** (x.abs().clamp(min=1e-30).log2().floor() - 10)
    return (x / scale).round() * scale


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_the_bound_of_float32_is_below_what_is_wrong(wrong, sharpness):
    h, w, y, g = at_the_width_of_a_model(sharpness, seed=0)
    found = errors(WRONG[wrong](h, w, y, g), definition(h, w, y, g))
    assert max(found) > 2 * ref.logp_rounding(h, w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharpness", [0.5, 4.0, 30.0])
def test_narrow_types_are_only_rounded_at_the_ends(dtype, sharpness):
    """At every sharpness, up to p > 0.999; no row's gradient is much worse than the norm of all."""
    h, w, y, g = problem(65, 90, 700, dtype=dtype, sharpness=sharpness)
    y = (h.double() @ w.double().T).argmax(1) if sharpness > 3 else y
    got, want = run(h, w, y, g, workspace_mb=TINY), definition(h, w, y, g)
    assert (np.exp(want[0]).max() > 0.999) == (sharpness == 30)
    assert [x.dtype for x in got] == [torch.float32] * 3 + [dtype] * 2
    assert_close(got[:3], want[:3], 1e-4)
    for x, r in zip(got[3:], want[3:], strict=True):
        assert np.linalg.norm(x.double().numpy() - r) <= 4e-3 * np.linalg.norm(r)
    rows = np.linalg.norm(got[3].double().numpy() - want[3], axis=1)
    assert (rows <= 1e-2 * np.linalg.norm(want[3], axis=1)).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_nearly_certain_policy_in_bfloat16(frozen):
    """With 1 - p formed from a rounded p, the gradient of such a row has no correct digit."""
    h, w, _, g = problem(65, 90, 700, dtype=torch.bfloat16, sharpness=30)
    y, zero = (h.double() @ w.double().T).argmax(1), torch.zeros(65).double()
    want = definition(h, w, y, [g[0], zero, zero])
    logp, dh = gradient_of_logp(h, w, y, g[0], frozen=frozen, workspace_mb=TINY)
    certain = np.exp(want[0]) > 0.999
    assert certain.sum() > 5
    np.testing.assert_allclose(logp, want[0], atol=1e-4)
    error = np.linalg.norm(dh.double().numpy() - want[3], axis=1)
    assert (error <= 1e-2 * np.linalg.norm(want[3], axis=1))[certain].all()


def test_mixed_types_and_label_types():
    h, w, y, g = problem(9, 8, 70)
    h = h.bfloat16()
    got = run(h, w, y.int(), g)
    assert_close(got[:3], definition(h, w, y, g)[:3], 1e-5)
    assert (got[3].dtype, got[4].dtype) == (torch.bfloat16, torch.float32)


def test_tokens_in_several_blocks(monkeypatch):
    """More tokens than the rows of a tile: dw is summed over the blocks, in float32 for narrow weights."""
    monkeypatch.setattr("rft_kernels.streamed._CPU_ROWS", 16)
    h, w, y, g = problem(50, 8, 300, dtype=torch.float64)
    assert_close(run(h, w, y, g, workspace_mb=TINY), definition(h, w, y, g), 1e-12)
    h, w = h.float(), w.bfloat16()
    got, want = run(h, w, y, g, workspace_mb=TINY)[4].double().numpy(), definition(h, w, y, g)[4]
    assert np.linalg.norm(got - want) <= 2.5e-3 * np.linalg.norm(want)


# --------------------------------------------------------------------------------------- difficult numbers
@pytest.mark.parametrize("offset", [-200.0, 200.0, -5000.0])
def test_a_common_offset_of_the_logits(offset):
    """Kernels that start their maximum at 0, or pad the vocabulary with logits of 0, lose these."""
    h, w, y, g = problem(7, 9, 1000)
    h[:, 0], w[:, 0] = 1.0, offset
    got, want = run(h, w, y, g, workspace_mb=TINY), definition(h, w, y, g)
    for x, r in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, r, atol=abs(offset) * 1e-5)
    for x, r in zip(got[3:], want[3:], strict=True):
        assert np.linalg.norm(x.numpy() - r) <= abs(offset) * 1e-5 * np.linalg.norm(r)


def test_a_nearly_certain_policy_keeps_its_relative_accuracy():
    """1 - p = 1e-8 is 0 in float32, so neither logp nor its gradient may be formed from p."""
    h, _, y, _ = problem(5, 20, 20)
    h, w = 0.1 * h + 21 * torch.eye(20)[y], torch.eye(20)
    g, zero = torch.ones(5).double(), torch.zeros(5).double()
    want = definition(h, w, y, [g, zero, zero])
    assert -5e-8 < want[0].min() < want[0].max() < 0
    for frozen in (False, True):
        logp, dh = gradient_of_logp(h, w, y, g, frozen=frozen, workspace_mb=TINY)
        np.testing.assert_allclose(logp, want[0], rtol=1e-5)
        np.testing.assert_allclose(dh, want[3], rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-2, 10.0])
def test_extreme_temperatures(temperature):
    h, w, y, g = problem(9, 8, 200)
    got = run(h, w, y, g, temperature=temperature, workspace_mb=TINY)
    assert_close(got, definition(h, w, y, g, temperature=temperature), 1e-4)


def test_half_precision_logits_beyond_65504():
    h, w, y, g = problem(5, 64, 100, dtype=torch.float16)
    h, w = h * 100, w * 400
    assert (h.double() @ w.double().T).abs().max() > 65504
    got, want = run(h, w, y, g), definition(h, w, y, g)
    for x, r in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, r, rtol=1e-5, atol=1e-1)


def test_a_vocabulary_masked_by_the_bias():
    """-inf in the bias, one whole slice of it: probability 0, entropy and gradients finite."""
    h, w, y, g = problem(6, 8, 200, dtype=torch.float64)
    y, allowed = y % 50, torch.arange(200) < 50
    bias = torch.where(allowed, 0.0, -torch.inf).double()
    got, want = run(h, w, y, g, bias=bias, workspace_mb=TINY), definition(h, w[:50], y, g)
    assert_close([*got[:4], got[4][:50]], want, 1e-12)
    assert not got[4][50:].any() and not got[5][50:].any()


# -------------------------------------------------------------------------------------- rows and their fate
def gradient_of_logp(h, w, y, g, *, frozen=False, **options):
    """logp, and the gradient of sum(g logp) in h, with or without w needing one."""
    leaf, w = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_(not frozen)
    logp = linear_logprob(leaf, w, y, **options).logp
    return logp.detach(), torch.autograd.grad((g.to(logp.dtype) * logp).sum(), leaf)[0]


@pytest.mark.parametrize("engine", ["streamed", "reference"])
@pytest.mark.parametrize("frozen", [False, True])
def test_ignored_rows_are_zero_even_if_their_h_is_nan(engine, frozen):
    h, w, y, g = problem(9, 8, 70, dtype=torch.float64)
    clean = run(h, w, y, [x.index_fill(0, torch.tensor([0, 4]), 0) for x in g])
    y[[0, 4]], h[[0, 4]] = -100, torch.nan
    got = run(h, w, y, g, engine=engine)
    assert all((x[[0, 4]] == 0).all() for x in got[:4])
    torch.testing.assert_close(got[4], clean[4])
    dh = gradient_of_logp(h, w, y, g[0], frozen=frozen, engine=engine)[1]
    assert (dh[[0, 4]] == 0).all() and dh.isfinite().all()


@pytest.mark.parametrize("engine", ["streamed", "reference"])
def test_every_row_ignored_and_another_ignore_index(engine):
    h, w, y, g = problem(4, 8, 20)
    got = run(h * torch.nan, w, torch.full_like(y, 3), g, ignore_index=3, engine=engine)
    assert not any(x.any() for x in got)


@pytest.mark.parametrize("engine", ["streamed", "reference"])
@pytest.mark.parametrize("label", [70, 128, -1, 2**40])
def test_a_label_out_of_range_is_nan_in_its_row_alone(engine, label):
    """128 is the edge of a padded slice: elsewhere such labels hit padding, or memory that nobody wrote."""
    h, w, y, _ = problem(6, 8, 70)
    want = linear_logprob(h, w, y, entropy=True, workspace_mb=TINY, engine=engine)
    y[2] = label
    got = linear_logprob(h, w, y, entropy=True, workspace_mb=TINY, engine=engine)
    others = [0, 1, 3, 4, 5]
    assert got.logp[2].isnan() and torch.equal(got.logp[others], want.logp[others])
    with pytest.raises(ValueError, match=rf"y: expected labels in \[0, 70\).*, got {label} at row 2"):
        check_labels(y, 70)
    check_labels(y, 70, ignore_index=label)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_row_does_not_reach_the_others(bad):
    h, w, y, _ = problem(6, 8, 70)
    want = linear_logprob(h, w, y, entropy=True, lse=True, workspace_mb=TINY)
    h[3, 5] = bad
    got = linear_logprob(h, w, y, entropy=True, lse=True, workspace_mb=TINY)
    for x, r in zip(got, want, strict=True):
        assert x.isnan().tolist() == [False] * 3 + [True] + [False] * 2 or x is got.lse
        others = [0, 1, 2, 4, 5]
        assert torch.equal(x[others], r[others])
    assert not got.lse[3].isfinite()


def test_an_infinite_logit_of_the_target_is_not_certainty():
    h, w, y, _ = problem(6, 8, 70)
    h[3, 5], w[:, 5] = torch.inf, -1
    w[y[3], 5] = 1  # the row is -inf but for its target, which is +inf: log softmax is NaN, not 0
    assert linear_logprob(h, w, y).logp.isnan().tolist() == [False] * 3 + [True] + [False] * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_without_an_upstream_gradient_are_dropped(frozen):
    """They contribute exactly 0, also if they are NaN; the rest is what it is without them."""
    h, w, y, g = problem(9, 8, 70, dtype=torch.float64)
    g[0][[1, 5]] = 0
    want = gradient_of_logp(h, w, y, g[0], frozen=frozen)[1]
    h[[1, 5]] = torch.nan
    got = gradient_of_logp(h, w, y, g[0], frozen=frozen)[1]
    assert (got[[1, 5]] == 0).all()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_an_upstream_gradient_of_zero_costs_no_matrix_product():
    h, w, y, _ = problem(9, 8, 70)
    leaves = h.requires_grad_(), w.requires_grad_()
    logp = linear_logprob(*leaves, y).logp
    with Recorder() as seen:
        grads = torch.autograd.grad((0 * logp).sum(), leaves)
    assert not any(x.any() for x in grads)
    assert all(rows == 0 for rows in seen.product_rows)


def test_a_row_does_not_depend_on_the_others():
    h, w, y, _ = problem(40, 16, 300)
    want = linear_logprob(h, w, y, entropy=True, workspace_mb=TINY)
    other = h.clone()
    other[1:] = h[1:].flip(0) * 3
    assert torch.equal(linear_logprob(other, w, y, workspace_mb=TINY).logp[0], want.logp[0])
    alone = linear_logprob(h[:7], w, y[:7], entropy=True, workspace_mb=TINY)
    torch.testing.assert_close(alone.logp, want.logp[:7], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(alone.entropy, want.entropy[:7], rtol=2e-6, atol=2e-6)


# --------------------------------------------------------------------------------------- the same each time
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"temperature": torch.linspace(0.5, 2, 65)}])
def test_reruns_are_equal_to_the_bit_and_slices_do_not_matter(options):
    h, w, y, g = problem(65, 32, 900)
    first = run(h, w, y, g, workspace_mb=TINY, **options)
    assert_same(first, run(h, w, y, g, workspace_mb=TINY, **options))
    for mb in (0.05, 0.1, 16):
        got = run(h, w, y, g, workspace_mb=mb, **options)
        for x, r in zip(got, first, strict=True):
            torch.testing.assert_close(x, r, rtol=2e-6, atol=2e-6 * max(1, r.abs().max().item()))


def misaligned(x):
    """The same numbers, from one element after an aligned address on."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def test_non_contiguous_and_sliced_inputs():
    h, w, y, g = problem(12, 8, 150)
    want = run(h, w, y, g, workspace_mb=TINY)
    wide = torch.stack([h, h * 0], 2).flatten(1)[:, ::2]
    parent = torch.cat([w, w], 1)[:, 8:]
    labels = torch.stack([y, y], 1)[:, 1]
    strided = [(h.T.contiguous().T, w.T.contiguous().T, y), (wide, parent, labels)]
    assert not any(x.is_contiguous() for views in strided for x in views[:2])
    for views in (*strided, [misaligned(x) for x in (h, w, y)]):
        leaves = [x.detach().requires_grad_() for x in views[:2]]
        out = linear_logprob(*leaves, views[2], entropy=True, lse=True, workspace_mb=TINY)
        grads = torch.autograd.grad([x.double() for x in out], leaves, g)
        for x, r in zip([*out, *grads], want, strict=True):
            torch.testing.assert_close(x, r, rtol=2e-6, atol=2e-6)


# ------------------------------------------------------------------------------ what autograd does, and keeps
class Recorder(TorchDispatchMode):
    """The number of elements of the largest output of any operation, and the rows of every matrix product."""

    def __init__(self):
        super().__init__()
        self.largest, self.product_rows = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        if func.name().split(".")[0] in ("aten::mm", "aten::addmm_", "mkldnn::_linear_pointwise"):
            self.product_rows.append(min(a.numel() for a in args if isinstance(a, torch.Tensor)))
        return out


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [{}, {"entropy": True}, {"softcap": 3.0, "entropy": True}])
def test_the_logits_never_exist(frozen, options):
    h, w, y, _ = problem(256, 8, 4096)
    leaves = h.requires_grad_(), w.requires_grad_(not frozen)
    with Recorder() as seen:
        out = linear_logprob(*leaves, y, workspace_mb=0.25, **options)
        sum(x.sum() for x in out if x is not None).backward()
    assert 256 * 64 <= seen.largest <= 256 * 1024 / 4 + 1
    with Recorder() as seen:
        linear_logprob(*leaves, y, engine="reference")
    assert seen.largest >= 256 * 4096


def saved(h, w, y, **options):
    """The sizes of the tensors that the graph keeps."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        linear_logprob(h, w, y, **options)
    return sizes


def test_what_is_saved():
    h, w, y, _ = problem(33, 8, 700)
    h.requires_grad_()
    with torch.no_grad():
        assert saved(h, w, y) == []
    assert saved(h.detach(), w, y) == []
    assert max(saved(h, w, y)) == w.numel()
    assert saved(h, w, y).count(h.numel()) == 2  # h and the gradient in it
    w.requires_grad_()
    assert saved(h, w, y).count(h.numel()) == 1


def test_the_graph_is_freed():
    h, w, y, _ = problem(5, 8, 70)
    h.requires_grad_()
    out = linear_logprob(h, w, y).logp
    node = weakref.ref(out.grad_fn)
    del out
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("which", ["h", "w", "bias"])
@pytest.mark.parametrize("entropy", [False, True])
def test_only_one_input_needs_a_gradient(which, entropy):
    h, w, y, g = problem(9, 8, 150, dtype=torch.float64)
    inputs = {"h": h, "w": w, "bias": torch.linspace(-1, 1, 150).double()}
    inputs[which].requires_grad_()
    grads = []
    for engine in ("streamed", "reference"):
        out = linear_logprob(
            inputs["h"],
            inputs["w"],
            y,
            bias=inputs["bias"],
            entropy=entropy,
            engine=engine,
            workspace_mb=TINY,
        )
        total = (out.logp * g[0]).sum() + ((out.entropy * g[1]).sum() if entropy else 0)
        grads.append(torch.autograd.grad(total, inputs[which])[0])
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("output", ["logp", "entropy", "lse"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_through_one_output(output, frozen):
    h, w, y, g = problem(9, 8, 150, dtype=torch.float64)
    h.requires_grad_()
    w.requires_grad_(not frozen)
    ask = {"entropy": output == "entropy", "lse": output == "lse"}
    leaves = [h] if frozen else [h, w]
    grads = [
        torch.autograd.grad(getattr(linear_logprob(h, w, y, engine=e, **ask), output), leaves, g[0])
        for e in ("streamed", "reference")
    ]
    for x, r in zip(*grads, strict=True):
        torch.testing.assert_close(x, r, rtol=1e-11, atol=1e-11)


def test_a_frozen_head_needs_two_products_and_a_trained_one_four():
    h, w, y, g = problem(9, 8, 60)  # one tile

    def products(frozen, **options):
        leaf, weight = h.clone().requires_grad_(), w.clone().requires_grad_(not frozen)
        with Recorder() as seen:
            (linear_logprob(leaf, weight, y, **options).logp * g[0]).sum().backward()
        return len(seen.product_rows)

    assert (products(True), products(True, entropy=True)) == (2, 2)
    assert (products(False), products(True, lse=True)) == (4, 3)


@pytest.mark.parametrize("frozen", [False, True])
def test_retain_graph_twice_is_equal(frozen):
    h, w, y, g = problem(9, 8, 150)
    leaves = [h.requires_grad_(), w.requires_grad_(not frozen)][: 1 if frozen else 2]
    out = linear_logprob(h, w, y, entropy=True, workspace_mb=TINY)
    total = (out.logp * g[0]).sum() + (out.entropy * g[1]).sum()
    assert_same(torch.autograd.grad(total, leaves, retain_graph=True), torch.autograd.grad(total, leaves))


def test_tied_embeddings_accumulate():
    _, w, y, g = problem(9, 8, 40, dtype=torch.float64)
    ids, grads = torch.arange(9) % 5, []
    for engine in ("streamed", "reference"):
        tied = w.clone().requires_grad_()
        logp = linear_logprob(tied[ids] * 2, tied, y, engine=engine).logp
        grads.append(torch.autograd.grad((logp * g[0]).sum(), tied)[0])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_torch_checks_the_gradient():
    h, w, y, _ = problem(4, 3, 7, dtype=torch.float64)
    bias = torch.linspace(-1, 1, 7).double().requires_grad_()

    def f(h, w, bias):
        return linear_logprob(h, w, y, bias=bias, temperature=0.7, softcap=2.0, entropy=True, lse=True)[:]

    assert torch.autograd.gradcheck(f, (h.requires_grad_(), w.requires_grad_(), bias))


@pytest.mark.parametrize("frozen", [False, True])
def test_two_differentiations_are_refused_with_a_way_out(frozen):
    h, w, y, _ = problem(4, 3, 7, dtype=torch.float64)
    h.requires_grad_()
    w.requires_grad_(not frozen)
    (dh,) = torch.autograd.grad(linear_logprob(h, w, y).logp.square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match=r"engine='reference'.*bound model fused=False"):
        dh.sum().backward()
    inner = torch.func.grad(lambda h, w: linear_logprob(h, w, y).logp.sum())
    for outer in (0, 1):
        with pytest.raises(RuntimeError, match="engine='reference'"):
            torch.func.grad(lambda *a: inner(*a).sum(), argnums=outer)(h.detach(), w.detach())
    (dh,) = torch.autograd.grad(linear_logprob(h, w, y, engine="reference").logp.sum(), h, create_graph=True)
    dh.square().sum().backward()
    assert h.grad.isfinite().all()


# ------------------------------------------------------------------------------------------- transformations
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("entropy", [False, True])
def test_torch_func(argnums, entropy):
    h, w, y, _ = problem(7, 5, 33, dtype=torch.float64)
    y[2] = -100
    batch = torch.stack([h, -h, h.flip(0)])

    def loss(h, w, engine):
        out = linear_logprob(h, w, y, entropy=entropy, engine=engine)
        return out.logp.sum() + (out.entropy.square().sum() if entropy else 0)

    def both(transform, *args):
        got, want = (transform(engine)(*args) for engine in ("streamed", "reference"))
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)

    grad = partial(torch.func.grad, argnums=argnums)
    both(lambda e: grad(partial(loss, engine=e)), h, w)
    both(lambda e: torch.vmap(grad(partial(loss, engine=e)), in_dims=(0, None)), batch, w)
    both(lambda e: torch.vmap(partial(loss, engine=e), in_dims=(0, None)), batch, w)
    both(lambda e: torch.func.jacrev(partial(loss, engine=e), argnums=argnums), h, w)


def test_hessian_through_the_reference():
    h, w, y, _ = problem(2, 3, 7, dtype=torch.float64)

    def f(x):
        return linear_logprob(x, w, y, engine="reference").logp.sum()

    hessian = torch.func.hessian(f)(h).reshape(6, 6)
    torch.testing.assert_close(hessian, hessian.T)
    assert (torch.linalg.eigvalsh(hessian) < 1e-9).all()  # a log-probability is concave in the logits


@pytest.mark.parametrize("engine", ["streamed", "reference"])
def test_autocast_changes_nothing(engine):
    h, w, y, g = problem(9, 64, 150)
    want = run(h, w, y, g, engine=engine)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(h, w, y, g, engine=engine)
    if engine == "streamed":
        assert_same(got, want)
    else:  # plain operations leave their backward to torch, which does want it outside of autocast
        assert_same(got[:3], want[:3])


def test_meta_tensors_have_shapes():
    h, w = (
        torch.empty(5, 8, device="meta", requires_grad=True),
        torch.empty(70, 8, device="meta", requires_grad=True),
    )
    out = linear_logprob(h, w, torch.empty(5, dtype=torch.long, device="meta"), entropy=True, lse=True)
    assert [x.shape for x in out] == [(5,)] * 3
    (out.logp + out.entropy).sum().backward()
    assert (h.grad.shape, w.grad.shape, out.lse.is_meta) == (h.shape, w.shape, True)


def test_temperature_as_a_tensor():
    h, w, y, g = problem(5, 8, 70, dtype=torch.float64)
    per_row, scalar = torch.full((5,), 0.7), torch.tensor(0.7)
    assert_same(run(h, w, y, g, temperature=per_row), run(h, w, y, g, temperature=scalar))
    leaf = torch.full((5,), 0.7, requires_grad=True)
    logp = linear_logprob(h, w, y, temperature=leaf, engine="reference").logp
    assert torch.autograd.grad(logp.sum(), leaf)[0].abs().min() > 0


def test_unasked_outputs_are_none():
    h, w, y, _ = problem(5, 8, 70)
    for engine in ("auto", "reference"):
        assert [x is None for x in linear_logprob(h, w, y, engine=engine)] == [False, True, True]
        assert [x is None for x in linear_logprob(h, w, y, lse=True, engine=engine)] == [False, True, False]


# ---------------------------------------------------------------------------------------------------- errors
H, W, Y = torch.zeros(5, 8), torch.zeros(7, 8), torch.zeros(5, dtype=torch.long)
BAD = [
    ((torch.zeros(5, 8, 2), W, Y), {}, "h: expected [T, D], got [5, 8, 2]"),
    ((H, torch.zeros(16, 7), Y), {}, "w: expected [V, D] with D = 8, got [16, 7]"),
    ((H, torch.zeros(8), Y), {}, "w: expected [V, D] with D = 8, got [8]"),
    ((H, torch.zeros(0, 8), Y), {}, "w: expected [V, D] with V > 0, got [0, 8]"),
    ((H, W, Y[:4]), {}, "y: expected [T] = [5], got [4]"),
    ((H, W, Y[:, None]), {}, "y: expected [T] = [5], got [5, 1]"),
    ((H, W, Y.float()), {}, "y: expected an integer tensor, got torch.float32"),
    ((H, W, Y.bool()), {}, "y: expected an integer tensor, got torch.bool"),
    ((H.long(), W, Y), {}, "h: expected a floating-point tensor, got torch.int64"),
    ((H, W.long(), Y), {}, "w: expected a floating-point tensor, got torch.int64"),
    ((H, W.to("meta"), Y), {}, "w: expected a tensor on cpu, got meta"),
    ((H, W, Y.to("meta")), {}, "y: expected a tensor on cpu, got meta"),
    ((H, W, Y), {"bias": torch.zeros(8)}, "bias: expected [V] = [7], got [8]"),
    ((H, W, Y), {"bias": Y[:7]}, "bias: expected a floating-point tensor, got torch.int64"),
    ((H, W, Y), {"temperature": torch.ones(4)}, "temperature: expected a number, [] or [T] = [5], got [4]"),
    ((H, W, Y), {"temperature": 0}, "temperature: expected a number > 0, got 0"),
    ((H, W, Y), {"temperature": float("nan")}, "temperature: expected a number > 0, got nan"),
    (
        (H, W, Y),
        {"temperature": torch.ones(5, requires_grad=True)},
        "temperature: expected no gradient (engine='reference' has one), got requires_grad=True",
    ),
    ((H, W, Y), {"softcap": 0.0}, "softcap: expected None or a number > 0, got 0.0"),
    ((H, W, Y), {"workspace_mb": -1}, "workspace_mb: expected None or a number > 0, got -1"),
    ((H, W, Y), {"engine": "cuda"}, "engine: expected 'auto' or 'streamed' or 'reference', got 'cuda'"),
]


@pytest.mark.parametrize(("args", "options", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_inputs(args, options, message):
    with pytest.raises(ValueError) as error:
        linear_logprob(*args, **options)
    assert str(error.value) == message
