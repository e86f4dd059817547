"""A sharded head gives the results of the whole head: gloo, 2 and 4 processes.

The kernels of the GPU engines run in triton's interpreter here.
"""

import copy
import itertools
import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rft_kernels import linear_logprob, products

pytestmark = pytest.mark.slow

CASES = {
    "plain": {},
    "entropy and lse": {"entropy": True, "lse": True},
    "bias": {"bias": True, "entropy": True},
    "temperature by token": {"temperature": True, "entropy": True},
    "softcap": {"softcap": 3.0, "entropy": True, "bias": True},
    "frozen head": {"frozen": True},
    "small workspace": {"workspace_mb": 0.001, "entropy": True},
    "float32": {"dtype": torch.float32, "entropy": True},
    "oneDNN": {"dtype": torch.float32, "entropy": True, "softcap": 9.0, "bias": True},
    "oneDNN, fewer words than ranks": {"dtype": torch.float32, "vocab": 3, "entropy": True},
    "oneDNN, frozen": {"dtype": torch.float32, "frozen": True},
    "bfloat16 head": {"dtype": torch.float32, "narrow": True},
    "fewer words than ranks": {"vocab": 3, "entropy": True},
    "words that two do not divide": {"vocab": 37, "entropy": True, "bias": True},
    "extreme logits": {"spread": 300.0, "entropy": True},
}


def inputs(vocab=33, dtype=torch.float64, narrow=False, spread=1.0, **options):
    """((h, w, y, bias, temperature), the other options) of a case."""
    g = torch.Generator().manual_seed(vocab)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    h = spread * normal(9, 5)
    w = normal(vocab, 5)
    y = torch.randint(0, vocab, (9,), generator=g)
    y[2], y[5], y[6] = -100, 0, vocab - 1
    bias = None
    if options.pop("bias", False):
        bias = normal(vocab).to(dtype)
    temperature = 1.0
    if options.pop("temperature", False):
        temperature = torch.rand(9, generator=g, dtype=torch.float64) + 0.5
    w_dtype = dtype
    if narrow:
        w_dtype = torch.bfloat16
    return (h.to(dtype), w.to(w_dtype), y, bias, temperature), options


def outputs(h, w, y, bias, temperature, frozen=False, **options):
    """(outputs, gradients) with a random upstream gradient for each output; DTensors as whole tensors."""
    leaves = [h]
    if not frozen:
        leaves += [x for x in (w, bias) if x is not None]
    for x in leaves:
        x.requires_grad_()
    out = [x for x in linear_logprob(h, w, y, temperature=temperature, bias=bias, **options) if x is not None]
    g = torch.Generator().manual_seed(1)
    total = sum((torch.randn(9, generator=g).to(x.dtype) * x).sum() for x in out)
    grads = []
    for grad in torch.autograd.grad(total, leaves):
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        grads.append(grad)
    return [x.detach() for x in out], grads


def check(name, mesh, engine):
    products._LARGE = 1
    products.mkl_is_half = lambda: name.startswith("oneDNN") and torch.backends.mkldnn.is_available()
    options = dict(CASES[name])
    frozen = options.pop("frozen", False)
    args, options = inputs(**options)
    want = outputs(*copy.deepcopy(args), frozen=frozen, **options)
    h, w, y, bias, temperature = args
    sharded_w = distribute_tensor(w, mesh, [Shard(0)])
    sharded_bias = None
    if bias is not None:
        sharded_bias = distribute_tensor(bias, mesh, [Shard(0)])
    got = outputs(h, sharded_w, y, sharded_bias, temperature, frozen=frozen, engine=engine, **options)
    tol = 1e-5
    if h.dtype == torch.float64:
        tol = 1e-12
    if w.dtype == torch.bfloat16:
        tol = 8e-3  # one rounding of dw
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def bad(mesh):
    """Every rank raises the same error, in one line, for heads that cannot be."""
    (h, w, y, _, _), _ = inputs()
    found = []
    whole = distribute_tensor(w, mesh, [Replicate()])
    columns = distribute_tensor(w, mesh, [Shard(1)])
    rows = distribute_tensor(w, mesh, [Shard(0)])
    for weight, options in (
        (whole, {}),
        (columns, {}),
        (rows, {"engine": "reference"}),
        (rows, {"bias": torch.zeros(33)}),
    ):
        try:
            linear_logprob(h, weight, y, **options)
        except ValueError as error:
            found.append(str(error).split(":")[0])
    assert found == ["w", "w", "engine", "bias"], found
    wrong = y.clone()
    wrong[0] = 33  # a word of no shard: NaN, on every rank
    assert linear_logprob(h, rows, wrong).logp.isnan().tolist() == [True] + [False] * 8


def work(rank, world, folder, engines):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for engine, name in itertools.product(engines, CASES):
        try:
            check(name, mesh, engine)
        except Exception as error:
            raise AssertionError(f"{name}, {engine}, rank {rank} of {world}: {error}") from error
    bad(mesh)
    dist.barrier()
    dist.destroy_process_group()
    # Not by way of the interpreter's end: a thread of gloo that still holds a tensor then aborts the process.
    os._exit(0)


@pytest.mark.parametrize(("world", "kernels"), [(2, "gemm"), (4, "triton")])
def test_a_sharded_head_is_the_whole_head(world, kernels, tmp_path, monkeypatch):
    """By torch's own operations, and by one engine of kernels, for which triton has builds on Linux."""
    engines = ["streamed"]
    if sys.platform == "linux":
        engines.append(kernels)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # here: a process decides it while it imports
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.start_processes(work, (world, str(tmp_path), engines), nprocs=world, start_method="spawn")
