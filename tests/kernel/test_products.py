"""Matrix products of float32 on a CPU: the choice of a library changes only their speed."""

import math

import processors
import pytest
import ref_kernels
import torch

from rft_kernels import linear_logprob, narrow, products

LAYOUTS = {
    "plain": lambda m, n: torch.randn(m, n),
    "transposed": lambda m, n: torch.randn(n, m).T,
    "sliced": lambda m, n: torch.randn(m + 3, n + 5)[1:-2, 2:-3],
    "misaligned": lambda m, n: torch.randn(m * n + 1)[1:].view(m, n),
}


@pytest.fixture
def onednn(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(products, "mkl_is_half", lambda: True)
    monkeypatch.setattr(products, "is_zen4", lambda: False)
    monkeypatch.setattr(products, "_LARGE", 1)


@pytest.mark.parametrize("a_is", LAYOUTS)
@pytest.mark.parametrize("b_is", LAYOUTS)
@pytest.mark.parametrize("size", [(7, 5, 3), (1, 90, 17), (130, 65, 1), (64, 576, 96)])
def test_products_of_onednn_are_those_of_float64(onednn, a_is, b_is, size):
    torch.manual_seed(0)
    m, k, n = size
    a, b, total = LAYOUTS[a_is](m, k), LAYOUTS[b_is](k, n), torch.randn(m, n)
    want, bound = a.double() @ b.double(), 1e-6 * k
    torch.testing.assert_close(products.mm(a, b).double(), want, rtol=0, atol=bound)
    out = torch.full((m, 2 * n), 7.0)
    assert products.mm(a, b, out[:, :n]).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out[:, :n].double(), want, rtol=0, atol=bound)
    assert (out[:, n:] == 7).all()
    added = total.clone()
    assert products.add_mm(added, a, b) is added
    torch.testing.assert_close(added.double(), want + total, rtol=0, atol=bound)


@pytest.mark.parametrize("size", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty_products(onednn, size):
    m, k, n = size
    assert torch.equal(products.mm(torch.ones(m, k), torch.ones(k, n)), torch.zeros(m, n))
    assert torch.equal(
        products.add_mm(torch.ones(m, n), torch.ones(m, k), torch.ones(k, n)), torch.ones(m, n)
    )


def test_other_types_and_devices_are_torchs(onednn):
    assert products.by_onednn(torch.ones(2))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert not products.by_onednn(torch.ones(2, dtype=dtype))
        assert products.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype)).dtype == dtype
    assert not products.by_onednn(torch.ones(2, device="meta"))
    assert products.mm(torch.ones(2, 3, device="meta"), torch.ones(3, 4, device="meta")).shape == (2, 4)


def test_small_products_and_those_of_matrices_with_gaps_are_torchs(onednn, monkeypatch):
    """For a matrix with gaps between its rows oneDNN took minutes, where torch takes milliseconds."""
    monkeypatch.setattr(products, "_LARGE", 60)
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, mm=torch.mm, out=None: seen.append(a.shape) or mm(a, b))
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    products.mm(a, b), products.mm(torch.ones(4, 3).T, torch.ones(5, 4).T)
    assert seen == []
    products.mm(a, b[:, :4])
    assert seen == [(3, 4)]
    wide = torch.ones(9, 9)
    products.mm(a, wide[:4, :5]), products.mm(a, wide[:5, :4].T), products.mm(wide[:3, :4], b)
    assert seen == [(3, 4)] * 4


def test_a_factor_that_is_read_by_columns_is_torchs_on_a_zen4(onednn, monkeypatch):
    monkeypatch.setattr(products, "is_zen4", lambda: True)
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, mm=torch.mm, out=None: seen.append(a.shape) or mm(a, b))
    by_columns, b, total = torch.randn(4, 3).T, torch.randn(4, 5), torch.zeros(3, 5)
    product = products.mm(by_columns, b)
    assert seen == [(3, 4)]
    products.mm(by_columns.contiguous(), b), products.mm(torch.ones(3, 5), b.T)
    assert seen == [(3, 4)]
    torch.testing.assert_close(products.add_mm(total, by_columns, b), product)


@pytest.mark.parametrize(
    ("maker", "capability", "mkl", "onednn", "half", "packs"),
    [
        ("AuthenticAMD", "AVX512", True, True, True, (1 << 16, 1)),
        ("GenuineIntel", "AVX512", True, True, False, (math.inf, 1)),
        ("AuthenticAMD", "AVX2", True, True, False, (1 << 19, 2)),
        ("GenuineIntel", "AVX2", True, True, False, (math.inf, 1)),
        ("AuthenticAMD", "DEFAULT", True, True, False, (math.inf, 1)),
        ("AuthenticAMD", "AVX512", False, True, False, (math.inf, 1)),
        ("AuthenticAMD", "AVX512", True, False, False, (math.inf, 1)),
        (None, "AVX512", True, True, False, (math.inf, 1)),
    ],
)
def test_where_mkl_leaves_half_of_the_vector_alone_and_where_packs_win(
    monkeypatch, maker, capability, mkl, onednn, half, packs
):
    monkeypatch.setattr(products, "processor", {"vendor_id": maker}.get)
    monkeypatch.setattr(products, "_vectors", products._vectors.__wrapped__)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    assert products.mkl_is_half() is half
    assert products.packing() == packs


def test_the_maker_and_the_family_of_the_processor(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(products, "Path", lambda _: info)
    assert products.processor("vendor_id") is None
    info.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name\t: A: B\n\n")
    assert products.processor("vendor_id") == "AuthenticAMD"
    assert products.processor("cpu family") == "26"
    assert products.processor("model name") == "A: B"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert products.processor("vendor_id") is None


def test_this_process_is_the_processor_that_it_stands_for():
    """Where RFT_FN_TEST_CPU forces one, the libraries obey it: else its tests would be those of any other."""
    level = processors.forced()
    if level is None:
        pytest.skip(f"{processors.NAME} is not set")
    assert torch.backends.cpu.get_cpu_capability() == level.torch
    assert narrow.has_products() == level.bfloat16
    amd = products.processor("vendor_id") == "AuthenticAMD"
    assert amd or not level.cpuinfo.startswith("zen")
    if amd and not level.cpuinfo:
        return  # a level without a file is this machine with fewer instructions
    wide = products.Packing(math.inf, rows=1)
    packing = {"zen3": products.Packing(1 << 19, rows=2)}.get(level.cpuinfo, wide)
    half = level.cpuinfo in ("zen4", "zen5")
    assert products.packing() == (products.Packing(1 << 16, rows=1) if half else packing)
    assert products.mkl_is_half() == half and products.is_zen4() == (level.cpuinfo in ("zen3", "zen4"))
    assert level.bfloat16 or narrow.packing() == wide


@pytest.mark.parametrize(("family", "want"), [("25", 1 << 26), ("26", 1 << 22), (None, 1 << 22)])
def test_a_layer_is_large_where_the_processor_gains_more_than_a_new_shape_costs(monkeypatch, family, want):
    monkeypatch.setattr(products, "processor", {"cpu family": family}.get)
    monkeypatch.setattr(products, "_family", products._family.__wrapped__)
    assert products.large_layer() == want


@pytest.mark.parametrize("softcap", [None, 100.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_two_logits_that_count_most_are_vector_products(onednn, monkeypatch, softcap, entropy):
    """With matrix products that are wrong, log p is wrong by the share of p that only they have seen."""
    make, wrong = torch.Generator().manual_seed(0), 1e-3
    h, w = torch.randn(60, 90, generator=make), torch.randn(700, 90, generator=make)
    y, bias, temperature = torch.arange(60) * 11, torch.linspace(-2, 1, 700), torch.linspace(0.8, 2, 60)
    y[::3] = (h @ w.T).argmax(1)[::3]
    product, unit = products.mm, 1 if softcap is None else 0.8 / softcap
    monkeypatch.setattr(products, "mm", lambda a, b, out=None: product(a, b, out).add_(wrong * unit))
    given = {"temperature": temperature, "bias": bias, "softcap": softcap}
    got = linear_logprob(h, w, y, entropy=entropy, workspace_mb=0.002, **given)[0].double()
    arrays = [x.double().numpy() for x in (h, w, temperature, bias)]
    z = torch.tensor(ref_kernels._logits(*arrays, softcap)[0])
    log_p = z.log_softmax(1)
    others = log_p.exp().scatter(1, y[:, None], 0)
    unseen = others.sum(1) - others.amax(1)
    assert unseen.min() < 0.01 and unseen.max() > 0.3
    error = (got - log_p.gather(1, y[:, None])[:, 0]).abs()
    assert (error <= wrong * unseen + 1e-5).all(), (error - wrong * unseen).max()
