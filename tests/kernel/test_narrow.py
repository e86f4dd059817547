"""Products of bfloat16 on a CPU: each way against float64, the choice, and what follows from it."""

import itertools
import json
import math

import pytest
import torch
from tiny import llama
from torch import nn

from rft_fn.model import packed_attention
from rft_fn.model.quantize import FastLinear, set_fast
from rft_kernels import linear, linear_logprob, narrow, products
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


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The file of this processor's seconds, which are 1e-3, in a folder of its own."""
    monkeypatch.setenv("RFT_FN_CACHE", str(tmp_path))
    monkeypatch.setattr(narrow, "_seconds", lambda layout: dict.fromkeys(narrow._names(layout), 1e-3))
    narrow.measured.cache_clear()
    narrow.measured()
    narrow.measured.cache_clear()
    yield next(tmp_path.iterdir())
    narrow.measured.cache_clear()


def broken(change):
    """A file whose first layout has other seconds."""
    return lambda found: json.dumps([found[0] | change, *found[1:]])


DAMAGED = {
    "0": broken({"wide": 0.0}),
    "negative": broken({"wide": -1e-3}),
    "too fast for any processor": broken({"given": 1e-9}),
    "an hour": broken({"given": 3600.0}),
    "nan": broken({"given": math.nan}),
    "infinite": broken({"given": math.inf}),
    "text": broken({"given": "1e-3"}),
    "true": broken({"given": True}),
    "another way": broken({"sparse": 1e-3}),
    "a layout less": lambda found: json.dumps(found[1:]),
    "a number": lambda found: "7",
    "null": lambda found: json.dumps([None] * 3),
    "cut off": lambda found: json.dumps(found)[:40],
    "empty": lambda found: "",
    "no text": lambda found: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_file_that_cannot_be_a_measurement_is_made_anew(file, damage):
    content = DAMAGED[damage](json.loads(file.read_text()))
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = narrow.measured()
    assert {x for of in found.values() for x in of.values()} == {1e-3}
    assert json.loads(file.read_text()) == list(found.values())
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_seconds_are_told_apart_by_the_processor_and_its_limits(monkeypatch, file):
    file.unlink()
    tmp_path = file.parent
    for name in products._LIMITS:
        monkeypatch.delenv(name, raising=False)
    info = tmp_path / "cpuinfo"
    monkeypatch.setenv("RFT_FN_CPUINFO", str(info))
    kinds = [
        "vendor_id: GenuineIntel\nmodel name: X\nflags: avx2\ncpu MHz: 1\n",
        "vendor_id: GenuineIntel\nmodel name: X\nflags: avx2 amx_bf16\n",
        "CPU implementer: 0x41\nCPU part: 0xd0c\nFeatures: bf16\n",
        "CPU implementer: 0x41\nCPU part: 0xd4f\nFeatures: bf16\n",
        "CPU implementer: 0x41\nCPU part: 0xd4f\nFeatures: asimd\n",
        "vendor_id: GenuineIntel\nmodel name: X\nflags: avx2\ncpu MHz: 2\n",  # the first one, at another time
    ]
    files = []
    for kind in kinds:
        info.write_text(kind)
        narrow.measured.cache_clear()
        narrow.measured()
        files.append(len(list(tmp_path.glob("bf16_*"))))
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.setenv(name, "AVX")
        narrow.measured.cache_clear()
        narrow.measured()
        files.append(len(list(tmp_path.glob("bf16_*"))))
    narrow.measured.cache_clear()
    assert files == [1, 2, 3, 4, 5, 5, 6, 7, 8]


@pytest.mark.parametrize("step", [1e-7, 0.01])
def test_a_turn_is_long_against_the_step_of_its_clock(monkeypatch, step):
    """A processor's clock that goes on by 10 ms gave 0 for a product."""
    spent = {"exact": 0.0, "product": 3e-4, "calls": 0}

    def clock(step, each):
        def now():
            spent["exact"] += each
            return spent["exact"] // step * step

        return now

    def product(a, b):
        spent["exact"] += spent["product"]
        spent["calls"] += 1

    monkeypatch.setattr(narrow.time, "process_time", clock(step, 1e-8))
    monkeypatch.setattr(narrow.time, "perf_counter", clock(1e-6, 1e-8))
    monkeypatch.setattr(narrow, "WAYS", dict.fromkeys(WAYS, product))
    found = narrow._seconds(INPUT)
    assert set(found) == set(WAYS) and spent["calls"] < 100
    assert all(abs(x - 3e-4) < 5e-6 for x in found.values())


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
    packs = way == "given" and narrow.packs()
    assert (pack.packed is not None) == packs
    want = x.double() @ weight.double().T + bias.double()
    assert got.dtype == torch.bfloat16 and (got.double() - want).abs().max() <= want.abs().max() * 2**-7
    if packs:
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


def test_a_processor_without_bfloat16_multiplies_in_float32(monkeypatch):
    """Nothing is timed or packed there, whatever a measurement would say."""
    monkeypatch.setattr(narrow, "has_products", lambda: False)
    monkeypatch.setattr(narrow, "measured", None)
    assert set(narrow.ways().values()) == {"wide"} and not narrow.is_fast() and narrow.gain() == 0
    assert narrow.packing().elements == math.inf
    packed_attention.warn_once.cache_clear()
    lm = llama(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"^bfloat16: this processor multiplies it in float32; "):
        set_fast(lm, True, narrow=True)
    assert any(type(m) is FastLinear for m in lm.modules())


def refused(*_):
    raise RuntimeError(
        "mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw"
    )


@pytest.mark.parametrize("operator", ["_reorder_linear_weight", "_linear_pointwise"])
def test_what_onednn_refuses_is_not_packed(chosen, monkeypatch, operator):
    chosen("given")
    monkeypatch.setattr(narrow, "packs", narrow.packs.__wrapped__)
    monkeypatch.setattr(torch.ops.mkldnn, operator, refused, raising=False)
    assert not narrow.packs() and narrow.packing().elements == math.inf
    assert linear.Packed(normal(300, 256)).linear(normal(9, 256)).shape == (9, 300)


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
