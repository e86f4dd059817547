"""Products of bfloat16 on a CPU: each way against float64, the choice, and what follows from it."""

import itertools

import pytest
import torch
from tiny import llama
from torch import nn

from rft_fn.model import packed_attention
from rft_fn.model.quantize import FastLinear, set_fast
from rft_kernels import linear, linear_logprob, narrow
from rft_kernels.narrow import FORWARD, INPUT, WAYS, WEIGHT, Layout


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def chosen(monkeypatch):
    """Every layout goes one way."""

    def choose(way):
        monkeypatch.setattr(narrow, "ways", lambda: dict.fromkeys((FORWARD, INPUT, WEIGHT), way))

    return choose


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [Layout(*x) for x in itertools.product((False, True), repeat=2)])
def test_every_way_is_the_product_rounded_once(way, layout, chosen):
    chosen(way)
    a = normal(33, 7).T if layout.a else normal(7, 33)
    b = normal(33, 5, seed=1).T if layout.b else normal(5, 33, seed=1)
    got = narrow.product(a, b)
    want = a.double() @ b.double().T
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= want.abs().max() * 2**-8


def test_another_way_is_taken_only_where_it_is_clearly_faster():
    seconds = {
        FORWARD: {"given": 1.0, "wide": 0.7},
        INPUT: {"given": 1.0, "dense": 0.5, "wide": 2.0},
        WEIGHT: {"given": 1.0, "dense": 1.1, "wide": 0.5},
    }
    assert narrow.choose(seconds) == {FORWARD: "given", INPUT: "dense", WEIGHT: "wide"}


def test_this_processor_is_measured_once(monkeypatch, tmp_path):
    """Also for other processes: the seconds are in a file."""
    monkeypatch.setenv("RFT_FN_CACHE", str(tmp_path))
    narrow.measured.cache_clear()
    found = narrow.measured()
    assert set(found) == {FORWARD, INPUT, WEIGHT} and narrow.measured() is found
    narrow.measured.cache_clear()
    assert narrow.measured() == found and len(list(tmp_path.iterdir())) == 1
    assert all(0 < x < 10 for of in found.values() for x in of.values())
    assert set(narrow.ways().values()) <= set(WAYS) and (narrow.gain() > 0) == narrow.has_products()


@pytest.mark.parametrize("way", ["dense", "wide"])
def test_a_layer_and_its_gradients_go_the_chosen_way(way, chosen, monkeypatch):
    chosen(way)
    taken = []
    plain = WAYS[way]
    monkeypatch.setitem(WAYS, way, lambda a, b: taken.append((a.shape, b.shape)) or plain(a, b))
    monkeypatch.setattr(linear.products, "large_layer", lambda: 1)
    x, weight, up = normal(2, 9, 24), normal(16, 24, seed=1), normal(2, 9, 16, seed=2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = linear.linear(*leaves)
    out.backward(up)
    assert taken == [((18, 24), (16, 24)), ((18, 16), (24, 16)), ((16, 18), (24, 18))]
    wide = [x.double().requires_grad_() for x in (x, weight)]
    want = nn.functional.linear(*wide)
    want.backward(up.double())
    for got, exact in ((out, want), *((g.grad, w.grad) for g, w in zip(leaves, wide))):
        assert (got.double() - exact).norm() <= 4e-3 * exact.norm()


def test_layers_are_torchs_where_its_own_way_is_the_fastest(chosen, monkeypatch):
    chosen("given")
    monkeypatch.setattr(linear._Product, "apply", None)
    assert linear.linear(normal(64, 512), normal(512, 512)).shape == (64, 512)


@pytest.mark.parametrize("way", ["given", "wide"])
def test_a_weight_is_packed_where_bfloat16_is_fast(way, chosen, monkeypatch):
    """Rows have the same bits in any company, also fewer than oneDNN likes."""
    chosen(way)
    monkeypatch.setattr(linear.products, "large_layer", lambda: 1)
    weight, x, bias = normal(300, 256), normal(9, 256, seed=1), normal(300, seed=2)
    pack = linear.Packed(weight)
    got = pack.linear(x, bias)
    assert (pack.packed is not None) == (way == "given")
    want = x.double() @ weight.double().T + bias.double()
    assert got.dtype == torch.bfloat16 and (got.double() - want).abs().max() <= want.abs().max() * 2**-7
    if way == "given":
        assert all(torch.equal(pack.linear(x[:rows], bias), got[:rows]) for rows in range(1, 9))


@pytest.mark.parametrize("way", ["given", "wide"])
def test_the_head_rounds_the_gradient_of_its_logits_only_where_bfloat16_is_fast(way, chosen, monkeypatch):
    """Log-probs are those of float32 products either way."""
    chosen(way)
    rounded = []
    plain = narrow.product
    monkeypatch.setattr(narrow, "product", lambda a, b: rounded.append(a.dtype) or plain(a, b))
    h, w = normal(30, 64), (normal(700, 64, seed=1) / 4).bfloat16()
    y, up = torch.arange(30), torch.linspace(-1, 1, 30)
    narrow_leaves = [x.clone().requires_grad_() for x in (h, w)]
    wide_leaves = [x.double().requires_grad_() for x in (h, w)]
    got = linear_logprob(*narrow_leaves, y).logp
    want = linear_logprob(*wide_leaves, y).logp
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    got.backward(up)
    want.backward(up.double())
    assert bool(rounded) == (way == "given")
    for x, exact in zip(narrow_leaves, wide_leaves):
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad.double() - exact.grad).norm() <= 4e-3 * exact.grad.norm()


def test_a_slow_processor_is_told_once_and_multiplies_in_float32(chosen, monkeypatch):
    chosen("wide")
    monkeypatch.setattr(narrow, "gain", lambda: 0.4)
    monkeypatch.setattr("rft_kernels.products.packing", lambda: linear.products.Packing(float("inf"), rows=1))
    packed_attention.warn_once.cache_clear()
    lm = llama(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"^bfloat16: products take this processor 2.5 times as long"):
        set_fast(lm, True, narrow=True)
    assert any(type(m) is FastLinear for m in lm.modules())
    set_fast(lm, False, narrow=True)
    assert not any(type(m) is FastLinear for m in lm.modules())
    set_fast(lm, True)  # for float32, which gains nothing here
    assert not any(type(m) is FastLinear for m in lm.modules())
