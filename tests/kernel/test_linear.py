"""A linear layer by oneDNN: its values and derivatives are those of float64, under every transform."""

import floor
import pytest
import ref_kernels
import torch
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rft_kernels import linear as fast
from rft_kernels import narrow, products

SHAPES = {"rows": (9, 7), "batch": (2, 5, 7), "one": (7,), "none": (0, 7)}


@pytest.fixture(autouse=True)
def products_seen(monkeypatch):
    """The shapes of oneDNN's products, all of which are large enough."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    seen = []
    by_onednn = torch.ops.mkldnn._linear_pointwise

    def record(a, b, *options):
        seen.append((*a.shape, b.shape[0]))
        return by_onednn(a, b, *options)

    narrow.measured()  # once in a process, with products of its own
    monkeypatch.setattr(products, "mkl_is_half", lambda: True)
    monkeypatch.setattr(products, "is_zen4", lambda: False)
    monkeypatch.setattr(products, "large_layer", lambda: 1)
    monkeypatch.setattr(products, "packing", lambda: products.Packing(1, 1))
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", record, raising=False)
    return seen


def _inputs(shape=(9, 7), wide=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g), torch.randn(wide, 7, generator=g), torch.randn(wide, generator=g)


def _loss(layer, x, weight, bias):
    """A scalar with derivatives of every order, none alike."""
    out = layer(x, weight, bias)
    return (out.tanh() * torch.arange(1, out.numel() + 1, dtype=x.dtype).view_as(out).sin()).sum()


def _same(got, want):
    torch.testing.assert_close([x.double() for x in got], list(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_are_those_of_float64(shape, has_bias, products_seen):
    leaves = [t.requires_grad_() for t in _inputs(shape)][: 2 + has_bias]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    bias = [None] * (not has_bias)
    _same([fast.linear(*leaves, *bias)], [F.linear(*doubles, *bias)])
    got = torch.autograd.grad(_loss(fast.linear, *leaves, *bias), leaves)
    _same(got, torch.autograd.grad(_loss(F.linear, *doubles, *bias), doubles))
    rows = leaves[0].numel() // 7
    want = [(rows, 7, 5)] * 2 + [(rows, 5, 7), (5, rows, 7)]
    if rows < 4:
        want = []
    assert sorted(products_seen) == sorted(want)


def test_the_gradient_of_a_weight_is_torchs_on_a_zen4(products_seen, monkeypatch):
    monkeypatch.setattr(products, "is_zen4", lambda: True)
    leaves = [t.requires_grad_() for t in _inputs()]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    got = torch.autograd.grad(_loss(fast.linear, *leaves), leaves)
    _same(got, torch.autograd.grad(_loss(F.linear, *doubles), doubles))
    assert products_seen == [(9, 7, 5), (9, 5, 7)]


@pytest.mark.parametrize("order", ["reverse", "forward", "vmap of grad", "hessian", "per weight"])
def test_transforms_of_torch_func_agree_with_float64(order, products_seen):
    x, weight, bias = _inputs()
    many, weights = torch.randn(3, 9, 7), torch.randn(3, 5, 7)

    def found(layer, cast):
        x_, w_, b_, many_, weights_ = map(cast, (x, weight, bias, many, weights))
        loss = lambda x, w, b: _loss(layer, x, w, b)  # noqa: E731
        return {
            "reverse": lambda: grad(loss, (0, 1, 2))(x_, w_, b_),
            "forward": lambda: jvp(loss, (x_, w_, b_), (x_ + 1, w_.flip(0), b_)),
            "vmap of grad": lambda: vmap(grad(loss, (0, 1, 2)), (0, None, None))(many_, w_, b_),
            "hessian": lambda: (hessian(loss, 1)(x_, w_, b_),),
            "per weight": lambda: vmap(grad(loss, (0, 1)), (None, 0, None))(x_, weights_, b_),
        }[order]()

    _same(found(fast.linear, lambda t: t), found(F.linear, torch.Tensor.double))
    assert len(products_seen) >= 2


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (1, 2), (2, None), (None, 1)])
def test_each_factor_may_vary_under_vmap(dims):
    x, weight = torch.randn(6, 6, 6), torch.randn(6, 6, 6)
    args = [t if d is not None else t[0] for t, d in zip((x, weight), dims)]
    want = vmap(F.linear, dims)(*[t.double() for t in args])
    torch.testing.assert_close(vmap(fast.linear, dims)(*args).double(), want, rtol=1e-5, atol=1e-5)


def test_second_derivatives_by_autograd_are_those_of_float64():
    leaves = [t.requires_grad_() for t in _inputs()]
    doubles = [t.detach().double().requires_grad_() for t in leaves]

    def second(layer, args):
        first = torch.autograd.grad(_loss(layer, *args), args, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), args)

    got, want = second(fast.linear, leaves), second(F.linear, doubles)
    torch.testing.assert_close([g.double() for g in got], list(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant):
    leaves = [t.requires_grad_() for t in _inputs()]
    want = torch.autograd.grad(_loss(fast.linear, *leaves), leaves)
    loss = checkpoint(_loss, fast.linear, *leaves, use_reentrant=reentrant)
    loss.backward()
    for leaf, g in zip(leaves, want):
        assert torch.equal(leaf.grad, g)


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_a_frozen_factor_costs_neither_a_product_nor_what_that_would_keep(frozen, products_seen):
    x, weight, _ = _inputs()
    kept = []
    {"weight": x, "input": weight}[frozen].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = fast.linear(x, weight)
    out.tanh().sum().backward()
    assert len(products_seen) == 2
    assert kept[0] == {"weight": weight, "input": x}[frozen].shape
    assert {"weight": x, "input": weight}[frozen].shape not in kept


def test_what_is_small_or_of_another_kind_is_torchs(products_seen, monkeypatch):
    x, weight, bias = _inputs()
    fast.linear(x[:3], weight, bias)
    for dtype in (torch.float64, torch.bfloat16):
        assert fast.linear(x.to(dtype), weight.to(dtype)).dtype == dtype
    assert fast.linear(x.to("meta"), weight.to("meta")).shape == (9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast.linear(x, weight, bias).dtype == torch.bfloat16
    monkeypatch.setattr(products, "large_layer", lambda: 9 * 7 * 5 + 1)
    fast.linear(x, weight, bias)
    with monkeypatch.context() as patch:
        patch.setattr(products, "packing", lambda: products.Packing(7 * 5 + 1, 1))
        fast.Packed(weight).linear(x, bias)
    monkeypatch.setattr(products, "mkl_is_half", lambda: False)
    monkeypatch.setattr(products, "large_layer", lambda: 1)
    fast.linear(x, weight, bias)
    assert products_seen == []
    # where MKL is as fast in training, a packed weight may still be faster in sampling
    fast.Packed(weight).linear(x, bias)
    assert len(products_seen) == 1


def test_what_comes_again_is_large_from_fewer_multiplications_on(products_seen, monkeypatch):
    """Every token of a rollout has the shapes of the one before; a pack has a shape of its own."""
    x, weight, bias = _inputs()
    monkeypatch.setattr(products, "large_layer", lambda: 9 * 7 * 5 + 1)
    want = fast.linear(x, weight, bias)
    assert products_seen == []
    torch.testing.assert_close(fast.Packed(weight).linear(x, bias), want)
    assert len(products_seen) == 1


def test_matrices_with_gaps_are_torchs(products_seen):
    _, weight, _ = _inputs()
    wide = torch.randn(9, 14)
    got = fast.linear(wide[:, :7], weight)
    torch.testing.assert_close(got, F.linear(wide[:, :7], weight))
    assert products_seen == []


def same(got, want):
    """The same bits; of few rows only but for rounding, where oneDNN is an old one."""
    assert torch.equal(got, want) or (floor.OLD_ONEDNN and len(got) < 64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_weight_changes_no_bit(has_bias, monkeypatch):
    sizes = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda *a: sizes.append(1) or reorder(*a), raising=False
    )
    weight, bias = torch.randn(96, 130), [torch.randn(96)][: int(has_bias)]
    packed = fast.Packed(weight)
    for shape in ((4, 130), (64, 130), (3, 50, 130), (1000, 130)):
        x = torch.randn(shape)
        same(packed.linear(x, *bias), fast.linear(x, weight, *bias))
    assert len(sizes) == 1
    gaps = torch.randn(9, 200)[:, :130]  # which `linear` leaves to torch
    same(packed.linear(gaps, *bias), fast.linear(gaps.contiguous(), weight, *bias))


def test_rows_by_a_packed_weight_have_the_same_bits_in_any_company(products_seen):
    """Also fewer rows than oneDNN likes, which are filled up with zeros."""
    weight, bias, x = torch.randn(96, 130), torch.randn(96), torch.randn(9, 130)
    packed = fast.Packed(weight)
    want = packed.linear(x, bias)
    for rows in range(1, 9):
        assert torch.equal(packed.linear(x[:rows], bias), want[:rows])
    assert torch.equal(packed.linear(x[4], bias), want[4])
    assert packed.linear(x[:0], bias).shape == (0, 96)
    assert [seen[0] for seen in products_seen] == [9, 4, 4, 4, 4, 5, 6, 7, 8, 4]


def test_fewer_rows_than_win_by_a_pack_are_torchs(products_seen, monkeypatch):
    monkeypatch.setattr(products, "packing", lambda: products.Packing(1, rows=2))
    monkeypatch.setattr(products, "mkl_is_half", lambda: False)
    weight, x = torch.randn(96, 130), torch.randn(2, 130)
    packed = fast.Packed(weight)
    one = packed.linear(x[:1])
    assert products_seen == [] and torch.equal(one, F.linear(x[:1], weight))
    bound = ref_kernels.logit_rounding(x, weight)
    torch.testing.assert_close(packed.linear(x)[:1], one, rtol=0, atol=bound)
    assert len(products_seen) == 1


def test_torch_compile_traces_it_whole():
    x, weight, bias = _inputs()
    compiled = torch.compile(fast.linear, backend="aot_eager", fullgraph=True)
    for rows in (9, 8, 5):
        torch.testing.assert_close(compiled(x[:rows], weight, bias), F.linear(x[:rows], weight, bias))


def test_parameters_that_are_given_are_those_that_are_read():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return fast.linear(x, self.weight, self.bias)

    layer = Layer(7, 5)
    x, weight, bias = _inputs()
    got = functional_call(layer, {"weight": weight, "bias": bias}, (x,))
    torch.testing.assert_close(got, F.linear(x, weight, bias))
