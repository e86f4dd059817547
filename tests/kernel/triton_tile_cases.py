"""The kernels that make the logits they use, on CUDA or in triton's interpreter; see test_triton.py.

When they are used, how they cut tokens and vocabulary, and that their loops run in triton 3.6.
"""

import numpy as np
import pytest
import torch
from test_linear_logprob import TINY, assert_close, definition, misaligned, problem
from triton.runtime import interpreter
from triton_cases import DEVICE, ENGINES, call, quick_calls, run

from rft_kernels import gemm, tile_kernels
from rft_kernels import triton as triton_engine
from rft_kernels.interface import Problem

assert quick_calls  # a fixture of this file, too


def test_the_kernels_of_triton_are_used_where_they_fit(monkeypatch):
    """Otherwise every test of engine="triton" would be one of "gemm"."""
    dtype = {"cpu": torch.float32, "cuda": torch.bfloat16}[DEVICE]
    h, w, y, _ = problem(4, 16, 60, dtype=dtype)
    monkeypatch.setattr(gemm, "forward", None)
    monkeypatch.setattr(gemm, "backward", None)
    logp = call(h.requires_grad_(), w.requires_grad_(), y, engine="triton").logp
    assert all(x.isfinite().all() for x in torch.autograd.grad(logp.sum(), (h, w)))


def test_the_kernels_of_triton_are_not_given_what_no_descriptor_can_describe(monkeypatch):
    monkeypatch.setattr(triton_engine, "INTERPRETED", False)
    monkeypatch.setattr(gemm, "_product_type", lambda h, w, scale: h.dtype)

    def fits(h, w):
        one = torch.ones(len(h))
        head = gemm.unscaled_head(Problem(h, w, None, one, softcap=None, workspace=1))
        return triton_engine._fits(head)

    h, w, _, _ = problem(4, 64, 60, dtype=torch.bfloat16)
    assert fits(h, w) and fits(h[:, :48], w[:, 16:]) and fits(h[:, :40], w[:, :40])
    assert not fits(h.float(), w.float()) and not fits(h[:0], w) and not fits(h, w[:0])
    assert not fits(h, misaligned(w)) and not fits(misaligned(h), w)
    assert not fits(h[:, :63], w[:, 1:]) and not fits(h[:, :36], w[:, :36])
    assert not fits(h, w.T.contiguous().T)


@ENGINES
def test_no_loop_makes_an_index_of_an_argument(engine, monkeypatch):
    """Triton 3.6 cannot in its interpreter with numpy 2.4."""
    change = interpreter._patch_lang_tensor

    def refused(self):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    def refusing(tensor, *scope):
        change(tensor, *scope)
        tensor.__index__ = refused

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", refusing)
    h, w, y, g = problem(4, 16, 60, dtype=torch.float64)
    assert_close(run(h, w, y, g, engine=engine, workspace_mb=TINY), definition(h, w, y, g), 1e-12)
    logp, _ = run(h, w, y, g, frozen=True, engine=engine, workspace_mb=TINY)
    np.testing.assert_allclose(logp, definition(h, w, y, g)[0], rtol=1e-12)


@pytest.mark.parametrize("splits", [1, 8, 11, 44])
@pytest.mark.parametrize("shape", [(20, 16, 1000), (3, 8, 130)])
def test_the_splits_of_the_vocabulary_are_merged_to_one_softmax(splits, shape, monkeypatch):
    """Also where most of them have no column."""
    monkeypatch.setattr(tile_kernels, "SPLITS", (splits,))
    h, w, y, g = problem(*shape, dtype=torch.float64)
    options = {"bias": torch.linspace(-2, 1, shape[2]).double(), "softcap": 2.0}
    assert_close(run(h, w, y, g, engine="triton"), definition(h, w, y, g), 1e-12)
    assert_close(run(h, w, y, g, engine="triton", **options), definition(h, w, y, g, **options), 1e-10)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "programs", "busiest"),
    [
        (100, 151936, 132, 5),
        (512, 151936, 132, 18),
        (1024, 151936, 128, 38),
        (2304, 151936, 396, 81),
        (16384, 151936, 1024, 600),
        (512, 32000, 132, 4),
        (512, 200, 32, 1),
    ],
)
def test_few_tokens_are_split_until_every_multiprocessor_has_a_program(tokens, vocabulary, programs, busiest):
    """On 132 of them; `busiest` is the number of tiles of the one that has most."""
    blocks, tiles = -(-tokens // tile_kernels.WIDE.tokens), -(-vocabulary // tile_kernels.WIDE.columns)
    splits = triton_engine.choose_splits(blocks, tiles, 132)
    assert splits * blocks == programs
    assert -(-programs // 132) * -(-tiles // splits) == busiest


@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_tile_of_the_gradient_is_made_once_in_whatever_order(group, monkeypatch):
    """9 blocks of tokens in groups, the last of which is not whole."""
    monkeypatch.setattr(tile_kernels, "GROUP", group)
    h, w, y, g = problem(9 * 16 - 3, 16, 150, dtype=torch.float64)
    assert_close(run(h, w, y, g, engine="triton", workspace_mb=0.2), definition(h, w, y, g), 1e-12)
