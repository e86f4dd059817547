"""The cases of GPU kernels (the files *_cases.py), and how an engine is chosen.

The cases run in triton's interpreter or on CUDA, in a separate process: triton decides when it is imported
whether kernels are interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from each_case import each

from rft_kernels import engines, linear_logprob, logits_logprob

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="triton has no builds for this system")


def python(*args, interpret):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": str(int(interpret))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True)


def run_cases(*, interpret):
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::RuntimeWarning"]
    files = [
        "tests/kernel/triton_cases.py",
        "tests/kernel/triton_tile_cases.py",
        "tests/kernel/decode_cases.py",
    ]
    done = python("-m", "pytest", *files, *options, interpret=interpret)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on CUDA instead")
def test_the_cases_in_the_interpreter():
    run_cases(interpret=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cases_on_cuda():
    run_cases(interpret=False)


def test_a_cpu_neither_needs_nor_imports_the_kernels():
    code = """if True:
        import sys, torch
        sys.modules["triton"] = None  # an import of it would raise
        from rft_kernels import linear_logprob, logits_logprob
        y = torch.tensor([1, 2])
        linear_logprob(torch.ones(2, 3), torch.ones(5, 3), y), logits_logprob(torch.ones(2, 5), y)
        assert "rft_kernels.row_kernels" not in sys.modules
    """
    done = python("-c", code, interpret=False)
    assert done.returncode == 0, done.stderr


@needs_triton
@pytest.mark.parametrize("engine", ["gemm", "triton"])
def test_a_kernel_on_a_cpu_is_refused_with_the_reason(engine):
    h, w, y = torch.zeros(5, 8), torch.zeros(7, 8), torch.zeros(5, dtype=torch.long)
    for call in (lambda: linear_logprob(h, w, y, engine=engine), lambda: logits_logprob(h, y, engine=engine)):
        with pytest.raises(ValueError, match=r"engine: expected 'auto' or 'streamed' on cpu \(ker"):
            call()


def test_without_triton_a_kernel_is_refused_and_auto_is_streamed(monkeypatch):
    monkeypatch.setattr(engines, "_HAS_TRITON", False)
    x = torch.zeros(2, 2)
    assert engines.pick("auto", x, x) == "streamed"
    with pytest.raises(ValueError, match="without triton installed, got 'gemm'"):
        engines.pick("gemm", x, x)


def test_the_table_of_auto():
    rules = {"sm_90": [[2048, "triton"], [None, "gemm"]], "default": [[None, "gemm"]]}
    picks = [engines.choose(rules, *case) for case in (("sm_90", 2048), ("sm_90", 2049), ("sm_80", 64))]
    assert picks == ["triton", "gemm", "gemm"]
    with pytest.raises(ValueError, match=r"auto.json: expected a last rule without a limit for sm_90"):
        engines.choose({"sm_90": [[64, "gemm"]], "default": []}, "sm_90", 65)
    file = json.loads(Path(engines.__file__).with_name("auto.json").read_text())["engine"]
    assert {device: entry["rules"] for device, entry in file.items()} == engines.table()
    for entry in file.values():
        rules = entry["rules"]
        assert rules[-1][0] is None and {name for _, name in rules} <= {"gemm", "triton", "streamed"}
        assert entry["source"]


BAD = [
    ((torch.zeros(5), torch.zeros(5).long()), {}, "z: expected [T, V] with V > 0, got [5]"),
    ((torch.zeros(5, 0), torch.zeros(5).long()), {}, "z: expected [T, V] with V > 0, got [5, 0]"),
    (
        (torch.zeros(5, 2).long(), torch.zeros(5).long()),
        {},
        "z: expected a floating-point tensor, got torch.int64",
    ),
    ((torch.zeros(5, 2), torch.zeros(4).long()), {}, "y: expected [T] = [5], got [4]"),
    ((torch.zeros(5, 2), torch.zeros(5)), {}, "y: expected an integer tensor, got torch.float32"),
    ((torch.zeros(5, 2), torch.zeros(5).long().to("meta")), {}, "y: expected a tensor on cpu, got meta"),
    (
        (torch.zeros(5, 2), torch.zeros(5).long()),
        {"engine": "cuda"},
        "engine: expected 'auto' or 'streamed', got 'cuda'",
    ),
    (
        (torch.zeros(5, 2), torch.zeros(5).long()),
        {"temperature": torch.ones(5, requires_grad=True)},
        "temperature: expected no gradient, got requires_grad=True",
    ),
    (
        (torch.zeros(5, 2), torch.zeros(5).long()),
        {"temperature": -1.0},
        "temperature: expected a number > 0, got -1.0",
    ),
]


@each(("args", "options", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_logits(args, options, message):
    with pytest.raises(ValueError) as error:
        logits_logprob(*args, **options)
    assert str(error.value) == message


def test_torch_checks_the_gradient_of_given_logits():
    z = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.tensor([0, 6, 3, -100])

    def f(z):
        return tuple(logits_logprob(z, y, temperature=0.7, entropy=True))

    assert torch.autograd.gradcheck(f, (z,)) and torch.autograd.gradgradcheck(f, (z,))


def test_given_logits_on_the_meta_device_have_shapes():
    z = torch.empty(5, 70, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = logits_logprob(z, torch.empty(5, dtype=torch.long, device="meta"), entropy=True)
    (out.logp + out.entropy).sum().backward()
    assert [x.shape for x in out] == [(5,)] * 2 and (z.grad.shape, z.grad.dtype) == (z.shape, z.dtype)


def test_given_logits_save_nothing_that_nobody_needs():
    sizes, z, y = [], torch.randn(5, 70, requires_grad=True), torch.arange(5)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x)
    with keep, torch.no_grad():
        logits_logprob(z, y, entropy=True)
    with keep:
        logits_logprob(z.detach(), y, entropy=True)
    assert sizes == []
    with keep:
        logits_logprob(z, y, entropy=True)
    assert sorted(sizes) == [5, 5, 5, 5, 5, z.numel()]


def test_autocast_changes_nothing_on_given_logits():
    z, y = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.arange(5)
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = logits_logprob(z, y, entropy=True)
            found.append([*out, *torch.autograd.grad(out.logp.sum() + out.entropy.sum(), z)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_logits_that_were_overwritten_cannot_be_differentiated_again():
    z = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = logits_logprob(z * 1, torch.tensor([0, 6, 3, -100]), inplace_backward=True).logp.sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_gradient_in_place_of_the_logits_cannot_be_differentiated():
    z = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    kept = z * 1
    logp = logits_logprob(kept, torch.tensor([0, 6, 3, -100]), inplace_backward=True).logp.square().sum()
    (dz,) = torch.autograd.grad(logp, kept, create_graph=True)
    with pytest.raises(RuntimeError, match=r"expected one .* inplace_backward=True, got two"):
        dz.sum().backward()
